"""The placement `cached` for the contract tests: a live teacher's outputs, written to a cache and read back."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distiller.cache.layout import Layout
from distiller.cache.shards import Shard, write_shard
from distiller.cache.writing import Batching, CacheWriter
from distiller.distributed.ranks import Ranks
from distiller.tasks.interfaces import Cacheable
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.cached import CachedTeacher
from tests.toy_task import Sequences


class FromFiles(Teacher):
    """Writes a live teacher's outputs to a cache, and reads them by `CachedTeacher`."""

    def __init__(self, live: Teacher, network: Network, setup: Setup) -> None:
        self.live, self.cached = live, CachedTeacher(network, setup)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        device = next(iter(requests[0].inputs.values())).device
        outputs, answered = self.live.predict(requests), []
        for request, known in zip(requests, outputs, strict=True):
            samples = [{k: v[row].cpu() for k, v in known.items()} for row in range(len(request.sample_ids))]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "outputs-000000.safetensors"
                write_shard(file, samples)
                shard = Shard(file)
                read = [shard.read(row) for row in range(len(shard))]
                stored = {name: torch.stack([sample[name] for sample in read]).to(device) for name in known}
            answered.append(Request(request.sample_ids, {}, request.wanted, request.modules, stored))
        return self.cached.predict(answered)

    def memory(self) -> TeacherMemory:
        return self.cached.memory()

    def close(self) -> None:
        self.live.close()


def fill_cache(
    folder: Path, task: Cacheable[Any, Any], teacher: Teacher, batch_size: int, device: torch.device
) -> Layout:
    """A cache of the toy sequences, in files of eight samples. Communicates."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = Ranks.join(device)
    layout = Layout(num_samples=16, draws=1, per_shard=8, seed=0)
    filling = CacheWriter(folder, task, teacher, Sequences(), Batching(batch_size, 1, 0), ranks)
    ranks.barrier()
    filling.fill(layout, filling.missing(layout))
    return layout
