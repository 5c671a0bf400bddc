"""The learning rate is a pure function of the update's number."""

import pytest
import torch

from distiller.config import Optim
from distiller.optim import average_unless, build_optimizer, learning_rate


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_then_decay_to_the_end(schedule):
    optim = Optim(lr=2.0, schedule=schedule, warmup_steps=4)
    rates = [learning_rate(optim, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert max(rates) == 2.0
    if schedule == "constant":
        assert rates[-1] == 2.0
    else:
        assert rates[4] == 2.0
        assert rates == rates[:4] + sorted(rates[4:], reverse=True)
        assert 0 < rates[-1] < 0.2


def test_vectors_are_not_decayed():
    optimizer = build_optimizer(torch.nn.Linear(3, 2), Optim(weight_decay=0.1))
    decays = {tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {(2, 3): 0.1, (2,): 0.0}


@pytest.mark.parametrize("is_skipped", [0.0, 1.0])
def test_an_average_of_several_dtypes(is_skipped):
    dtypes = (torch.float32, torch.float64, torch.float32, torch.bfloat16)
    averages = [torch.full((3,), 2.0, dtype=dtype) for dtype in dtypes]
    average_unless(averages, [torch.full((3,), 4.0, dtype=dtype) for dtype in dtypes], 0.25, torch.tensor(is_skipped))
    assert [average.tolist() for average in averages] == [[2.0 if is_skipped else 2.5] * 3] * 4
    assert [average.dtype for average in averages] == list(dtypes)


@pytest.mark.parametrize("num_ranks", [0, 1, 2])
def test_the_flag_of_an_overflow_may_be_a_vector_and_a_number_of_ranks(num_ranks):
    """As FSDP1's loss scaler hands it over."""
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, Optim(lr=0.1))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.found_inf = torch.full((1,), float(num_ranks))
    optimizer.step()
    assert torch.equal(layer.weight, before) == (num_ranks > 0)
    assert float(optimizer.state[layer.weight]["step"]) == (0 if num_ranks else 1)
