"""Kinds of GPUs and their rates, from data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from distiller.errors import UserError

GIB = 2**30
GB, TERA = 1e9, 1e12

DISK = 3 * GB
"""Bytes a second that a machine reads of its disk."""
LAUNCH_MS = 0.024
"""What a typical host takes to start an operation of a model. It bounds models whose operations are short."""


@final
@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its maker's data sheet; rates are without sparsity.

    Attributes:
        memory_gib: what CUDA says that the card has, in GiB.
        short_flops: a second, of matrix products in 16 bits with sums in float32.
        float32_flops: a second.
        bandwidth: bytes a second of its memory.
        host: bytes a second from page-locked host memory: what copies reach of the bus.
        peers: bytes a second to another GPU of the machine, one way; over the bus where there is no NVLink.
        has_bfloat16: computes in bfloat16 without emulation.
        has_float8: computes in float8.
        launch_ms: milliseconds that its host takes to start an operation of a model.
    """

    name: str
    memory_gib: float
    short_flops: float
    float32_flops: float
    bandwidth: float
    host: float
    peers: float
    has_bfloat16: bool = True
    has_float8: bool = False
    launch_ms: float = LAUNCH_MS


# PCIe 5, 4 and 3 with 16 lanes, as page-locked copies reach them. The first was measured on H200 (docs/performance.md).
_PCIE5, _PCIE4, _PCIE3 = 54 * GB, 25 * GB, 12 * GB
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 139.8, 989 * TERA, 67 * TERA, 4800 * GB, _PCIE5, 400 * GB, has_float8=True),
        Gpu("H100", 79.1, 989 * TERA, 67 * TERA, 3350 * GB, _PCIE5, 400 * GB, has_float8=True),
        Gpu("A100", 79.2, 312 * TERA, 19.5 * TERA, 2039 * GB, _PCIE4, 250 * GB),
        Gpu("A100-40", 39.4, 312 * TERA, 19.5 * TERA, 1555 * GB, _PCIE4, 250 * GB),
        Gpu("L40S", 44.4, 362 * TERA, 91.6 * TERA, 864 * GB, _PCIE4, 20 * GB, has_float8=True),
        Gpu("A6000", 47.4, 155 * TERA, 38.7 * TERA, 768 * GB, _PCIE4, 20 * GB),
        Gpu("4090", 23.6, 165 * TERA, 82.6 * TERA, 1008 * GB, _PCIE4, 10 * GB, has_float8=True),
        Gpu("3090", 23.6, 71 * TERA, 35.6 * TERA, 936 * GB, _PCIE4, 10 * GB),
        Gpu("A10", 22.1, 125 * TERA, 31.2 * TERA, 600 * GB, _PCIE4, 10 * GB),
        Gpu("L4", 22.2, 121 * TERA, 30.3 * TERA, 300 * GB, _PCIE4, 10 * GB, has_float8=True),
        Gpu("V100", 31.7, 125 * TERA, 15.7 * TERA, 900 * GB, _PCIE3, 120 * GB, has_bfloat16=False),
        Gpu("T4", 14.6, 65 * TERA, 8.1 * TERA, 320 * GB, _PCIE3, 8 * GB, has_bfloat16=False),
    )
}
"""From NVIDIA's data sheets of these products. `A100` is that of 80 GB with NVLink, as are H100, H200 and V100."""


def named_gpu(name: str, size: int | None) -> Gpu:
    """The kind of this name, of so many bytes where the name does not tell. Raises UserError for an unknown one."""
    known = {kind.lower(): gpu for kind, gpu in GPUS.items()}
    if name.lower() not in known:
        raise UserError(f"--gpu is '{name}', whose rates are not known; known are {', '.join(GPUS)}: give the nearest")
    return _of_size(known[name.lower()], size)


def known_gpu(name: str, size: int) -> Gpu | None:
    """The kind of a GPU by the name that CUDA gives it, and its bytes; None where its rates are not known."""
    found = [gpu for kind, gpu in GPUS.items() if re.search(rf"\b{kind}\b", name)]
    if not found or re.search("laptop|max-q|mig", name, re.IGNORECASE):
        return None
    return _of_size(found[0], size)


def _of_size(gpu: Gpu, size: int | None) -> Gpu:
    """The A100 of 40 GB has the name of the one of 80."""
    is_smaller = gpu is GPUS["A100"] and size is not None and size < 60 * GIB
    return GPUS["A100-40"] if is_smaller else gpu
