"""Interleaves forward passes block by block: each runs up to its next block, then the next pass runs.

When blocks are copied to the GPU one by one, all micro-batches of an update then use a block while it is there, and it
is copied once instead of once for each micro-batch. Every pass runs exactly the operations that it would run alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar, final

import torch

T = TypeVar("T")


@final
class InterleavedForward:
    """Runs functions in one thread each, of which only one runs at a time; `switch` passes control to the next.

    The threads are kept for the next call: torch caches cuDNN's plans by thread, and new threads would choose again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0
        self._may_run: list[threading.Semaphore] = []
        self._is_alive: list[bool] = []
        self._index_of_thread: dict[int, int] = {}
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """The functions' results, in order; the first failure is raised after all functions have ended.

        The functions run without gradients and autocast, on the caller's device and current stream.
        """
        if len(functions) == 1:
            return [functions[0]()]
        results: dict[int, T] = {}
        self._may_run = [threading.Semaphore(0) for _ in functions]
        self._is_alive, self._failure = [True] * len(functions), None
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def body(i: int) -> None:
            self._index_of_thread[threading.get_ident()] = i
            self._may_run[i].acquire()
            try:
                if stream is not None:
                    # `torch.cuda.stream` sets the former device again when it ends: GPU 0 in a new thread, where that
                    # would open a CUDA context.
                    torch.cuda.set_device(stream.device)
                if self._failure is None:
                    # Gradient mode, autocast, device and stream are set for each thread.
                    with torch.no_grad(), torch.autocast(self._device.type, enabled=False), torch.cuda.stream(stream):
                        results[i] = functions[i]()
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._is_alive[i] = False
                del self._index_of_thread[threading.get_ident()]
                self._wake_next(i)

        pool = self._thread_pool(len(functions))
        futures = [pool.submit(body, i) for i in range(len(functions))]
        self._may_run[0].release()
        wait(futures)
        if self._failure is not None:
            raise self._failure
        return [results[i] for i in range(len(functions))]

    def switch(self) -> None:
        """Lets the other passes run up to their next block. Does nothing outside of `run`'s threads."""
        i = self._index_of_thread.get(threading.get_ident())
        if i is None:
            return
        if self._wake_next(i):
            self._may_run[i].acquire()
        if self._failure is not None:
            raise RuntimeError("another forward pass of this step failed") from self._failure

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _thread_pool(self, num_threads: int) -> ThreadPoolExecutor:
        if self._pool is None or self._num_threads < num_threads:
            self.close()
            self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="interleaved")
            self._num_threads = num_threads
        return self._pool

    def _wake_next(self, i: int) -> bool:
        """Wakes the next thread that is alive; False if there is no other."""
        count = len(self._is_alive)
        for other in ((i + offset) % count for offset in range(1, count)):
            if self._is_alive[other]:
                self._may_run[other].release()
                return True
        return False
