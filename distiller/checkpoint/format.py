"""The names and the JSON of a checkpoint's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal, final

from distiller.student_state.base import Counters

StoredKind = Literal["weights", "exp_avg", "exp_avg_sq", "average"]

FORMAT = "pieces-1"
PROGRESS_FILE, LATEST_FILE = "progress.json", "latest"
STEP_NAME = r"step-(0|[1-9]\d*)"
"""Regular expression for the name of a checkpoint's folder."""
OLDER_NAMES = ("model.safetensors", "optimizer.pt", "engine", "average.safetensors", "scaler.json")
"""Files of checkpoints by older versions; `optimizer.pt` and the files in `engine` are pickles."""


@final
@dataclass(frozen=True)
class Identity:
    """What determines an update's result (compared on resume), and how the student was sharded (engine, world_size).

    `mixed_precision`, `teacher_dtype` and the modes of torch.compile have `auto` resolved. The modes may differ on
    resume, which is said: they change roundings alone. Older files have none, and nothing was compiled. `quantization`
    is what the teacher's layers compute; older files have none, and a teacher that was quantised then is another one.
    """

    engine: str
    world_size: int
    samples_per_update: int
    num_samples: int
    data_digest: str
    mixed_precision: str
    teacher_dtype: str
    student_compile: str = "none"
    teacher_compile: str = "none"
    quantization: str = "none"


@final
@dataclass(frozen=True)
class SessionTotals:
    """Sums over the sessions of a run, each up to the checkpoint that the next one resumed from, or the run's end.

    Attributes:
        wall_s: seconds from each session's start, with all that comes before the loop.
        timed_steps, timed_s: the updates that count for the throughput, and the loop's seconds for these.
        failed_saves: checkpoints that could not be written.
        num_sessions: number of sessions.
    """

    wall_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0
    failed_saves: int = 0
    num_sessions: int = 0

    def __add__(self, other: SessionTotals) -> SessionTotals:
        return SessionTotals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@final
@dataclass(frozen=True)
class StoredFile:
    """A complete file: its size, and the SHA-256 of its content in hexadecimal."""

    num_bytes: int
    sha256: str


@final
@dataclass(frozen=True)
class Progress:
    """The content of progress.json; `shapes` are those of whole tensors, in the module's order."""

    step: int
    skipped_steps: int
    counters: Counters
    identity: Identity
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, StoredFile]
    spent: SessionTotals = SessionTotals()


def dump_progress(progress: Progress) -> str:
    """As JSON with a digest of its own, so that damage to it is found like damage to the tensors."""
    content = {"format": FORMAT, **asdict(progress)}
    return json.dumps({**content, "sha256": _digest_of(content)}, indent=1) + "\n"


def parse_progress(text: str) -> Progress:
    """Raises ValueError with the reason where the text is not what `dump_progress` wrote."""
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
        # Older files do not have it.
        spent=SessionTotals(**content.get("spent", {})),
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
    """The steps in a `checkpoints` folder, ascending. A folder gets the name step-N only when it is complete."""
    names = (re.fullmatch(STEP_NAME, path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
