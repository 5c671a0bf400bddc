"""What a task may offer beside training: notices, stages, a cache of outputs, evaluation and samples.

A task inherits those that it has. Whoever needs one asks with `isinstance`, and refuses (a command) or leaves out (a
training run) what the task does not offer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from distiller.distributed.ranks import Ranks
from distiller.storage.stages import Stage
from distiller.tasks.base import BatchT, NetworkT, Task
from distiller.teachers.base import Outputs, Teacher


class Checkable(ABC):
    """Has more to fill in, to say or to check before a run begins. Reads no weights and does not communicate."""

    @abstractmethod
    def with_defaults(self, recipe: Any) -> Any:
        """The recipe, its own or one of the same teacher and data, with what only the teacher's files say filled in.

        A run works with this one and writes it to its folder.
        """

    @abstractmethod
    def notices(self) -> list[str]:
        """One line each: what a user should know before the run starts; see `format_notice`.

        Printed by `--check` and, on rank 0, when a run begins.
        """

    @abstractmethod
    def check_samples(self) -> str | None:
        """Reads some of the samples whole, which nothing else does before training, and says how many of them.

        None where there is nothing to find out. Raises UserError for the first that cannot be read.
        """


class Staged(ABC):
    """Has stages before the loop: work of its own whose results lie in keyed files. `dtype` is the teacher's."""

    @abstractmethod
    def prepare_stages(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        """Runs the stages that need no teacher, and says whether `load_data` needs one. Communicates."""

    @abstractmethod
    def missing_stage(self, dtype: torch.dtype) -> Path | None:
        """Where something should lie that belongs to cached outputs, and that would be another one if made again here.

        None where it is there, or where there is no such thing. Reads no weights.
        """

    @abstractmethod
    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        """Stages that a cache holds beside the outputs, so that its folder is all that a run of the same recipe needs.

        Reads no weights.
        """


class ReplicatesHead(ABC):
    """Its loss applies the teacher's last layer on every rank."""

    @abstractmethod
    def replicated_head_bytes(self, dtype: torch.dtype) -> int:
        """Of the teacher's weights, what every rank holds on its device itself, wherever the teacher is.

        `dtype` is the teacher's. Reads no weights.
        """

    @abstractmethod
    def make_head_without_data(self, dtype: torch.dtype) -> list[Tensor]:
        """Makes that layer where `load_data` would read it, for a plan, which computes nothing; returns its tensors."""

    @abstractmethod
    def drop_head(self) -> None:
        """Forgets that layer again."""


class Plannable(ABC):
    """Its updates can be followed without data."""

    @abstractmethod
    def example(self, batch_size: int) -> Any:
        """A micro-batch of zeros on the CPU, with the largest shapes that the recipe's data may have.

        Reads no weights and none of the data but texts.
        """

    @abstractmethod
    def stage_passes(self) -> tuple[int, int]:
        """(samples that the teacher is asked about before the loop where nothing is made yet, samples a pass).

        A sample counts once for each pass that it is in.
        """


class Cacheable(Task[BatchT, NetworkT]):
    """Its teacher's outputs can be stored and read instead of asking the teacher."""

    @property
    @abstractmethod
    def wanted(self) -> tuple[str, ...]:
        """Names of the outputs that the loss reads, as a cache holds them."""

    @abstractmethod
    def data_settings(self) -> dict[str, Any]:
        """What `data_digest` follows from beside the data's files, for JSON, by the keys of the recipe's `data`."""

    @abstractmethod
    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        """Everything in recipe and files, for JSON, that the teacher's inputs depend on, but for `data_digest`.

        `dtype` is the teacher's. May read files for their digests, and no weights.
        """

    @abstractmethod
    def cached_form(self) -> dict[str, Any]:
        """How outputs are stored, for JSON: a `kind`, and what else decides the bytes."""

    @abstractmethod
    def store(self, batch: BatchT, outputs: Outputs) -> list[Outputs]:
        """What a cache keeps of each sample of a micro-batch, on the CPU, every tensor with at least one axis."""

    @abstractmethod
    def restore(self, batch: BatchT, samples: Sequence[Outputs]) -> Outputs:
        """The outputs of a micro-batch from what was stored of its samples; runs in loader processes."""

    @abstractmethod
    def compare_forms(self, batches: Sequence[BatchT], outputs: Sequence[Outputs]) -> str | None:
        """A table of the forms in which a cache could store these outputs; None where there is one alone.

        Reads the student's weights. `batches` are on the device where the teacher's answers are.
        """


class CacheableWhole(Cacheable[BatchT, NetworkT]):
    """Stores outputs as they are: tensors [B, ...], a row a sample."""

    def cached_form(self) -> dict[str, Any]:
        return {"kind": "whole"}

    def store(self, batch: BatchT, outputs: Outputs) -> list[Outputs]:
        held = {name: outputs[name].cpu() for name in self.wanted}
        return [{name: tensor[row] for name, tensor in held.items()} for row in range(len(self.sample_ids(batch)))]

    def restore(self, batch: BatchT, samples: Sequence[Outputs]) -> Outputs:
        del batch
        return {name: torch.stack([sample[name] for sample in samples]) for name in self.wanted}

    def compare_forms(self, batches: Sequence[BatchT], outputs: Sequence[Outputs]) -> str | None:
        del batches, outputs
        return None


class HoldsOut(ABC):
    """Has samples that it is not trained on, on which the loss is measured while training."""

    @property
    @abstractmethod
    def num_held_out(self) -> int:
        """How many there are, known before any weight is read."""

    @abstractmethod
    def held_out_sample(self, draw: int, index: int) -> Any:
        """One of them, for `Task.collate`; after `load_data`.

        The same at every call. A task with draws (noise, timesteps) draws anew for each `draw`, from 0 on.
        """


class Evaluable(ABC):
    """Can measure a finished student."""

    @abstractmethod
    def figures(self) -> tuple[str, ...]:
        """Dotted keys of the numbers that the report of `evaluate` may have. Reads no weights. Raises UserError.

        A figure may be missing from a report, or be None, where the data has nothing to compute it from.
        """

    @abstractmethod
    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Compares `run_dir/student` with the teacher on held-out data; one process, JSON-ready figures.

        Among them, for every task, are those of `distiller.tasks.cost_figures` and `speed_ratio`.
        """

    @abstractmethod
    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        """What `evaluate` measured against what the recipe demands: one line where that is missed."""


class Samplable(ABC):
    """Can show teacher and student side by side."""

    sample_suffixes: tuple[str, ...]
    """What the name of a file that `sample` writes may end with; the first is that of `samples` in the run's folder."""

    @abstractmethod
    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        """Writes `samples` into `run_dir`, reading `run_dir/student`; every rank calls it."""

    @abstractmethod
    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        """Writes `output` for these prompts; one process."""


def format_notice(notice: str) -> str:
    """What is printed of one of `Checkable.notices`: a note, unless it says itself that it is a warning."""
    return notice if notice.startswith("warning: ") else f"note: {notice}"


def default_recipe(task: Task[Any, Any], recipe: Any) -> Any:
    """The recipe with the defaults that the task fills in; see `Checkable.with_defaults`."""
    return task.with_defaults(recipe) if isinstance(task, Checkable) else recipe


def notices_of(task: Task[Any, Any]) -> list[str]:
    """See `Checkable.notices`."""
    return task.notices() if isinstance(task, Checkable) else []


def missing_stage(task: Task[Any, Any], dtype: torch.dtype) -> Path | None:
    """See `Staged.missing_stage`; None of a task without stages."""
    return task.missing_stage(dtype) if isinstance(task, Staged) else None
