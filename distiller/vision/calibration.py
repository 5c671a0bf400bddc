"""How right a classifier's predictions are, and whether it is as sure of them as it is right."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

NUM_BINS = 15
"""Equal ranges of the confidence, as in Guo et al. 2017, section 4."""
TOP = 5
"""`top5_accuracy` is reported where there are more classes than this."""


@final
class Predictions:
    """What one model predicts for pictures with known labels, added batch by batch. On the CPU, in float64."""

    def __init__(self) -> None:
        self._confidences: list[Tensor] = []
        self._is_right: list[Tensor] = []
        self._likelihood_sum = 0.0
        self._top_hits: int | None = None

    @staticmethod
    def figure_names(num_classes: int) -> tuple[str, ...]:
        """Keys of `figures` for logits of so many classes."""
        names = ("accuracy", "negative_log_likelihood", "calibration_error")
        return (*names, f"top{TOP}_accuracy") if num_classes > TOP else names

    def add(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Adds the logits [B, classes], floating, of pictures with these labels [B] int64; returns the classes [B]."""
        log_probabilities, classes = logits.double().log_softmax(1), logits.argmax(1)
        self._confidences.append(log_probabilities.gather(1, classes[:, None]).squeeze(1).exp())
        self._is_right.append(classes == labels)
        self._likelihood_sum -= log_probabilities.gather(1, labels[:, None]).sum().item()
        if logits.shape[1] > TOP:
            likeliest = log_probabilities.topk(TOP, dim=1).indices
            self._top_hits = (self._top_hits or 0) + int((likeliest == labels[:, None]).sum())
        return classes

    def figures(self) -> dict[str, float]:
        """Of all pictures, of which there is at least one.

        Returns:
            `accuracy`, the share of right predictions; `negative_log_likelihood`, the mean of -log of the label's
            probability, in nats; `calibration_error`, see `calibration_error`; and, where there are more than 5
            classes, `top5_accuracy`, the share of pictures whose label is among the 5 likeliest.
        """
        confidences, is_right = torch.cat(self._confidences), torch.cat(self._is_right)
        figures = {
            "accuracy": is_right.double().mean().item(),
            "negative_log_likelihood": self._likelihood_sum / len(is_right),
            "calibration_error": calibration_error(confidences, is_right),
        }
        return figures if self._top_hits is None else figures | {f"top{TOP}_accuracy": self._top_hits / len(is_right)}


def calibration_error(confidences: Tensor, is_right: Tensor) -> float:
    """The expected calibration error: sum over bins of (share of pictures) * |accuracy - mean confidence|.

    Guo et al. 2017 (arXiv 1706.04599), equation 3, with `NUM_BINS` bins ((m - 1) / 15, m / 15]. 0 is a model that is
    right as often as it says; 1 is one that is sure and always wrong.

    Args:
        confidences: [N] floating, in (0, 1]: the probability of each picture's predicted class.
        is_right: [N] bool: whether that class is the label.
    """
    bins = (confidences * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1
    # Within a bin, share * |accuracy - confidence| is |sum of (hit - confidence)| / N.
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add(0, bins, is_right.double() - confidences.double())
    return gaps.abs().sum().item() / len(confidences)
