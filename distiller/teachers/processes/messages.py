"""What a rank and a process of the teacher send each other, beside the tensors in shared buffers. All of it pickles.

A rank sends `NeedBuffer` (answered by `NewBuffer`) or `Question` (answered by `Answer` or `Failure`), one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.storage.stage_folders import StageFolders
from distiller.teachers.base import Network, TeacherMemory
from distiller.teachers.processes.buffers import TensorSpec

HOST = "127.0.0.1"
"""Where ranks connect to a process: on the machine itself."""


@final
@dataclass(frozen=True)
class Start:
    """What a process of the teacher begins with; sent by the rank that starts it.

    Attributes:
        authkey: with which ranks prove that they belong to the run.
        options: with the placement that the teacher has in this process.
        device: where it computes, by its name.
        reserved_bytes: of the device, for the students of ranks that train on it.
        num_ranks: that will ask it.
        is_first: whether it says for all processes what is chosen while the teacher is loaded.
        num_threads, allows_tf32, is_deterministic: torch's settings, as the ranks have them.
    """

    authkey: bytes
    network: Network
    options: TeacherOptions
    dtype: torch.dtype
    device: str
    compile_mode: str
    stages_dir: Path | StageFolders | None
    reserved_bytes: int
    num_ranks: int
    is_first: bool
    num_threads: int
    allows_tf32: bool
    is_deterministic: bool


@final
@dataclass(frozen=True)
class Ready:
    """The weights are loaded; ranks may connect to this port of the machine itself."""

    port: int
    memory: TeacherMemory


@final
@dataclass(frozen=True)
class Failure:
    """An error, in words, and whether it is the user's to mend. Before `Ready` the process ends after it."""

    text: str
    is_user_error: bool = False


@final
@dataclass(frozen=True)
class NeedBuffer:
    """Asks for a buffer for inputs, of so many bytes."""

    num_bytes: int


@final
@dataclass(frozen=True)
class NewBuffer:
    """The handle of a buffer."""

    handle: Any


@final
@dataclass(frozen=True)
class QuestionPart:
    """A `Request` whose inputs lie in the buffer."""

    sample_ids: tuple[int, ...]
    inputs: dict[str, TensorSpec]
    wanted: tuple[str, ...]
    modules: tuple[int, ...]


@final
@dataclass(frozen=True)
class Question:
    """Requests whose inputs lie in the buffer for inputs.

    Attributes:
        known_bytes: of the buffer for outputs that the rank has mapped; 0 without one.
    """

    parts: tuple[QuestionPart, ...]
    known_bytes: int


@final
@dataclass(frozen=True)
class Answer:
    """Outputs of each request, in the buffer for outputs; with its handle where it is a new one."""

    outputs: tuple[dict[str, TensorSpec], ...]
    new_buffer: Any = None
