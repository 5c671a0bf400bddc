"""Repeats an evaluation with half the batch where a GPU's memory is used up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from distiller.distributed.process import print_to_stderr
from distiller.errors import RunError

ResultT = TypeVar("ResultT")


def with_fitting_batch(compute: Callable[[int], ResultT], size: int, key: str, smallest: int = 1) -> ResultT:
    """What `compute(size)` returns, or `compute` of the first of size/2, size/4, ... for which memory suffices.

    Nothing may depend on what an attempt that failed has done, and no result on the size of a batch. Accelerate's
    `find_executable_batch_size` would also repeat after errors of cuDNN, and go on below `smallest`.

    Args:
        size: of a batch, in what `key` counts.
        key: the recipe's, for messages.
        smallest: below it nothing gets smaller.

    Raises:
        RunError: memory is used up with a batch of `smallest`.
    """
    while True:
        try:
            return compute(size)
        except torch.OutOfMemoryError as error:
            if size <= smallest:
                raise RunError(
                    f"memory is used up with {key}={size}, below which nothing gets smaller ({error}); choose a "
                    "teacher.placement that takes less"
                ) from error
        # Only here: the exception has held the tensors of the attempt.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = max(size // 2, smallest)
        print_to_stderr(f"note: memory is used up; again with {key}={size}")
