"""A task: what a batch means. The loop knows this interface and no concrete task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distiller.distributed.ranks import Ranks
from distiller.tasks.student_module import TrainedStudent
from distiller.teachers.base import Network, Outputs, Request, Teacher

BatchT = TypeVar("BatchT")
NetworkT = TypeVar("NetworkT", bound=Network)


@dataclass(frozen=True)
class LossSum:
    """A micro-batch's loss, summed over its samples (float32 scalars); `terms` are unweighted, detached sums."""

    total: Tensor
    terms: dict[str, Tensor]


class Task(ABC, Generic[BatchT, NetworkT]):
    """What training needs. What else a task may offer (stages, a cache ...) is in `distiller.tasks.interfaces`.

    Built from a recipe and files' descriptions alone; weights are read in the methods that say so. In order:
    construction (raises UserError), `load_data`, `build_student`, then `collate` in loader processes and the rest once
    a micro-batch.
    """

    network: NetworkT
    """The teacher, without a place."""

    num_samples: int
    """Samples an epoch, known before any weight is read."""

    data_digest: str
    """Changes when the data do, as far as a quick look shows: a resumed run, and every rank, has the same."""

    @property
    @abstractmethod
    def needs_live_teacher(self) -> bool:
        """Whether the loop asks the teacher for predictions."""

    @property
    @abstractmethod
    def has_draws(self) -> bool:
        """Whether what the teacher is asked about a sample differs from epoch to epoch."""

    @abstractmethod
    def load_data(self, ranks: Ranks, teacher: Teacher | None) -> Dataset[Any]:
        """The training data, indexed by (epoch, sample id); runs the stages that need the teacher. Communicates."""

    @abstractmethod
    def student_skeleton(self) -> TrainedStudent:
        """What is trained, on the meta device, from descriptions alone."""

    @property
    @abstractmethod
    def block_classes(self) -> tuple[str, ...]:
        """Names of the classes of its repeated blocks, each of which an engine may gather as one unit."""

    @abstractmethod
    def build_student(self) -> TrainedStudent:
        """What is trained, on the CPU in float32, the same on every rank."""

    @abstractmethod
    def enable_gradient_checkpointing(self, trained: TrainedStudent) -> None:
        """Recomputes activations in the backward pass, in the student only."""

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> BatchT:
        """Dataset items -> a micro-batch on the CPU."""

    @abstractmethod
    def to_device(self, batch: BatchT, device: torch.device) -> BatchT:
        """Moves a micro-batch, without waiting where its memory is page-locked."""

    @abstractmethod
    def sample_ids(self, batch: BatchT) -> tuple[int, ...]:
        """The samples' places in the data, on the host."""

    @abstractmethod
    def count(self, batch: BatchT) -> int:
        """What the loss sum is divided by, summed over the update: samples here, tokens elsewhere. Needs no model."""

    @abstractmethod
    def tokens(self, batch: BatchT) -> int:
        """Tokens that the student's blocks see, for throughput."""

    @abstractmethod
    def request(self, batch: BatchT) -> Request:
        """What to ask the teacher."""

    @abstractmethod
    def student_inputs(self, batch: BatchT, teacher_outputs: Outputs | None, dtype: torch.dtype) -> Mapping[str, Any]:
        """Keyword arguments of the trained module; `dtype` is its weights'.

        A task whose loss needs a weight of the student (a language model's head) compares inside the module's forward,
        where every engine has that weight whole; hence the teacher's outputs.
        """

    @abstractmethod
    def loss(self, student_outputs: Any, teacher_outputs: Outputs | None, batch: BatchT) -> LossSum:
        """The loss in float32, whatever the precision of the outputs."""

    @abstractmethod
    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the student in its library's own format from the trained module's full state."""
