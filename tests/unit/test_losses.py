"""Losses against float64 references."""

from typing import get_args

import pytest
import torch

from distiller.config.diffusion import PredictionLoss
from distiller.config.prediction_distances import DISTANCES
from distiller.diffusion.objective import distance_of
from distiller.tasks.losses import huber, mean_squared_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_equal_float64_references_and_are_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(3, 4, 5, generator=generator).to(dtype)
    target = (2 * torch.randn(3, 4, 5, generator=generator)).to(dtype)
    error = student.double() - target.double()
    quadratic = error.square().flatten(1).mean(1)
    delta = 0.7
    linear = torch.where(error.abs() <= delta, 0.5 * error.square(), delta * (error.abs() - 0.5 * delta))
    for value, reference in (
        (mean_squared_error(student, target), quadratic),
        (huber(student, target, delta), linear.flatten(1).mean(1)),
    ):
        assert value.dtype is torch.float32
        assert value.shape == (3,)
        torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=0)


def test_16_bit_inputs_do_not_overflow():
    big = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert mean_squared_error(big, -big).item() == 360_000.0


def test_every_kind_of_prediction_loss_has_its_distance():
    assert get_args(PredictionLoss.model_fields["kind"].annotation) == tuple(DISTANCES)
    student, target = torch.zeros(1, 4), torch.full((1, 4), 2.0)
    options = [PredictionLoss(kind=name, huber_delta=0.5) for name in DISTANCES]
    assert {one.kind: distance_of(one)(student, target, one).item() for one in options} == {
        "mse": 4.0,
        "huber": 0.5 * (2 - 0.25),
    }
