"""Checkpoints: complete under `checkpoints/step-N`, or absent. Pieces of tensors in safetensors files, and JSON.

    rank-KKKKK-of-NNNNN.safetensors     what each rank held; keys are KIND/NAME:START, START the first element
    progress.json                       written last: step, counters, run's identity, whole shapes, files' digests

KIND is weights, exp_avg, exp_avg_sq or average; NAME is the module's. Each tensor is a range of consecutive elements
of the whole one, and all files together hold every element once, so any engine and any number of ranks can read them.
No pickle is written or read. There is no random state to save: draws are functions of (seed, epoch, sample id).
"""
