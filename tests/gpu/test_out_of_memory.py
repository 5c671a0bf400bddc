"""A GPU whose memory is really used up: torch's own message and its snapshot."""

from __future__ import annotations

import pickle

import pytest
import torch

from distiller.errors import RunError
from distiller.training.loop import train
from tests.gpu.ranks import NUM_GPUS
from tests.toy_task import TokenTask, build_toy_run, toy_recipe

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")

FAILED_UPDATE = 4


class GreedyTask(TokenTask):
    """Asks for more memory than any GPU has, in one update."""

    num_losses = 0

    def loss(self, student_outputs, teacher_outputs, batch):
        self.num_losses += 1
        # One loss is computed before the first update, for DDP's buckets, in runs of several ranks alone.
        if self.num_losses == FAILED_UPDATE:
            torch.empty(2**42, dtype=torch.uint8, device=student_outputs.device)
        return super().loss(student_outputs, teacher_outputs, batch)


@pytest.mark.parametrize("records_all", [False, True])
def test_the_message_is_read_and_the_snapshot_written(tmp_path, records_all):
    recipe = toy_recipe(tmp_path, batch_size=8)
    profile = recipe.profile.model_copy(update={"memory": records_all})
    run = build_toy_run(recipe.model_copy(update={"profile": profile}), task=GreedyTask(), cpu=False)
    try:
        with pytest.raises(RunError) as caught:
            train(run)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    text = str(caught.value)
    assert f"in update {FAILED_UPDATE}, student: {2**22} MiB more were asked for and " in text
    assert "activations and the rest" in text
    file = tmp_path / "profile" / "out-of-memory-rank-0.pickle"
    assert text.endswith(f"Allocations: {file}")
    # Written by torch in this test.
    snapshot = pickle.loads(file.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert any(frame["name"] == "_train" for block in blocks for frame in block.get("frames", ()))
    # The events are forgotten when the recording ends; where blocks were allocated is not.
    assert ("oom" in {event["action"] for trace in snapshot["device_traces"] for event in trace}) == records_all
