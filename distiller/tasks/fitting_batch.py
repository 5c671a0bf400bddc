"""Repeats an evaluation with half the batch where a GPU's memory is used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import find_executable_batch_size

from distiller.distributed.process import print_to_stderr
from distiller.errors import RunError

ResultT = TypeVar("ResultT")


def with_fitting_batch(compute: Callable[[int], ResultT], size: int, key: str) -> ResultT:
    """What `compute(size)` returns, or `compute` of the first of size/2, size/4, ... for which memory suffices.

    Nothing may depend on what an attempt that failed has done, and no result on the size of a batch.

    Args:
        size: of a batch, in what `key` counts.
        key: the recipe's, for messages.

    Raises:
        RunError: memory is used up with a batch of 1.
    """

    def halve() -> int:
        nonlocal size
        size //= 2
        if not size:
            raise RunError(f"a {key} of 1 is too much for the memory; choose a teacher.placement that takes less")
        print_to_stderr(f"note: memory is used up; again with {key}={size}")
        return size

    @find_executable_batch_size(starting_batch_size=size, reduce_batch_size_fn=halve)
    def attempt(batch_size: int) -> ResultT:
        return compute(batch_size)

    return attempt()  # type: ignore[call-arg]
