"""The ways in which a run ends early, and the exit codes they become."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent


class UserError(ValueError):
    """Wrong use: the message is one line that says what was given, which rule it breaks and what to change.

    The command line prints it on rank 0 and exits with 2; it is raised before any weight is read.
    """


class AgreedUserError(UserError):
    """Wrong use that one rank found and told all others; rank 0 alone says it."""


class OwnUserError(UserError):
    """Wrong use that one rank alone can see: it speaks for itself, whatever the others say."""


class SilentUserError(UserError):
    """Wrong use that another process says."""


class RunError(RuntimeError):
    """The run was set up correctly and failed while running. One line; the command line exits with 1.

    Attributes:
        out_of_memory_at_start: whether a GPU's memory was used up in the first two updates of the session.
    """

    def __init__(self, message: str, *, out_of_memory_at_start: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory_at_start = out_of_memory_at_start


class AgreedError(RunError):
    """A failure that every rank raises together; rank 0 alone says it."""


class CheckpointError(AgreedError):
    """A checkpoint that the run waited for could not be written; what was trained is still in memory."""


class QualityGateError(RunError):
    """A figure that the recipe demands was not reached. The command line exits with 3."""


class StoppedError(BaseException):
    """A signal asked the process to end. Not an Exception, as KeyboardInterrupt is none: nobody handles it on the way.

    The command line exits with 128 + the signal's number, as shells report it.

    Attributes:
        signal_number: what was received first.
        is_agreed: every rank raises it after the same update, and rank 0 alone says it.
    """

    def __init__(self, message: str, signal_number: int, is_agreed: bool) -> None:
        super().__init__(message)
        self.signal_number, self.is_agreed = signal_number, is_agreed


def shown(value: Any) -> str:
    """A value as it stands in a recipe, cut to a readable length."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def full_disk(error: BaseException) -> str | None:
    """One line on a full disk or a quota that is used up, where that is the error's cause; None where it is not."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        code, file = error.errno, error.filename
    else:
        # The type is that of a compiled module, which has no number to give.
        is_file_of_weights = type(error).__name__ == "SafetensorError"
        code = next((code for code in codes if is_file_of_weights and os.strerror(code) in str(error)), None)
        file = None
    if code not in codes:
        return None
    what = "the disk is full" if code == errno.ENOSPC else "the disk quota is used up"
    return f"{'' if file is None else f'{file}: '}{what}; make room and start again, a training run with --resume"


def full_gpu(error: BaseException) -> str | None:
    """One line on a GPU whose memory is used up outside of the training loop; None where it is not the cause."""
    if type(error).__name__ != "OutOfMemoryError":
        # The type is torch's, which is not imported here.
        return None
    said, where = str(error).partition(" If reserved but unallocated")[0], ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(_PACKAGE):
            where = f" in {Path(frame.filename).relative_to(_PACKAGE.parent)}, line {frame.lineno}"
    return (
        f"out of GPU memory{where}: {said} Choose a teacher.placement or teacher.quantization that takes less, or "
        "lower what is computed at once (evaluation.batch_size or evaluation.batch_tokens, rollout.batch_size, in "
        "training train.batch_size)"
    )


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that a misspelt one was meant to be; None where none is alike."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)), None)
