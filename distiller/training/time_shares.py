"""Which share of an update's time went to what, from intervals of kernels, copies and waits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

Kind = Literal["products", "memory", "network", "bus"]
PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|wgmma|hmma|flash|fmha|attention|sdpa|conv|^ampere_|^sm\d+_|splitk", re.IGNORECASE
)
"""Kernels of matrix products, convolutions and attention, by what NVIDIA's libraries and torch call them."""
OPERATORS = re.compile(r"::(?:\w*mm|mkldnn_linear|linear|\w*conv\w*|\w*scaled_dot_product\w*|matmul)(?:_\w+)?$")
SHORT_KERNEL_US = 10.0
"""A kernel takes the host about as long to start. Shorter ones on average: the host cannot keep up."""
NAMES = {
    "products": "matrix products and attention",
    "memory": "element-wise and other operations",
    "bus": "copies from and to the host that nothing hides",
    "network": "communication that nothing hides",
    "data": "waiting for data",
    "host": "the host",
}


class Interval(NamedTuple):
    """Microseconds, on one clock."""

    start: float
    end: float


@final
@dataclass(frozen=True)
class TimeShares:
    """Of the profiled updates.

    Attributes:
        update_ms: mean duration of an update.
        shares: name -> share of that time; they add up to 1.
        num_kernels: of an update, on the GPU; 0 on a CPU.
        kernel_us: their mean duration.
    """

    update_ms: float
    shares: dict[str, float]
    num_kernels: int
    kernel_us: float

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        largest = max(self.shares, key=self.shares.__getitem__)
        if largest == "host" and self.num_kernels and self.kernel_us < SHORT_KERNEL_US:
            return f"starting kernels ({self.num_kernels:,} an update, of {self.kernel_us:.0f} us)"
        return NAMES[largest]

    def __str__(self) -> str:
        parts = sorted(self.shares.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{NAMES[name]} {share:.0%}" for name, share in parts if share >= 0.005)
        return f"{self.update_ms:.1f} ms an update, bound by {self.bound}: {listed}"


def time_shares(
    updates: Sequence[Interval], waits: Sequence[Interval], work: Iterable[tuple[Kind, Interval]], on_gpu: bool
) -> TimeShares:
    """Splits the time of the updates.

    Kernels of products and other kernels share the time in which any of them runs, by their durations. Communication
    and copies count where no such kernel runs beside them. What is left is waiting for data, as far as the host waited
    for it, and otherwise the host.

    Args:
        updates: one for each update, by the host's clock.
        waits: in which the host waited for the loader.
        work: kernels and copies of the GPU; on a CPU, operators, none beside another.
    """
    total = sum(interval.end - interval.start for interval in updates)
    by_kind: dict[Kind, list[Interval]] = {"products": [], "memory": [], "network": [], "bus": []}
    for kind, interval in work:
        by_kind[kind].append(interval)
    computing = [*by_kind["products"], *by_kind["memory"]]
    products = sum(interval.end - interval.start for interval in by_kind["products"])
    computed = sum(interval.end - interval.start for interval in computing)
    busy = min(length(computing), total)
    with_network = length([*computing, *by_kind["network"]])
    with_all = length([*computing, *by_kind["network"], *by_kind["bus"]])
    idle = max(total - with_all, 0.0)
    waited = min(sum(interval.end - interval.start for interval in waits), idle)
    shares = {
        "products": busy * products / computed if computed else 0.0,
        "memory": busy * (computed - products) / computed if computed else 0.0,
        "network": with_network - length(computing),
        "bus": with_all - with_network,
        "data": waited,
        "host": idle - waited,
    }
    whole = sum(shares.values()) or 1.0
    count = len(computing) if on_gpu else 0
    return TimeShares(
        total / 1e3 / max(len(updates), 1),
        {name: share / whole for name, share in shares.items()},
        count // max(len(updates), 1),
        computed / count if count else 0.0,
    )


def length(intervals: Iterable[Interval]) -> float:
    """Of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def kernel_kind(name: str) -> Kind:
    """What a kernel or copy of a GPU, by its name, is bound by."""
    if "nccl" in name.lower() or "PtoP" in name:
        return "network"
    if name.startswith("Memcpy") and ("HtoD" in name or "DtoH" in name):
        return "bus"
    return "products" if PRODUCTS.search(name) else "memory"


def operator_kind(name: str) -> Kind:
    """The same of a torch operator on a CPU."""
    return "products" if OPERATORS.search(name) else "memory"
