"""Output layer and loss in one, over chunks of tokens, so that the logits of the whole batch are never in memory.

For each chunk, the forward pass makes the logits, computes values and gradients from them, and drops them. It also adds
up the gradients by hidden states and output weights, which the backward pass only scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from distiller.language.loss.targets import HiddenTarget, Target, logits_of, teacher_rows
from distiller.language.loss.token_losses import Objective, compiled_token_losses, token_losses
from distiller.language.model.logits import PLAIN, LogitChange, TokenIds
from distiller.tasks.gpu_kernels import one_kernel_on_gpu, runs_on_gpu

CHUNK_BYTES = 512 * 2**20
"""Size of a chunk's logits in float32. Eager operations hold several tensors of this size at a time. Compiled ones hold
few or none: both models' logits and the gradient then stay in the dtype of the matrix products."""
MAX_CHUNK_TOKENS = 4096
FLOAT16_SCALE = 2.0**10
"""Factor of gradients while they are in float16: with a large vocabulary most of p - q is below float16's range."""


class TokenSums(NamedTuple):
    """Sums over the tokens that count; tensors are float32 scalars on the hidden states' device."""

    loss: Tensor
    """The objective; the only one with a gradient."""

    divergence: Tensor
    """temperature^2 * divergence."""

    cross_entropy: Tensor
    """At temperature 1."""

    agreeing: Tensor
    """Number of tokens whose likeliest id is also the teacher's (of a sparse target: the id of the largest weight)."""

    tokens: int
    """Number of tokens that count."""

    unused: Tensor
    """-log of the student's probability on ids that stand for a token; 0 where every id does."""


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

    With `ids`, every softmax is over the ids that stand for a token, and the term `unused` keeps the probability of the
    student's other ids low. Without `ids`, the divergence and `agreeing` compare the first min(V, V') ids (V' of a
    sparse target is its `vocabulary`), and the cross-entropy is over all V ids of the student.

    The matrix products run in the autocast dtype where autocast is on, else in the dtype of `hidden`. The operations
    between them are float32. The gradients of weight and bias are added up in float32 and cast to the parameter's dtype
    once. Under `torch.no_grad` no gradient is computed. Tokens that do not count are left out before the products:
    their hidden states, logits and labels have no effect.

    Does not communicate: the caller gathers a weight that an engine has sharded. The host waits for the device once, to
    learn which tokens count, and not at all where `mask` is on the CPU.

    Args:
        hidden: [N, H], floating.
        weight: [V, H], floating, on the device of `hidden`, as are `bias`, `target` and `labels`.
        target: the teacher, N rows, on the device of `hidden`; it gets no gradient.
        labels: [N] int64; an id of both models where the mask is true, any value elsewhere (such as -100).
        mask: [N] bool, on any device: the tokens that count. All may be false.
        objective: what is computed for each token.
        bias: [V], floating.
        change: the scale and cap that the student applies to the output layer's logits.
        ids: the ids that stand for a token. Both models have them, and the `vocabulary` of a sparse target is
            `ids.size`. None = every id stands for a token.
        chunk_tokens: tokens of a chunk; by default as many as `CHUNK_BYTES` allow.
        compile: whether the operations between the products are compiled, once for each objective and shape; by default
            only on CUDA. Every chunk then has the same shape: the last one is padded with rows that do not count.

    Raises:
        UserError: the target is an estimate and the objective's divergence has not `can_be_sampled`.
        RuntimeError: `backward` ran a second time through one result.
    """
    rows = _counting_rows(mask, hidden.device)
    call = _Call(
        target,
        labels,
        rows,
        objective,
        chunk_tokens or default_chunk_tokens(weight.shape[0]),
        runs_on_gpu(hidden.device) if compile is None else compile,
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
    """Tokens of a chunk for a vocabulary of this size.

    A multiple of 128, for which matrix products are fast, unless fewer than 128 fit. 1,024 for 128,256 ids, and 4,096
    for 32,000 ids.
    """
    tokens = min(CHUNK_BYTES // (4 * vocabulary), MAX_CHUNK_TOKENS)
    return max(tokens // 128 * 128, min(tokens, 128), 1)


@final
@dataclass(frozen=True)
class _Call:
    """The arguments of one `chunked_loss` that get no gradient.

    Attributes:
        rows: [M] int64, the indices of the tokens that count.
        dtype: of the matrix products.
        num_ids, absent: see `token_losses`.
    """

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
    """Gradients of the chunks so far, times `gradient_scale`; None where no gradient is needed."""

    hidden: Tensor | None
    """[N, H], in the dtype of the hidden states."""

    weight: Tensor | None
    """[V, H] float32."""

    bias: Tensor | None
    """[V] float32."""


@final
class _ChunkedLoss(torch.autograd.Function):
    """Returns the loss, and the sums [4] of `_run`, which have no gradient."""

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
        # Of float16 parameters in `backward`, after scaling: sums over tokens, times the scale, may exceed their range.
        ctx.gradients = [
            None if gradient is None or like is None else gradient.to(_dtype_until_backward(gradient, like))
            for gradient, like in zip(gradients, inputs, strict=True)
        ]
        ctx.dtypes = [None if like is None else like.dtype for like in inputs]
        ctx.scale = call.gradient_scale
        ctx.mark_non_differentiable(sums)
        return _mixed(call.objective, sums), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunked loss are made once and were handed over: compute it again")
        # Scaled in place, and no longer held here: a copy of the weight's gradient would be the largest tensor of the
        # whole loss.
        gradients, ctx.gradients = ctx.gradients, None
        factor = incoming[0] / ctx.scale
        return *(
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ), None


@torch.no_grad()
def _run(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, gradients: _Gradients) -> Tensor:
    """The sums [4] float32: divergence, cross-entropy, agreeing tokens, unused. Adds to `gradients` in place."""
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
    """One chunk's part of `_run`. A function of its own, so that its tensors are freed before the next chunk.

    Args:
        rows: [n] int64, the indices of the chunk's tokens.
        height: rows of the chunk's logits, padding included; at least n.
    """
    num_rows = len(rows)
    padded_rows = F.pad(rows, (0, height - num_rows))
    counts = torch.arange(height, device=rows.device) < num_rows
    chunk = hidden[rows].to(call.dtype)
    logits = logits_of(chunk, weight, bias, height)
    num_shared = weight.shape[0] if call.num_ids is None else call.num_ids
    teacher = teacher_rows(call.target, rows, padded_rows, height, num_shared)
    teacher_change = call.target.change if isinstance(call.target, HiddenTarget) else PLAIN
    wants_gradient = any(gradient is not None for gradient in gradients)
    evaluate = compiled_token_losses() if call.compile else token_losses
    scale = call.gradient_scale
    # Padding repeats token 0, which may be one that does not count, with a label that is no id (-100).
    labels = call.labels[padded_rows].masked_fill(~counts, 0)
    ids_and_changes = call.num_ids, call.absent, call.change, teacher_change
    sums, logit_gradient = evaluate(
        logits, teacher, labels, counts, call.objective, wants_gradient, scale, *ids_and_changes
    )
    if logit_gradient is None:
        return sums
    logit_gradient = logit_gradient[:num_rows]
    if gradients.hidden is not None:
        gradients.hidden.index_copy_(0, rows, (logit_gradient @ weight).to(gradients.hidden.dtype))
    if gradients.weight is not None:
        _add_product(gradients.weight, logit_gradient.t(), chunk)
    if gradients.bias is not None:
        gradients.bias.add_(logit_gradient.sum(0, dtype=torch.float32))
    return sums


@one_kernel_on_gpu
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in float32; both factors have the same floating dtype."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        # cuBLAS accumulates in float32: with out_dtype that sum is added, without float32 copies of the factors.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _dtype_until_backward(gradient: Tensor, like: Tensor) -> torch.dtype:
    return gradient.dtype if like.dtype is torch.float16 else like.dtype


def _counting_rows(mask: Tensor, device: torch.device) -> Tensor:
    """The indices [M] int64, on the device, where the mask is true. The host waits only for a mask on the device."""
    rows = mask.nonzero().squeeze(1)
    if device.type == "cuda" and rows.device.type == "cpu":
        rows = rows.pin_memory()
    return rows.to(device, non_blocking=True)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _mixed(objective: Objective, sums: Tensor) -> Tensor:
    return objective.weight * sums[0] + (1 - objective.weight) * sums[1] + sums[3]
