"""A causal language model on disk or on a hub: what it is, before any weight is read; then its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distiller.errors import UserError
from distiller.language.gguf.model import GgufModel
from distiller.language.model.spec import ModelSpec
from distiller.language.model.weight_conversion import check_stored, converted_files, headers_of, reads_directly
from distiller.language.model.weight_tying import tied_as_stored
from distiller.storage.hub import check_listed, download, listed_files, looks_like_hub_id, stored_names
from distiller.storage.packaged_files import find_model_file, looked_for
from distiller.storage.saved_model import TRANSFORMERS_NAME, refuse_adapter, transformers_files
from distiller.storage.stage_folders import StageFolders

DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""What is read of a repository before its weights."""
TRUST = "task.trust_remote_code"


@final
@dataclass(frozen=True)
class LanguageFiles:
    """A saved model: its folder has config.json and the tokenizer's files from the start.

    Attributes:
        origin: how messages name it.
        anatomy: what its config describes.
        tokenizer: the library's, as it lies beside the model; None where there is none.
        fetch: makes the weights present on this machine (downloads or converts them) and returns their folder.
        stages_dir: where weights are kept that the library changes while it loads them.
    """

    origin: str
    root: Path
    anatomy: ModelSpec
    tokenizer: Any
    fetch: Callable[[], Path]
    stages_dir: Path

    def weight_files(self) -> list[Path]:
        """Safetensors files with the tensors of its module, complete: its own, or what the library makes of them.

        Found once: what is converted is known by the digest of all its weights.
        """
        return list(self._weight_files)

    @cached_property
    def _weight_files(self) -> list[Path]:
        folder = self.fetch()
        files = transformers_files(folder, self.origin)
        if reads_directly(self.anatomy, headers_of(files)):
            return files
        return converted_files(self.anatomy, folder, files, self.stages_dir, self.origin)


def find_model(
    section: str,
    path: str,
    revision: str | None,
    subfolder: str | None,
    stages_dir: Path | StageFolders,
    trusts_code: bool,
) -> LanguageFiles:
    """Finds a model and reads its descriptions; of a folder's weights, the headers alone.

    Args:
        section: of the recipe, `teacher` or `student`, which messages name.
        path: a folder, a hub id, a GGUF file, or `package:NAME/FILE` for what an installed package carries.
        stages_dir: where a GGUF file's plain form is kept.
        trusts_code: whether Python files of the folder may be run.

    Raises:
        UserError: in one line.
    """
    origin, local = f"{section}.path: {path}", find_model_file(path)
    if local.suffix == ".gguf":
        gguf = GgufModel(local, stages_dir)
        config = read_config(gguf.description / "config.json", origin, trusts_code)
        tokenizer = read_tokenizer(gguf.description, trusts_code)
        # Whichever process comes first converts, and the others find it done: none waits for one that never comes.
        fetch = partial(gguf.convert, is_maker=True)
        anatomy = ModelSpec(config, trusts_code, origin)
        return LanguageFiles(origin, gguf.description, anatomy, tokenizer, fetch, stages_dir)
    inside, is_folder = f"{subfolder}/" if subfolder else "", os.path.isdir(local)
    if is_folder:
        if revision is not None:
            raise UserError(f"{section}.revision is {revision} and {section}.path {path} a folder; remove it")
        root = local / inside
        fetch = partial(Path, root)
    elif os.path.exists(local):
        raise UserError(f"{origin} is a file; give the folder that holds config.json, or a GGUF file")
    elif not looks_like_hub_id(path):
        raise UserError(f"{origin} is neither a folder nor a hub id (owner/name){looked_for(local)}")
    else:
        root = download(section, path, revision, [f"{inside}{pattern}" for pattern in DESCRIPTIONS]) / inside
        check_listed(listed_files(path, revision), inside, TRANSFORMERS_NAME, origin)

        def fetch() -> Path:
            return download(section, path, revision, [f"{inside}*.safetensors", f"{inside}*.json"]) / inside

    anatomy = ModelSpec(read_config(root / "config.json", origin, trusts_code), trusts_code, origin)
    refuse_adapter(root, origin)
    if is_folder:
        headers = headers_of(transformers_files(root, origin))
        anatomy = tied_as_stored(anatomy, headers, lambda: transformers_files(root, origin), origin)
        check_stored(anatomy, root, headers, origin)
    elif anatomy.is_tied:
        names = stored_names(path, revision, root, inside)
        anatomy = tied_as_stored(anatomy, names, lambda: transformers_files(fetch(), origin), origin)
    return LanguageFiles(origin, root, anatomy, read_tokenizer(root, trusts_code), fetch, stages_dir)


def read_config(file: Path, origin: str, trusts_code: bool) -> Any:
    """The library's config of a causal language model. Raises UserError, which `origin` begins."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{origin}: {file} does not exist; give a model of transformers, with config.json") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{origin}: {file} is not readable JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(kind := content.get("model_type"), str):
        raise UserError(f"{origin}: {file} names no model_type, so it describes no model of transformers")
    own_code = content.get("auto_map")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (own_code and trusts_code):
        if own_code:
            raise UserError(
                f"{origin}: model type {kind} comes with Python code of its own, which is not run unless you read it "
                f"and set {TRUST}=true"
            )
        raise UserError(f"{origin}: model type {kind} is none of transformers' causal language models")
    if content.get("quantization_config"):
        raise UserError(f"{origin}: is a quantised model; give the plain one (teacher.quantization quantises it)")
    if own_code and trusts_code and file.name != "config.json":
        # The library finds the code's files beside a config of that name alone, and would read that one.
        raise UserError(f"{origin}: names Python code (auto_map), so the file must be called config.json; rename it")
    try:
        if own_code and trusts_code:
            return AutoConfig.from_pretrained(file.parent, trust_remote_code=True, local_files_only=True)
        # Infinities, which JSON has not, are objects in the file.
        return AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(content))
    except Exception as error:
        # Each of the library's configs checks its values with errors of its own kind.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{origin}: {file.name} is not a valid config ({reason})") from error


def read_tokenizer(folder: Path, trusts_code: bool) -> Any:
    """The tokenizer beside a model; None where none lies there, or one that cannot be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code, local_files_only=True)
    except Exception as error:
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
