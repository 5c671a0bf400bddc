"""Finds a causal language model on disk or on a hub: first its config and tokenizer, then its weight files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distiller.errors import UserError
from distiller.language.model.spec import ModelSpec
from distiller.language.model.weight_conversion import check_stored, converted_files, headers_of, reads_directly
from distiller.language.model.weight_tying import tied_as_stored
from distiller.storage.hub import check_listed, download, find_root, listed_files, stored_names
from distiller.storage.packaged_files import find_model_file
from distiller.storage.saved_model import TRANSFORMERS_NAME, refuse_adapter, transformers_files
from distiller.storage.stage_folders import StageFolders

if TYPE_CHECKING:
    from distiller.language.gguf.model import GgufModel

DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""Patterns of the files that are downloaded from a repository before its weights."""
TRUST = "task.trust_remote_code"


@final
@dataclass(frozen=True)
class LanguageFiles:
    """A saved model. Its config and tokenizer are on this machine from the start; its weights may not be.

    Attributes:
        origin: the model in messages, such as `teacher.path: PATH`.
        root: the folder with config.json and the tokenizer's files.
        spec: the structure that the config describes.
        tokenizer: a tokenizer of transformers, read from `root`; None where there is none.
        fetch: makes the weights present on this machine (downloads or converts them) and returns their folder.
        stages_dir: folder for weights that had to be converted (`distiller.language.model.weight_conversion`).
    """

    origin: str
    root: Path
    spec: ModelSpec
    tokenizer: Any
    fetch: Callable[[], Path]
    stages_dir: Path | StageFolders

    def weight_files(self) -> list[Path]:
        """Complete safetensors files with all tensors of the module: the model's own files, or converted ones.

        The first call fetches the weights and may convert them. The result is kept: converted files are found by a
        digest of all weights. Does not communicate. Raises UserError.
        """
        return list(self._weight_files)

    @cached_property
    def _weight_files(self) -> list[Path]:
        folder = self.fetch()
        files = transformers_files(folder, self.origin)
        if reads_directly(self.spec, headers_of(files)):
            return files
        return converted_files(self.spec, folder, files, self.stages_dir, self.origin)


def find_model(
    section: str,
    path: str,
    revision: str | None,
    subfolder: str | None,
    stages_dir: Path | StageFolders,
    trusts_code: bool,
) -> LanguageFiles:
    """Finds a model, and reads its config and tokenizer; for a folder, also the headers of its weights.

    Weights are read, and downloaded from a hub, only where the config ties embedding and output layer and both are
    stored: see `tied_as_stored`.

    Args:
        section: of the recipe, `teacher` or `student`, for messages.
        path: a folder, a hub id, a GGUF file, or `package:NAME/FILE` for what an installed package carries.
        stages_dir: folder for the converted weights of a GGUF file, and see `LanguageFiles`.
        trusts_code: whether Python files of the folder may be run.

    Raises:
        UserError: in one line.
    """
    origin, local = f"{section}.path: {path}", find_model_file(path)
    if local.suffix == ".gguf":
        gguf = _open_gguf(local, stages_dir, origin)
        config = read_config(gguf.description / "config.json", origin, trusts_code)
        tokenizer = read_tokenizer(gguf.description, trusts_code)
        # Every process may convert: the first one does, and the others find the result. With a fixed converting process
        # the others would wait forever where that process does not get here.
        fetch = partial(gguf.convert, is_maker=True)
        spec = ModelSpec(config, trusts_code, origin)
        return LanguageFiles(origin, gguf.description, spec, tokenizer, fetch, stages_dir)
    prefix = f"{subfolder}/" if subfolder else ""
    patterns = [f"{prefix}{pattern}" for pattern in DESCRIPTIONS]
    folder, is_hub = find_root(section, path, local, revision, patterns, "config.json, or a GGUF file")
    root = folder / prefix
    if not is_hub:
        fetch = partial(Path, root)
    else:
        check_listed(listed_files(path, revision), prefix, TRANSFORMERS_NAME, origin)
        fetch = partial(_download_weights, section, path, revision, prefix)
    spec = ModelSpec(read_config(root / "config.json", origin, trusts_code), trusts_code, origin)
    refuse_adapter(root, origin)
    if is_hub:
        if spec.is_tied:
            names = stored_names(path, revision, root, prefix)
            spec = tied_as_stored(spec, names, lambda: transformers_files(fetch(), origin), origin)
    elif files := transformers_files(root, origin):
        headers = headers_of(files)
        spec = tied_as_stored(spec, headers, lambda: files, origin)
        check_stored(spec, root, headers, origin)
    return LanguageFiles(origin, root, spec, read_tokenizer(root, trusts_code), fetch, stages_dir)


def _download_weights(section: str, path: str, revision: str | None, prefix: str) -> Path:
    return download(section, path, revision, [f"{prefix}*.safetensors", f"{prefix}*.json"]) / prefix


def read_config(file: Path, origin: str, trusts_code: bool) -> Any:
    """The transformers config of a causal language model. Raises UserError, whose message begins with `origin`."""
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
        # transformers looks for the code beside a file named config.json, and would read that file instead.
        raise UserError(f"{origin}: names Python code (auto_map), so the file must be called config.json; rename it")
    try:
        if own_code and trusts_code:
            return AutoConfig.from_pretrained(file.parent, trust_remote_code=True, local_files_only=True)
        # FlashAttention keeps packed documents apart in batches of one row only, and the library's choice elsewhere.
        kept = {key: value for key, value in content.items() if not key.endswith("attn_implementation")}
        # JSON has no infinities: the file holds objects for them.
        return AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(kept))
    except Exception as error:
        # Each config class raises errors of its own types for wrong values.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{origin}: {file.name} is not a valid config ({reason})") from error


def read_tokenizer(folder: Path, trusts_code: bool) -> Any:
    """The tokenizer in a model's folder; None where there is none. Raises UserError where it cannot be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code, local_files_only=True)
    except Exception as error:
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def _open_gguf(file: Path, stages_dir: Path | StageFolders, origin: str) -> GgufModel:
    # Imported here: this alone needs parts of transformers that change from release to release.
    try:
        from distiller.language.gguf.model import GgufModel
    except ImportError as error:
        raise UserError(
            f"{origin}: a GGUF file needs transformers 5.18 or newer, and {transformers.__version__} is installed "
            f"({error}); run pip install -U transformers, or give the model's folder of transformers"
        ) from error
    return GgufModel(file, stages_dir)
