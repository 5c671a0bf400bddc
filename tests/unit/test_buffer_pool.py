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


def make_ring(num_slots: int, delay_s: float = 0.0) -> tuple[BufferPool, list[int]]:
    """A ring whose unit n is filled with the number n, slowly; and the units in the order in which they came."""
    brought: list[int] = []

    def fill(unit: int, buffer: torch.Tensor) -> None:
        time.sleep(delay_s)
        brought.append(unit)
        buffer.fill_(unit)

    slots = [BlockBuffer(torch.zeros(4, dtype=torch.uint8)) for _ in range(num_slots)]
    return BufferPool(slots, ThreadCopier(fill)), brought


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 7, 9])
def test_every_unit_is_there_when_it_is_entered(num_slots):
    """Slots by number, `unit % slots`, are wrong at the wrap-around unless the slots divide the units."""
    ring, brought = make_ring(num_slots, delay_s=0.001)
    route = list(range(NUM_UNITS))
    for _ in range(3):
        ring.schedule(route, then=route[:num_slots])
        for unit in route:
            assert ring.acquire(unit).buffer.tolist() == [unit] * 4
        ring.release()
    ring.close()
    # Each unit travels once a step; the last prefetch is for a step that did not come.
    assert len(brought) == 3 * NUM_UNITS + min(num_slots, NUM_UNITS)


def test_the_next_steps_first_units_are_on_their_way_before_it_begins():
    ring, brought = make_ring(3)
    route = list(range(NUM_UNITS))
    ring.schedule(route, then=route[:3])
    for unit in route:
        ring.acquire(unit)
    ring.release()
    deadline = time.monotonic() + 10
    while len(brought) < NUM_UNITS + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert brought[NUM_UNITS:] == [0, 1, 2]
    ring.close()


@pytest.mark.parametrize(
    "entered",
    [[3, 4, 5, 6], [0, 2, 4, 6], [6, 5, 4], [0, 0, 1, 1], [2, 2, 0, 6, 6], list(range(NUM_UNITS))],
)
def test_what_was_not_expected_is_brought_all_the_same(entered):
    ring, _ = make_ring(3)
    route = list(range(NUM_UNITS))
    for _ in range(2):
        ring.schedule(route, then=route[:3])
        for unit in entered:
            assert ring.acquire(unit).buffer.tolist() == [unit] * 4
        ring.release()
    ring.close()


def test_a_unit_that_cannot_be_brought_raises_where_it_is_entered():
    def fill(unit: int, buffer: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    ring = BufferPool([BlockBuffer(torch.zeros(4, dtype=torch.uint8))], ThreadCopier(fill))
    ring.schedule([0], then=[])
    with pytest.raises(OSError, match="disk is gone"):
        ring.acquire(0)


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
