"""The files that hold a saved model's weights: which there are, whether they are whole, and what their headers say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from distiller.errors import UserError

_WEIGHTS = re.compile(r".*\.safetensors|(pytorch_model|tf_model|flax_model).*\.(bin|h5|msgpack)")


def weights_among(names: Iterable[str]) -> str | None:
    """The first, by name, that holds weights, whether or not its format is read here."""
    return next((name for name in sorted(names) if _WEIGHTS.fullmatch(name)), None)


def stored_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model: those that its index names, or its only one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    return [folder / "model.safetensors"]


def stored_names(files: list[Path]) -> set[str]:
    """The names of the tensors in safetensors files, from their headers."""
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            names |= set(stored.keys())
    return names


def stored_dtype(files: list[Path]) -> torch.dtype:
    """One that holds all floating-point tensors of safetensors files without rounding, from their headers."""
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            found |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    halves = found & {"BF16", "F16"}
    if len(halves) == 1 and not found & {"F32", "F64"}:
        return torch.bfloat16 if "BF16" in halves else torch.float16
    return torch.float32


def check_weights(folder: Path, origin: str) -> None:
    """Raises UserError unless a saved model's safetensors files are all there and whole. Reads their headers only."""
    try:
        files = stored_files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{origin}: model.safetensors.index.json is not readable JSON with a weight_map") from error
    for file in files:
        if not file.is_file():
            raise UserError(
                f"{origin}: holds no {file.name} (other formats are not read); save the model with safetensors, or "
                "set teacher_training.max_steps to train it first"
            )
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{origin}: {file.name} is not a complete safetensors file ({error}); copy it again"
            ) from error
