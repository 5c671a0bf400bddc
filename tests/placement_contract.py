"""The contract of every placement, on any number of ranks: outputs and training results that tests compare."""

from __future__ import annotations

import random
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distiller.data import rng
from distiller.teachers import Outputs, Request
from distiller.teachers.base import Teacher
from distiller.teachers.factory import open_teacher
from tests.cached_cases import FromFiles, fill_cache
from tests.toy_network import DIM, ToyNetwork, setup

CASES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "cpu": {},
    "streamed": {},
    "streamed, two buffers": {"ring_blocks": 2},
    "streamed, five buffers": {"ring_blocks": 5},
    "streamed, more buffers than blocks": {"ring_blocks": 9},
    "streamed, three resident": {"resident_blocks": 3},
    "streamed, all resident": {"resident_blocks": 7},
    "streamed, each call by itself": {"amortise": False},
    "streamed, shared transfers": {"shard_transfers": True},
    "disk": {},
    "disk, one thread": {"read_threads": 1, "ring_blocks": 2},
    "balanced": {},
    "sequential": {},
    "custom": {"device_map": {"": 0}},
    "custom, spread": {
        "device_map": {"embed": 0, "blocks.0": 0, "blocks.1": 0}
        | {f"blocks.{number}": "cpu" for number in (2, 3)}
        | {f"blocks.{number}": "disk" for number in (4, 5)}
        | {"blocks.6": 0, "head": 0, "bias": 0, "positions": 0},
    },
    "rank0": {},
    "rank0, micro-batches of two": {"micro_batch": 2},
    "rank0, the last rank": {"rank": -1},
    "sharded": {},
    "sharded, offloaded": {"offload": "cpu"},
    "swap": {},
    "swap, pageable": {"pin_memory": False},
    "cached": {},
    "cached, by a streamed teacher": {},
}
"""Name -> options; the name begins with the placement's."""

IN_PROCESSES: dict[str, dict[str, Any]] = {
    "dedicated": {},
    "dedicated, two processes": {"devices": 2},
    "dedicated, streamed": {"inner": "streamed"},
}
"""More of them, whose processes take seconds to start: in tests of their own."""


def placement_of(case: str) -> str:
    return case.partition(",")[0]


def open_case(case: str, network: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", **more: Any):
    """The teacher of a case, on the ranks that exist."""
    options = (CASES | IN_PROCESSES)[case]
    if options.get("rank") == -1:
        options = options | {
            "rank": torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
        }
    if placement_of(case) == "cached":
        asked = setup(dtype, device, placement="streamed" if "streamed" in case else "replicated")
        return FromFiles(open_teacher(network, asked), network, asked)
    stages_dir = network.folder / "stages"
    return open_teacher(
        network, setup(dtype, device, stages_dir=stages_dir, placement=placement_of(case), **options, **more)
    )


def requests_of(rank: int, step: int, num_modules: int, device: str = "cpu") -> list[Request]:
    """Two micro-batches, uneven over ranks. Step 0 skips blocks, and with two modules no rank needs what others do."""
    requests = []
    for number, size in enumerate((3 + rank, 2)):
        ids = tuple(100 * step + 10 * number + 1000 * rank + i for i in range(size))
        x = torch.stack([rng.noise(0, 0, i, (DIM,)) for i in ids]).to(device)
        wanted = ("output", "again", "features/4") if step else ("output", "skip/3", "again")
        modules = ()
        if num_modules == 2:
            # Step 0: rank r needs module r mod 2 alone. Later: a batch needs both, in another order on each rank.
            modules = tuple(rank % 2 if step == 0 else (i + rank + number) % 2 for i in range(size))
        requests.append(Request(ids, {"x": x}, wanted, modules))
    return requests


def answers(
    teacher: Any, rank: int, num_modules: int, num_steps: int = 3, device: str = "cpu", autocast: bool = True
) -> list[np.ndarray]:
    """All outputs of some steps, flattened; those after the first under autocast, which must change nothing."""
    steps = []
    for step in range(num_steps):
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=autocast and step > 0):
            steps.append(teacher.predict(requests_of(rank, step, num_modules, device)))
    return [_flat(outputs) for step in steps for outputs in step]


def answers_of_cases(
    folder: Path, cases: list[str], dtype: str, on_gpu: bool = False, modules: tuple[int, ...] = (1, 2), **options: Any
) -> dict[str, Any]:
    """Every case's answers on this rank, for such numbers of modules, or the traceback of what went wrong.

    `options` are more keys of the recipe's `teacher`, for all cases.

    With each come what the teacher says that it takes, and by how much the allocator's own figure grew.
    """
    results: dict[str, Any] = {}
    from accelerate import PartialState

    state = PartialState(cpu=not on_gpu)
    device = str(state.device) if on_gpu else "cpu"
    for case in cases:
        for num_modules in modules:
            try:
                before = torch.cuda.memory_allocated() if on_gpu else 0
                teacher = open_case(case, ToyNetwork(folder, num_modules), getattr(torch, dtype), device, **options)
                try:
                    told, grown = teacher.memory(), (torch.cuda.memory_allocated() if on_gpu else 0) - before
                    answered = answers(teacher, state.process_index, num_modules, device=device)
                    results[f"{case} {num_modules}"] = answered, told, grown
                finally:
                    teacher.close()
            except Exception:
                results[f"{case} {num_modules}"] = traceback.format_exc()
    return results


MAX_CYCLES = 20_000_000
"""Of a GPU's clock: about 10 ms."""


def delay_stream(moments: random.Random) -> None:
    """Makes the current stream late, and what its allocator hands out next garbage; nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda._sleep(moments.randint(0, MAX_CYCLES))
        for size in (8, 64, 512, 4096):
            torch.full((size,), float("nan"), device="cuda")


class Delayed(Teacher):
    """A teacher that every rank asks after a delay of its own, and whose stream is late before and after an answer."""

    def __init__(self, teacher: Teacher, rank: int) -> None:
        self._teacher, self._random = teacher, random.Random(rank)

    def predict(self, requests: Any) -> Any:
        time.sleep(self._random.uniform(0, 0.02))
        delay_stream(self._random)
        answers = self._teacher.predict(requests)
        delay_stream(self._random)
        return answers

    def memory(self) -> Any:
        return self._teacher.memory()

    def close(self) -> None:
        self._teacher.close()


def train_cases(
    folder: Path,
    output: Path,
    cases: list[str],
    batch_size: int,
    accumulations: list[int],
    prefetch_steps: int = 0,
    delays: bool = False,
    on_gpu: bool = False,
) -> dict[str, Any]:
    """Loss series, student weights and losses on held-out samples, for each case and each accumulation.

    The global batch is the same in all of them. `cached` measures nothing on held-out samples.
    """
    from accelerate.state import AcceleratorState, GradientState

    from distiller.training.loop import train
    from tests import toys
    from tests.toy_task import RowTask, build_toy_run, toy_recipe

    class DelayedTask(RowTask):
        """The student's stream is late too, before its loss is computed from the answers and after it."""

        moments = random.Random(0)

        def loss(self, *arguments: Any) -> Any:
            delay_stream(self.moments)
            loss = super().loss(*arguments)
            delay_stream(self.moments)
            return loss

    results: dict[str, Any] = {}
    for number, (case, accumulation) in enumerate((case, steps) for case in cases for steps in accumulations):
        run_dir = output / str(number)
        try:
            from accelerate import PartialState

            device = str(PartialState(cpu=not on_gpu).device)
            keys = {"prefetch_steps": prefetch_steps} if prefetch_steps else {}
            teacher: Any = open_case(case, ToyNetwork(folder, 2), device=device, **keys)
            recipe = toy_recipe(run_dir, batch_size=batch_size // accumulation, max_steps=5)
            asked = recipe.teacher.model_copy(update={"prefetch_steps": prefetch_steps})
            # Five held-out samples are never as many for each rank: some ranks' micro-batches do not count.
            every = None if placement_of(case) == "cached" else 2
            evaluation = recipe.evaluation.model_copy(update={"every_steps": every})
            recipe = recipe.model_copy(update={"teacher": asked, "evaluation": evaluation})
            task, cache = (DelayedTask if delays and on_gpu else RowTask)(2), None
            if placement_of(case) == "cached":
                cache = run_dir / "cache", fill_cache(run_dir / "cache", task, teacher.live, 4, torch.device(device))
                teacher = teacher.cached
            if delays:
                teacher = Delayed(teacher, PartialState().process_index)
            run = build_toy_run(recipe, accumulation, task, teacher, cpu=not on_gpu, cache=cache)
            run.placement = placement_of(case)
            train(run)
            weights = torch.cat([p.detach().flatten() for p in run.student.parameters()]).cpu().numpy()
            run.accelerator.wait_for_everyone()
            lines = toys.read_metrics(run_dir) if run.accelerator.is_main_process else []
            held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
            results[f"{case} {accumulation}"] = [line["loss"] for line in lines], weights, held_out
            teacher.close()
        except Exception:
            results[f"{case} {accumulation}"] = traceback.format_exc()
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return results


def _flat(outputs: Outputs) -> np.ndarray:
    return np.concatenate([outputs[name].float().cpu().flatten().numpy() for name in sorted(outputs)])
