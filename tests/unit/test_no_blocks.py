"""Teachers without blocks, such as a classifier of which one layer runs twice: each module is one unit of weights."""

import pytest
import torch

from tests.placement_contract import CASES, answers, open_case, placement_of
from tests.toy_network import ToyNetwork, save_toy


class WholeNetwork(ToyNetwork):
    def block_names(self, name: str) -> tuple[str, ...]:
        return ()


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> WholeNetwork:
    return WholeNetwork(save_toy(tmp_path_factory.mktemp("toy")))


@pytest.mark.parametrize("case", [case for case in CASES if placement_of(case) != "cached"])
def test_placements_answer_as_replicated_does(network, case):
    expected = answers(open_case("replicated", network, torch.bfloat16), 0, 1, autocast=False)
    teacher = open_case(case, network, torch.bfloat16)
    for ours, theirs in zip(answers(teacher, 0, 1, autocast=False), expected, strict=True):
        assert abs(ours - theirs).max() <= 2e-2 * max(1.0, abs(theirs).max())
    teacher.close()
