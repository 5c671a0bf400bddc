"""The files that hold a saved model's weights: which there are, whether they are whole, and what their headers say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from distiller.errors import UserError
from distiller.storage.saved_model import check_whole, may_lack_weights, refuse_adapter, transformers_files

_WEIGHTS = re.compile(r".*\.safetensors|(pytorch_model|tf_model|flax_model).*\.(bin|h5|msgpack)")


def weights_among(names: Iterable[str]) -> str | None:
    """The first file name, in sorted order, of a file with weights in any format; None without one."""
    return next((name for name in sorted(names) if _WEIGHTS.fullmatch(name)), None)


def stored_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model that the library reads. UserError where there are none."""
    return transformers_files(folder, str(folder))


def stored_names(files: list[Path]) -> set[str]:
    """The names of the tensors in safetensors files, from their headers."""
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            names |= set(stored.keys())
    return names


def stored_dtype(files: list[Path]) -> torch.dtype:
    """A 16-bit dtype where all 16-bit floating-point tensors have it and none is wider, else float32. Reads headers."""
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            found |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    halves = found & {"BF16", "F16"}
    if len(halves) == 1 and not found & {"F32", "F64"}:
        return torch.bfloat16 if "BF16" in halves else torch.float16
    return torch.float32


def check_weights(folder: Path, origin: str) -> None:
    """Raises UserError unless a saved model's safetensors files are all present and complete. Reads headers only."""
    found = weights_among(file.name for file in folder.iterdir() if file.suffix == ".safetensors")
    if found is None and not may_lack_weights():
        raise UserError(
            f"{origin}: holds no model.safetensors (other formats are not read); save the model with safetensors, or "
            "set teacher_training.max_steps to train it first"
        )
    refuse_adapter(folder, origin)
    check_whole(transformers_files(folder, origin), f"{origin}: ")
