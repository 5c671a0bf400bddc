"""A language model's weight files under the names and in the shapes of the module's tensors.

Placements read tensors one by one by the module's names. Files that hold the module's tensors, under whatever names,
are read directly. Where transformers merges, splits or transposes tensors while it loads, it loads the model once, and
the module's tensors are saved in a keyed folder.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.errors import UserError
from distiller.language.model.spec import ModelSpec
from distiller.storage.saved_model import transformers_files
from distiller.storage.stage_folders import StageFolders
from distiller.storage.stages import Stage, digest_files
from distiller.storage.weight_files import StoredTensor, read_header

CONVERTED = "converted-weights"
SHARD_SIZE = "5GB"


def headers_of(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The headers of all tensors in safetensors files, by stored name. Raises UserError for an incomplete file."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= read_header(file)
    return found


def reads_directly(spec: ModelSpec, stored: Iterable[str]) -> bool:
    """Whether files with these tensors hold all of the module's tensors unchanged, under whatever names."""
    names = set()
    for name in stored:
        if spec.tensor_names.is_converted(name):
            return False
        names.add(spec.tensor_names.name(name))
    return names >= spec.shapes.keys() - spec.tied_names


def check_stored(spec: ModelSpec, folder: Path, stored: Mapping[str, StoredTensor], origin: str) -> None:
    """Raises UserError where weights and config.json do not belong together. Reads headers only.

    Accepted are tensors that transformers ignores, and unknown tensors outside of the body, such as another head. An
    unknown tensor in the body means that the config is another model's.
    """
    if reads_directly(spec, stored):
        names = {spec.tensor_names.name(name): tensor for name, tensor in stored.items()}
        unknown = [name for name in names if name is not None and name not in spec.shapes]
        pairs = [(name, names[name].shape, shape) for name, shape in spec.shapes.items() if name in names]
        misshapen = [pair for pair in pairs if pair[1] != pair[2]]
        missing: Sequence[str] = ()
    else:
        # On the meta device no weights are read.
        report = _read(spec, folder, origin, device_map="meta", ignore_mismatched_sizes=True)[1]
        missing, unknown = report["missing_keys"], report["unexpected_keys"]
        misshapen = sorted(report["mismatched_keys"])
    if missing:
        raise UserError(f"{origin}: its weights lack {min(missing)}; copy it again")
    if inside := [name for name in unknown if spec.is_of_body(name)]:
        raise UserError(
            f"{origin}: its weights hold {min(inside)}, which the model of its config.json does not have; give the "
            "config.json that belongs to them"
        )
    if misshapen:
        name, found, wanted = misshapen[0]
        raise UserError(
            f"{origin}: {name} has shape {list(found)} in the weights and {list(wanted)} by its config.json; the two "
            "do not belong together"
        )


def converted_files(
    spec: ModelSpec, folder: Path, files: Sequence[Path], stages_dir: Path | StageFolders, origin: str
) -> list[Path]:
    """Safetensors files with the module's tensors, which are converted once into a keyed folder.

    Does not communicate: of several processes, one converts and the others wait for its file lock. The converting
    process holds the whole model in host memory, in the dtype of `stored_dtype`. Raises UserError, whose message begins
    with `origin`.
    """
    key = {
        "files": digest_files([folder / "config.json", *files]),
        "is_tied": spec.is_tied,
        "transformers": transformers.__version__,
    }
    stage = Stage(CONVERTED, key, stages_dir)

    def convert() -> None:
        headers = headers_of(files)
        # For a model of the hub this is the first check: its weights were not yet downloaded when it was found.
        check_stored(spec, folder, headers, origin)
        dtype = stored_dtype(spec, headers)
        model, _ = _read(spec, folder, origin, dtype=dtype)
        shutil.rmtree(stage.partial, ignore_errors=True)
        model.save_pretrained(stage.partial, save_original_format=False, max_shard_size=SHARD_SIZE)
        for file in stage.partial.iterdir():
            # safetensors creates files that only their owner may read.
            file.chmod(0o644)
        stage.finish()

    stage.make_once(is_maker=True, make=convert)
    return transformers_files(stage.folder, origin)


def stored_dtype(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """A 16-bit dtype where all stored floating-point tensors have it, else float32.

    Tensors that transformers keeps in float32 are not considered.
    """
    for dtype in (torch.bfloat16, torch.float16):
        float32_patterns = spec.kept_in_float32(dtype)
        found = {
            tensor.dtype
            for name, tensor in stored.items()
            if tensor.dtype.is_floating_point
            and not any(re.search(pattern, spec.tensor_names.name(name) or name) for pattern in float32_patterns)
        }
        if found <= {dtype}:
            return dtype
    return torch.float32


def _read(spec: ModelSpec, folder: Path, origin: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model, loaded by transformers, and its loading report. The message of a UserError begins with `origin`."""
    unset_hf_deepspeed_config()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=spec.config,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=spec.trusts_code,
            output_loading_info=True,
            **options,
        )
        return loaded
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{origin}: transformers cannot read its weights ({' '.join(str(error).split())})") from error
