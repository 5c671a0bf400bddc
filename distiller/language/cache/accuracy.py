"""How far the stored forms are from the live teacher, on the recipe's own rows: what `cache --compare` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.config.causal_lm import LanguageRecipe
from distiller.language.cache.forms import StoredForm, stored_form, target_of
from distiller.language.cache.sparse_records import SparseKind
from distiller.language.data.batch import MaskedBatch
from distiller.language.loss import divergence_values
from distiller.language.loss.chunked_loss import HiddenTarget, Target, default_chunk_tokens
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.divergences import Divergence
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head, TokenIds
from distiller.language.student_module import LanguageStudent, LossInputs
from distiller.teachers.base import Outputs


@final
@dataclass(frozen=True)
class FormFigures:
    """One stored form.

    Attributes:
        bytes_per_token: of what is stored, without a file's own overhead.
        divergence: mean over learnt tokens, in nats, as the form shows it.
        bias: of that mean, as a share of the live teacher's.
        standard_error: of the bias, by the spread over tokens.
        gradient_cosine: between the student's gradients (all trained parameters, divergence alone) by this form and by
            the live teacher.
    """

    bytes_per_token: float
    divergence: float
    bias: float
    standard_error: float
    gradient_cosine: float


def forms_to_compare(recipe: LanguageRecipe, ids: TokenIds, divergence: Divergence) -> dict[str, StoredForm]:
    """All forms that suit the recipe's divergence, by their names and sizes; `ids` are those that are compared."""
    kinds: list[Literal["hidden"] | SparseKind] = ["hidden", "topk"]
    if divergence.can_be_sampled:
        kinds.append("sampled")
        if recipe.cache.fits_both:
            kinds.append("topk+sampled")
    forms = {}
    for kind in kinds:
        form = stored_form(kind, recipe, ids)
        settings = [f"{key} {value}" for key, value in form.describe().items() if key in ("k", "samples")]
        forms[" ".join([kind, *settings])] = form
    return forms


def compare_forms(
    forms: Mapping[str, StoredForm],
    student: LanguageStudent,
    head: Head,
    objective: Objective,
    batches: Sequence[MaskedBatch],
    outputs: Sequence[Outputs],
) -> dict[str, FormFigures]:
    """Stores and restores every micro-batch in every form, and compares divergences and gradients.

    Args:
        student: with weights, on the device of `head`, made with `objective`; its gradients are overwritten.
        head: the teacher's output layer.
        objective: the divergence alone (weight 1).
        batches, outputs: micro-batches on the device, and the live teacher's answers.
    """
    assert objective.weight == 1, "the labels' cross-entropy is the same under every form"
    vocabulary = len(head.weight) if head.ids is None else head.ids.size
    live = [target_of(of, head, vocabulary) for of in outputs]
    expected, gradient = _measure(student, objective, batches, live)
    figures = {}
    for name, form in forms.items():
        num_bytes, targets = 0, []
        for batch, of in zip(batches, outputs, strict=True):
            rows = form.store(batch, of, head)
            num_bytes += sum(tensor.nbytes for row in rows for tensor in row.values())
            restored = form.restore(batch, rows, ())
            on_device = {key: value.to(head.weight.device) for key, value in restored.items()}
            targets.append(target_of(on_device, head, vocabulary))
        found, own_gradient = _measure(student, objective, batches, targets)
        differences = found - expected
        figures[name] = FormFigures(
            bytes_per_token=num_bytes / sum(sum(batch.batch.lengths) for batch in batches),
            divergence=float(found.mean()),
            bias=float(differences.mean() / expected.mean()),
            standard_error=float(differences.std() / math.sqrt(len(differences)) / expected.mean()),
            gradient_cosine=float(F.cosine_similarity(gradient, own_gradient, dim=0)),
        )
    return figures


def table(figures: Mapping[str, FormFigures]) -> str:
    """The figures for a terminal."""
    heads = ("form", "bytes a token", "divergence", "bias", "std. error", "gradient cosine")
    rows = [
        (
            name,
            f"{of.bytes_per_token:,.1f}",
            f"{of.divergence:.4f}",
            f"{of.bias:+.2%}",
            f"{of.standard_error:.2%}",
            f"{of.gradient_cosine:.4f}",
        )
        for name, of in figures.items()
    ]
    lines = [f"{name:<34}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in (heads, *rows)]
    return "\n".join(lines)


def _measure(
    student: LanguageStudent,
    objective: Objective,
    batches: Sequence[MaskedBatch],
    targets: Sequence[Target],
) -> tuple[Tensor, Tensor]:
    """The divergence of each learnt token [N] and the gradient of their sum, flat; both float64 on the CPU."""
    student.zero_grad(set_to_none=True)
    values = []
    for batch, target in zip(batches, targets, strict=True):
        rows = batch.batch
        inputs = LossInputs(rows.input_ids, rows.position_ids, rows.labels.flatten(), batch.loss_mask, target, ())
        student(inputs).loss.backward()
        values.append(_values(student, objective, inputs))
    gradients = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    return torch.cat(values), torch.cat([gradient.flatten().double().cpu() for gradient in gradients])


@torch.no_grad()
def _values(student: LanguageStudent, objective: Objective, inputs: LossInputs) -> Tensor:
    body = student.model.base_model
    hidden = body(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)
    ours: Head = student.model.get_output_embeddings().head
    counting, values = inputs.loss_mask.nonzero().squeeze(1).to(hidden.device), []
    for rows in counting.split(default_chunk_tokens(len(ours.weight))):
        logits = ours.logits(hidden[rows])
        target, divergence, temperature = inputs.target, objective.divergence, objective.temperature
        if isinstance(target, SparseTarget):
            values.append(divergence_values.sparse_divergence(divergence, logits, target.rows(rows), temperature))
        else:
            assert isinstance(target, HiddenTarget)
            teacher = Head(target.weight, target.bias, target.change, ours.ids).logits(target.hidden[rows])
            values.append(divergence_values.dense_divergence(divergence, logits, teacher, temperature))
    return torch.cat(values).double().cpu()
