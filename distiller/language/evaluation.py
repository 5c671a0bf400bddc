"""Compares a trained student with its teacher on held-out rows: perplexity, KL divergence and agreement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from tqdm import tqdm

from distiller.language.data.batch import IGNORED, collate
from distiller.language.data.length_grouping import batches_by_length
from distiller.language.data.packing import TextData
from distiller.language.generation import HiddenOf
from distiller.language.loss import divergence_values
from distiller.language.loss.chunked_loss import TokenSums, chunked_loss, default_chunk_tokens
from distiller.language.loss.targets import HiddenTarget
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import Head
from distiller.tasks.cost_figures import SIZE_FIGURES

FIRST_BAND = 16
"""Positions of the first band of those by which figures are reported; each later edge is 4 times the one before."""


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
        student are the rows' tokens divided by the seconds of the forward passes without output layer, and
        `speed_ratio` is the student's over the teacher's. `by_token_position` has `kl_divergence` and `top1_agreement`
        of the tokens at positions 0-15, 16-63, 64-255 and so on of their row, by these names, where there are any.
    """
    device, objective = teacher.head.weight.device, Objective()
    lengths = rows.lengths
    batches = batches_by_length([lengths[index] for index in indices], batch_tokens)
    losses, seconds = dict.fromkeys(["teacher", *students], 0.0), dict.fromkeys(["teacher", *students], 0.0)
    band_names = position_bands(max(lengths[index] for index in indices))
    bands = [_BandSums() for _ in band_names]
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
        band_of = _band_numbers(batch.input_ids.shape[1]).repeat(len(batch.sample_ids))
        losses["teacher"] += cross_entropy_sum(hidden["teacher"], teacher.head, labels, loss_mask)
        for index, (name, model) in enumerate(students.items()):
            if index:
                losses[name] += cross_entropy_sum(hidden[name], model.head, labels, loss_mask)
                continue
            target, head = HiddenTarget.of(hidden["teacher"], teacher.head), model.head
            options = {"bias": head.bias, "change": head.change, "ids": head.ids}
            for number, band in enumerate(bands):
                # Each token is in one band, so its logits are computed once.
                in_band = loss_mask & (band_of == number)
                if not in_band.any():
                    continue
                with torch.no_grad():
                    sums = chunked_loss(hidden[name], head.weight, target, labels, in_band, objective, **options)
                band.add(sums)
    trained, whole = next(iter(students)), _BandSums.total(bands)
    losses[trained] = whole.cross_entropy
    report: dict[str, Any] = {"num_rows": len(indices), "num_tokens": whole.num_tokens}
    report |= {f"{name}_perplexity": math.exp(min(loss / whole.num_tokens, 700)) for name, loss in losses.items()}
    report |= whole.means()
    head = students[trained].head
    if head.ids is not None and head.ids.num_unused(len(head.weight)):
        report["unused_ids_probability"] = -math.expm1(-whole.unused / whole.num_tokens)
    speeds = {name: sum(lengths[row] for row in indices) / seconds[name] for name in ("teacher", trained)}
    report |= {f"{name}_tokens_per_s": speed for name, speed in speeds.items()}
    report["speed_ratio"] = speeds[trained] / speeds["teacher"]
    report["by_token_position"] = {
        name: band.means() for name, band in zip(band_names, bands, strict=True) if band.num_tokens
    }
    return report


def figure_names(max_length: int, has_unused_ids: bool) -> tuple[str, ...]:
    """Dotted keys of the numbers in a report on rows of at most `max_length` tokens."""
    names = [f"{name}_perplexity" for name in ("teacher", "student", "untrained_student")]
    unused = ("unused_ids_probability",) if has_unused_ids else ()
    speeds = ("teacher_tokens_per_s", "student_tokens_per_s", "speed_ratio", "improvement")
    bands = [f"by_token_position.{band}.{name}" for band in position_bands(max_length) for name in _BandSums.FIGURES]
    return ("num_rows", "num_tokens", *names, *_BandSums.FIGURES, *unused, *speeds, *SIZE_FIGURES, *bands)


def position_bands(length: int) -> list[str]:
    """Names of the ranges of positions in rows of `length` tokens: 0-15, 16-63, 64-255 and so on in powers of 4."""
    edges = [0, FIRST_BAND]
    while edges[-1] < length:
        edges.append(4 * edges[-1])
    return [f"{first}-{end - 1}" for first, end in pairwise(edges)]


def _band_numbers(length: int) -> Tensor:
    """The index in `position_bands` of each position: [length] int64 on the CPU."""
    numbers = torch.zeros(length, dtype=torch.int64)
    edge = FIRST_BAND
    while edge < length:
        numbers[edge:] += 1
        edge *= 4
    return numbers


@final
@dataclass
class _BandSums:
    """Sums over the learnt tokens of one range of positions."""

    FIGURES: ClassVar = ("kl_divergence", "top1_agreement")

    divergence: float = 0.0
    cross_entropy: float = 0.0
    agreeing: float = 0.0
    unused: float = 0.0
    num_tokens: int = 0

    @staticmethod
    def total(bands: Sequence[_BandSums]) -> _BandSums:
        """The sums of all bands together."""
        return _BandSums(*(sum(values) for values in zip(*map(astuple, bands), strict=True)))

    def add(self, sums: TokenSums) -> None:
        """Adds the sums of some tokens; waits for the device."""
        self.divergence += float(sums.divergence)
        self.cross_entropy += float(sums.cross_entropy)
        self.agreeing += float(sums.agreeing)
        self.unused += float(sums.unused)
        self.num_tokens += sums.tokens

    def means(self) -> dict[str, float]:
        """`FIGURES` of these tokens, of which there is at least one."""
        values = self.divergence / self.num_tokens, self.agreeing / self.num_tokens
        return dict(zip(self.FIGURES, values, strict=True))


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
