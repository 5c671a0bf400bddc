"""What saving costs a run, under any launch file: the loop's time with and without saves, and the disk's own speed.

    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/benchmarks/checkpoints.py --model wan-1.3b

A Wan student of real layout with random weights learns nothing from noise, as fast as it would learn something; there
is no teacher, so steps are shorter than a run's and a save weighs more. Rounds without and with one save follow each
other on one student. "in the loop" is what `save` itself takes: the copy to host memory, and waiting for a save before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from distiller.checkpoint.format import Identity
from distiller.checkpoint.saving import Checkpoints
from distiller.config.loading import parse
from distiller.config.recipe import Recipe
from distiller.distributed.process import prepare_environment
from distiller.distributed.ranks import Ranks
from distiller.launch.accelerator import World, open_world
from distiller.launch.fsdp import wrapped_classes
from distiller.student_state.factory import open_state
from distiller.student_state.moving_average import MovingAverage
from distiller.training.optim import build_optimizer

GIB = 2**30
MODELS = {
    "tiny": {"num_attention_heads": 2, "ffn_dim": 512, "num_layers": 4},
    "wan-1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
}
TEXT_ROWS, CHANNELS = 64, 16


def new_student(model: str, num_layers: int | None) -> WanTransformer3DModel:
    """Random weights; with fewer layers than the model's if a number is given."""
    layout = MODELS[model] if num_layers is None else MODELS[model] | {"num_layers": num_layers}
    return WanTransformer3DModel(attention_head_dim=128, **layout)


class Student:
    """A prepared Wan student, its optimizer, and one batch of noise for this rank."""

    def __init__(self, world: World, recipe: Recipe, module: WanTransformer3DModel, side: int) -> None:
        self._accelerator = world.accelerator
        module.enable_gradient_checkpointing()
        self.module, self.optimizer = self._accelerator.prepare(module, build_optimizer(module, recipe.optim))
        device, dtype = self._accelerator.device, next(self.module.parameters()).dtype
        size = recipe.train.batch_size
        self._inputs = {
            "hidden_states": torch.randn(size, CHANNELS, 1, side, side, device=device, dtype=dtype),
            "timestep": torch.full((size,), 500, device=device),
            "encoder_hidden_states": torch.randn(size, TEXT_ROWS, 4096, device=device, dtype=dtype),
        }

    def step(self) -> None:
        """One update."""
        # As in the trainer: Accelerate does not wrap FSDP2's forward in autocast.
        with self._accelerator.autocast():
            outputs = self.module(**self._inputs, return_dict=False)
        loss = outputs[0].float().square().mean()
        self._accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(student: Student, num_steps: int, checkpoints: Checkpoints | None, first: int) -> tuple[float, float]:
    """(seconds of a round, of these inside `save`); with checkpoints one is saved after the first step."""
    in_save, started = 0.0, time.perf_counter()
    for step in range(num_steps):
        student.step()
        if step == 0 and checkpoints is not None:
            _wait_for_device()
            before = time.perf_counter()
            checkpoints.save(first, 0)
            in_save = time.perf_counter() - before
    _wait_for_device()
    return time.perf_counter() - started, in_save


def disk_speed(folder: Path, ranks: Ranks, num_bytes: int) -> float:
    """GiB/s of all ranks together, each writing as much as of a checkpoint, without digests."""
    block = memoryview(bytearray(os.urandom(2**20)) * 64)
    ranks.barrier()
    started = time.perf_counter()
    with (folder / f"speed-{ranks.rank}").open("wb", buffering=0) as stream:
        for _ in range(max(1, num_bytes // len(block))):
            stream.write(block)
        os.fsync(stream.fileno())
    ranks.barrier()
    speed = ranks.world_size * max(1, num_bytes // len(block)) * len(block) / GIB / (time.perf_counter() - started)
    (folder / f"speed-{ranks.rank}").unlink()
    return speed


def main() -> None:
    """Trains, saves and prints a few lines on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="wan-1.3b")
    parser.add_argument("--layers", type=int, help="instead of the model's; copies and steps shrink alike")
    parser.add_argument("--folder", help="on the disk to measure; all ranks see it; default: a temporary one")
    parser.add_argument("--side", type=int, default=80, help="of the latents; 80 is 1,600 tokens")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40, help="a round; a save should fit into it")
    parser.add_argument("--rounds", type=int, default=3, help="without and with a save, in turns")
    parser.add_argument("--every", type=int, default=200, help="steps between saves, for the share that is printed")
    parser.add_argument("--average", action="store_true", help="with a moving average")
    options = parser.parse_args()
    prepare_environment()
    names = {"teacher": {"path": "-"}, "student": {"config": "-"}, "data": {"path": "-"}}
    recipe = parse({**names, "train": {"max_steps": 1, "batch_size": options.batch_size}})
    with torch.device("meta"):
        skeleton = new_student(options.model, options.layers)
    world = open_world(recipe, lambda fsdp: wrapped_classes(fsdp, skeleton, ("WanTransformerBlock",)))
    ranks = Ranks.join(world.accelerator.device)
    folder = Path(ranks.broadcast_from_main(lambda: tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = new_student(options.model, options.layers)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    student = Student(world, recipe, module, options.side)
    state = open_state(world.engine, world.accelerator, student.module, student.optimizer)
    average = MovingAverage(state, 0.999) if options.average else None
    identity = Identity(
        engine=world.engine,
        world_size=ranks.world_size,
        samples_per_update=options.batch_size * ranks.world_size,
        num_samples=1,
        data_digest="noise",
        mixed_precision=world.mixed_precision,
        teacher_dtype="float32",
    )
    checkpoints = Checkpoints(folder, ranks, 1, identity, state, average)
    started = time.perf_counter()
    checkpoints.reserve()
    reserve_s = time.perf_counter() - started
    timed(student, 3, None, 0)

    without: list[float] = []
    rounds: list[tuple[float, float]] = []
    for number in range(options.rounds):
        without.append(timed(student, options.steps, None, 0)[0])
        rounds.append(timed(student, options.steps, checkpoints, 1 + number))
        checkpoints.finish()
    student.step()
    _wait_for_device()
    started = time.perf_counter()
    checkpoints.save(1 + options.rounds, 0, wait=True)
    alone_s = time.perf_counter() - started
    newest = folder / "checkpoints" / f"step-{1 + options.rounds}"
    num_bytes = sum(file.stat().st_size for file in newest.iterdir())
    speed = disk_speed(folder, ranks, num_bytes // ranks.world_size)
    ranks.barrier()
    if ranks.is_main:
        shutil.rmtree(folder)
        step_s = statistics.median(without) / options.steps
        cost_s = statistics.median(whole for whole, _ in rounds) - statistics.median(without)
        in_save_s = statistics.median(own for _, own in rounds)
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{options.model} under {world.engine} on {ranks.world_size} x {where}, torch {torch.__version__}")
        print(f"{num_params:,} parameters, batches of {options.batch_size} x {options.side**2 // 4:,} tokens a rank")
        print(f"a step without saves     {1e3 * step_s:10.1f} ms")
        print(f"a save, in the loop      {1e3 * in_save_s:10.1f} ms")
        print(
            f"a save, all that it costs{1e3 * cost_s:10.1f} ms, {cost_s / (options.every * step_s):.2%} of the time ",
            end="",
        )
        print(f"at one in {options.every} steps")
        print(
            f"a save that waits        {alone_s:10.2f} s for {num_bytes / GIB:.2f} GiB: "
            f"{num_bytes / GIB / alone_s:.2f} GiB/s"
        )
        print(f"the disk                 {speed:10.2f} GiB/s")
        print(f"host memory, reserved in {reserve_s:10.2f} s")


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
