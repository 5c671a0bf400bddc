"""Runs a Wan transformer on short text embeddings with the same result as on fully padded ones.

``WanPipeline`` pads every prompt's embeddings with zero rows to 512 rows, and Wan's cross-attention takes no mask: the
zero rows are keys like any other, so a transformer's output depends on how many there are. But all of them are equal,
and ``m`` equal keys have the same weight as ``k`` of them whose attention logits are raised by ``log(m / k)``. So the
real rows and a single zero row are enough. For small models and short prompts this is several times faster, forward and
backward.

Shape suffixes: B batch, L rows of text, D width of the text encoder.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportPrivateImportUsage=false

import math
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformerBlock
from torch.utils.weak import WeakTensorKeyDictionary

PIPELINE_TEXT_LENGTH = 512
"""Rows that ``WanPipeline`` pads text embeddings to by default."""

NUM_KEPT_ROWS = 2
"""Zero rows that ``WanFamily.pad`` adds at least to the longest prompt; see :func:`padding_bias`."""

ROW_MULTIPLE = 8
"""``WanFamily.pad`` rounds the number of rows up to a multiple of this. cuDNN plans its attention kernels anew for each
number of rows that it has not seen (0.15 s for teacher and student on an H200), and torch.compile makes one code for
the multiples of 8 and another one for all other numbers."""


def short_length(longest: int, padded_length: int) -> int:
    """Rows of a batch whose longest prompt has ``longest`` real rows, of which at least two are zero in every sample.

    At most ``padded_length``, with which no correction is needed.
    """
    return min(-(-(longest + NUM_KEPT_ROWS) // ROW_MULTIPLE) * ROW_MULTIPLE, padded_length)


def install_short_text(transformer: WanTransformer3DModel, padded_length: int = PIPELINE_TEXT_LENGTH) -> None:
    """Makes ``transformer`` treat text embeddings of any length as if zero rows padded them to ``padded_length``.

    Replaces the processors of the cross-attentions and the blocks' `forward`, which sets the bias and then calls the
    former one (`inner_forward`, see `distiller.launch.block_compilation`), and adds one forward pre-hook. Weights,
    state dict and config do not change. Deep copies of the transformer include the change. Call this before the
    transformer is wrapped (DDP, DeepSpeed). In bfloat16 the weight of the padding is right to 0.05%.

    Afterwards, text embeddings [B, L, D] of a forward must have at least one zero row in every sample
    (``WanFamily.pad`` adds two or more), except at L = ``padded_length``, where the forward is the original one. A
    sample without a zero row raises ValueError on the CPU. On a GPU, where this check would make the host wait, the
    sample's output is NaN.

    With gradient checkpointing, several forwards may come before their backwards if the blocks get the same tensor
    object that the text projection returned. A wrapper that casts the inputs of every block (FSDP with mixed precision)
    allows only one forward before its backward.

    Args:
        transformer: The transformer itself, not a wrapper around it.
        padded_length: Number of rows, real and zero, whose result to reproduce.

    Raises:
        ValueError: It is already installed, or the transformer takes image embeddings, which Wan separates from text
            by the fixed text length of 512.
    """
    attentions = [block.attn2 for block in _blocks(transformer)]
    if any(isinstance(attention.processor, _ShortTextProcessor) for attention in attentions):
        raise ValueError("install_short_text: already installed on this transformer; call remove_short_text first")
    if any(attention.add_k_proj is not None for attention in attentions):
        raise ValueError(
            "install_short_text: this transformer takes image embeddings (config.added_kv_proj_dim is set) and finds "
            "them by a text length of exactly 512; give it padded text instead"
        )
    text_bias = _TextBias(padded_length)
    text_bias.hook = transformer.register_forward_pre_hook(text_bias.before_forward, with_kwargs=True)
    for block in _blocks(transformer):
        block.attn2.set_processor(_ShortTextProcessor(text_bias, replaced=block.attn2.processor))
        # Methods, not closures: a deep copy of the block then has methods of its own.
        block.inner_forward = MethodType(type(block).forward, block)
        block.forward = MethodType(_forward_with_bias, block)


def remove_short_text(transformer: WanTransformer3DModel) -> None:
    """Restores the processors that :func:`install_short_text` replaced; does nothing where it was not installed."""
    for block in _blocks(transformer):
        processor = block.attn2.processor
        if isinstance(processor, _ShortTextProcessor):
            processor.text_bias.hook.remove()
            block.attn2.set_processor(processor.replaced)
            del block.forward, block.inner_forward


def padding_bias(embeds_BLD: torch.Tensor, padded_length: int) -> torch.Tensor | None:
    """Attention bias that gives the zero rows of ``embeds_BLD`` the weight of all rows that would pad it.

    Returns:
        float32 [B, 1, 1, L] on the embeddings' device, 0 on real rows; on zero rows, logarithms of weights that add up
        to the number of padding rows. None when L = ``padded_length``, which needs no correction.

    Raises:
        ValueError: L exceeds ``padded_length``, or (on the CPU) a sample of a shorter L has no zero row.
    """
    length = embeds_BLD.shape[1]
    if length > padded_length:
        raise ValueError(f"text embeddings have {length} rows, more than the {padded_length} they stand for")
    if length == padded_length:
        return None
    is_zero_BL = (embeds_BLD == 0).all(dim=-1)
    num_zero_B1 = is_zero_BL.sum(dim=1, keepdim=True)
    if embeds_BLD.device.type == "cpu" and bool((num_zero_B1 == 0).any()):
        raise ValueError(
            f"text embeddings of {length} rows have a sample without a zero row; keep at least one after the longest "
            f"prompt (WanFamily.pad keeps two or more), or pad to {padded_length} rows"
        )
    num_padding_B1 = padded_length - length + num_zero_B1
    # bfloat16 rounds log(500) by up to 1/64, that is 1.6% of the padding's weight. So the first zero row gets the
    # logarithm of the whole weight, rounded down to bfloat16 (the upper 16 bits), and the other zero rows share the
    # rest of the weight: with two zero rows the error is 0.05%.
    whole_B1 = torch.log(num_padding_B1.float())
    rounded_B1 = whole_B1.view(torch.int32).bitwise_and(-65536).view(torch.float32)
    rest_B1 = torch.log((num_padding_B1 - rounded_B1.exp()).clamp_min(0) / (num_zero_B1 - 1))
    is_first_BL = is_zero_BL & (is_zero_BL.cumsum(dim=1) == 1)
    first_B1 = torch.where(num_zero_B1 == 1, whole_B1, rounded_B1)
    bias_BL = torch.where(is_first_BL, first_B1, torch.where(is_zero_BL, rest_B1, 0.0))
    bias_BL = bias_BL.masked_fill(num_zero_B1 == 0, math.nan)
    return bias_BL[:, None, None, :]


class _TextBias:
    """Carries the bias of a forward from the transformer's pre-hook to the processors of its cross-attentions."""

    hook: torch.utils.hooks.RemovableHandle

    def __init__(self, padded_length: int) -> None:
        self.padded_length = padded_length
        # Thread id -> bias: several threads may run forwards of one transformer in turn.
        self._current: dict[int, torch.Tensor | None] = {}
        # Gradient checkpointing runs blocks again in the backward, perhaps after another forward has replaced the entry
        # of _current. It passes the same tensors to the blocks, so the projected text identifies the forward.
        self._by_text = WeakTensorKeyDictionary()

    # A bound method, not a closure: a deep copy of the transformer then has one _TextBias for its hook and processors.
    def before_forward(self, transformer: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        embeds_BLD = kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[2]
        with torch.no_grad():
            self._current[threading.get_ident()] = padding_bias(embeds_BLD, self.padded_length)

    def of(self, projected_text: torch.Tensor) -> torch.Tensor | None:
        """The bias for the projected text [B, L, width] that a block's cross-attention gets, on the text's device."""
        if projected_text not in self._by_text:
            bias = self._current[threading.get_ident()]
            # With a teacher on several GPUs, blocks of other GPUs get copies of the text there.
            self._by_text[projected_text] = None if bias is None else bias.to(projected_text.device)
        return self._by_text[projected_text]


class _ShortTextProcessor(WanAttnProcessor):
    """Wan's own attention with a bias, which the block's ``forward`` sets, added to its logits."""

    bias: torch.Tensor | None = None

    def __init__(self, text_bias: _TextBias, replaced: WanAttnProcessor) -> None:
        super().__init__()
        self.text_bias = text_bias
        self.replaced = replaced
        self._attention_backend = replaced._attention_backend
        self._parallel_config = replaced._parallel_config

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert encoder_hidden_states is not None and attention_mask is None
        bias = None if self.bias is None else self.bias.to(hidden_states.dtype)
        return super().__call__(attn, hidden_states, encoder_hidden_states, bias, rotary_emb)


def _forward_with_bias(
    block: WanTransformerBlock, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, *args: Any
) -> torch.Tensor:
    """The block's forward pass. Finding the bias is no work for a compiler; what `inner_forward` does is."""
    processor = cast(_ShortTextProcessor, block.attn2.processor)
    processor.bias = processor.text_bias.of(encoder_hidden_states)
    inner_forward = cast(Callable[..., torch.Tensor], block.inner_forward)
    try:
        return inner_forward(hidden_states, encoder_hidden_states, *args)
    finally:
        processor.bias = None


def _blocks(transformer: WanTransformer3DModel) -> list[WanTransformerBlock]:
    return [cast(WanTransformerBlock, block) for block in transformer.blocks]
