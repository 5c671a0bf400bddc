"""Writes the student as a transformers model folder with its tokenizer, and reads that folder back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.errors import UserError
from distiller.language.evaluation import FrozenModel
from distiller.language.generation import generate_with_cache, model_hidden_states
from distiller.language.model.logits import Head, LogitChange, TokenIds
from distiller.language.student import StudentModel
from distiller.tasks.student_module import damaged_student, exported_folder, model_state

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "chat_template*", "additional_chat_templates/*", "generation_config.json"),
)
"""Glob patterns of the files that are copied from the tokenizer's folder into the exported student's."""


def export_student(
    student: StudentModel, tokenizer_folder: Path, token_ids: TokenIds, state: Mapping[str, Tensor], folder: Path
) -> None:
    """Writes the model (a tied tensor once, in the dtype of `state`) and its tokenizer as a transformers folder.

    Ids that stand for no token are listed in `suppress_tokens` of generation_config.json, so that `generate` never
    returns one.

    Args:
        student: the recipe's student.
        tokenizer_folder: the folder of the tokenizer with which the student was trained.
        token_ids: the ids that stand for a token.
        state: the full state of `LanguageStudent`; a tied tensor may have one of its names only.
        folder: where the files are written.

    Raises:
        UserError: `state` lacks a tensor of the recipe's student, or holds another one.
    """
    model = student.skeleton().to_empty(device="cpu")
    model_tensors = model_state(state)
    if student.spec.is_tied:
        # Under both names: the model would tie what is loaded to an embedding that is not.
        tied = [name for name in student.spec.head_names if name in model.state_dict()]
        given = next((model_tensors[name] for name in tied if name in model_tensors), None)
        model_tensors = {**({} if given is None else dict.fromkeys(tied, given)), **model_tensors}
    report = model.load_state_dict(model_tensors, strict=False, assign=True)
    model.tie_weights()
    missing, heads = set(report.missing_keys), set(student.spec.head_names)
    if student.spec.is_tied and heads & model_tensors.keys():
        missing -= heads
    if wrong := sorted(missing) or sorted(report.unexpected_keys):
        kind = "lacks" if missing else "holds"
        raise UserError(
            f"{student.origin}: is not the student of this checkpoint, which {kind} {wrong[0]}; export it with the "
            "recipe that it was trained by"
        )
    model.save_pretrained(folder)
    for file in sorted(
        {file for pattern in TOKENIZER_FILES for file in tokenizer_folder.glob(pattern) if file.is_file()}
    ):
        copy = folder / file.relative_to(tokenizer_folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    _suppress(folder / "generation_config.json", token_ids.unused(student.spec.vocabulary))


def _suppress(file: Path, unused: list[int]) -> None:
    """Adds the ids to `suppress_tokens` of a generation_config.json, if there is one: `generate` never returns them."""
    if unused and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        content["suppress_tokens"] = sorted({*(content.get("suppress_tokens") or ()), *unused})
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_exported(
    run_dir: Path, trusts_code: bool, device: torch.device, change: LogitChange, ids: TokenIds
) -> FrozenModel:
    """The exported student of a run in float32, on `device`; see `frozen_model` for `change` and `ids`.

    `trusts_code`: whether Python files of the folder may be run. Raises UserError where the run has no exported student
    or a damaged one.
    """
    folder = exported_folder(run_dir)
    unset_hf_deepspeed_config()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trusts_code,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise damaged_student(run_dir, error) from error
    return frozen_model(model, device, change, ids)


def frozen_model(model: Any, device: torch.device, change: LogitChange, ids: TokenIds) -> FrozenModel:
    """A causal language model of transformers, moved to `device`, in eval mode and without gradients.

    Args:
        model: changed in place.
        device: where the model is moved.
        change: what the model does to the logits of its output layer.
        ids: the ids that stand for a token.
    """
    model = model.eval().requires_grad_(False).to(device)
    output = model.get_output_embeddings()
    head = Head(output.weight, output.bias, change, ids)
    return FrozenModel(model_hidden_states(model), head, partial(generate_with_cache, model, ids))
