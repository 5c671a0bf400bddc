"""Rates of this machine: measured in seconds, and kept in the user's cache folder for later plans and runs."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distiller.planner.allocation_trace import AllocationTrace
from distiller.planner.gpus import Gpu, known_gpu
from distiller.planner.kernel_times import FORWARD_SHARE
from distiller.storage.durable_writes import write_durably

MATRIX_SIZE = 8192
"""Rows and columns of the matrices that are multiplied."""
COPIED_BYTES = 2**29
"""Bytes that are copied."""
REPEATS = 10


@final
@dataclass(frozen=True)
class Rates:
    """Of one GPU and its host, as a plan uses them.

    Attributes:
        short_flops, float32_flops: a second, of large matrix products, divided by the share that models reach.
        bandwidth: bytes a second of the GPU's memory, divided likewise.
        host: bytes a second from page-locked host memory to the GPU, alone.
        launch_ms: what the host takes to start an operation of a model.
    """

    short_flops: float
    float32_flops: float
    bandwidth: float
    host: float
    launch_ms: float


def rates_file() -> Path:
    """Where rates are kept: `distiller/rates.json` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`).

    Raises OSError for a user without a home folder.
    """
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "distiller" / "rates.json"
    try:
        return Path.home() / ".cache" / "distiller" / "rates.json"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "the user has no home folder") from error


def read_rates(gpu_name: str) -> Rates | None:
    """What was measured on this host for a GPU of this name; None where nothing was, or the file cannot be read."""
    try:
        found = json.loads(rates_file().read_text())[_key(gpu_name)]
        rates = Rates(**{field.name: float(found[field.name]) for field in fields(Rates)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rates if all(value > 0 for value in asdict(rates).values()) else None


def keep_rates(gpu_name: str, rates: Rates) -> Path:
    """Writes the rates beside those of other machines; returns the file. Raises OSError."""
    path = rates_file()
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    found = (known if isinstance(known, dict) else {}) | {_key(gpu_name): asdict(rates)}
    write_durably(path, json.dumps(found, indent=2) + "\n")
    return path


def gpu_here() -> Gpu | None:
    """The kind of this machine's first GPU, with the rates that were measured here, if they were.

    None where the rates are neither known nor measured.
    """
    properties = torch.cuda.get_device_properties(0)
    name = torch.cuda.get_device_name(0)
    kind, rates = known_gpu(name, properties.total_memory), read_rates(name)
    if rates is None:
        return kind
    if kind is None:
        major_minor = (properties.major, properties.minor)
        # What another GPU reads of this one passes the bus, as far as is known.
        kind = Gpu(
            name,
            properties.total_memory / 2**30,
            *(rates.short_flops, rates.float32_flops, rates.bandwidth, rates.host, rates.host),
            has_bfloat16=major_minor >= (8, 0),
            has_float8=major_minor >= (8, 9),
        )
    return replace(kind, **asdict(rates))


def _key(gpu_name: str) -> str:
    # Machines that share a home folder have rates of their own.
    return f"{platform.node()}: {gpu_name}"


def measure_rates(device: torch.device) -> Rates:
    """Measures a GPU and its host in a few seconds, with 2 GiB of its memory. Does not communicate.

    Each figure is the fastest of some repetitions. Raises torch.OutOfMemoryError where the memory is not free.
    """
    return Rates(
        short_flops=_product_rate(device, torch.bfloat16) / FORWARD_SHARE,
        float32_flops=_product_rate(device, torch.float32) / FORWARD_SHARE,
        bandwidth=_memory_rate(device) / FORWARD_SHARE,
        host=_host_rate(device),
        launch_ms=launch_ms(device),
    )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of a matrix product; in float32 without TF32, as the run's precision is."""
    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = torch.float16
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        seconds = _fastest(device, lambda: torch.mm(left, right, out=result))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2 * MATRIX_SIZE**3 / seconds


def _memory_rate(device: torch.device) -> float:
    """Bytes read and written a second by an addition."""
    given = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device).view(torch.float32)
    result = torch.empty_like(given)
    return 2 * COPIED_BYTES / _fastest(device, lambda: torch.add(given, 1.0, out=result))


def _host_rate(device: torch.device) -> float:
    given = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    result = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    return COPIED_BYTES / _fastest(device, lambda: result.copy_(given, non_blocking=True))


def launch_ms(device: torch.device) -> float:
    """Milliseconds that the host takes for an operation of a training step: tiny blocks, forward and backward.

    Operations are counted as a plan counts them.
    """
    width, count = 64, 8
    with torch.random.fork_rng(devices=[]):
        blocks = nn.ModuleList(_TinyBlock(width) for _ in range(count)).to(device)
    given = torch.zeros(1, 16, width, device=device)

    def step() -> None:
        hidden = given
        with torch.autocast(device.type, torch.bfloat16):
            for block in blocks:
                hidden = block(hidden)
        hidden.sum().backward()
        for parameter in blocks.parameters():
            parameter.grad = None

    step()
    with AllocationTrace() as trace:
        step()
    return 1e3 * _fastest(device, step) / sum(trace.kernels.values())


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of some repetitions."""
    measured = []
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        measured.append(time.perf_counter() - began)
    return min(measured)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@final
class _TinyBlock(nn.Module):
    """A transformer's block with Wan's kinds of operations: norms, modulation, attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.queries, self.keys, self.values, self.output = (nn.Linear(width, width) for _ in range(4))
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Parameter(torch.zeros(4, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden`: [batch, tokens, width], float32."""
        scale, shift, gate, later_gate = self.modulation.unbind()
        normed = self.first_norm(hidden) * (1 + scale) + shift
        heads = [part(normed).unflatten(2, (4, -1)).transpose(1, 2) for part in (self.queries, self.keys, self.values)]
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        hidden = hidden + self.output(attended) * gate
        normed = self.second_norm(hidden) * (1 + scale) + shift
        return hidden + self.narrower(F.gelu(self.wider(normed), approximate="tanh")) * later_gate
