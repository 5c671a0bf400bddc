"""Output layer and loss in one, over chunks of tokens: no logits of the whole batch, in any dtype, ever exist.

The logits of a chunk are made, turned into values and gradients, and dropped; the gradients by hidden states and output
weights are made on the way (in the forward pass) and only scaled in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.token_losses import Objective, compiled_token_losses, token_losses
from distiller.language.model.logits import PLAIN, Head, LogitChange, TokenIds, product_width

CHUNK_BYTES = 512 * 2**20
"""A chunk's logits, were they float32. Eager operations hold several tensors of this size at a time, compiled ones few
or none: there the logits of both models and the gradient stay in the products' dtype."""
MOST_CHUNK_TOKENS = 4096
FLOAT16_SCALE = 2.0**10
"""What gradients are multiplied by while they are in float16: p - q of a large vocabulary is mostly below its range."""


class HiddenTarget(NamedTuple):
    """The teacher's last hidden states and output layer; its logits are made in the layer's dtype, without autocast."""

    hidden: Tensor
    """[N, H'], any floating dtype."""

    weight: Tensor
    """[V', H'], floating."""

    bias: Tensor | None = None
    """[V'], the weight's dtype."""

    change: LogitChange = PLAIN
    """What the teacher does to the layer's logits."""

    @staticmethod
    def of(hidden: Tensor, head: Head) -> HiddenTarget:
        """The teacher by its output layer."""
        return HiddenTarget(hidden, head.weight, head.bias, head.change)


class LogitsTarget(NamedTuple):
    """The teacher's logits, where they exist anyway, as the model itself gives them."""

    logits: Tensor
    """[N, V'], any floating dtype."""


Target = HiddenTarget | LogitsTarget | SparseTarget


class TokenSums(NamedTuple):
    """Sums over the tokens that count; scalars, float32, on the hidden states' device."""

    loss: Tensor
    """What the objective says; the only one with a gradient."""

    divergence: Tensor
    """temperature^2 * divergence."""

    cross_entropy: Tensor

    agreeing: Tensor
    """Tokens whose likeliest id is the teacher's (of a sparse target: that of the largest weight)."""

    tokens: int

    unused: Tensor
    """-log of the student's probability on ids that stand for a token; 0 where all do."""


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Target,
    labels: Tensor,
    mask: Tensor,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    change: LogitChange = PLAIN,
    ids: TokenIds | None = None,
    chunk_tokens: int | None = None,
    compile: bool | None = None,
) -> TokenSums:
    """The objective of N tokens from the student's last hidden states.

    Vocabularies of different size: with `ids`, everything is compared over the ids that stand for a token, over which
    all softmaxes are then taken, and the student's other ids are kept down by a term of their own (`unused`). Without,
    the divergence (and `agreeing`) compares the first min(V, V') ids (V' of a sparse target is its `vocabulary`), and
    the cross-entropy is that of all V ids of the student.

    The products run in the autocast dtype where autocast is on, else in that of `hidden`; everything between them in
    float32; the weight's gradient gathers in float32 and is cast once. Under `torch.no_grad` no gradient is made.
    Tokens that do not count are left out before the products, and whatever their hidden states, logits and labels hold
    has no effect.

    Nothing communicates: a weight that an engine has sharded must be gathered by the caller. The host waits for the
    device once, to learn which tokens count, and not at all where `mask` lies on the CPU.

    Args:
        hidden: [N, H], floating.
        weight: [V, H], floating, on the device of `hidden`, as are `bias`, `target` and `labels`.
        target: the teacher, N rows, on the device of `hidden`; it gets no gradient.
        labels: [N] int64; ids of both models where the mask is true, anything elsewhere (such as -100).
        mask: [N] bool, on any device: the tokens that count. None may.
        objective: what is summed.
        bias: [V], floating.
        change: what the student does to the output layer's logits.
        ids: those that stand for a token; both models have them, and a sparse target is over `ids.size`. None = all.
        chunk_tokens: tokens at a time; by default as many as `CHUNK_BYTES` allow.
        compile: whether what happens between the products is compiled (once for each objective and shape; by default
            on CUDA). Every chunk then has the same shape: the last one is filled up with rows that do not count.

    Raises:
        UserError: the target is an estimate and the objective's divergence is not `ForwardKL`.
        RuntimeError: `backward` came a second time through one result.
    """
    rows = _counting_rows(mask, hidden.device)
    call = _Call(
        target,
        labels,
        rows,
        objective,
        chunk_tokens or default_chunk_tokens(weight.shape[0]),
        hidden.device.type == "cuda" if compile is None else compile,
        _product_dtype(hidden),
        change,
        None if ids is None else ids.size,
        None if ids is None else ids.absence(hidden.device),
    )
    with torch.autocast(hidden.device.type, enabled=False):
        needs_gradient = any(tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
        if torch.is_grad_enabled() and needs_gradient:
            loss, sums = _ChunkedLoss.apply(hidden, weight, bias, call)  # type: ignore[misc]
        else:
            sums = _run(hidden, weight, bias, call, _Gradients(None, None, None))
            loss = _mixed(objective, sums)
    return TokenSums(loss, sums[0], sums[1], sums[2], len(rows), sums[3])


def default_chunk_tokens(vocabulary: int) -> int:
    """Tokens at a time for a vocabulary of this size; a multiple of 128, which products like, where it is above that.

    For 128,256 ids 1,024; for 32,000 ids 4,096.
    """
    tokens = min(CHUNK_BYTES // (4 * vocabulary), MOST_CHUNK_TOKENS)
    return max(tokens // 128 * 128, min(tokens, 128), 1)


@final
@dataclass(frozen=True)
class _Call:
    """What has no gradient."""

    target: Target
    labels: Tensor
    rows: Tensor
    objective: Objective
    chunk_tokens: int
    compile: bool
    dtype: torch.dtype
    change: LogitChange
    num_ids: int | None
    absent: Tensor | None

    @property
    def gradient_scale(self) -> float:
        return FLOAT16_SCALE if self.dtype is torch.float16 else 1.0


class _Gradients(NamedTuple):
    """Sums so far, by the student's inputs; None where none is wanted."""

    hidden: Tensor | None
    """[N, H], its dtype."""

    weight: Tensor | None
    """[V, H] float32."""

    bias: Tensor | None
    """[V] float32."""


@final
class _ChunkedLoss(torch.autograd.Function):
    """The loss, and the sums without gradients [4]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        gradients = _Gradients(
            torch.zeros_like(hidden) if wants_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None,
        )
        sums = _run(hidden, weight, bias, call, gradients)
        inputs = (hidden, weight, bias)
        ctx.gradients = [
            None if gradient is None or like is None else gradient.to(like.dtype)
            for gradient, like in zip(gradients, inputs, strict=True)
        ]
        ctx.scale = call.gradient_scale
        ctx.mark_non_differentiable(sums)
        return _mixed(call.objective, sums), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunked loss are made once and were handed over: compute it again")
        # Scaled in place and let go: a copy of the weight's gradient would be the largest tensor of the whole loss.
        gradients, ctx.gradients = ctx.gradients, None
        factor = incoming[0] / ctx.scale
        return *(None if gradient is None else gradient.mul_(factor) for gradient in gradients), None


@torch.no_grad()
def _run(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, gradients: _Gradients) -> Tensor:
    """The sums [4]: divergence, cross-entropy, agreeing tokens, unused. Adds to `gradients`."""
    sums = torch.zeros(4, device=hidden.device)
    weight = weight.to(call.dtype)
    bias = None if bias is None else bias.to(call.dtype)
    size = call.chunk_tokens if call.compile else min(call.chunk_tokens, max(len(call.rows), 1))
    for start in range(0, len(call.rows), size):
        rows = call.rows[start : start + size]
        height = size if call.compile else len(rows)
        sums += _run_chunk(hidden, weight, bias, call, gradients, rows, height)
    return sums


def _run_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: _Call,
    gradients: _Gradients,
    rows: Tensor,
    height: int,
) -> Tensor:
    """One chunk's part of `_run`. What it makes is gone when it returns, before the next one makes its own."""
    num_rows = len(rows)
    filled = F.pad(rows, (0, height - num_rows))
    counts = torch.arange(height, device=rows.device) < num_rows
    chunk = hidden[rows].to(call.dtype)
    logits = _logits(chunk, weight, bias, height)
    num_shared = weight.shape[0] if call.num_ids is None else call.num_ids
    teacher = _teacher_rows(call.target, rows, filled, height, num_shared)
    of_teacher = call.target.change if isinstance(call.target, HiddenTarget) else PLAIN
    wants_gradient = any(gradient is not None for gradient in gradients)
    evaluate = compiled_token_losses() if call.compile else token_losses
    scale = call.gradient_scale
    # What fills a chunk up is the first token of all, which may not count: its label need be no id.
    labels = call.labels[filled].masked_fill(~counts, 0)
    about_ids = call.num_ids, call.absent, call.change, of_teacher
    sums, by_logits = evaluate(logits, teacher, labels, counts, call.objective, wants_gradient, scale, *about_ids)
    if by_logits is None:
        return sums
    by_logits = by_logits[:num_rows]
    if gradients.hidden is not None:
        gradients.hidden.index_copy_(0, rows, (by_logits @ weight).to(gradients.hidden.dtype))
    if gradients.weight is not None:
        _add_product(gradients.weight, by_logits.t(), chunk)
    if gradients.bias is not None:
        gradients.bias.add_(by_logits.sum(0, dtype=torch.float32))
    return sums


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, height: int) -> Tensor:
    """hidden @ weight.t() + bias in the leading rows of [height, V]; the others are not computed, and hold anything."""
    logits = hidden.new_empty(height, weight.shape[0])
    out = logits[: len(hidden)]
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)
    return logits


def _teacher_rows(target: Target, rows: Tensor, filled: Tensor, height: int, num_shared: int) -> Tensor | SparseTarget:
    """The logits of these rows over the first `num_shared` ids and perhaps more, or their part of a sparse target.

    `height` rows. Of an output layer as many ids as `product_width` says, or all that it has.
    """
    if isinstance(target, SparseTarget):
        return target.rows(filled)
    if isinstance(target, LogitsTarget):
        return target.logits[filled, :num_shared]
    width = product_width(num_shared, len(target.weight))
    weight = target.weight[:width]
    bias = None if target.bias is None else target.bias[:width]
    return _logits(target.hidden[rows].to(weight.dtype), weight, bias, height)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32 from factors of any one floating dtype."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        # The product's accumulator is float32 already: it is added as it is, with no float32 copy of the factors.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _counting_rows(mask: Tensor, device: torch.device) -> Tensor:
    """The indices [M] int64 of what is true, on the device. Waits for it only where the mask lies there."""
    rows = mask.nonzero().squeeze(1)
    if device.type == "cuda" and rows.device.type == "cpu":
        rows = rows.pin_memory()
    return rows.to(device, non_blocking=True)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _mixed(objective: Objective, sums: Tensor) -> Tensor:
    return objective.weight * sums[0] + (1 - objective.weight) * sums[1] + sums[3]
