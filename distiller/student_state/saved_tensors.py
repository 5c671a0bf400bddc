"""The saved tensors of a module: parameters and persistent buffers, each under its first name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from distiller.student_state.base import Piece, Read


@final
class SavedTensors:
    """The live tensors of a module, in its order.

    Attributes:
        tensors: name -> tensor, for all saved tensors; a tied tensor once.
        parameters, buffers: those of `tensors` that are parameters, and the others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                self.tensors[name] = tensor
        self.parameters = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}
        self.buffers = {name: tensor for name, tensor in self.tensors.items() if name not in self.parameters}

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that are trained."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not trained."""
        return {name: parameter for name, parameter in self.parameters.items() if not parameter.requires_grad}

    def buffer_pieces(self) -> Iterator[Piece]:
        """A piece for each buffer, of all its elements."""
        for name, buffer in self.buffers.items():
            yield Piece(name, 0, buffer.detach().reshape(-1), is_persistent=True)

    def load_buffers(self, read: Read) -> None:
        """Copies saved buffers into the module's buffers, which keep their dtype."""
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffer.copy_(read("weights", name, 0, buffer.numel()).view(buffer.shape))
