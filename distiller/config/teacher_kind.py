"""Which task a teacher belongs to, by the files in its folder. Reads JSON only, and imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from distiller.errors import UserError
from distiller.storage.packaged_files import PACKAGE_PREFIX, local_path

INDEX, CONFIG = "model_index.json", "config.json"


@final
class Evidence(NamedTuple):
    """The task's kind, None if it is none of ours; and a description for messages, None for no saved model."""

    kind: str | None
    what: str | None


def kind_by_teacher(teacher: Any, origin: str) -> str | None:
    """The `task.kind` of a recipe that leaves it out, by its section `teacher` as it stands in the file.

    Of a hub's model the JSON files are fetched. None where no teacher is named, where it cannot be had, and for a
    folder that holds no saved model.

    Raises:
        UserError: the teacher is a model of `transformers` of another kind.
    """
    path = teacher.get("path") if isinstance(teacher, Mapping) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    found = _evidence(path, teacher, fetches=True)
    if found is None or found.what is None:
        return None
    if found.kind is None:
        raise UserError(
            f"{origin}: task.kind is left out and teacher.path {path} {found.what}, which does not tell it; set "
            "task.kind to diffusion (a pipeline's folder), causal_lm or classification"
        )
    return found.kind


def check_kind(kind: str, teacher: Any, origin: str) -> None:
    """UserError where the teacher lies on this machine and is of another kind than the recipe says."""
    path = teacher.get("path") if isinstance(teacher, Mapping) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return
    found = _evidence(path, teacher, fetches=False)
    if found is not None and found.kind not in (None, kind):
        raise UserError(
            f"{origin}: task.kind is {kind} and teacher.path {path} {found.what}: set task.kind={found.kind}, or give "
            f"a teacher of {kind}"
        )


def _evidence(path: str, teacher: Mapping[str, Any], fetches: bool) -> Evidence | None:
    """The evidence on a teacher; None where its files cannot be had."""
    if path.startswith(PACKAGE_PREFIX) or path.endswith(".gguf"):
        return Evidence("causal_lm", "is a GGUF file")
    folder, revision, inside = local_path(path), teacher.get("revision"), teacher.get("subfolder") or ""
    if not os.path.exists(folder):
        if not fetches:
            return None
        # Imported here: huggingface_hub takes longer to import than everything else that reads recipes.
        from distiller.storage.hub import download, looks_like_hub_id

        if not looks_like_hub_id(path):
            return None
        try:
            folder = download("teacher", path, revision if isinstance(revision, str) else None, ["*.json"])
        except UserError:
            # The task asks for the same files, and reports the error after the rest of the recipe is validated.
            return None
    return _of_folder(folder / str(inside))


def _of_folder(folder: Path) -> Evidence:
    if (folder / INDEX).is_file():
        return Evidence("diffusion", f"is a pipeline of diffusers ({INDEX})")
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Evidence(None, None)
    if not isinstance(content, Mapping) or not {"architectures", "model_type"} & content.keys():
        # Nothing, or a part of a pipeline.
        return Evidence(None, None)
    named = content.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    for name in names:
        if "ForImageClassification" in name:
            return Evidence("classification", f"is an image classifier ({name})")
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return Evidence("causal_lm", f"is a causal language model ({name})")
    if names:
        return Evidence(None, f"holds a {names[0]}")
    # A bare config, for a teacher that the recipe trains or a library that writes no architectures.
    if (folder / "preprocessor_config.json").is_file():
        return Evidence("classification", "has a preprocessor_config.json")
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        return Evidence("causal_lm", "has a tokenizer")
    return Evidence(None, f"holds a {CONFIG} without architectures")
