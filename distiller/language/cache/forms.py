"""Forms in which a cache stores the teacher's outputs of a row of tokens, and from which the loss's target is made."""

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
from distiller.language.loss.chunked_loss import default_chunk_tokens
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.targets import HiddenTarget, Target
from distiller.language.model.logits import Head, TokenIds
from distiller.language.network import FEATURES, HIDDEN
from distiller.teachers.base import Outputs

SPARSE = "sparse/"
"""Prefix of the names of a `SparseTarget`'s tensors, which replace the hidden states among restored outputs."""


class StoredForm(ABC):
    """How a cache stores the teacher's outputs of one row of tokens.

    Only real tokens are stored, since a row's padding depends on the other rows of its micro-batch. Features are stored
    unchanged.
    """

    needs_head: bool
    """Whether training reads the teacher's output layer."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The form and its settings, JSON-ready, for the cache's key."""

    @abstractmethod
    def store_tokens(self, hidden: Tensor, sample_id: int, head: Head) -> Outputs:
        """The tensors that are stored for one row, on the CPU.

        Args:
            hidden: the teacher's last hidden states [L, H] of the row's real tokens, any floating dtype and device.
            sample_id: the row's place in the data, on which random draws depend.
            head: the teacher's output layer, on the device of `hidden`.
        """

    @abstractmethod
    def restore_tokens(self, rows: Sequence[Outputs], lengths: Sequence[int], length: int) -> Outputs:
        """A micro-batch's tensors [B, length, ...] on the CPU, from what `store_tokens` made of its rows.

        Runs in loader processes.

        Args:
            lengths: real tokens of each row.
            length: tokens of a row with padding.
        """

    @final
    def store(self, batch: MaskedBatch, outputs: Outputs, head: Head) -> list[Outputs]:
        """The tensors that are stored for each row of a micro-batch, on the CPU."""
        rows = []
        for row, length in enumerate(batch.batch.lengths):
            kept = self.store_tokens(outputs[HIDDEN][row, :length], batch.batch.sample_ids[row], head)
            features = {name: tensor for name, tensor in outputs.items() if name.startswith(FEATURES)}
            rows.append(kept | {name: tensor[row, :length].cpu() for name, tensor in features.items()})
        return rows

    @final
    def restore(self, batch: MaskedBatch, rows: Sequence[Outputs], features: Sequence[str]) -> Outputs:
        """The outputs of a micro-batch [B, L, ...] on the CPU, from what `store` made of its rows.

        `features` are the names of the feature outputs to restore.
        """
        lengths, length = batch.batch.lengths, batch.batch.input_ids.shape[1]
        restored = self.restore_tokens(rows, lengths, length)
        return restored | {name: _padded([row[name] for row in rows], length) for name in features}


@final
class HiddenForm(StoredForm):
    """The last hidden states, unchanged: the teacher's output layer makes the exact distribution from them."""

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
    """Some ids of each token with their probabilities. Random draws depend on (seed, sample id) alone."""

    needs_head = False

    def __init__(self, form: SparseForm, seed: int, absent: Sequence[int] = ()) -> None:
        """`absent`: ids below `form.vocabulary` that stand for no token."""
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
    """The form that `cache.form` names `kind`, with the recipe's settings; `ids` are the ids that are compared."""
    if kind == "hidden":
        return HiddenForm()
    cache, temperature = recipe.cache, recipe.task.losses.divergence.temperature
    return TokenForm(SparseForm(kind, cache.k, cache.samples, temperature, ids.size), recipe.seed, ids.absent)


def target_of(outputs: Outputs, head: Head | None, vocabulary: int) -> Target:
    """The loss's target with B L rows, from the outputs [B, L, ...] of a live teacher or of a cache.

    Args:
        head: the teacher's output layer; may be None for a cache that holds distributions.
        vocabulary: the ids below this number are compared.
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
    """Rows [L, ...] padded with zeros to one length and stacked: [B, length, ...]."""
    padded = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _widened(tensor: Tensor, width: int) -> Tensor:
    """[L, K] padded with zeros to [L, width]."""
    return F.pad(tensor, (0, width - tensor.shape[1]))
