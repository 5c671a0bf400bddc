"""What the loop trains: a library's model and, beside it, whatever is learnt only to train it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from distiller.errors import UserError


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


def model_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a `TrainedStudent`'s full state, the tensors of its `model`, under that one's own names."""
    prefix = "model."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def exported_folder(run_dir: Path) -> Path:
    """The folder of the run's exported student. Raises UserError where the run has none."""
    folder = run_dir / "student"
    if not (folder / "config.json").is_file():
        raise UserError(f"{run_dir}: has no student/ yet; finish its training first")
    return folder


def damaged_student(run_dir: Path, error: Exception) -> UserError:
    """The error for an exported student that cannot be read, for this reason."""
    return UserError(f"{run_dir}: its student/ is damaged ({error}); copy it again")
