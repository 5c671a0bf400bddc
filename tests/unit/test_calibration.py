"""Calibration, likelihood and top-5 accuracy of a classifier, against loops over pictures in float64."""

from __future__ import annotations

import math

import pytest
import torch

from distiller.vision.calibration import Predictions, calibration_error


def softmax(row: list[float]) -> list[float]:
    whole = sum(math.exp(value) for value in row)
    return [math.exp(value) / whole for value in row]


def expected_figures(logits: list[list[float]], labels: list[int]) -> dict[str, float]:
    """Guo et al. 2017: equation 3 for the calibration error, section 2 for the likelihood."""
    probabilities = [softmax(row) for row in logits]
    predicted = [row.index(max(row)) for row in probabilities]
    count, error = len(labels), 0.0
    for number in range(1, 16):
        inside = [i for i in range(count) if (number - 1) / 15 < max(probabilities[i]) <= number / 15]
        if inside:
            accuracy = sum(predicted[i] == labels[i] for i in inside) / len(inside)
            confidence = sum(max(probabilities[i]) for i in inside) / len(inside)
            error += len(inside) / count * abs(accuracy - confidence)
    ranks = [sorted(row, reverse=True).index(row[label]) for row, label in zip(logits, labels, strict=True)]
    figures = {
        "accuracy": sum(rank == 0 for rank in ranks) / count,
        "negative_log_likelihood": -sum(math.log(probabilities[i][labels[i]]) for i in range(count)) / count,
        "calibration_error": error,
    }
    return figures | ({"top5_accuracy": sum(rank < 5 for rank in ranks) / count} if len(logits[0]) > 5 else {})


@pytest.mark.parametrize("num_classes", [2, 5, 9])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_figures_are_those_of_a_loop_over_pictures(num_classes, scale):
    generator = torch.Generator().manual_seed(num_classes)
    logits = scale * torch.randn(57, num_classes, generator=generator)
    labels = torch.randint(num_classes, (57,), generator=generator)
    predictions = Predictions()
    for part in torch.arange(57).split(20):
        assert torch.equal(predictions.add(logits[part], labels[part]), logits[part].argmax(1))
    figures = predictions.figures()
    assert figures == pytest.approx(expected_figures(logits.double().tolist(), labels.tolist()), rel=1e-9)
    assert tuple(figures) == Predictions.figure_names(num_classes)


def test_a_model_that_is_sure_and_wrong_is_not_calibrated():
    assert calibration_error(torch.ones(4), torch.tensor([False] * 4)) == 1
    assert calibration_error(torch.ones(4), torch.tensor([True] * 4)) == 0
    # 0.75 sure, three of four right: in one bin, and calibrated.
    assert calibration_error(torch.full((4,), 0.75), torch.tensor([True, True, True, False])) == pytest.approx(0)


def test_sixteen_bit_logits_are_widened_before_the_softmax():
    logits, labels = torch.tensor([[8.0, 0.0, -3.0], [1.0, 5.0, 0.5]]), torch.tensor([0, 2])
    predictions = Predictions()
    predictions.add(logits.bfloat16(), labels)
    assert predictions.figures() == pytest.approx(expected_figures(logits.double().tolist(), labels.tolist()), rel=1e-9)
