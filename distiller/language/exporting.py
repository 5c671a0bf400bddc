"""The student as a plain model of the library: written with its tokenizer, and read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.errors import UserError
from distiller.language.evaluation import Reader
from distiller.language.generation import students_hidden
from distiller.language.model.logits import Head, LogitChange, TokenIds
from distiller.language.student import StudentModel

COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "chat_template*", "generation_config.json"),
)
"""What goes into an exported student beside its config and weights."""


def export_student(
    student: StudentModel, tokenizer_folder: Path, known: TokenIds, state: Mapping[str, Tensor], folder: Path
) -> None:
    """Writes the model, tied weights once, and the tokenizer by which it was trained.

    Ids that stand for no token are suppressed in `generate` by its generation_config.json.

    Args:
        tokenizer_folder: where that lies.
        known: the ids of its tokens.
        state: of `LanguageStudent`; a tied tensor may have one of its names only.
    """
    model = student.skeleton().to_empty(device="cpu")
    ours = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    report = model.load_state_dict(ours, strict=False, assign=True)
    model.tie_weights()
    lacking, heads = set(report.missing_keys), set(student.anatomy.head_names)
    if student.anatomy.is_tied and heads & ours.keys():
        lacking -= heads
    if wrong := sorted(lacking) or sorted(report.unexpected_keys):
        kind = "lacks" if lacking else "holds"
        raise UserError(
            f"{student.origin}: is not the student of this checkpoint, which {kind} {wrong[0]}; export it with the "
            "recipe that it was trained by"
        )
    model.save_pretrained(folder)
    for file in sorted({file for pattern in COMPANIONS for file in tokenizer_folder.glob(pattern)}):
        shutil.copyfile(file, folder / file.name)
    _suppress(folder / "generation_config.json", known.unused(student.anatomy.vocabulary))


def _suppress(file: Path, unused: list[int]) -> None:
    """Has the library's `generate` never draw these ids, whatever probability is left to them."""
    if unused and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        content["suppress_tokens"] = sorted({*(content.get("suppress_tokens") or ()), *unused})
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_exported(run_dir: Path, trusts_code: bool, device: torch.device, change: LogitChange, ids: TokenIds) -> Reader:
    """The exported student of a run, in float32; see `reader_of`. Raises UserError when the run has none."""
    folder = run_dir / "student"
    if not (folder / "config.json").is_file():
        raise UserError(f"{run_dir}: has no student/ yet; finish its training first")
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
        raise UserError(f"{run_dir}: its student/ is damaged ({error}); copy it again") from error
    return reader_of(model, device, change, ids)


def reader_of(model: Any, device: torch.device, change: LogitChange, ids: TokenIds) -> Reader:
    """A model of the library that is only read.

    `change` is what it does to its output layer's logits, `ids` are those that stand for a token.
    """
    model = model.eval().requires_grad_(False).to(device)
    output = model.get_output_embeddings()
    return Reader(students_hidden(model), Head(output.weight, output.bias, change, ids))
