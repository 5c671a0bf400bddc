"""`disk` on a real GPU: run by hand, `python -m pytest tests/gpu/test_disk.py`. CI has no GPU."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from distiller.teachers.disk import NUM_STAGING
from distiller.teachers.footprint import measure
from tests.gpu.ranks import NUM_GPUS
from tests.placement_contract import answers, open_case
from tests.toy_network import ToyNetwork, save_toy, setup

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.mark.parametrize("pin_memory", [True, False])
def test_the_host_holds_two_blocks_and_no_more(tmp_path, pin_memory):
    """Page-locked or not; what torch allocates itself is rounded up to a power of two."""
    network = ToyNetwork(save_toy(tmp_path / "toy"), 2)
    replicated = open_case("replicated", network, device="cuda:0")
    teacher = open_case("disk", network, device="cuda:0", pin_memory=pin_memory)
    assert teacher._staging.piece(0).is_pinned() == pin_memory
    blocks = NUM_STAGING * measure(network, setup()).largest_block
    assert blocks <= teacher.memory().host_bytes < blocks + mmap.PAGESIZE
    pairs = zip(answers(teacher, 0, 2, device="cuda:0"), answers(replicated, 0, 2, device="cuda:0"), strict=True)
    assert all(np.array_equal(mine, theirs) for mine, theirs in pairs)
    teacher.close()
    assert teacher._staging is None
