"""Writing a cache: every rank asks the teacher for shards of its own, and writes each beside the next one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from distiller.cache.layout import Layout, shard_name
from distiller.cache.manifest import KEY_FILE, check_key
from distiller.cache.shards import write_shard
from distiller.data.loading import batches_of
from distiller.data.order import SampleKey
from distiller.durable import write_durably
from distiller.errors import UserError
from distiller.micro_batch import LiveCollation, MicroBatch
from distiller.process import settle_loader_worker
from distiller.ranks import Ranks
from distiller.tasks.base import Task
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


@final
class Filling:
    """One cache being made. Every rank calls every method, in the same order."""

    def __init__(
        self,
        folder: Path,
        task: Task[Any, Any],
        teacher: Teacher,
        data: Dataset[Any],
        batching: Batching,
        ranks: Ranks,
    ) -> None:
        self._folder, self._task, self._teacher, self._data = folder, task, teacher, data
        self._batching, self._ranks = batching, ranks

    def measure(self) -> Measured:
        """Asks for the first samples and keeps none. Communicates."""
        keys = [(0, number % self._task.num_samples) for number in range(self._batching.samples)]
        (batches,) = self._groups([keys])
        samples = [sample for stored, _ in self._ask(batches) for sample in stored]
        num_bytes = sum(tensor.nbytes for sample in samples for tensor in sample.values())
        tokens = sum(self._task.tokens(micro.batch) for micro in batches)
        return self._ranks.from_main(lambda: Measured(num_bytes / len(samples), num_bytes / tokens))

    def missing(self, layout: Layout) -> list[int]:
        """The shards that have to be made, as rank 0 sees the folder. Communicates."""

        def look() -> list[int]:
            there = set(os.listdir(self._folder))
            return [shard for shard in range(layout.num_shards) if shard_name(shard) not in there]

        return self._ranks.from_main(look)

    def fill(self, layout: Layout, missing: Sequence[int]) -> None:
        """Makes these shards; returns when all ranks' are on the disk. Communicates."""
        ranks, world_size = self._ranks, self._ranks.world_size
        rounds = -(-len(missing) // world_size)
        # A rank without a shard of its own asks again for another one's: placements may communicate in `predict`.
        turns = [turn * world_size + ranks.rank for turn in range(rounds)]
        shards = [(missing[min(turn, len(missing) - 1)], turn < len(missing)) for turn in turns]
        groups = self._groups([keys for shard, _ in shards for keys in self._keys(layout, shard)])
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
            for shard, is_own in shards:
                samples: list[Outputs] = []
                for _ in range(per_shard):
                    for stored, _ in self._ask(next(groups)):
                        samples += stored
                    bar.update()
                if written is not None:
                    written.result()
                if is_own:
                    of_shard = samples[: len(layout.keys_of(shard))]
                    written = writer.submit(write_shard, self._folder / shard_name(shard), of_shard)
            if written is not None:
                written.result()
        ranks.wait()

    def _keys(self, layout: Layout, shard: int) -> Iterator[list[SampleKey]]:
        """The samples of a shard, as many at a time as are asked for at once; the last one again to fill the last."""
        keys = layout.keys_of(shard)
        keys += keys[-1:] * (-(-layout.per_shard // self._batching.samples) * self._batching.samples - len(keys))
        for first in range(0, len(keys), self._batching.samples):
            yield keys[first : first + self._batching.samples]

    def _groups(self, groups: Sequence[Sequence[SampleKey]]) -> Iterator[list[MicroBatch]]:
        """Micro-batches of each group, on the device."""
        size, count = self._batching.batch_size, self._batching.micro_batches
        device = self._ranks.device
        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=[keys[first : first + size] for keys in groups for first in range(0, len(keys), size)],  # type: ignore[arg-type]
            collate_fn=LiveCollation(self._task),
            num_workers=self._batching.num_workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=settle_loader_worker,
        )
        batches = batches_of(loader)
        for _ in groups:
            yield [next(batches).to(self._task, device) for _ in range(count)]

    def _ask(self, batches: Sequence[MicroBatch]) -> list[tuple[list[Outputs], MicroBatch]]:
        outputs = self._teacher.predict([micro.request(self._task) for micro in batches])
        return [(self._task.store(micro.batch, of), micro) for micro, of in zip(batches, outputs, strict=True)]


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
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise UserError(f"teacher.cache: {folder} is not empty and is no cache; give a new folder")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"teacher.cache: {folder} cannot be used ({error}); give another folder") from error


def plan_layout(folder: Path, key: Mapping[str, Any], wanted: Layout) -> Layout:
    """The layout that the folder has, or the wanted one, which is written down with the key. Rank 0 calls it."""
    file = folder / KEY_FILE
    if not file.is_file():
        write_durably(file, json.dumps({"key": key, "layout": asdict(wanted)}, indent=1) + "\n")
        return wanted
    held = Layout(**json.loads(file.read_text(encoding="utf-8"))["layout"])
    if held.draws != wanted.draws:
        raise UserError(
            f"teacher.cache: {folder} was begun with {held.draws} draws of each sample, and now it is {wanted.draws}; "
            f"set cache.draws={held.draws}, or give another folder"
        )
    return held


def check_room(folder: Path, num_bytes: float) -> None:
    """UserError where the disk cannot hold what is still to be written."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"teacher.cache: {folder} has {free / 2**30:.2f} GiB free and {num_bytes / 2**30:.2f} GiB are still to be "
            "written; free some, give another folder, or store less"
        )


def remove_partial(folder: Path) -> None:
    """Takes away what a killed run was writing. Rank 0 calls it."""
    for file in folder.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
