"""What the loop trains: a library's model and, beside it, whatever is learnt only to train it."""

from __future__ import annotations

from typing import Any

from torch import nn


class TrainedStudent(nn.Module):
    """The student model, and projections and the like that a concrete class adds.

    One module, since DeepSpeed and FSDP prepare exactly one. Only `model` is exported.
    """

    model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def num_trained_parameters(self) -> int:
        """Of all that is trained."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_model_parameters(self) -> int:
        """Of the model that predicts, without what stands beside it."""
        return sum(parameter.numel() for parameter in self.model.parameters())
