"""The machine that a plan is for: this one, or one that is described."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

import torch

from distiller.config.placements.base import Links
from distiller.distributed.free_memory import free_gpu_bytes, free_host_bytes
from distiller.errors import UserError
from distiller.planner.gpus import DISK, GIB, GPUS, Gpu, named_gpu
from distiller.planner.rates import gpu_here

CONTEXT_BYTES = int(0.6 * GIB)
"""Of each GPU, what CUDA and its libraries take for a process; 0.5 GiB on an H200."""

CPU_SLOWDOWN = 100.0
"""How many times longer the CPU takes for a pass; 135 was measured beside an H200 (14 B parameters, 1,560 tokens)."""


@final
@dataclass(frozen=True)
class Machine:
    """Machines of one kind, each with its own memory.

    Attributes:
        gpu: None on a machine without GPUs.
        num_gpus: of each machine.
        gpu_memory: bytes of each GPU that a process may fill with tensors.
        host_memory: bytes of each machine.
        num_machines: all of which take part.
    """

    gpu: Gpu | None
    num_gpus: int
    gpu_memory: int
    host_memory: int
    num_machines: int = 1

    @property
    def links(self) -> Links:
        """Rates between memories."""
        assert self.gpu is not None
        return Links(self.gpu.host, self.gpu.peers, DISK, CPU_SLOWDOWN)

    def describe(self) -> str:
        """In words, for the head of a plan."""
        machines = f"{self.num_machines} machines, each with " if self.num_machines > 1 else ""
        host = f"{self.host_memory / GIB:.0f} GiB of host memory"
        if self.gpu is None:
            return f"{machines}{host}, without a GPU"
        return f"{machines}{self.num_gpus} x {self.gpu.name}, {self.gpu_memory / GIB:.1f} GiB free on each, {host}"


def plan_machine(
    shorthand: str | None,
    num_gpus: int | None,
    gpu_memory: str | None,
    gpu: str | None,
    host_memory: str | None,
    num_machines: int,
) -> Machine:
    """The machine that the options of `distiller plan` describe; what they leave out is this machine's. UserError.

    Args:
        shorthand: such as `4x3090-24G`: the number, kind and memory of the GPUs.
        gpu_memory, host_memory: such as `24GiB`.
    """
    if shorthand is not None:
        if (num_gpus, gpu_memory, gpu) != (None, None, None):
            raise UserError("--machine says number, kind and memory of the GPUs; leave --gpus, --gpu, --gpu-memory out")
        num_gpus, gpu, gpu_memory = _parse_shorthand(shorthand)
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = num_gpus if num_gpus is not None else max(here, 1)
    if count < 1 or num_machines < 1:
        raise UserError(f"--gpus is {count} and --machines {num_machines}; each is at least 1")
    host = free_host_bytes() if host_memory is None else parse_bytes(host_memory, "--host-memory")
    if (num_gpus, gpu_memory, gpu) == (None, None, None) and not here:
        return Machine(None, 0, 0, host, num_machines)
    size = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")
    kind = named_gpu(gpu, size) if gpu is not None else _of_this_machine(here, size)
    if size is None and gpu is None and here:
        return Machine(kind, count, min(free_gpu_bytes(torch.device("cuda", index)) for index in range(here)), host)
    # A card of 24 GB, as it is called, has less than 24 GiB.
    whole = int(kind.memory_gib * GIB)
    free = (whole if size is None else min(size, whole) if gpu is not None else size) - CONTEXT_BYTES
    if free <= 0:
        raise UserError(f"--gpu-memory is {gpu_memory}; CUDA alone takes {CONTEXT_BYTES / GIB:.1f} GiB of it")
    return Machine(kind, count, free, host, num_machines)


def parse_bytes(text: str, option: str) -> int:
    """`24GiB`, `24G` or `24GB` in bytes; UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(TiB|GiB|MiB|TB|GB|MB|T|G|M)", text.strip())
    if found is None:
        raise UserError(f"{option} is '{text}'; write a number with a unit, such as 24GiB")
    unit = found[2]
    power = {"T": 4, "G": 3, "M": 2}[unit[0]]
    return int(float(found[1]) * (1000**power if unit.endswith("B") and "i" not in unit else 1024**power))


def _parse_shorthand(text: str) -> tuple[int, str, str | None]:
    found = re.fullmatch(r"(\d+)x([A-Za-z0-9]+)(?:-(\d+)G)?", text)
    if found is None:
        raise UserError(f"--machine is '{text}'; write number, kind and memory of its GPUs, such as 4x3090-24G")
    size = f"{found[3]}GiB" if found[3] else None
    return int(found[1]), named_gpu(found[2], None).name, size


def _of_this_machine(count: int, size: int | None) -> Gpu:
    """The kind of this machine's GPUs, or of one that is described by its memory alone."""
    if count:
        if (gpu := gpu_here()) is None:
            raise UserError(
                f"the rates of this machine's GPU ({torch.cuda.get_device_name(0)}) are not known; measure them with "
                "--measure, or give the nearest: --gpu NAME"
            )
        return gpu
    if size is None:
        raise UserError(f"this machine has no GPU; say which kind the plan is for: --gpu {', '.join(GPUS)}")
    # The smallest that has so much: memory is what was asked about.
    large = [gpu for gpu in GPUS.values() if gpu.memory_gib * 1.1 >= size / GIB]
    return min(large, key=lambda gpu: gpu.memory_gib, default=GPUS["H200"])
