"""Says when something is compiled again in the middle of a run, and why: it costs seconds, and need not happen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, final

from distiller.distributed.process import print_to_stderr
from distiller.distributed.ranks import Ranks

NUM_FREE_UPDATES = 2
"""Of a session, in which code for what it will run is made."""
MAX_LINES = 4


@final
class RecompilationNotice:
    """Prints on rank 0 which functions torch.compile has compiled again since the update before. Does not communicate.

    A function is compiled again where its inputs break what the code that exists has taken for granted, such as a size.
    The first two updates of a session are left out, and after four lines it is silent.
    """

    def __init__(self, ranks: Ranks, first_step: int) -> None:
        """`first_step`: the session's first update."""
        self._is_main, self._first_step = ranks.is_main, first_step
        self._seen_us, self._num_lines = 0, 0

    def pass_over(self) -> None:
        """Passes over what was compiled since the update before: not for training."""
        self._seen_us = max([self._seen_us, *(one.end_time_us or 0 for one in _compilations())])

    def end(self, step: int) -> None:
        """After update `step`."""
        if not self._is_main or self._num_lines == MAX_LINES:
            return
        new = [one for one in _compilations() if (one.end_time_us or 0) > self._seen_us]
        if not new:
            return
        self._seen_us = max(one.end_time_us for one in new)
        # What is compiled for the first time has no reason, nor has a backward pass, whose forward pass has it.
        reasons = [one for one in new if one.recompile_reason]
        if step < self._first_step + NUM_FREE_UPDATES or not reasons:
            return
        self._num_lines += 1
        took_s, first = sum((one.duration_us or 0) for one in new) / 1e6, reasons[0]
        where = f"{first.co_name} ({Path(first.co_filename or '-').name}:{first.co_firstlineno})"
        # Of each version of the code that there is, the condition that failed; the newest version's is the last one.
        reason = " ".join(str(first.recompile_reason).split())
        others = "" if len(reasons) == 1 else f" and {len(reasons) - 1} more"
        silence = "; more of these are not shown" if self._num_lines == MAX_LINES else ""
        print_to_stderr(
            f"warning: update {step} compiled {where}{others} again, for {took_s:.1f} s, since: {reason}{silence}"
        )


def _compilations() -> list[Any]:
    """torch's records of what was compiled in this process, the oldest forgotten; none before anything was."""
    utils = sys.modules.get("torch._dynamo.utils")
    return [] if utils is None else utils.get_compilation_metrics()
