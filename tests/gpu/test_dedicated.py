"""A teacher in processes of its own, on the GPU that trains too, and on another one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from distiller.teachers import Request
from distiller.teachers.factory import open_teacher
from tests.gpu.ranks import NUM_GPUS
from tests.toy_network import DIM, ToyNetwork, save_toy, setup

pytestmark = [pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"), pytest.mark.timeout(300)]


def request_of(value: float, num_samples: int) -> Request:
    x = torch.full((num_samples, DIM), value, device="cuda:0")
    return Request(tuple(range(num_samples)), {"x": x}, ("output", "features/4"))


def differences(requests: Any, answers: Any, ready: torch.cuda.Event, plain: Any) -> list[str]:
    """The outputs that differ from those of the placement `plain`."""
    ready.synchronize()
    both = zip(answers, plain.predict(requests), strict=True)
    return [name for mine, expected in both for name in expected if not torch.equal(mine[name], expected[name])]


@pytest.mark.parametrize("inner", ["replicated", "streamed"])
@pytest.mark.parametrize("gpus", [gpus for gpus in ((0,), (1,), (0, 1)) if max(gpus) < NUM_GPUS])
def test_answers_are_those_of_replicated_whatever_stream_asks(tmp_path, gpus, inner):
    """Buffers grow, and two threads ask at the same time, on streams that are late before and after."""
    save_toy(tmp_path)
    plain = open_teacher(ToyNetwork(tmp_path, 1), setup(torch.bfloat16, "cuda:0"))
    options = {"placement": "dedicated", "devices": gpus, "inner": inner}
    teacher = open_teacher(ToyNetwork(tmp_path, 1), setup(torch.bfloat16, "cuda:0", **options))
    # Libraries take their workspaces with the first pass.
    plain.predict([request_of(0.0, 1)])
    contexts = torch.cuda.memory_allocated()
    wrong: list[str] = []

    def ask(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            for turn in range(20):
                torch.cuda._sleep(2_000_000)
                requests = [request_of(thread + turn + part / 2, (1, 300, 7)[turn % 3]) for part in range(2)]
                answers = teacher.predict(requests)
                torch.cuda._sleep(2_000_000)
                # Compared later: until then other answers may have come.
                kept.append((requests, answers, torch.cuda.current_stream().record_event()))

    kept: list = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Nothing of the loop stays in this frame's variables: memory is compared at the end.
    for requests, answers, ready in kept:
        wrong += differences(requests, answers, ready, plain)
    del requests, answers, ready
    assert len(kept) == 40
    assert wrong == []
    kept.clear()
    teacher.close()
    assert torch.cuda.memory_allocated() <= contexts
