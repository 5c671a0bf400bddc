"""The names and the JSON of a checkpoint's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from distiller.student_state.base import Counters

StoredKind = Literal["weights", "exp_avg", "exp_avg_sq", "average"]

FORMAT = "pieces-1"
PROGRESS_FILE, LATEST_FILE = "progress.json", "latest"
STEP_NAME = r"step-(0|[1-9]\d*)"
"""What a checkpoint's folder is called, as a regular expression."""
OLDER_NAMES = ("model.safetensors", "optimizer.pt", "engine", "average.safetensors", "scaler.json")
"""What checkpoints held before there were pieces; `optimizer.pt` and the files in `engine` are pickles."""


@dataclass(frozen=True)
class Identity:
    """What decides what an update computes (compared on resume), and where the pieces were cut (said).

    `mixed_precision` and `teacher_dtype` are what `auto` came out as.
    """

    engine: str
    world_size: int
    samples_per_update: int
    num_samples: int
    data_digest: str
    mixed_precision: str
    teacher_dtype: str


@dataclass(frozen=True)
class Spent:
    """What the sessions of a run have taken: to the checkpoint that each was continued from, or to the run's end.

    Attributes:
        wall_s: seconds from the start of each, all that comes before the loop included.
        timed_steps, timed_s: the updates of which the throughput is told, and the loop's seconds for these.
        failed_saves: checkpoints that were given up.
        num_sessions: how many there were.
    """

    wall_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0
    failed_saves: int = 0
    num_sessions: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StoredFile:
    """A complete file: its size, and the SHA-256 of its content in hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Progress:
    """The content of progress.json; `shapes` are whole ones, in the module's order."""

    step: int
    skipped_steps: int
    counters: Counters
    identity: Identity
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, StoredFile]
    spent: Spent = Spent()


def dump_progress(progress: Progress) -> str:
    """As JSON, with a digest of its own: a flipped bit in here is found like one in the tensors."""
    content = {"format": FORMAT, **asdict(progress)}
    return json.dumps({**content, "sha256": _digest_of(content)}, indent=1) + "\n"


def parse_progress(text: str) -> Progress:
    """ValueError with the reason where the text is not what `dump_progress` wrote."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    digest = content.pop("sha256", None)
    if digest != _digest_of(content):
        raise ValueError("its content does not have the digest that it states")
    return Progress(
        step=content["step"],
        skipped_steps=content["skipped_steps"],
        counters=Counters(**content["counters"]),
        identity=Identity(**content["identity"]),
        shapes={name: tuple(shape) for name, shape in content["shapes"].items()},
        files={name: StoredFile(**file) for name, file in content["files"].items()},
        # Older ones do not tell.
        spent=Spent(**content.get("spent", {})),
    )


def rank_file(rank: int, world_size: int) -> str:
    """The name of one rank's file."""
    return f"rank-{rank:05}-of-{world_size:05}.safetensors"


def piece_key(kind: StoredKind, name: str, start: int) -> str:
    """The key of a piece in its file."""
    return f"{kind}/{name}:{start}"


def split_key(key: str) -> tuple[str, str, int]:
    """(kind, name, start) of a key."""
    kind, _, rest = key.partition("/")
    name, _, start = rest.rpartition(":")
    return kind, name, int(start)


def steps_in(folder: Path) -> list[int]:
    """The steps of a `checkpoints` folder, ascending: a folder step-N was complete when it got its name."""
    names = (re.fullmatch(STEP_NAME, path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
