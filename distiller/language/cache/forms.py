"""What a cache keeps of a row of tokens, and what the loss is given of it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.config.causal_lm import LanguageRecipe
from distiller.data import rng
from distiller.language.cache.sparse_records import Records, SparseForm, SparseKind
from distiller.language.data.batch import MaskedBatch
from distiller.language.loss.chunked_loss import HiddenTarget, Target, default_chunk_tokens
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.model.logits import Head, TokenIds
from distiller.language.network import FEATURES, HIDDEN
from distiller.teachers.base import Outputs

SPARSE = "sparse/"
"""Begins the names of what the loss is given in place of hidden states."""


class StoredForm(ABC):
    """Features are kept as they are, real tokens alone: the padding depends on the rows beside them."""

    needs_head: bool
    """Whether training reads the teacher's output layer."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For the cache's key."""

    @abstractmethod
    def store_tokens(self, hidden: Tensor, sample_id: int, head: Head) -> Outputs:
        """What is kept of one row.

        Args:
            hidden: the teacher's last hidden states [L, H].
            head: its output layer.
        """

    @abstractmethod
    def restore_tokens(self, rows: Sequence[Outputs], lengths: Sequence[int], length: int) -> Outputs:
        """A micro-batch's tensors [B, length, ...] from its rows, on the CPU; runs in loader processes."""

    @final
    def store(self, batch: MaskedBatch, outputs: Outputs, head: Head) -> list[Outputs]:
        """What is kept of each row of a micro-batch, on the CPU."""
        rows = []
        for row, length in enumerate(batch.batch.lengths):
            kept = self.store_tokens(outputs[HIDDEN][row, :length], batch.batch.sample_ids[row], head)
            features = {name: tensor for name, tensor in outputs.items() if name.startswith(FEATURES)}
            rows.append(kept | {name: tensor[row, :length].cpu() for name, tensor in features.items()})
        return rows

    @final
    def restore(self, batch: MaskedBatch, rows: Sequence[Outputs], features: Sequence[str]) -> Outputs:
        """What the loss reads of a micro-batch."""
        lengths, length = batch.batch.lengths, batch.batch.input_ids.shape[1]
        restored = self.restore_tokens(rows, lengths, length)
        return restored | {name: _padded([row[name] for row in rows], length) for name in features}


@final
class HiddenForm(StoredForm):
    """The last hidden states: with the teacher's output layer they are the whole distribution, exactly."""

    needs_head = True

    def describe(self) -> dict[str, Any]:
        return {"kind": "hidden"}

    def store_tokens(self, hidden: Tensor, sample_id: int, head: Head) -> Outputs:
        del sample_id, head
        return {HIDDEN: hidden.cpu()}

    def restore_tokens(self, rows: Sequence[Outputs], lengths: Sequence[int], length: int) -> Outputs:
        del lengths
        return {HIDDEN: _padded([row[HIDDEN] for row in rows], length)}


@final
class TokenForm(StoredForm):
    """Some ids of each token; where they are drawn, as functions of (seed, sample id)."""

    needs_head = False

    def __init__(self, form: SparseForm, seed: int, absent: Sequence[int] = ()) -> None:
        """`absent`: ids of the form's vocabulary that stand for no token."""
        self.form, self._seed, self._absent = form, seed, list(absent)

    def describe(self) -> dict[str, Any]:
        form = self.form
        described: dict[str, Any] = {"kind": form.kind, "temperature": form.temperature, "vocabulary": form.vocabulary}
        if self._absent:
            described["absent"] = self._absent
        if form.kind != "sampled":
            described["k"] = form.k
        return described | ({} if form.kind == "topk" else {"samples": form.samples, "seed": self._seed})

    @torch.no_grad()
    def store_tokens(self, hidden: Tensor, sample_id: int, head: Head) -> Outputs:
        generator = rng.generator(self._seed, 0, sample_id, "cached tokens")
        uniform = torch.rand(len(hidden), generator=generator, dtype=torch.float64)
        size = default_chunk_tokens(head.weight.shape[0])
        parts = []
        for start in range(0, len(hidden), size):
            logits = head.logits(hidden[start : start + size])
            parts.append(self.form.make(logits, uniform[start : start + size]))
        return self.form.pack(Records(*(torch.cat(columns) for columns in zip(*parts, strict=True))))

    def restore_tokens(self, rows: Sequence[Outputs], lengths: Sequence[int], length: int) -> Outputs:
        del lengths
        targets = [self.form.target(self.form.unpack(row)) for row in rows]
        width = max(target.ids.shape[1] for target in targets)
        restored = {
            f"{SPARSE}ids": _padded([_widened(target.ids, width) for target in targets], length),
            f"{SPARSE}weights": _padded([_widened(target.weights, width) for target in targets], length),
            f"{SPARSE}tail": _padded([target.tail for target in targets], length),
        }
        entropies = [target.entropy for target in targets if target.entropy is not None]
        return restored | ({f"{SPARSE}entropy": _padded(entropies, length)} if entropies else {})


def stored_form(kind: Literal["hidden"] | SparseKind, recipe: LanguageRecipe, ids: TokenIds) -> StoredForm:
    """The form that `cache.form` names as `kind`, with the recipe's settings; `ids` are those that are compared."""
    if kind == "hidden":
        return HiddenForm()
    cache, temperature = recipe.cache, recipe.task.losses.divergence.temperature
    return TokenForm(SparseForm(kind, cache.k, cache.samples, temperature, ids.size), recipe.seed, ids.absent)


def target_of(outputs: Outputs, head: Head | None, vocabulary: int) -> Target:
    """What the loss compares with, B L rows, from a live teacher's outputs or a cache's.

    Args:
        head: the teacher's output layer; of a cache that holds distributions nothing needs it.
        vocabulary: ids that are compared, from the first.
    """
    if HIDDEN in outputs:
        assert head is not None
        return HiddenTarget.of(outputs[HIDDEN].flatten(0, 1), head)
    entropy = outputs.get(f"{SPARSE}entropy")
    return SparseTarget(
        outputs[f"{SPARSE}ids"].flatten(0, 1),
        outputs[f"{SPARSE}weights"].flatten(0, 1),
        outputs[f"{SPARSE}tail"].flatten(),
        None if entropy is None else entropy.flatten(),
        vocabulary=vocabulary,
    )


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """Rows [L, ...] with zeros to one length: [B, length, ...]."""
    padded = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _widened(tensor: Tensor, width: int) -> Tensor:
    """[L, K] with zeros to [L, width]."""
    return F.pad(tensor, (0, width - tensor.shape[1]))
