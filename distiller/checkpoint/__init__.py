"""Checkpoints: complete under `checkpoints/step-N`, or absent. Pieces of tensors in safetensors files, and JSON.

    rank-KKKKK-of-NNNNN.safetensors     what each rank held; keys are KIND/NAME:START, START the first element
    progress.json                       written last: step, counters, whose run it is, whole shapes, the files' digests

KIND is weights, exp_avg, exp_avg_sq or average; NAME is the module's. Each tensor is a run of consecutive elements of
the whole one, and all files together hold every element once, so any engine and any number of ranks can read them.
There is no pickle among them and none is read. There is no random state to keep: draws are functions of (seed, epoch,
sample id).
"""
