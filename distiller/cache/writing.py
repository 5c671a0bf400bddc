"""Writes a cache: every rank asks the teacher for its own shards, and writes one while it computes the next."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from distiller.cache.layout import Layout, shard_name
from distiller.cache.manifest import KEY_FILE, check_key
from distiller.cache.shards import write_shard
from distiller.data.loader_processes import open_loader
from distiller.data.loading import batches_of
from distiller.data.order import SampleKey
from distiller.distributed.liveness import LivenessBarrier
from distiller.distributed.ranks import Ranks
from distiller.errors import RunError, UserError
from distiller.storage.durable_writes import write_durably
from distiller.storage.stage_folders import CACHED_STAGES
from distiller.tasks.interfaces import Cacheable
from distiller.tasks.micro_batch import LiveCollation, MicroBatch
from distiller.teachers.base import Outputs, Teacher


@final
@dataclass(frozen=True)
class Batching:
    """How samples are batched for the teacher: as in training, since batch sizes can change the last bits of outputs.

    Attributes:
        batch_size: samples in a micro-batch.
        micro_batches: micro-batches in a call of `predict`.
        num_workers: loader processes of each rank.
    """

    batch_size: int
    micro_batches: int
    num_workers: int

    @property
    def samples(self) -> int:
        """Samples in a call of `predict`."""
        return self.batch_size * self.micro_batches


@final
@dataclass(frozen=True)
class Measured:
    """Size and names of the outputs of each sample, measured on a few."""

    bytes_per_sample: float
    bytes_per_token: float
    names: frozenset[str]
    """Names of the tensors that each sample has."""


@final
class CacheWriter:
    """Makes one cache. Every rank calls every method, in the same order."""

    def __init__(
        self,
        folder: Path,
        task: Cacheable[Any, Any],
        teacher: Teacher,
        data: Dataset[Any],
        batching: Batching,
        ranks: Ranks,
    ) -> None:
        self._folder, self._task, self._teacher, self._data = folder, task, teacher, data
        self._batching, self._ranks = batching, ranks

    def measure(self) -> Measured:
        """Asks the teacher for samples at even distances in the data, and discards the outputs. Communicates."""
        num_samples, num_asked = self._task.num_samples, self._batching.samples
        (batches,) = self._groups([[(0, i * num_samples // num_asked) for i in range(num_asked)]])
        # The outputs may be non-finite on one rank alone; all ranks must end then.
        samples = self._ranks.all_succeed(lambda: self._ask(batches))
        num_bytes = sum(tensor.nbytes for sample in samples for tensor in sample.values())
        tokens = sum(self._task.tokens(micro_batch.batch) for micro_batch in batches)
        names = frozenset(samples[0])
        return self._ranks.broadcast_from_main(lambda: Measured(num_bytes / len(samples), num_bytes / tokens, names))

    def missing(self, layout: Layout) -> list[int]:
        """Indices of the shards that are not in the folder, as rank 0 sees it. Communicates."""

        def look() -> list[int]:
            there = set(os.listdir(self._folder))
            return [shard for shard in range(layout.num_shards) if shard_name(shard) not in there]

        return self._ranks.broadcast_from_main(look)

    def fill(self, layout: Layout, missing: Sequence[int]) -> None:
        """Computes and writes these shards; returns when all ranks have written theirs to disk. Communicates.

        Raises RunError, on one rank alone, if the teacher's outputs are not finite or a shard cannot be written.
        """
        ranks, world_size = self._ranks, self._ranks.world_size
        rounds = -(-len(missing) // world_size)
        # A rank that has no shard left computes the last shard again: `predict` may communicate, so all ranks call it.
        indices = [i * world_size + ranks.rank for i in range(rounds)]
        shards = [(missing[min(i, len(missing) - 1)], i < len(missing)) for i in indices]
        groups = self._groups(_Keys(layout, [shard for shard, _ in shards], self._batching.samples))
        per_shard = -(-layout.per_shard // self._batching.samples)
        with (
            ThreadPoolExecutor(1, "cache") as writer,
            tqdm(
                total=len(shards) * per_shard,
                desc="cache",
                unit="batch",
                disable=not ranks.is_main,
                dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 10,
            ) as bar,
        ):
            written: Future[None] | None = None
            liveness = LivenessBarrier(ranks)
            for shard, is_own in shards:
                liveness.arrive()
                samples: list[Outputs] = []
                for _ in range(per_shard):
                    samples += self._ask(next(groups))
                    bar.update()
                if written is not None:
                    written.result()
                if is_own:
                    shard_samples = samples[: layout.size_of(shard)]
                    written = writer.submit(write_shard, self._folder / shard_name(shard), shard_samples)
            if written is not None:
                written.result()
        ranks.barrier()

    def _groups(self, groups: Iterable[list[SampleKey]]) -> Iterator[list[MicroBatch]]:
        """For each group of keys, its micro-batches on the device. `groups` is iterated twice: give no iterator."""
        size, count = self._batching.batch_size, self._batching.micro_batches
        sampler, collate = _MicroBatches(groups, size), LiveCollation(self._task)
        batches = batches_of(open_loader(self._data, sampler, collate, self._batching.num_workers, count, self._ranks))
        for _ in groups:
            yield [next(batches).to(self._task, self._ranks.device) for _ in range(count)]

    def _ask(self, batches: Sequence[MicroBatch]) -> list[Outputs]:
        """The outputs to store of each sample, on the CPU. Raises RunError if the teacher's outputs are not finite."""
        samples: list[Outputs] = []
        for micro_batch, outputs in zip(
            batches, self._teacher.predict([batch.request(self._task) for batch in batches]), strict=True
        ):
            for name, tensor in outputs.items():
                if not bool(torch.isfinite(tensor).all()):
                    ids = ", ".join(map(str, self._task.sample_ids(micro_batch.batch)[:8]))
                    raise RunError(
                        f"the teacher's {name} is not finite for samples {ids} or the ones beside them, and would be "
                        "learnt from; try teacher.dtype float32, or bfloat16 for float16"
                    )
            samples += self._task.store(micro_batch.batch, outputs)
        return samples


@final
class _Keys:
    """Keys of the samples of shards, in groups of `step`; a shard's last key is repeated to fill its groups."""

    def __init__(self, layout: Layout, shards: Sequence[int], step: int) -> None:
        self._layout, self._shards, self._step = layout, shards, step

    def __iter__(self) -> Iterator[list[SampleKey]]:
        whole = -(-self._layout.per_shard // self._step) * self._step
        for shard in self._shards:
            keys = self._layout.keys_of(shard)
            keys += keys[-1:] * (whole - len(keys))
            for first in range(0, whole, self._step):
                yield keys[first : first + self._step]


@final
class _MicroBatches:
    """A loader's `batch_sampler`: splits each group of keys into micro-batches of `size`."""

    def __init__(self, groups: Iterable[list[SampleKey]], size: int) -> None:
        self._groups, self._size = groups, size

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for keys in self._groups:
            for first in range(0, len(keys), self._size):
                yield keys[first : first + self._size]


def claim(folder: Path, key: Mapping[str, Any]) -> None:
    """Makes the folder if it does not exist, and checks that it is empty or has this key. Rank 0 calls it.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    file = folder / KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            check_key(folder, json.loads(file.read_text(encoding="utf-8"))["key"], key)
            return
        if any(not entry.name.startswith(".") and entry.name != CACHED_STAGES for entry in folder.iterdir()):
            raise UserError(f"teacher.cache: {folder} is not empty and is no cache; give a new folder")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"teacher.cache: {folder} cannot be used ({error}); give another folder") from error


def plan_layout(folder: Path, key: Mapping[str, Any], wanted: Layout, names: frozenset[str]) -> Layout:
    """The layout in the folder's key file; without one, the wanted layout, written there with the key. For rank 0.

    Raises:
        UserError: the cache was begun with other draws, or with other outputs of each sample than `names`.
    """
    file = folder / KEY_FILE
    if not file.is_file():
        content = {"key": key, "layout": asdict(wanted), "names": sorted(names)}
        write_durably(file, json.dumps(content, indent=1) + "\n")
        return wanted
    content = json.loads(file.read_text(encoding="utf-8"))
    held = Layout(**content["layout"])
    if sorted(names) != content["names"]:
        raise UserError(
            f"teacher.cache: {folder} was begun with {', '.join(content['names'])} of each sample, and now it is "
            f"{', '.join(sorted(names))}; set task.losses as it was, or give another folder"
        )
    if held.draws != wanted.draws:
        raise UserError(
            f"teacher.cache: {folder} was begun with {held.draws} draws of each sample, and now it is {wanted.draws}; "
            f"set cache.draws={held.draws}, or give another folder"
        )
    return held


def check_free_space(folder: Path, num_bytes: float) -> None:
    """Raises UserError if the disk has less than `num_bytes` free, which are still to be written.

    If no shard has been written yet, removes the key file, so that the folder can take a smaller cache.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        if not any(folder.glob("outputs-*")):
            (folder / KEY_FILE).unlink(missing_ok=True)
        raise UserError(
            f"teacher.cache: {folder} has {free / 2**30:.2f} GiB free and {num_bytes / 2**30:.2f} GiB are still to be "
            "written; free some, give another folder, or store less"
        )
