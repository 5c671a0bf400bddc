"""The buffer pool, its copiers and interleaved passes: what is where when a block runs, whatever comes next."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from distiller.teachers.streaming.buffer_pool import BlockBuffer, BufferPool
from distiller.teachers.streaming.copiers import ThreadCopier
from distiller.teachers.streaming.interleaved_forward import InterleavedForward

NUM_UNITS = 7


def make_pool(num_buffers: int, delay_s: float = 0.0) -> tuple[BufferPool, list[int]]:
    """A pool whose unit i is bytes of value i, loaded slowly; and the units in the order in which they were loaded."""
    loaded: list[int] = []

    def load_unit(unit: int, data: torch.Tensor) -> None:
        time.sleep(delay_s)
        loaded.append(unit)
        data.fill_(unit)

    buffers = [BlockBuffer(torch.zeros(4, dtype=torch.uint8)) for _ in range(num_buffers)]
    return BufferPool(buffers, ThreadCopier(load_unit)), loaded


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4, 7, 9])
def test_every_unit_is_there_when_it_is_acquired(num_buffers):
    """Buffers chosen by `unit % num_buffers` would be wrong where that does not divide the number of units."""
    pool, loaded = make_pool(num_buffers, delay_s=0.001)
    route = list(range(NUM_UNITS))
    for _ in range(3):
        pool.schedule(route, then=route[:num_buffers])
        for unit in route:
            assert pool.acquire(unit).data.tolist() == [unit] * 4
        pool.release()
    pool.close()
    # Each unit is copied once a step; the last prefetch is for a step that did not come.
    assert len(loaded) == 3 * NUM_UNITS + min(num_buffers, NUM_UNITS)


def test_copies_of_the_next_steps_first_units_start_before_it_begins():
    pool, loaded = make_pool(3)
    route = list(range(NUM_UNITS))
    pool.schedule(route, then=route[:3])
    for unit in route:
        pool.acquire(unit)
    pool.release()
    deadline = time.monotonic() + 10
    while len(loaded) < NUM_UNITS + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loaded[NUM_UNITS:] == [0, 1, 2]
    pool.close()


@pytest.mark.parametrize(
    "acquired",
    [[3, 4, 5, 6], [0, 2, 4, 6], [6, 5, 4], [0, 0, 1, 1], [2, 2, 0, 6, 6], list(range(NUM_UNITS))],
)
def test_units_outside_of_the_schedule_are_loaded_too(acquired):
    pool, _ = make_pool(3)
    route = list(range(NUM_UNITS))
    for _ in range(2):
        pool.schedule(route, then=route[:3])
        for unit in acquired:
            assert pool.acquire(unit).data.tolist() == [unit] * 4
        pool.release()
    pool.close()


def test_a_unit_that_cannot_be_loaded_raises_where_it_is_acquired():
    def fails(unit: int, data: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    pool = BufferPool([BlockBuffer(torch.zeros(4, dtype=torch.uint8))], ThreadCopier(fails))
    pool.schedule([0], then=[])
    with pytest.raises(OSError, match="disk is gone"):
        pool.acquire(0)


def test_passes_take_turns_in_order_and_only_one_is_awake():
    interleaved, log, awake = InterleavedForward(torch.device("cpu")), [], threading.Lock()

    def one(name: str, num_blocks: int):
        def run() -> str:
            for block in range(num_blocks):
                interleaved.switch()
                assert awake.acquire(blocking=False)
                log.append(f"{name}{block}")
                awake.release()
            return name

        return run

    assert interleaved.run([one("a", 3), one("b", 2), one("c", 3)]) == ["a", "b", "c"]
    assert log == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "c2"]


def test_gradients_are_off_in_every_pass():
    weight = torch.ones(2, requires_grad=True)
    outputs = InterleavedForward(torch.device("cpu")).run([lambda: weight * 2, lambda: weight * 3])
    assert not any(output.requires_grad for output in outputs)


def test_a_failing_pass_ends_all_of_them():
    interleaved = InterleavedForward(torch.device("cpu"))

    def fails() -> None:
        interleaved.switch()
        raise ValueError("no")

    def waits() -> None:
        for _ in range(100):
            interleaved.switch()

    with pytest.raises(ValueError, match="no"):
        interleaved.run([waits, fails, waits])
