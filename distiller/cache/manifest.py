"""The two JSON files of a cache's folder: the key, written first, and the manifest, written last."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from distiller.cache.key import first_difference
from distiller.cache.layout import Layout, shard_name
from distiller.cache.shards import Shard
from distiller.errors import UserError
from distiller.storage.durable_writes import sync_folder, write_durably

KEY_FILE = "key.json"
MANIFEST_FILE = "manifest.json"


@final
@dataclass(frozen=True)
class Manifest:
    """Describes a complete cache.

    Attributes:
        key: what its content depends on; see `distiller.cache.key`.
        outputs: names of the tensors that are stored of each sample.
        shard_bytes: size of each shard's file.
        bytes_per_sample, bytes_per_token: size of the outputs, without the files' overhead.
        made_with: placement, world size, batch size and versions; for information, never compared.
    """

    key: Mapping[str, Any]
    layout: Layout
    outputs: tuple[str, ...]
    shard_bytes: tuple[int, ...]
    bytes_per_sample: float
    bytes_per_token: float
    made_with: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Writes the manifest durably, which marks the cache as complete."""
        write_durably(folder / MANIFEST_FILE, json.dumps(asdict(self), indent=1) + "\n")
        sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the cache in a folder. Raises UserError if the folder holds no complete cache."""
    file = folder / MANIFEST_FILE
    if not os.path.isfile(file):
        state = "is not complete" if os.path.isfile(folder / KEY_FILE) else "is no cache"
        raise UserError(f"teacher.cache: {folder} {state} (it has no {MANIFEST_FILE}); run distiller cache RECIPE")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Manifest(
            key=content["key"],
            layout=Layout(**content["layout"]),
            outputs=tuple(content["outputs"]),
            shard_bytes=tuple(content["shard_bytes"]),
            bytes_per_sample=content["bytes_per_sample"],
            bytes_per_token=content["bytes_per_token"],
            made_with=content["made_with"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"teacher.cache: {file} cannot be read ({error}); run distiller cache RECIPE --repair"
        ) from error


def check_key(folder: Path, held: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises UserError, with the first difference, unless the cache's key `held` is the recipe's key `asked`."""
    if (found := first_difference(held, asked)) is not None:
        raise UserError(
            f"teacher.cache: {folder} was made for something else: {found}; change the recipe, or make a cache of its "
            "own in another folder"
        )


def open_cache(
    folder: Path, key: Mapping[str, Any], wanted: tuple[str, ...], epochs: int, draws: int | None
) -> Manifest:
    """The manifest of the cache, checked against what a run needs; reads no outputs.

    Args:
        key: the key of the run.
        wanted: outputs that the loss reads.
        epochs: passes over the data, begun ones included.
        draws: the recipe's `cache.draws`, after which draws repeat.

    Raises:
        UserError: it is not complete, was made for something else, lacks an output or a draw, or a shard is damaged.
    """
    manifest = read_manifest(folder)
    check_key(folder, manifest.key, key)
    if missing := [name for name in wanted if name not in manifest.outputs]:
        raise UserError(
            f"teacher.cache: {folder} holds {', '.join(manifest.outputs)} of each sample, and task.losses also needs "
            f"{missing[0]}; make a cache of its own in another folder"
        )
    held, needed = manifest.layout.draws, draws or epochs
    if "seed" in key and held < needed:
        raise UserError(
            f"teacher.cache: {folder} holds {held} draws of each sample and the run passes {needed} times over the "
            f"data; set cache.draws={held} to repeat them, or make a cache with cache.draws={needed} in another folder"
        )
    for shard, num_bytes in enumerate(manifest.shard_bytes):
        file = folder / shard_name(shard)
        if not os.path.isfile(file) or os.path.getsize(file) != num_bytes:
            found = f"has {os.path.getsize(file)} bytes of {num_bytes}" if os.path.isfile(file) else "is missing"
            raise UserError(f"teacher.cache: {file} {found}; make it again with distiller cache RECIPE --repair")
    return manifest


def remove_damaged(folder: Path, layout: Layout, shards: range, names: frozenset[str]) -> list[str]:
    """Reads whole shards, removes those whose bytes are not what was written, and returns their file names.

    Args:
        shards: indices of the shards to read.
        names: of the tensors that each sample must have.
    """
    removed = []
    for index in shards:
        file = folder / shard_name(index)
        if not file.is_file():
            continue
        try:
            shard = Shard(file)
            if len(shard) != layout.size_of(index) or shard.names != names:
                raise UserError(f"{file}: holds something else")
            for row in range(len(shard)):
                shard.read(row)
        except (UserError, RuntimeError, KeyError):
            file.unlink()
            removed.append(file.name)
    return removed
