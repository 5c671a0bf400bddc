"""A task: what a batch means. The loop knows this interface and no concrete task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import Dataset

from distiller.distributed.ranks import Ranks
from distiller.storage.stages import Stage
from distiller.tasks.student_module import TrainedStudent
from distiller.teachers.base import Network, Outputs, Request, Teacher

BatchT = TypeVar("BatchT")
NetworkT = TypeVar("NetworkT", bound=Network)


@dataclass(frozen=True)
class LossSum:
    """A micro-batch's loss, summed over its samples (float32 scalars); `terms` are unweighted, detached sums."""

    total: Tensor
    terms: dict[str, Tensor]


def line_of(notice: str) -> str:
    """What is printed of one of `Task.notices`: a note, unless it says itself that it is a warning."""
    return notice if notice.startswith("warning: ") else f"note: {notice}"


class Task(ABC, Generic[BatchT, NetworkT]):
    """Built from a recipe and files' descriptions alone; weights are read in the methods that say so.

    In order: construction (raises UserError), `run_stages`, `build_student`, then `collate` in loader processes and the
    rest once a micro-batch.
    """

    network: NetworkT
    """The teacher, without a place."""

    num_samples: int
    """Samples an epoch, known before any weight is read."""

    data_digest: str
    """Changes when the data do, as far as a quick look shows: a resumed run, and every rank, has the same."""

    sample_suffixes: tuple[str, ...]
    """What the name of a file that `sample` writes may end with; the first is that of `samples` in the run's folder."""

    @property
    @abstractmethod
    def needs_live_teacher(self) -> bool:
        """Whether the loop asks the teacher for predictions."""

    def with_defaults(self, recipe: Any) -> Any:
        """The recipe, its own or one of the same teacher and data, with what only the teacher's files say filled in.

        A run works with this one and writes it to its folder. Reads no weights and does not communicate.
        """
        return recipe

    def notices(self) -> list[str]:
        """One line each: what a user should know before the run starts, known once the task is built; see `line_of`.

        Printed by `--check` and, on rank 0, when a run begins. Reads no weights and does not communicate.
        """
        return []

    def look_at_samples(self) -> str | None:
        """Reads some of the samples whole, which nothing else does before training, and says how many of them.

        None where there is nothing to find out. Raises UserError for the first that cannot be read.
        """
        return None

    @abstractmethod
    def prepare_stages(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        """Runs the stages that come before the teacher is loaded, and says whether a later one needs it.

        Communicates. `dtype` is the teacher's.
        """

    def missing_stage(self, dtype: torch.dtype) -> Path | None:
        """Where something should lie that belongs to cached outputs, and that would be another one if made again here.

        None where it is there, or where there is no such thing. Reads no weights.
        """
        del dtype
        return None

    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        """Stages that a cache holds beside the outputs, so that its folder is all that a run of the same recipe needs.

        `dtype` is the teacher's. Reads no weights.
        """
        del dtype
        return []

    @abstractmethod
    def run_stages(self, ranks: Ranks, teacher: Teacher | None) -> Dataset[Any]:
        """Runs the other stages and returns the training data, indexed by (epoch, sample id). Communicates."""

    def num_trained_parameters(self) -> int:
        """Parameters of what is trained, from descriptions alone."""
        return sum(parameter.numel() for parameter in self.student_skeleton().parameters())

    @abstractmethod
    def student_skeleton(self) -> TrainedStudent:
        """What is trained, on the meta device, from descriptions alone."""

    def replicated_head_bytes(self, dtype: torch.dtype) -> int:
        """Of the teacher's weights, what every rank holds on its device itself, wherever the teacher is.

        `dtype` is the teacher's. Reads no weights.
        """
        del dtype
        return 0

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
    def request(self, batch: BatchT) -> Request:
        """What to ask the teacher."""

    @property
    @abstractmethod
    def has_draws(self) -> bool:
        """Whether what the teacher is asked about a sample differs from epoch to epoch."""

    @property
    @abstractmethod
    def wanted(self) -> tuple[str, ...]:
        """Names of the outputs that the loss reads, as a cache holds them."""

    def data_settings(self) -> dict[str, Any]:
        """What `data_digest` follows from beside the data's files, for JSON, by the keys of the recipe's `data`."""
        return {}

    @abstractmethod
    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        """Everything in recipe and files, for JSON, that the teacher's inputs depend on, but for `data_digest`.

        `dtype` is the teacher's. May read files for their digests, and no weights.
        """

    def cached_form(self) -> dict[str, Any]:
        """How outputs are stored, for JSON: as they are, unless a task has a smaller form."""
        return {"kind": "whole"}

    def store(self, batch: BatchT, outputs: Outputs) -> list[Outputs]:
        """What a cache keeps of each sample of a micro-batch, on the CPU, every tensor with at least one axis."""
        held = {name: outputs[name].cpu() for name in self.wanted}
        return [{name: tensor[row] for name, tensor in held.items()} for row in range(len(self.sample_ids(batch)))]

    def restore(self, batch: BatchT, samples: Sequence[Outputs]) -> Outputs:
        """The outputs of a micro-batch from what was stored of its samples; runs in loader processes."""
        del batch
        return {name: torch.stack([sample[name] for sample in samples]) for name in self.wanted}

    def compare_forms(self, batches: Sequence[BatchT], outputs: Sequence[Outputs]) -> str | None:
        """A table of the forms in which a cache could store these outputs; None where there is one alone.

        Reads the student's weights. `batches` are on the device where the teacher's answers are.
        """
        del batches, outputs
        return None

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

    @abstractmethod
    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        """Shows teacher and student side by side in `run_dir`, reading `run_dir/student`; every rank calls it."""

    @abstractmethod
    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Compares `run_dir/student` with the teacher on held-out data; one process, JSON-ready figures."""

    @abstractmethod
    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        """What `evaluate` measured against what the recipe demands: one line where that is missed."""

    @abstractmethod
    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        """Shows teacher and student side by side for these prompts; one process."""
