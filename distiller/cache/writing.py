"""Writing a cache: every rank asks the teacher for shards of its own, and writes each beside the next one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from distiller.cache.layout import Layout, shard_name
from distiller.cache.manifest import KEY_FILE, check_key
from distiller.cache.shards import write_shard
from distiller.data.loading import batches_of
from distiller.data.order import SampleKey
from distiller.distributed.liveness import LivenessBarrier
from distiller.distributed.process import initialize_loader_worker
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
    """How samples are handed to the teacher: as training does, since a batch's size can change its outputs' last bits.

    Attributes:
        batch_size: samples a micro-batch.
        micro_batches: asked for at once.
        num_workers: loader processes.
    """

    batch_size: int
    micro_batches: int
    num_workers: int

    @property
    def samples(self) -> int:
        """Samples asked for at once."""
        return self.batch_size * self.micro_batches


@final
@dataclass(frozen=True)
class Measured:
    """What outputs take, by the first samples."""

    bytes_per_sample: float
    bytes_per_token: float
    names: frozenset[str]
    """Of the tensors that each sample has."""


@final
class CacheWriter:
    """One cache being made. Every rank calls every method, in the same order."""

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
        """Asks for some samples from everywhere in the data, and keeps none. Communicates."""
        total, asked = self._task.num_samples, self._batching.samples
        (batches,) = self._groups([[(0, number * total // asked) for number in range(asked)]])
        # A teacher that is not finite is so on every rank or on one: all of them end.
        samples = self._ranks.all_succeed(lambda: self._ask(batches))
        num_bytes = sum(tensor.nbytes for sample in samples for tensor in sample.values())
        tokens = sum(self._task.tokens(micro.batch) for micro in batches)
        names = frozenset(samples[0])
        return self._ranks.broadcast_from_main(lambda: Measured(num_bytes / len(samples), num_bytes / tokens, names))

    def missing(self, layout: Layout) -> list[int]:
        """The shards that have to be made, as rank 0 sees the folder. Communicates."""

        def look() -> list[int]:
            there = set(os.listdir(self._folder))
            return [shard for shard in range(layout.num_shards) if shard_name(shard) not in there]

        return self._ranks.broadcast_from_main(look)

    def fill(self, layout: Layout, missing: Sequence[int]) -> None:
        """Makes these shards; returns when all ranks' are on the disk. Communicates."""
        ranks, world_size = self._ranks, self._ranks.world_size
        rounds = -(-len(missing) // world_size)
        # A rank without a shard of its own asks again for another one's: placements may communicate in `predict`.
        turns = [turn * world_size + ranks.rank for turn in range(rounds)]
        shards = [(missing[min(turn, len(missing) - 1)], turn < len(missing)) for turn in turns]
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
            others = LivenessBarrier(ranks)
            for shard, is_own in shards:
                others.arrive()
                samples: list[Outputs] = []
                for _ in range(per_shard):
                    samples += self._ask(next(groups))
                    bar.update()
                if written is not None:
                    written.result()
                if is_own:
                    of_shard = samples[: layout.size_of(shard)]
                    written = writer.submit(write_shard, self._folder / shard_name(shard), of_shard)
            if written is not None:
                written.result()
        ranks.barrier()

    def _groups(self, groups: Collection[Sequence[SampleKey]]) -> Iterator[list[MicroBatch]]:
        """Micro-batches of each group, on the device."""
        size, count = self._batching.batch_size, self._batching.micro_batches
        device = self._ranks.device
        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=_MicroBatches(groups, size),  # type: ignore[arg-type]
            collate_fn=LiveCollation(self._task),
            num_workers=self._batching.num_workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=initialize_loader_worker,
        )
        batches = batches_of(loader)
        for _ in groups:
            yield [next(batches).to(self._task, device) for _ in range(count)]

    def _ask(self, batches: Sequence[MicroBatch]) -> list[Outputs]:
        """What is stored of each sample; RunError where the teacher's answer is not finite."""
        samples: list[Outputs] = []
        for micro, outputs in zip(
            batches, self._teacher.predict([m.request(self._task) for m in batches]), strict=True
        ):
            for name, tensor in outputs.items():
                if not bool(torch.isfinite(tensor).all()):
                    ids = ", ".join(map(str, self._task.sample_ids(micro.batch)[:8]))
                    raise RunError(
                        f"the teacher's {name} is not finite for samples {ids} or the ones beside them, and would be "
                        "learnt from; try teacher.dtype float32, or bfloat16 for float16"
                    )
            samples += self._task.store(micro.batch, outputs)
        return samples


@final
class _Keys:
    """The samples of shards, as many at a time as are asked for at once; the last one again to fill a shard's last."""

    def __init__(self, layout: Layout, shards: Sequence[int], step: int) -> None:
        self._layout, self._shards, self._step = layout, shards, step

    def __len__(self) -> int:
        return len(self._shards) * -(-self._layout.per_shard // self._step)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        whole = -(-self._layout.per_shard // self._step) * self._step
        for shard in self._shards:
            keys = self._layout.keys_of(shard)
            keys += keys[-1:] * (whole - len(keys))
            for first in range(0, whole, self._step):
                yield keys[first : first + self._step]


@final
class _MicroBatches:
    """A loader's `batch_sampler`: each group of keys in micro-batches."""

    def __init__(self, groups: Collection[Sequence[SampleKey]], size: int) -> None:
        self._groups, self._size = groups, size

    def __iter__(self) -> Iterator[Sequence[SampleKey]]:
        for keys in self._groups:
            for first in range(0, len(keys), self._size):
                yield keys[first : first + self._size]


def claim(folder: Path, key: Mapping[str, Any]) -> None:
    """Makes the folder this key's, or finds that it is. Rank 0 calls it.

    Raises:
        UserError: it holds something else, or cannot be written.
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
    """The layout that the folder has, or the wanted one, which is written down with the key. Rank 0 calls it.

    Raises:
        UserError: it was begun with other draws, or with other outputs of each sample than these names.
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


def check_room(folder: Path, num_bytes: float) -> None:
    """UserError where the disk cannot hold what is still to be written.

    Where nothing has been written yet the folder is as it was before: less may be stored there.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        if not any(folder.glob("outputs-*")):
            (folder / KEY_FILE).unlink(missing_ok=True)
        raise UserError(
            f"teacher.cache: {folder} has {free / 2**30:.2f} GiB free and {num_bytes / 2**30:.2f} GiB are still to be "
            "written; free some, give another folder, or store less"
        )
