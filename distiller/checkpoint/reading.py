"""Reads any range of any tensor from a checkpoint's files, under any sharding; and checks the files for damage."""

from __future__ import annotations

import bisect
import hashlib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from distiller.checkpoint.format import PROGRESS_FILE, STEP_NAME, Progress, StoredKind, parse_progress, split_key
from distiller.errors import UserError
from distiller.storage.weight_files import StoredTensor, read_bytes, read_header

_BLOCK_BYTES = 16 * 2**20


@final
class CheckpointReader:
    """Reads the files' headers when it is constructed, and of the tensors only the bytes that are requested."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for an incomplete checkpoint. Digests are checked by `find_damage`, not here."""
        self.progress = read_progress_file(folder)
        self._pieces: dict[tuple[str, str], list[tuple[int, StoredTensor]]] = {}
        self._descriptors: dict[Path, int] = {}
        for name in self.progress.files:
            for key, stored in read_header(folder / name).items():
                kind, tensor, start = split_key(key)
                self._pieces.setdefault((kind, tensor), []).append((start, stored))
        for (kind, name), pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[0])
            ends = [start + stored.shape[0] for start, stored in pieces]
            whole = math.prod(self.progress.shapes[name])
            if [0, *ends] != [*(start for start, _ in pieces), whole]:
                raise UserError(f"{folder}: {kind} of {name} do not cover its {whole} elements once; remove the folder")
        self._descriptors = {folder / name: os.open(folder / name, os.O_RDONLY) for name in self.progress.files}

    @property
    def exported_kind(self) -> StoredKind:
        """The kind that is exported as the student: the moving average where there is one."""
        return "average" if any(kind == "average" for kind, _ in self._pieces) else "weights"

    def read(self, kind: StoredKind, name: str, start: int, count: int) -> Tensor:
        """Elements `start` to `start + count` as a new 1-D CPU tensor in the stored dtype. Raises KeyError, OSError."""
        pieces = self._pieces[kind, name]
        target = torch.empty(count, dtype=pieces[0][1].dtype)
        i = bisect.bisect_right(pieces, start, key=lambda piece: piece[0]) - 1
        done = 0
        while done < count:
            first, stored = pieces[i]
            skip = start + done - first
            part = target[done : done + min(count - done, stored.shape[0] - skip)]
            offset = stored.start + skip * stored.dtype.itemsize
            read_bytes(self._descriptors[stored.file], part.view(torch.uint8), offset, stored.file)
            done, i = done + len(part), i + 1
        return target

    def whole(self, kind: StoredKind) -> Iterable[tuple[str, Tensor]]:
        """(name, whole tensor) of one kind, one by one, in the module's order."""
        for name, shape in self.progress.shapes.items():
            yield name, self.read(kind, name, 0, math.prod(shape)).view(shape)

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_progress_file(folder: Path) -> Progress:
    """The folder's progress.json. Raises UserError, with the file and the reason, where it is damaged or missing.

    Also where folder step-N holds another step, as a copy or link would: it would count as N updates of training.
    """
    file = folder / PROGRESS_FILE
    try:
        progress = parse_progress(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error})") from error
    named = re.fullmatch(STEP_NAME, folder.name)
    if named and int(named[1]) != progress.step:
        raise UserError(f"{folder} is the checkpoint of step {progress.step}, copied or linked under another name")
    return progress


def find_damage(folder: Path, progress: Progress, share: int, num_shares: int) -> str | None:
    """Describes the first damaged file among every `num_shares`-th from `share` on; None if there is none.

    Reads these files completely.
    """
    for name in sorted(progress.files)[share::num_shares]:
        file, wanted = folder / name, progress.files[name]
        try:
            size = os.path.getsize(file)
            if size != wanted.num_bytes:
                return f"{file} is damaged (it has {size} bytes and had {wanted.num_bytes})"
            if _sha256(file) != wanted.sha256:
                return f"{file} is damaged (its content is not what was written)"
        except OSError as error:
            return f"{file} is damaged ({error.strerror})"
    return None


def _sha256(file: Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
