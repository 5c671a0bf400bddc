"""Functions that keep no tensors between their inputs and outputs on a GPU, though they do on a CPU.

A plan follows a computation on tensors without data, which look as if they were on a CPU. It observes these functions,
so that it counts them as they will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Observer = Callable[[Callable[[], Any]], Any]
"""Gets a call without arguments, and returns what it returns."""

_observer: ContextVar[Observer | None] = ContextVar("observer of GPU kernels", default=None)


def is_planned() -> bool:
    """Whether this is a plan, and nothing is computed."""
    return _observer.get() is not None


def runs_on_gpu(device: torch.device) -> bool:
    """Whether the device is a GPU, or stands for one in a plan."""
    return device.type == "cuda" or is_planned()


def one_kernel_on_gpu(function: FunctionT) -> FunctionT:
    """Marks a function, see the module."""

    @wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        observer = _observer.get()
        if observer is None:
            return function(*args, **kwargs)
        return observer(lambda: function(*args, **kwargs))

    return observed  # type: ignore[return-value]


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Inside, calls of marked functions go through `observer`, and `runs_on_gpu` is true."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
