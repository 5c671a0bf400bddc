"""Forward passes that take turns: each runs up to its next block, then hands over to the next.

When blocks are brought to the GPU one by one, all micro-batches of an update pass a block while it is there, and it
travels once instead of once each. Every pass runs exactly the operations that it would run alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch


class InterleavedForward:
    """Runs functions in threads of which only one is awake at a time; they change turns in `pause`.

    The threads stay for the next time: torch keeps cuDNN's plans by thread, and a new one would choose each anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0
        self._turns: list[threading.Semaphore] = []
        self._alive: list[bool] = []
        self._numbers: dict[int, int] = {}
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """The functions' results, in order; the first failure is raised after all threads have ended.

        They run without gradients and autocast, on the caller's device and stream.
        """
        if len(functions) == 1:
            return [functions[0]()]
        results: list[Any] = [None] * len(functions)
        self._turns = [threading.Semaphore(0) for _ in functions]
        self._alive, self._failure = [True] * len(functions), None
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def body(number: int) -> None:
            self._numbers[threading.get_ident()] = number
            self._turns[number].acquire()
            try:
                if self._failure is None:
                    # Gradient mode, autocast, device and stream belong to a thread.
                    with torch.no_grad(), torch.autocast(self._device.type, enabled=False), torch.cuda.stream(stream):
                        results[number] = functions[number]()
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._alive[number] = False
                del self._numbers[threading.get_ident()]
                self._wake_next(number)

        pool = self._threads(len(functions))
        futures = [pool.submit(body, number) for number in range(len(functions))]
        self._turns[0].release()
        wait(futures)
        if self._failure is not None:
            raise self._failure
        return results

    def switch(self) -> None:
        """Lets the others run up to their next block. Does nothing outside of `run`'s threads."""
        number = self._numbers.get(threading.get_ident())
        if number is None:
            return
        if self._wake_next(number):
            self._turns[number].acquire()
        if self._failure is not None:
            raise RuntimeError("another forward pass of this step failed") from self._failure

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _threads(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._num_threads < count:
            self.close()
            self._pool, self._num_threads = ThreadPoolExecutor(count, thread_name_prefix="interleaved"), count
        return self._pool

    def _wake_next(self, number: int) -> bool:
        """Wakes the next one that is alive; whether there was another."""
        count = len(self._alive)
        for other in ((number + offset) % count for offset in range(1, count)):
            if self._alive[other]:
                self._turns[other].release()
                return True
        return False
