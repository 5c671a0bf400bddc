"""Which kernels compute the attention of teacher and student, found by profiling one update."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, final

from torch.profiler import ProfilerActivity, profile

from distiller.distributed.process import print_to_stderr
from distiller.distributed.ranks import Ranks

KERNELS = (
    (re.compile(r"cudnn_attention"), "cuDNN"),
    (re.compile(r"efficient_attention"), "efficient"),
    (re.compile(r"attention_math"), "math"),
    (re.compile(r"flash_attention|flash_attn"), "flash"),
)
"""Of an operator's name -> the kernel. Fused operators have the same names in compiled code."""
PARTS = ("teacher", "student")
"""The parts of an update that `StepTimer` marks."""


@final
class AttentionNotice:
    """Prints on rank 0 which attention kernels an update ran, and a warning where a GPU had no fused one.

    The update is the second of the session, when everything has been compiled, unless the recipe has it profiled. It is
    profiled on rank 0's host alone, where it takes a little longer. Not seen are: passes in other threads (a `streamed`
    or `disk` teacher with several micro-batches, a `cpu` or `disk` teacher that is asked ahead), a teacher on another
    rank, attention that a model writes out itself, and, in compiled blocks, `math`, which the compiler takes apart.
    Does not communicate.
    """

    def __init__(self, profiled: tuple[int, int] | None, ranks: Ranks, first_step: int) -> None:
        """`profiled`: the recipe's `profile.steps`. Two profilers cannot run at once."""
        self._on_gpu, self._step = ranks.device.type == "cuda", first_step + 1
        # A profile begins with an update of warm-up.
        is_free = profiled is None or not profiled[0] - 1 <= self._step <= profiled[1]
        self._is_due = ranks.is_main and is_free
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        """Before update `step`."""
        if self._is_due and step == self._step:
            # The profiler's own lines on its start and end.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            # `acc_events`: without it torch 2.11 warns of events of earlier cycles, of which there are none.
            self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True)
            try:
                self._profiler.start()
            except RuntimeError:
                # Another profiler runs in this process: there can be one.
                self._profiler, self._is_due = None, False

    @property
    def is_profiling(self) -> bool:
        """Whether this update is being profiled, so that it takes longer than others."""
        return self._profiler is not None

    def end(self) -> bool:
        """After an update. Returns whether it was profiled, so that its time is not an update's."""
        if self._profiler is None:
            return False
        self._profiler.stop()
        found = attention_kernels(self._profiler.events())
        self._profiler, self._is_due = None, False
        for line in messages(found, self._on_gpu):
            print_to_stderr(line)
        return True

    def close(self) -> None:
        """Ends the profile of an update that failed."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def attention_kernels(events: Iterable[Any]) -> dict[str, dict[str, list[Any]]]:
    """Part of the update -> kernel -> shapes of the inputs of its first call, from torch.profiler's events."""
    found: dict[str, dict[str, list[Any]]] = {}
    for event in events:
        kernel = next((kernel for pattern, kernel in KERNELS if pattern.search(event.name)), None)
        if kernel is None or "backward" in event.name:
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name not in PARTS:
            parent = parent.cpu_parent
        if parent is not None:
            found.setdefault(parent.name, {}).setdefault(kernel, event.input_shapes)
    return found


def messages(found: Mapping[str, Mapping[str, list[Any]]], on_gpu: bool) -> list[str]:
    """The lines to print; none where no kernel was found."""
    parts = [f"{part} {' and '.join(found[part])}" for part in PARTS if part in found]
    lines = [f"attention kernels: {', '.join(parts)}"] if parts else []
    for part in PARTS:
        shapes = found.get(part, {}).get("math")
        if not on_gpu or shapes is None:
            continue
        seen = []
        if shapes and shapes[0]:
            seen.append(f"head size {shapes[0][-1]}")
        if len(shapes) > 3 and shapes[3]:
            seen.append("with a mask")
        what = f" ({', '.join(seen)})" if seen else ""
        lines.append(
            f"warning: {part}: attention runs without a fused kernel{what}, in several times the time and memory; "
            "fused kernels want bfloat16 or float16, and a head size up to 256 that is a multiple of 8"
        )
    return lines
