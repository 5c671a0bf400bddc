"""A token's distribution in a hundred bytes: exact head, sampled tail, packed ids.

A record belongs to one token. Top k alone shows a biased divergence (what the tail's ids would add is missing), and is
a divergence of k + 1 outcomes. Samples of the tail, each weighing the tail's mass by their number, have the expectation
of the whole distribution, so that the forward divergence and its gradient are unbiased (arXiv 2503.16870). They are
drawn systematically (one uniform number and equal steps through the cumulative distribution; Madow 1949): an id with
the mass of n steps comes n or n + 1 times, which varies less than independent draws do.
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
    """Tokens as they are stored; the first axis of each is the token's, or runs through the tokens' entries."""

    entries: Tensor
    """[sum of the tokens' entries] int32: ids, each token's head first."""

    sizes: Tensor
    """[N] uint8: entries of each token."""

    head: Tensor
    """[N, k] float16: probabilities of the head's ids, up to a factor: head and tail sum to 1."""

    tail: Tensor
    """[N] bfloat16: the probability of all other ids together, of which 1 - 1e-6 would leave nothing; empty without a
    head."""

    counts: Tensor
    """[sum of the tokens' entries] uint8: how often each was drawn; without a head only, else empty."""

    entropy: Tensor
    """[N] int32, in steps of `entropy_step` nats; empty for top k alone."""


@final
@dataclass(frozen=True)
class SparseForm:
    """How many ids of a token are kept, and how.

    Attributes:
        kind: topk = the likeliest `k` and the mass of all others; sampled = `samples` draws; topk+sampled = both, the
            draws from outside of the head.
        temperature: of the softmax; the loss has to use the same.
        vocabulary: ids that count, from the first: those that teacher and student share.
    """

    kind: SparseKind
    k: int
    samples: int
    temperature: float
    vocabulary: int

    @property
    def head_size(self) -> int:
        """Ids whose probability is kept."""
        return 0 if self.kind == "sampled" else min(self.k, self.vocabulary)

    @property
    def id_bits(self) -> int:
        """Bits of a stored id: 16, and in a plane of their own 1, 2, 4 or 8 more."""
        more = max(0, (self.vocabulary - 1).bit_length() - 16)
        return 16 + (0 if more == 0 else 1 << (more - 1).bit_length())

    @property
    def entropy_step(self) -> float:
        """Nats: two bytes reach from 0 to the largest entropy that there can be."""
        return math.log(self.vocabulary) / 0xFFFF

    @torch.no_grad()
    def make(self, logits: Tensor, uniform: Tensor) -> Records:
        """What is kept of each token.

        Args:
            logits: the teacher's, [N, V] with V >= `vocabulary`, any floating dtype and device.
            uniform: [N] float64 in [0, 1), on the CPU; where each token's draws begin.

        Returns:
            Records on the CPU.
        """
        log_p = log_probabilities(logits[:, : self.vocabulary], self.temperature)
        p, num = log_p.exp(), len(log_p)
        entropy = (-(p * log_p).sum(1) / self.entropy_step).round().clamp(0, 0xFFFF).int()
        head_p, head_ids = p.topk(self.head_size, dim=1)
        outside = p.scatter(1, head_ids, 0.0)
        head, tail = head_p.half().cpu(), outside.double().sum(1).bfloat16().cpu()
        empty = torch.empty(0, dtype=torch.uint8)
        if self.kind == "topk":
            sizes = torch.full((num,), self.head_size, dtype=torch.uint8)
            return Records(head_ids.flatten().int().cpu(), sizes, head, tail, empty, empty.int())
        drawn = _draw(outside, self.samples, uniform.to(p.device))
        if self.head_size:
            entries = torch.cat([head_ids, drawn], dim=1)
            sizes = torch.full((num,), entries.shape[1], dtype=torch.uint8)
            return Records(entries.flatten().int().cpu(), sizes, head, tail, empty, entropy.cpu())
        # Sorted by construction: equal ids are neighbours.
        drawn = drawn.cpu()
        is_new = torch.cat([torch.ones(num, 1, dtype=torch.bool), drawn[:, 1:] != drawn[:, :-1]], dim=1)
        flat = is_new.flatten().nonzero().squeeze(1)
        counts = torch.diff(flat, append=torch.tensor([is_new.numel()]))
        sizes = is_new.sum(1).to(torch.uint8)
        return Records(drawn.flatten()[flat].int(), sizes, head, tail[:0], counts.to(torch.uint8), entropy.cpu())

    def target(self, records: Records) -> SparseTarget:
        """What the loss compares the student with: N rows, padded with weights of 0, on the CPU."""
        num = len(records.sizes)
        if self.kind != "sampled":
            ids, tail, head_p = records.entries.long().view(num, -1), records.tail.float(), records.head.float()
            head_p *= ((1 - tail) / head_p.sum(1)).unsqueeze(1)
            if self.kind == "topk":
                return SparseTarget(ids, head_p, tail, None, self.vocabulary)
            weights = torch.cat([head_p, (tail / self.samples).unsqueeze(1).expand(-1, self.samples)], dim=1)
            entropy = records.entropy * self.entropy_step
            return SparseTarget(ids, weights, torch.zeros(num), entropy, self.vocabulary)
        sizes = records.sizes.long()
        # As wide as the draws, however few of them differ: a compiled loss is made for one width.
        width = min(self.samples, self.vocabulary)
        filled = torch.arange(width) < sizes.unsqueeze(1)
        ids, weights = torch.zeros(num, width, dtype=torch.int64), torch.zeros(num, width)
        ids[filled] = records.entries.long()
        weights[filled] = records.counts.float() / self.samples
        return SparseTarget(ids, weights, torch.zeros(num), records.entropy * self.entropy_step, self.vocabulary)

    def pack(self, records: Records) -> dict[str, Tensor]:
        """The records as a cache stores them: uint8 tensors of bytes, and halves."""
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
        """What `pack` was given."""
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
    """Systematic draws from each row, whose sum need not be 1: ids [N, samples] int64, ascending in a row.

    In float64: a cumulative sum of a hundred thousand float32 loses the small ones.
    """
    cumulative = p.double().cumsum(1)
    steps = torch.arange(samples, device=p.device, dtype=torch.float64)
    points = (steps + uniform.unsqueeze(1)) / samples * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, points, right=True)
    # Rounding may put the last point on the very end.
    return ids.clamp_max(p.shape[1] - 1)


def _pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Small numbers, `bits` (1, 2, 4 or 8) each, in bytes."""
    per_byte = 8 // bits
    padded = np.zeros(math.ceil(len(values) / per_byte) * per_byte, dtype=np.uint8)
    padded[: len(values)] = values
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    return np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1).astype(np.uint8)


def _unpack_bits(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    shifts = np.arange(8 // bits, dtype=np.uint8) * bits
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]
