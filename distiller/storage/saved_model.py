"""Which files hold a saved model's weights, by the different rules of transformers and diffusers.

    transformers   `model.safetensors`, and only where there is none the shards of `model.safetensors.index.json`;
                   before both, what `transformers_weights` of its config names
    diffusers      the shards of `diffusion_pytorch_model.safetensors.index.json`, and only without an index
                   `diffusion_pytorch_model.safetensors`

So a whole file that was saved beside an older index is the model of transformers, and not of diffusers. Files of other
names are not read by either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from safetensors import SafetensorError, safe_open

from distiller.errors import UserError

TRANSFORMERS_NAME = "model.safetensors"
DIFFUSERS_NAME = "diffusion_pytorch_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_weights_may_be_missing: ContextVar[bool] = ContextVar("weights may be missing", default=False)


@contextmanager
def weights_may_be_missing() -> Iterator[None]:
    """Inside, a model whose folder holds no weights, but its descriptions, is one with an empty list of files."""
    token = _weights_may_be_missing.set(True)
    try:
        yield
    finally:
        _weights_may_be_missing.reset(token)


def may_lack_weights() -> bool:
    """Whether this runs inside `weights_may_be_missing`."""
    return _weights_may_be_missing.get()


def transformers_files(folder: Path, origin: str) -> list[Path]:
    """The safetensors files that `from_pretrained` of transformers reads; not every one needs to be there.

    Raises:
        UserError: none of these files is there, or an index is not readable; the message begins with `origin`.
            Inside `weights_may_be_missing` the list is empty where none is there.
    """
    if (named := _named_in(folder / "config.json")) is not None:
        file = folder / named
        return _shards(file, origin) if named.endswith(".index.json") else [file]
    whole, index = folder / TRANSFORMERS_NAME, folder / f"{TRANSFORMERS_NAME}.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _shards(index, origin)
    return _nothing(folder, TRANSFORMERS_NAME, origin)


def diffusers_files(folder: Path, origin: str) -> list[Path]:
    """The safetensors files that `from_pretrained` of diffusers reads; as `transformers_files`."""
    whole, index = folder / DIFFUSERS_NAME, folder / f"{DIFFUSERS_NAME}.index.json"
    if index.is_file():
        return _shards(index, origin)
    if whole.is_file():
        return [whole]
    return _nothing(folder, DIFFUSERS_NAME, origin)


def check_whole(files: Iterable[Path], prefix: str) -> None:
    """Raises UserError for the first safetensors file that is missing or incomplete. Reads headers only.

    `prefix`: what the message begins with, directly before the file's name.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{prefix}{file.name} is not a complete safetensors file ({error}); copy it again"
            ) from error


def index_of(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a saved transformers model; {} without an index."""
    index = folder / f"{TRANSFORMERS_NAME}.index.json"
    return _weight_map(index, str(folder)) if index.is_file() else {}


def refuse_adapter(folder: Path, origin: str) -> None:
    """UserError for a folder with an adapter, which transformers would add to the weights where peft is installed."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{origin}: holds an adapter ({ADAPTER_CONFIG}), which is not read; merge it into the model (peft's "
            "merge_and_unload) and save that, or remove the file"
        )


def _nothing(folder: Path, name: str, origin: str) -> list[Path]:
    """The files of a model without weights: none, or UserError."""
    if may_lack_weights():
        return []
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f"; it has {others[0]}: a variant is read where it is saved again without one" if others else ""
    raise UserError(f"{origin}: holds no weights in {name} or its shards (other names and formats are not read){found}")


def _named_in(config: Path) -> str | None:
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("transformers_weights")
    except (OSError, ValueError, AttributeError):
        # A config that is needed is reported when it is read.
        return None
    return named if isinstance(named, str) else None


def _shards(index: Path, origin: str) -> list[Path]:
    return sorted({index.parent / name for name in _weight_map(index, origin).values()})


def _weight_map(index: Path, origin: str) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{origin}: {index.name} is not readable JSON with a weight_map") from error
