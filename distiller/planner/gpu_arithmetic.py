"""Makes fake tensors on the CPU behave as tensors on a GPU would: dtypes under autocast, attention, asked values.

torch refuses fake tensors of a GPU where it was built without one, so plans are made with fake tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distiller.planner.allocation_trace import AllocationTrace, Kernel

_NAMES = (
    *("layer_norm", "group_norm", "softmax", "log_softmax", "logsumexp", "softplus"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "nll_loss", "cosine_similarity"),
    *("pow", "rsqrt", "reciprocal", "exp", "log", "log1p", "expm1", "sum", "prod", "cumsum", "cumprod", "norm"),
    *("__pow__", "__rpow__"),
)
FLOAT32_FUNCTIONS = {
    function for place in (F, torch, Tensor) for name in _NAMES if (function := getattr(place, name, None)) is not None
}
"""What autocast runs in float32 on a GPU ("CUDA Ops that can autocast to float32", torch's documentation of amp) and
not on a CPU."""


@final
class GpuArithmetic(TorchFunctionMode):
    """A mode in which functions of torch give what they give on a GPU; see the module.

    Attention is counted as a kernel that keeps its output and one number for each query, as flash, memory-efficient and
    cuDNN attention do. Where a program asks for a value, `all` is true and everything else false; a mask is taken to be
    true everywhere.
    """

    def __init__(self, trace: AllocationTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _attention(self._trace, *args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(func, *args, **kwargs)
        if func in (Tensor.__bool__, Tensor.item, Tensor.__float__, Tensor.__int__):
            return getattr(args[0], "is_true_in_plans", False) if func is Tensor.__bool__ else 0
        if func in (Tensor.nonzero, torch.nonzero):
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func in FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_float32, args))
            kwargs = {name: _float32(value) for name, value in kwargs.items()}
        if func is Tensor.backward:
            # A mode is off while it handles a function, and `torch.autograd.backward` would be handled too. But a
            # backward pass may compute activations again, for which the mode must be on.
            loss, engine = args[0], torch.autograd.Variable._execution_engine
            with self:
                engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
            return None
        result = func(*args, **kwargs)
        if func in (Tensor.all, torch.all):
            result.is_true_in_plans = True
        return result


def _float32(value: Any) -> Any:
    is_shorter = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_shorter else value


def _rms_norm(
    func: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """One kernel where input and weight have the same dtype; else several, which keep float32 tensors."""
    if weight is None or weight.dtype is not input.dtype:
        return func(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight)  # type: ignore[return-value]


class _FusedRmsNorm(torch.autograd.Function):
    """Shapes and memory of the fused kernel, which keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[:-1], dtype=torch.float32))
        return torch.mul(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        return torch.mul(input, gradients[0]), torch.empty_like(weight)


def _attention(
    trace: AllocationTrace,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    del attn_mask, dropout_p, scale, enable_gqa
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _Attention.apply(query, key, value, is_causal, trace)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Shapes and memory of attention that never holds the matrix of all pairs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, trace: AllocationTrace) -> Tensor:  # type: ignore[override]
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        pairs = query.shape[:-1].numel() * key.shape[-2] // (2 if is_causal else 1)
        ctx.flops, ctx.trace = 2 * pairs * (query.shape[-1] + value.shape[-1]), trace
        trace.add_kernel(_attention_kernel(ctx.flops, query, key, value, output))
        # One number of float32 for each query and head, with which the backward pass makes the softmax again.
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, _ = ctx.saved_tensors
        # Five products instead of two.
        ctx.trace.add_kernel(_attention_kernel(ctx.flops * 5 // 2, query, key, value, output))
        results = [torch.empty_like(tensor) for tensor in (query, key, value)]
        return *results, None, None


def _attention_kernel(flops: int, *tensors: Tensor) -> Kernel:
    return Kernel(flops, sum(tensor.numel() * tensor.element_size() for tensor in tensors), tensors[0].dtype)
