"""A trained student against its teacher on rows that training never saw."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
from distiller.language.loss.chunked_loss import HiddenTarget, chunked_loss, default_chunk_tokens
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head


@final
@dataclass(frozen=True)
class Reader:
    """A model that reads rows: its last hidden states, and its output layer."""

    hidden_of: HiddenOf
    head: Head


def compare(
    teacher: Reader, students: dict[str, Reader], rows: TextData, numbers: Sequence[int], batch_tokens: int, pad_id: int
) -> dict[str, Any]:
    """Token-weighted means over all learnt tokens of the rows; exact, in float32, chunk by chunk.

    Args:
        students: the first one is the trained student; the others are reported by their perplexity alone.
        numbers: which rows.

    Returns:
        The perplexities (e to the mean cross-entropy), and of the trained student the mean KL divergence from the
        teacher at temperature 1, in nats, and the share of tokens for which both find the same id likeliest. All are
        over the ids that stand for a token; where the trained student has others, `unused_ids_probability` is what it
        gives them together (1 minus the geometric mean of what is left).
    """
    device, objective = teacher.head.weight.device, Objective()
    lengths = rows.lengths
    batches = batches_by_length([lengths[number] for number in numbers], batch_tokens)
    losses, seconds = dict.fromkeys(["teacher", *students], 0.0), dict.fromkeys(["teacher", *students], 0.0)
    divergence = agreeing = unused = 0.0
    num_tokens = 0
    for places in tqdm(batches, desc="evaluate", unit="batch", dynamic_ncols=True):
        batch = collate([rows[0, numbers[place]] for place in places], pad_id)
        counts = (batch.labels != IGNORED).flatten()
        batch = batch.map(lambda tensor: tensor.to(device))
        labels = batch.labels.flatten()
        hidden = {}
        for name, reader in {"teacher": teacher, **students}.items():
            started = time.perf_counter()
            hidden[name] = reader.hidden_of(batch).flatten(0, 1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] += time.perf_counter() - started
        num_tokens += int(counts.sum())
        losses["teacher"] += cross_entropy_sum(hidden["teacher"], teacher.head, labels, counts)
        for number, (name, reader) in enumerate(students.items()):
            if number:
                losses[name] += cross_entropy_sum(hidden[name], reader.head, labels, counts)
                continue
            target, head = HiddenTarget.of(hidden["teacher"], teacher.head), reader.head
            with torch.no_grad():
                options = {"bias": head.bias, "change": head.change, "ids": head.ids}
                sums = chunked_loss(hidden[name], head.weight, target, labels, counts, objective, **options)
            losses[name] += float(sums.cross_entropy)
            divergence, agreeing = divergence + float(sums.divergence), agreeing + float(sums.agreeing)
            unused += float(sums.unused)
    report: dict[str, Any] = {"num_rows": len(numbers), "num_tokens": num_tokens}
    report |= {f"{name}_perplexity": math.exp(min(loss / num_tokens, 700)) for name, loss in losses.items()}
    report |= {"kl_divergence": divergence / num_tokens, "top1_agreement": agreeing / num_tokens}
    trained, head = next(iter(students.items()))[0], next(iter(students.values())).head
    if head.ids is not None and head.ids.num_unused(len(head.weight)):
        report["unused_ids_probability"] = -math.expm1(-unused / num_tokens)
    report |= {
        f"{name}_tokens_per_s": sum(lengths[n] for n in numbers) / seconds[name] for name in ("teacher", trained)
    }
    return report


@torch.no_grad()
def cross_entropy_sum(hidden: Tensor, head: Head, labels: Tensor, counts: Tensor) -> float:
    """The sum over tokens that count, from hidden states [N, H]; logits exist for one chunk at a time."""
    total, rows = 0.0, counts.nonzero().squeeze(1).to(hidden.device)
    for part in rows.split(default_chunk_tokens(head.weight.shape[0])):
        total += float(divergence_values.cross_entropy(head.logits(hidden[part]), labels[part]).sum())
    return total
