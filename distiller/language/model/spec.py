"""The structure of a causal language model of transformers, from its config: body, blocks, output layer, names."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.errors import UserError
from distiller.language.model.logits import change_of
from distiller.language.model.tensor_names import TensorNames

LARGE = 2**24
"""A new tensor with more elements than this is made on the meta device, instead of being allocated."""


@final
class ModelSpec:
    """The structure of the models of one config. Holds no weights.

    Attributes:
        config: a config of transformers.
        trusts_code: whether Python files beside the config may be run.
        num_blocks, hidden_size: number of blocks, and width of the hidden states.
        vocabulary: number of ids of the output layer.
        num_blocks_of_all_kinds: the first so many blocks include one of each kind; at least 2 where the model has 2.
        block_class: name of the first block's class.
        block_prefix: prefix of the blocks' names in the body, such as `layers.`.
        head_names: name of the output weight in the whole model; for tied weights also that of the input embedding.
        head_bias: name of the output bias in the whole model, or None.
        body_prefix: prefix of the body's names in the whole model, such as `model.`.
        shapes: shape of each tensor of the whole model that is saved, by its name.
        tied_names: names of the saved tensors that are the same tensor as another one.
        tensor_names: maps names of stored tensors to names in the whole model.
        logit_change: scale and cap that the model applies to the logits of its output layer.
    """

    def __init__(self, config: Any, trusts_code: bool, origin: str) -> None:
        """Builds the model on the meta device.

        Raises:
            UserError: the task cannot use such a model. The message begins with `origin`.
        """
        self.config, self.trusts_code = config, trusts_code
        try:
            self.logit_change = change_of(config)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from error
        try:
            with _empty_weights():
                whole: Any = new_model(config, trusts_code)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{origin}: transformers cannot build a model of this config ({reason})") from error
        body, head = whole.base_model, whole.get_output_embeddings()
        num_blocks = getattr(config, "num_hidden_layers", None)
        lists = [
            (name, part)
            for name, part in body.named_modules()
            if isinstance(part, nn.ModuleList) and len(part) == num_blocks
        ]
        if body is whole or not isinstance(head, nn.Linear) or not lists:
            raise UserError(
                f"{origin}: {type(whole).__name__} is not a stack of blocks below one linear output layer; give another"
            )
        self._whole, self.body_prefix = whole, f"{whole.base_model_prefix}."
        list_name, blocks = lists[0]
        self.num_blocks, self.block_prefix, self.block_class = len(blocks), f"{list_name}.", type(blocks[0]).__name__
        self.num_blocks_of_all_kinds = _num_blocks_of_all_kinds(config, blocks)
        self.hidden_size, self.vocabulary = head.in_features, head.out_features
        names = {id(part): name for name, part in whole.named_modules()}
        own = f"{names[id(head)]}.weight"
        self.head_names = tuple(dict.fromkeys([own, whole.all_tied_weights_keys.get(own, own)]))
        self.head_bias = None if head.bias is None else f"{names[id(head)]}.bias"
        parts = (self.body_prefix, *self.head_names, *([self.head_bias] if self.head_bias else []))
        if others := [name for name, _ in whole.named_parameters() if not name.startswith(parts)]:
            raise UserError(
                f"{origin}: {type(whole).__name__} has {others[0]} between its blocks and its output layer, which this "
                "task cannot apply; give a model without it"
            )
        self.shapes = {name: tuple(value.shape) for name, value in whole.state_dict().items()}
        self.tied_names = frozenset(whole.all_tied_weights_keys)
        self._body_parts = {name for name, _ in body.named_children()}
        self.tensor_names = TensorNames(whole)

    @property
    def config_values(self) -> dict[str, Any]:
        """The values of the config that decide what the model computes, defaults included; for a cache's key."""
        values = json.loads(self.config.to_json_string(use_diff=False))
        if self.trusts_code:
            # A config that is read with its own code holds the path that it was read from.
            values["_name_or_path"] = ""
        return {key: value for key, value in values.items() if key != "transformers_version"}

    @property
    def is_tied(self) -> bool:
        """Whether input embedding and output layer are one tensor."""
        return len(self.head_names) > 1

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        tied = set(self._whole.all_tied_weights_keys)
        return sum(value.numel() for name, value in self._whole.named_parameters() if name not in tied)

    @property
    def max_positions(self) -> int | None:
        """Largest number of tokens in a row by the config (`max_position_embeddings`); None where it says nothing."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the whole model's parameters."""
        return [name for name, _ in self._whole.named_parameters()]

    def kept_in_float32(self, dtype: torch.dtype) -> list[str]:
        """Regular expressions for names of tensors that transformers keeps in float32 in a model of this dtype."""
        plan = self._whole._get_dtype_plan(dtype)
        return [name.replace("*", ".*") for name, kept in plan.items() if kept == torch.float32]

    def new_skeleton(self) -> Any:
        """The whole model on the meta device in float32, trainable; tied weights are one parameter."""
        return self._skeleton(torch.float32)

    def _skeleton(self, dtype: torch.dtype) -> Any:
        with _empty_weights():
            # A copy, since the library writes the dtype into the config that it is given.
            whole: Any = new_model(copy.deepcopy(self.config), self.trusts_code, dtype)
        whole.tie_weights()
        return whole

    def body_skeleton(self, dtype: torch.dtype) -> nn.Module:
        """The model without its output layer, in the form that `distiller.teachers.base.Network.skeleton` describes.

        Tensors that transformers keeps in float32 stay in it, such as the bias by which a router chooses its experts.
        """
        whole = self._skeleton(dtype)
        kept = self.kept_in_float32(dtype)
        body: Any = whole.base_model
        saved = {id(tensor) for tensor in body.state_dict(keep_vars=True).values()}
        converted: dict[int, Tensor] = {}
        for prefix, module in body.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    # Buffers that are not saved stay as the model makes them.
                    if tensor is None or id(tensor) not in saved or not tensor.is_floating_point():
                        continue
                    if id(tensor) not in converted:
                        full_name = f"{self.body_prefix}{prefix}.{name}"
                        # Otherwise the dtype that the class gave it: some classes use float32 in every model.
                        own_dtype = (
                            torch.float32 if any(re.search(pattern, full_name) for pattern in kept) else tensor.dtype
                        )
                        value = tensor.detach().to("meta", own_dtype)
                        is_parameter = table is module._parameters
                        converted[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
                    # A tensor with several names stays one tensor.
                    table[name] = converted[id(tensor)]
        return body.eval()

    def other_dtypes(self, dtype: torch.dtype) -> dict[str, str]:
        """Name -> dtype of the body's tensors that casting all parameters to `dtype` would not give.

        These are parameters that transformers keeps in another dtype, and floating-point buffers that are saved or have
        this dtype. {} for float32.
        """
        if dtype == torch.float32:
            return {}
        body = self.body_skeleton(dtype)
        kept = {name: value for name, value in body.named_parameters() if value.dtype != dtype}
        saved = body.state_dict()
        buffers = {name: value for name, value in body.named_buffers() if name in saved or value.dtype == dtype}
        return {name: str(value.dtype) for name, value in (kept | buffers).items() if value.is_floating_point()}

    def body_name(self, stored: str) -> str | None:
        """A stored tensor's name in the body; None for the output layer's tensors and for ignored ones."""
        name = self.tensor_names.name(stored)
        if name is None or name.startswith(self.body_prefix):
            return name and name.removeprefix(self.body_prefix)
        # An unknown name in the body is returned unchanged, so that the caller reports it.
        return name if name not in self.shapes and self.is_of_body(name) else None

    def is_of_body(self, name: str) -> bool:
        """Whether a tensor of this name, known or not, belongs to the body.

        The names in the files of a body that was saved alone lack the body's prefix.
        """
        return name.startswith(self.body_prefix) or name.partition(".")[0] in self._body_parts


class _LargeOnMeta(TorchFunctionMode):
    """Makes large new tensors on the meta device.

    `init_empty_weights` moves parameters there after their allocation, which fails for the experts of a mixture: they
    are one tensor of tens of gigabytes. Buffers, whose values are needed, are not made by `torch.empty` or
    `torch.zeros`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            on_meta = func(*args, **kwargs | {"device": "meta"})
            if on_meta.numel() > LARGE:
                return on_meta
        return func(*args, **kwargs)


@contextmanager
def _empty_weights() -> Iterator[None]:
    """Makes parameters on the meta device; buffers are real."""
    with init_empty_weights(), _LargeOnMeta():
        yield


def _num_blocks_of_all_kinds(config: Any, blocks: nn.ModuleList) -> int:
    """See `ModelSpec`. Blocks of one kind have the same submodules, and the same values in the config's lists."""
    lists = [value for key, value in config.to_dict().items() if isinstance(value, list) and "layer" in key]
    lists = [value for value in lists if len(value) == len(blocks)]
    kinds = [
        (
            tuple((name, type(part).__name__) for name, part in block.named_modules()),
            tuple(str(value[index]) for value in lists),
        )
        for index, block in enumerate(blocks)
    ]
    return max(1 + max(kinds.index(kind) for kind in set(kinds)), min(2, len(blocks)))


def new_model(config: Any, trusts_code: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers in this dtype, with new weights, drawn from torch's global random state.

    Buffers that are not saved have the values that transformers gives them in a model of this dtype.
    """
    # Under ZeRO-3 transformers would otherwise build it from shards, which cannot be filled with values here.
    unset_hf_deepspeed_config()
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusts_code)
