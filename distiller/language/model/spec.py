"""A causal language model of transformers, taken apart by its description: body, blocks, output layer, names."""

from __future__ import annotations

import copy
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
from distiller.language.model.tensor_names import Renaming

LARGE = 2**24
"""Numbers in a tensor that need not be allocated to be known."""


@final
class ModelSpec:
    """Where things are in the models of one config. Holds no weights.

    Attributes:
        config: the library's.
        trusts_code: whether Python files beside the config may be run.
        num_blocks, hidden_size, vocabulary: of the model.
        num_blocks_of_all_kinds: so many blocks, from the first, have one of each kind among them; at least 2, if there
            are.
        block_class: the name of its blocks' class.
        block_prefix: what the blocks' names begin with in the body, such as `layers.`.
        head_names: names in the whole model of the output weight; of tied weights, the input embedding's as well.
        head_bias: the name of the output bias, or None.
        body_prefix: what the names of the body begin with in the whole model, such as `model.`.
        shapes: of all tensors of the whole model that are saved, by their names.
        tied_names: those of them that are another one.
        renaming: what the tensors of its files are called.
        logit_change: what the model does to the logits of its output layer.
    """

    def __init__(self, config: Any, trusts_code: bool, origin: str) -> None:
        """Builds the model on the meta device. Raises UserError, which `origin` begins, for what cannot be used."""
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
        self.renaming = Renaming(whole)

    @property
    def is_tied(self) -> bool:
        """Whether input embedding and output layer are one tensor."""
        return len(self.head_names) > 1

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied tensor once."""
        tied = set(self._whole.all_tied_weights_keys)
        return sum(value.numel() for name, value in self._whole.named_parameters() if name not in tied)

    @property
    def max_positions(self) -> int | None:
        """The longest row that the config speaks of; None where it says nothing."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def parameter_names(self) -> list[str]:
        """Of the whole model."""
        return [name for name, _ in self._whole.named_parameters()]

    def kept_in_float32(self, dtype: torch.dtype) -> list[str]:
        """Regular expressions of the tensors that the library keeps in float32 in a model of another dtype."""
        plan = self._whole._get_dtype_plan(dtype)
        return [name.replace("*", ".*") for name, kept in plan.items() if kept == torch.float32]

    def new_skeleton(self) -> Any:
        """The whole model on the meta device, with trainable weights, tied ones as one."""
        return self._skeleton(torch.float32)

    def _skeleton(self, dtype: torch.dtype) -> Any:
        with _empty_weights():
            # A copy, since the library writes the dtype into the config that it is given.
            whole: Any = new_model(copy.deepcopy(self.config), self.trusts_code, dtype)
        whole.tie_weights()
        return whole

    def body_skeleton(self, dtype: torch.dtype) -> nn.Module:
        """The model without its output layer, as `distiller.teachers.base.Network.skeleton` wants it.

        In float32 stays what the library keeps in it, such as the bias by which a router chooses its experts.
        """
        whole = self._skeleton(dtype)
        kept = self.kept_in_float32(dtype)
        body: Any = whole.base_model
        saved = {id(tensor) for tensor in body.state_dict(keep_vars=True).values()}
        changed: dict[int, Tensor] = {}
        for prefix, module in body.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    # Buffers that are not saved stay as the model makes them.
                    if tensor is None or id(tensor) not in saved or not tensor.is_floating_point():
                        continue
                    if id(tensor) not in changed:
                        full = f"{self.body_prefix}{prefix}.{name}"
                        # Else in the dtype that its class gives it: some are float32 whatever the model's is.
                        own = torch.float32 if any(re.search(pattern, full) for pattern in kept) else tensor.dtype
                        value = tensor.detach().to("meta", own)
                        is_parameter = table is module._parameters
                        changed[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
                    # A tensor of several names stays one.
                    table[name] = changed[id(tensor)]
        return body.eval()

    def other_dtypes(self, dtype: torch.dtype) -> dict[str, str]:
        """The body's tensors by which a model of this dtype is more than its weights rounded to it.

        Weights that the library keeps in float32, and buffers of this dtype. None in float32.
        """
        if dtype == torch.float32:
            return {}
        body = self.body_skeleton(dtype)
        kept = {name: value for name, value in body.named_parameters() if value.dtype != dtype}
        saved = body.state_dict()
        buffers = {name: value for name, value in body.named_buffers() if name in saved or value.dtype == dtype}
        return {name: str(value.dtype) for name, value in (kept | buffers).items() if value.is_floating_point()}

    def body_name(self, stored: str) -> str | None:
        """What a tensor of the files is called in the body; None for the output layer's and what is ignored."""
        name = self.renaming.name(stored)
        if name is None or name.startswith(self.body_prefix):
            return name and name.removeprefix(self.body_prefix)
        # An unknown name of the body goes on as it is, so that it is reported.
        return name if name not in self.shapes and self.is_of_body(name) else None

    def is_of_body(self, name: str) -> bool:
        """Whether a tensor, known or not, belongs to the body: files of a body saved alone lack its prefix."""
        return name.startswith(self.body_prefix) or name.partition(".")[0] in self._body_parts


class _LargeOnMeta(TorchFunctionMode):
    """Makes large new tensors on the meta device.

    `init_empty_weights` takes parameters there once they are made, and a mixture's experts, one tensor of tens of
    gigabytes, cannot even be allocated. Buffers have values, and are made otherwise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            wanted = func(*args, **kwargs | {"device": "meta"})
            if wanted.numel() > LARGE:
                return wanted
        return func(*args, **kwargs)


@contextmanager
def _empty_weights() -> Iterator[None]:
    with init_empty_weights(), _LargeOnMeta():
        yield


def _num_blocks_of_all_kinds(config: Any, blocks: nn.ModuleList) -> int:
    """Kinds differ in their parts, or in what the config lists for each layer."""
    lists = [value for key, value in config.to_dict().items() if isinstance(value, list) and "layer" in key]
    lists = [value for value in lists if len(value) == len(blocks)]
    kinds = [
        (
            tuple((name, type(part).__name__) for name, part in block.named_modules()),
            tuple(str(value[number]) for value in lists),
        )
        for number, block in enumerate(blocks)
    ]
    return max(1 + max(kinds.index(kind) for kind in set(kinds)), min(2, len(blocks)))


def new_model(config: Any, trusts_code: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the library with new weights, drawn from torch's global random state.

    Buffers that are not saved are those of the library's model in this dtype.
    """
    # Under ZeRO-3 the library would otherwise make it of shards, whose values nobody can fill in.
    unset_hf_deepspeed_config()
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusts_code)
