"""Measures the error of each stored form against the live teacher, on the recipe's own rows (`cache --compare`)."""

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
from distiller.language.loss.chunked_loss import default_chunk_tokens
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.divergences import Divergence
from distiller.language.loss.targets import HiddenTarget, Target
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head, TokenIds
from distiller.language.student_module import LanguageStudent, LossInputs
from distiller.teachers.base import Outputs


@final
@dataclass(frozen=True)
class FormFigures:
    """How one stored form compares with the live teacher.

    Attributes:
        bytes_per_token: bytes of the stored tensors per token, without the files' own overhead.
        divergence: mean over learnt tokens in nats, times temperature^2, computed from the stored form.
        bias: difference of that mean from the live teacher's mean, as a share of the latter.
        standard_error: of `bias`, from the spread over tokens.
        gradient_cosine: cosine similarity of two gradients of the student (all trained parameters, divergence alone):
            one from the stored form, the other from the live teacher.
    """

    bytes_per_token: float
    divergence: float
    bias: float
    standard_error: float
    gradient_cosine: float


def forms_to_compare(recipe: LanguageRecipe, ids: TokenIds, divergence: Divergence) -> dict[str, StoredForm]:
    """All forms that can be used with the recipe's divergence, by name and sizes, such as `topk k 20`.

    `ids` are the ids that are compared.
    """
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

    Runs in one process and does not communicate.

    Args:
        student: with weights, on the device of `head`, made with `objective`; its gradients are overwritten.
        head: the teacher's output layer.
        objective: the divergence alone (weight 1).
        batches, outputs: micro-batches on the same device, and the live teacher's outputs for each.
    """
    assert objective.weight == 1, "the labels' cross-entropy is the same under every form"
    vocabulary = len(head.weight) if head.ids is None else head.ids.size
    live = [target_of(output, head, vocabulary) for output in outputs]
    expected, gradient = _measure(student, objective, batches, live)
    figures = {}
    for name, form in forms.items():
        num_bytes, targets = 0, []
        for batch, output in zip(batches, outputs, strict=True):
            rows = form.store(batch, output, head)
            num_bytes += sum(tensor.nbytes for row in rows for tensor in row.values())
            restored = form.restore(batch, rows, ())
            on_device = {key: value.to(head.weight.device) for key, value in restored.items()}
            targets.append(target_of(on_device, head, vocabulary))
        values, form_gradient = _measure(student, objective, batches, targets)
        differences = values - expected
        figures[name] = FormFigures(
            bytes_per_token=num_bytes / sum(sum(batch.batch.lengths) for batch in batches),
            divergence=float(values.mean()),
            bias=float(differences.mean() / expected.mean()),
            standard_error=float(differences.std() / math.sqrt(len(differences)) / expected.mean()),
            gradient_cosine=float(F.cosine_similarity(gradient, form_gradient, dim=0)),
        )
    return figures


def table(figures: Mapping[str, FormFigures]) -> str:
    """The figures as text, one line per form."""
    header = ("form", "bytes a token", "divergence", "bias", "std. error", "gradient cosine")
    rows = [
        (
            name,
            f"{figure.bytes_per_token:,.1f}",
            f"{figure.divergence:.4f}",
            f"{figure.bias:+.2%}",
            f"{figure.standard_error:.2%}",
            f"{figure.gradient_cosine:.4f}",
        )
        for name, figure in figures.items()
    ]
    lines = [f"{name:<34}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in (header, *rows)]
    return "\n".join(lines)


def _measure(
    student: LanguageStudent,
    objective: Objective,
    batches: Sequence[MaskedBatch],
    targets: Sequence[Target],
) -> tuple[Tensor, Tensor]:
    """The divergence of each learnt token [N], and the gradient of their sum, flattened; both float64 on the CPU."""
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
    """The divergence of each learnt token [N], float64 on the CPU, from a forward pass of its own."""
    body = student.model.base_model
    hidden = body(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)
    head: Head = student.model.get_output_embeddings().head
    learnt, values = inputs.loss_mask.nonzero().squeeze(1).to(hidden.device), []
    for rows in learnt.split(default_chunk_tokens(len(head.weight))):
        logits = head.logits(hidden[rows])
        target, divergence, temperature = inputs.target, objective.divergence, objective.temperature
        if isinstance(target, SparseTarget):
            values.append(divergence_values.sparse_divergence(divergence, logits, target.rows(rows), temperature))
        else:
            assert isinstance(target, HiddenTarget)
            teacher = Head(target.weight, target.bias, target.change, head.ids).logits(target.hidden[rows])
            values.append(divergence_values.dense_divergence(divergence, logits, teacher, temperature))
    return torch.cat(values).double().cpu()
