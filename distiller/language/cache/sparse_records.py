"""A token's distribution in about a hundred bytes: the likeliest ids (head), draws from the others (tail), packed ids.

A record belongs to one token. With the k likeliest ids alone, the divergence is one of k + 1 outcomes: the ids, and all
other ids together. That is biased, since differences within the tail are not seen. Draws from the tail, each with the
weight (probability of the tail) / (number of draws), have the expectation of the whole distribution, so that the
forward divergence and its gradient are unbiased (arXiv 2503.16870). Draws are systematic: one uniform number, and equal
steps from there through the cumulative distribution (Madow 1949). An id whose probability is between n and n + 1 steps
is drawn n or n + 1 times, so the variance is lower than that of independent draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from distiller.language.loss.divergence_values import SparseTarget, log_probabilities

SparseKind = Literal["topk", "sampled", "topk+sampled"]


class Records(NamedTuple):
    """The records of N tokens, on the CPU. An entry is one stored id; the entries of all tokens are concatenated."""

    entries: Tensor
    """[sum of `sizes`] int32: ids; of each token first the head's, then the drawn ones."""

    sizes: Tensor
    """[N] uint8: number of entries of each token."""

    head: Tensor
    """[N, k] float16: probabilities of the head's ids; `SparseForm.target` scales them to sum to 1 - tail."""

    tail: Tensor
    """[N] bfloat16: the probability of all ids outside of the head together. It is stored because 1 - sum(head) would
    lose a tail of 1e-6 to rounding. Empty without a head."""

    counts: Tensor
    """[sum of `sizes`] uint8: how often each id was drawn. Empty with a head."""

    entropy: Tensor
    """[N] int32: the distribution's entropy in units of `SparseForm.entropy_step`; empty for kind `topk`."""


@final
@dataclass(frozen=True)
class SparseForm:
    """Which ids of a token are stored, and how many.

    Attributes:
        kind: topk = the `k` likeliest ids, and the probability of all others together; sampled = `samples` draws;
            topk+sampled = the `k` likeliest ids, and `samples` draws from the others.
        temperature: of the softmax; the loss has to use the same.
        vocabulary: the distribution is over the ids below this number, which teacher and student share.
    """

    kind: SparseKind
    k: int
    samples: int
    temperature: float
    vocabulary: int

    @property
    def head_size(self) -> int:
        """Number of ids whose probability is stored."""
        return 0 if self.kind == "sampled" else min(self.k, self.vocabulary)

    @property
    def id_bits(self) -> int:
        """Bits of a stored id: 16, and where these are too few 1, 2, 4 or 8 more, in a tensor of their own."""
        more = max(0, (self.vocabulary - 1).bit_length() - 16)
        return 16 + (0 if more == 0 else 1 << (more - 1).bit_length())

    @property
    def entropy_step(self) -> float:
        """Unit of stored entropies, in nats: 16 bits then reach from 0 to the largest possible entropy."""
        return math.log(self.vocabulary) / 0xFFFF

    @torch.no_grad()
    def make(self, logits: Tensor, uniform: Tensor) -> Records:
        """The records of N tokens.

        Args:
            logits: the teacher's, [N, V] with V >= `vocabulary`, any floating dtype and device.
            uniform: [N] float64 in [0, 1), on the CPU; the offset of each token's systematic draws.

        Returns:
            Records on the CPU.
        """
        log_p = log_probabilities(logits[:, : self.vocabulary], self.temperature)
        p, num_tokens = log_p.exp(), len(log_p)
        entropy = (-(p * log_p).sum(1) / self.entropy_step).round().clamp(0, 0xFFFF).int()
        head_p, head_ids = p.topk(self.head_size, dim=1)
        outside = p.scatter(1, head_ids, 0.0)
        head, tail = head_p.half().cpu(), outside.double().sum(1).bfloat16().cpu()
        empty = torch.empty(0, dtype=torch.uint8)
        if self.kind == "topk":
            sizes = torch.full((num_tokens,), self.head_size, dtype=torch.uint8)
            return Records(head_ids.flatten().int().cpu(), sizes, head, tail, empty, empty.int())
        drawn = _draw(outside, self.samples, uniform.to(p.device))
        if self.head_size:
            entries = torch.cat([head_ids, drawn], dim=1)
            sizes = torch.full((num_tokens,), entries.shape[1], dtype=torch.uint8)
            return Records(entries.flatten().int().cpu(), sizes, head, tail, empty, entropy.cpu())
        # Draws are in ascending order, so equal ids are adjacent.
        drawn = drawn.cpu()
        is_new = torch.cat([torch.ones(num_tokens, 1, dtype=torch.bool), drawn[:, 1:] != drawn[:, :-1]], dim=1)
        starts = is_new.flatten().nonzero().squeeze(1)
        counts = torch.diff(starts, append=torch.tensor([is_new.numel()]))
        sizes = is_new.sum(1).to(torch.uint8)
        return Records(drawn.flatten()[starts].int(), sizes, head, tail[:0], counts.to(torch.uint8), entropy.cpu())

    def target(self, records: Records) -> SparseTarget:
        """The loss's target with N rows, on the CPU; rows with fewer ids are padded with id 0 and weight 0."""
        num_tokens = len(records.sizes)
        if self.kind != "sampled":
            ids, tail, head_p = records.entries.long().view(num_tokens, -1), records.tail.float(), records.head.float()
            head_p *= ((1 - tail) / head_p.sum(1)).unsqueeze(1)
            if self.kind == "topk":
                return SparseTarget(ids, head_p, tail, None, self.vocabulary)
            weights = torch.cat([head_p, (tail / self.samples).unsqueeze(1).expand(-1, self.samples)], dim=1)
            entropy = records.entropy * self.entropy_step
            return SparseTarget(ids, weights, torch.zeros(num_tokens), entropy, self.vocabulary)
        sizes = records.sizes.long()
        # Always this wide, although draws may repeat ids: the compiled loss is compiled once for each width.
        width = min(self.samples, self.vocabulary)
        is_entry = torch.arange(width) < sizes.unsqueeze(1)
        ids, weights = torch.zeros(num_tokens, width, dtype=torch.int64), torch.zeros(num_tokens, width)
        ids[is_entry] = records.entries.long()
        weights[is_entry] = records.counts.float() / self.samples
        return SparseTarget(ids, weights, torch.zeros(num_tokens), records.entropy * self.entropy_step, self.vocabulary)

    def pack(self, records: Records) -> dict[str, Tensor]:
        """The records as a cache stores them: `head` and `tail` in their dtypes, all others as uint8 tensors."""
        ids = records.entries.numpy().astype(np.uint32)
        packed = {"ids": torch.from_numpy((ids & 0xFFFF).astype("<u2").view(np.uint8))}
        if bits := self.id_bits - 16:
            packed["high"] = torch.from_numpy(_pack_bits(ids >> 16, bits))
        if self.kind == "sampled":
            packed |= {"sizes": records.sizes, "counts": records.counts}
        else:
            packed |= {"head": records.head, "tail": records.tail}
        if self.kind != "topk":
            packed["entropy"] = torch.from_numpy(records.entropy.numpy().astype("<u2").view(np.uint8))
        return packed

    def unpack(self, packed: dict[str, Tensor]) -> Records:
        """The records that `pack` was given."""
        low = packed["ids"].numpy().view("<u2").astype(np.int32)
        if bits := self.id_bits - 16:
            low |= _unpack_bits(packed["high"].numpy(), bits, len(low)).astype(np.int32) << 16
        entries, empty = torch.from_numpy(low), torch.empty(0, dtype=torch.uint8)
        entropy = empty.int()
        if self.kind != "topk":
            entropy = torch.from_numpy(packed["entropy"].numpy().view("<u2").astype(np.int32))
        if self.kind == "sampled":
            sizes = packed["sizes"]
            head, tail = torch.empty(len(sizes), 0).half(), torch.empty(0).bfloat16()
            return Records(entries, sizes, head, tail, packed["counts"], entropy)
        head, tail = packed["head"], packed["tail"]
        sizes = torch.full((len(head),), len(entries) // max(len(head), 1), dtype=torch.uint8)
        return Records(entries, sizes, head, tail, empty, entropy)


def _draw(p: Tensor, samples: int, uniform: Tensor) -> Tensor:
    """Systematic draws from each row of `p` [N, V], whose sum need not be 1: ids [N, samples] int64, ascending in a
    row.

    `uniform` [N] float64 in [0, 1) is the offset of each row's steps. Computed in float64, since a cumulative sum of
    100,000 float32 numbers loses small ones.
    """
    cumulative = p.double().cumsum(1)
    steps = torch.arange(samples, device=p.device, dtype=torch.float64)
    points = (steps + uniform.unsqueeze(1)) / samples * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, points, right=True)
    # By rounding the last point may equal the total, for which searchsorted returns V.
    return ids.clamp_max(p.shape[1] - 1)


def _pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers below 2^`bits` (`bits` is 1, 2, 4 or 8) into bytes, uint8, the first number in the lowest bits."""
    per_byte = 8 // bits
    padded = np.zeros(math.ceil(len(values) / per_byte) * per_byte, dtype=np.uint8)
    padded[: len(values)] = values
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    return np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1).astype(np.uint8)


def _unpack_bits(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` numbers that `_pack_bits` packed."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * bits
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]
