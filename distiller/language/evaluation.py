"""Compares a trained student with its teacher on held-out rows: perplexity, KL divergence and agreement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from tqdm import tqdm

from distiller.language.data.batch import IGNORED, collate
from distiller.language.data.length_grouping import batches_by_length
from distiller.language.data.packing import TextData
from distiller.language.generation import HiddenOf
from distiller.language.loss import divergence_values
from distiller.language.loss.chunked_loss import chunked_loss, default_chunk_tokens
from distiller.language.loss.targets import HiddenTarget
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head


@final
@dataclass(frozen=True)
class FrozenModel:
    """A model for inference.

    Attributes:
        hidden_of: returns its last hidden states.
        head: its output layer.
        generate: (token ids of each prompt, number of tokens, id of the padding) -> the most likely continuation of
            each; None for a teacher, whose placement has no key-value cache.
    """

    hidden_of: HiddenOf
    head: Head
    generate: Callable[[Sequence[Sequence[int]], int, int], list[list[int]]] | None = None


def compare(
    teacher: FrozenModel,
    students: dict[str, FrozenModel],
    rows: TextData,
    indices: Sequence[int],
    batch_tokens: int,
    pad_id: int,
) -> dict[str, Any]:
    """Figures of teacher and students on some rows: means over all learnt tokens, computed from full logits in float32.

    Logits exist for one chunk of tokens at a time. Prints a progress bar. Communicates only where a `hidden_of` does.

    Args:
        teacher: all computation is on the device of its output layer; the students must be there as well.
        students: the first one is the trained student; of the others only the perplexity is reported.
        rows: the rows to choose from.
        indices: indices of the evaluated rows.
        batch_tokens: tokens of a batch, padding included; a longer row is a batch of its own.
        pad_id: the token id in the padding.

    Returns:
        `num_rows`, `num_tokens` (learnt tokens), `{name}_perplexity` of every model (e to the mean cross-entropy), and
        of the trained student `kl_divergence` (the mean of KL(teacher || student) at temperature 1, in nats) and
        `top1_agreement` (the share of tokens for which teacher and student have the same most likely id). All of these
        are over the ids that stand for a token. Where the trained student's output layer has other ids,
        `unused_ids_probability` is the probability that it gives them together: 1 minus the geometric mean, over
        tokens, of the probability of the ids that stand for a token. `{name}_tokens_per_s` of teacher and trained
        student are the rows' tokens divided by the seconds of the forward passes without output layer.
    """
    device, objective = teacher.head.weight.device, Objective()
    lengths = rows.lengths
    batches = batches_by_length([lengths[index] for index in indices], batch_tokens)
    losses, seconds = dict.fromkeys(["teacher", *students], 0.0), dict.fromkeys(["teacher", *students], 0.0)
    divergence = agreeing = unused = 0.0
    num_tokens = 0
    for batch_positions in tqdm(batches, desc="evaluate", unit="batch", dynamic_ncols=True):
        batch = collate([rows[0, indices[position]] for position in batch_positions], pad_id)
        loss_mask = (batch.labels != IGNORED).flatten()
        batch = batch.map(lambda tensor: tensor.to(device))
        labels = batch.labels.flatten()
        hidden = {}
        for name, model in {"teacher": teacher, **students}.items():
            started = time.perf_counter()
            hidden[name] = model.hidden_of(batch).flatten(0, 1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] += time.perf_counter() - started
        num_tokens += int(loss_mask.sum())
        losses["teacher"] += cross_entropy_sum(hidden["teacher"], teacher.head, labels, loss_mask)
        for index, (name, model) in enumerate(students.items()):
            if index:
                losses[name] += cross_entropy_sum(hidden[name], model.head, labels, loss_mask)
                continue
            target, head = HiddenTarget.of(hidden["teacher"], teacher.head), model.head
            with torch.no_grad():
                options = {"bias": head.bias, "change": head.change, "ids": head.ids}
                sums = chunked_loss(hidden[name], head.weight, target, labels, loss_mask, objective, **options)
            losses[name] += float(sums.cross_entropy)
            divergence, agreeing = divergence + float(sums.divergence), agreeing + float(sums.agreeing)
            unused += float(sums.unused)
    report: dict[str, Any] = {"num_rows": len(indices), "num_tokens": num_tokens}
    report |= {f"{name}_perplexity": math.exp(min(loss / num_tokens, 700)) for name, loss in losses.items()}
    report |= {"kl_divergence": divergence / num_tokens, "top1_agreement": agreeing / num_tokens}
    trained, head = next(iter(students.items()))[0], next(iter(students.values())).head
    if head.ids is not None and head.ids.num_unused(len(head.weight)):
        report["unused_ids_probability"] = -math.expm1(-unused / num_tokens)
    report |= {
        f"{name}_tokens_per_s": sum(lengths[row] for row in indices) / seconds[name] for name in ("teacher", trained)
    }
    return report


@torch.no_grad()
def cross_entropy_sum(hidden: Tensor, head: Head, labels: Tensor, loss_mask: Tensor) -> float:
    """The cross-entropy in nats, summed over the tokens that count; logits exist for one chunk of tokens at a time.

    Args:
        hidden: last hidden states [N, H].
        head: the model's output layer, on the device of `hidden`.
        labels: [N] int64, on the device of `hidden`.
        loss_mask: [N] bool, on any device: the tokens that count.
    """
    total, token_indices = 0.0, loss_mask.nonzero().squeeze(1).to(hidden.device)
    for chunk in token_indices.split(default_chunk_tokens(head.weight.shape[0])):
        total += float(divergence_values.cross_entropy(head.logits(hidden[chunk]), labels[chunk]).sum())
    return total
