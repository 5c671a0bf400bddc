"""The average of the weights, and a scaler's flag. AdamW and its schedules are held by `test_reference_training`."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distiller.config.recipe import Optim
from distiller.student_state.moving_average import average_unless
from distiller.training.optim import build_optimizer, set_learning_rate


@pytest.mark.parametrize("is_skipped", [0.0, 1.0])
def test_an_average_of_several_dtypes(is_skipped):
    dtypes = (torch.float32, torch.float64, torch.float32, torch.bfloat16)
    averages = [torch.full((3,), 2.0, dtype=dtype) for dtype in dtypes]
    average_unless(averages, [torch.full((3,), 4.0, dtype=dtype) for dtype in dtypes], 0.25, torch.tensor(is_skipped))
    assert [average.tolist() for average in averages] == [[2.0 if is_skipped else 2.5] * 3] * 4
    assert [average.dtype for average in averages] == list(dtypes)


class NewElements(TorchDispatchMode):
    """Counts the elements of what the operations within it return; those in place return nothing."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.count += sum(tensor.numel() for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor))
        return output


def test_an_average_takes_no_memory_for_copies_of_the_weights():
    averages, values = ([torch.full((1000,), number) for _ in range(2)] for number in (2.0, 4.0))
    is_skipped = torch.tensor(0.0)
    with NewElements() as new:
        average_unless(averages, values, 0.25, is_skipped)
    assert averages[1][0] == 2.5
    assert new.count < 1000


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


def test_the_rate_reaches_the_second_optimizer_of_partial_offload():
    """DeepSpeed's ZeRO-3 with `offload_optimizer.ratio` below 1 steps what stays on the GPU by an AdamW of its own."""
    layer = torch.nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW([parameter], lr=0.5) for parameter in layer.parameters()]
    engine = SimpleNamespace(param_groups=optimizers[0].param_groups, backup_optimizer=optimizers[1])
    prepared = cast(Any, SimpleNamespace(optimizer=engine, param_groups=engine.param_groups))
    set_learning_rate(prepared, 0.25)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.25, 0.25]
