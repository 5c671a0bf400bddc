"""The teacher as the loop sees it: requests in, outputs out, wherever the weights live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Outputs = dict[str, Tensor]
"""Named outputs of one request, batch first, detached, on the caller's device."""


@dataclass(frozen=True)
class Request:
    """What one micro-batch asks of the teacher.

    Attributes:
        sample_ids: one id a sample; caches and prefetched outputs are matched by them.
        inputs: the network's inputs, batch first, on the caller's device.
        wanted: names of outputs; which ones exist is the network's to say (for example `prediction`,
            `unconditional`, `features/3`).
        modules: which module each sample needs, as places in `Network.module_names`, known on the host; empty when
            the network has one module.
    """

    sample_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    wanted: tuple[str, ...]
    modules: tuple[int, ...] = ()


class Network(ABC):
    """A frozen network of one or more modules, and how a request runs through them; knows no placement."""

    module_names: tuple[str, ...]

    @abstractmethod
    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Reads one module's weights, in eval mode, without gradients, at most one copy in host memory."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of all modules, without reading weights."""

    @abstractmethod
    def forward(self, modules: Mapping[str, nn.Module], request: Request) -> Outputs:
        """Runs the modules that the request needs. Deterministic; called without gradients."""


@dataclass
class TeacherMemory:
    """Bytes of the teacher's weights: on this rank's GPU, and in the node's host memory (shared ones counted once)."""

    gpu_bytes: int = 0
    host_bytes: int = 0
    by_module: dict[str, int] = field(default_factory=dict)


class Teacher(ABC):
    """A frozen teacher in one place of memory.

    Never an `nn.Module` and never handed to `Accelerator.prepare`, so it cannot enter the student's checkpoint,
    optimizer or sharding.
    """

    @abstractmethod
    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        """Outputs for all micro-batches of an update, in order.

        Equal to a plain eval-mode forward of the same weights in `teacher.dtype`, outside the caller's autocast.
        Some placements communicate here: every rank calls it equally often, in the same order.
        """

    @abstractmethod
    def memory(self) -> TeacherMemory:
        """What the weights take now."""

    @abstractmethod
    def close(self) -> None:
        """Frees the weights; the teacher cannot be asked again."""
