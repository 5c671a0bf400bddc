"""A language model's weight files under the names and in the shapes of the module's tensors.

Placements read tensors one by one by the module's names. Where the files hold the same tensors, under whatever names,
they are read as they are. Where the library merges, splits or transposes tensors while it loads, it reads them once,
and they are written as the module has them into a keyed folder.
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
from distiller.storage.stages import Stage, digest_files
from distiller.storage.weight_files import StoredTensor, read_header

CONVERTED = "converted-weights"
SHARD_SIZE = "5GB"


def headers_of(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of some safetensors files, by their stored names. UserError for a file that is not whole."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= read_header(file)
    return found


def reads_directly(anatomy: ModelSpec, stored: Iterable[str]) -> bool:
    """Whether files with these tensors hold the module's own, under whatever names."""
    names = set()
    for name in stored:
        if anatomy.renaming.is_converted(name):
            return False
        names.add(anatomy.renaming.name(name))
    return names >= anatomy.shapes.keys() - anatomy.tied_names


def check_stored(anatomy: ModelSpec, folder: Path, stored: Mapping[str, StoredTensor], origin: str) -> None:
    """Raises UserError where weights and config.json do not belong together, by the headers of the files.

    What the library ignores is left out without a word, and what it does not know outside of the blocks (another head)
    as well; a tensor in the blocks that it does not know says that the config is another model's.
    """
    if reads_directly(anatomy, stored):
        names = {anatomy.renaming.name(name): tensor for name, tensor in stored.items()}
        unknown = [name for name in names if name is not None and name not in anatomy.shapes]
        pairs = [(name, names[name].shape, shape) for name, shape in anatomy.shapes.items() if name in names]
        misshapen = [pair for pair in pairs if pair[1] != pair[2]]
        missing: Sequence[str] = ()
    else:
        # On the meta device, where nothing is read.
        report = _read(anatomy, folder, origin, device_map="meta", ignore_mismatched_sizes=True)[1]
        missing, unknown = report["missing_keys"], report["unexpected_keys"]
        misshapen = sorted(report["mismatched_keys"])
    if missing:
        raise UserError(f"{origin}: its weights lack {min(missing)}; copy it again")
    if inside := [name for name in unknown if anatomy.is_of_body(name)]:
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
    anatomy: ModelSpec, folder: Path, files: Sequence[Path], stages_dir: Path, origin: str
) -> list[Path]:
    """The module's tensors in a keyed folder, made once.

    Does not communicate: of processes that want the same folder, one makes it and the others wait for its lock. That
    one holds the whole model in host memory, in the files' dtype. Raises UserError, which `origin` begins.
    """
    key = {
        "files": digest_files([folder / "config.json", *files]),
        "is_tied": anatomy.is_tied,
        "transformers": transformers.__version__,
    }
    stage = Stage(CONVERTED, key, stages_dir)

    def convert() -> None:
        headers = headers_of(files)
        # Of a hub's model nobody has seen these before.
        check_stored(anatomy, folder, headers, origin)
        dtype = stored_dtype(anatomy, headers)
        model, _ = _read(anatomy, folder, origin, dtype=dtype)
        shutil.rmtree(stage.partial, ignore_errors=True)
        model.save_pretrained(stage.partial, save_original_format=False, max_shard_size=SHARD_SIZE)
        for file in stage.partial.iterdir():
            # safetensors creates its files for the owner only.
            file.chmod(0o644)
        stage.finish()

    stage.make_once(is_maker=True, make=convert)
    return transformers_files(stage.folder, origin)


def stored_dtype(anatomy: ModelSpec, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """One that holds all floating-point tensors without rounding, but for those that the library keeps in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        kept = anatomy.kept_in_float32(dtype)
        others = {
            tensor.dtype
            for name, tensor in stored.items()
            if tensor.dtype.is_floating_point
            and not any(re.search(pattern, anatomy.renaming.name(name) or name) for pattern in kept)
        }
        if others <= {dtype}:
            return dtype
    return torch.float32


def _read(anatomy: ModelSpec, folder: Path, origin: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    unset_hf_deepspeed_config()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=anatomy.config,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=anatomy.trusts_code,
            output_loading_info=True,
            **options,
        )
        return loaded
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{origin}: transformers cannot read its weights ({' '.join(str(error).split())})") from error
