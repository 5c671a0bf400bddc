"""What a loader yields: a task's batch, and the teacher's outputs where they were read with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import Dataset

from distiller.data.order import SampleKey
from distiller.tasks.base import Task
from distiller.teachers.base import Outputs, Request


class MicroBatch(NamedTuple):
    """Of one process; a tuple, so that DataLoader can put what is in it into page-locked memory."""

    batch: Any
    """The task's."""

    stored: Outputs | None
    """The teacher's outputs, read from a cache."""

    def to(self, task: Task[Any, Any], device: torch.device) -> MicroBatch:
        """On the device, without waiting where its memory is page-locked."""
        stored = self.stored
        if stored is not None:
            stored = {name: tensor.to(device, non_blocking=True) for name, tensor in stored.items()}
        return MicroBatch(task.to_device(self.batch, device), stored)

    def request(self, task: Task[Any, Any]) -> Request:
        """What to ask the teacher, with the answer where it is known."""
        request = task.request(self.batch)
        return request if self.stored is None else replace(request, stored=self.stored)


@final
@dataclass(frozen=True)
class LiveCollation:
    """A loader's `collate_fn` where the teacher will be asked."""

    task: Task[Any, Any]

    def __call__(self, samples: Sequence[Any]) -> MicroBatch:
        return MicroBatch(self.task.collate(samples), None)


@final
class RepeatedDraws(Dataset[Any]):
    """Every sample as it was in one of the first `draws` epochs."""

    def __init__(self, data: Dataset[Any], draws: int) -> None:
        self._data, self._draws = data, draws

    def __getitem__(self, key: SampleKey) -> Any:
        epoch, sample_id = key
        return self._data[epoch % self._draws, sample_id]
