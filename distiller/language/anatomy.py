"""A causal language model of transformers, taken apart by its description: body, blocks, output layer, names."""

from __future__ import annotations

import re
from typing import Any, final

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.errors import UserError
from distiller.language.logits import change_of


@final
class Anatomy:
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
        logit_change: what the model does to the logits of its output layer.
    """

    def __init__(self, config: Any, trusts_code: bool, origin: str) -> None:
        """Builds the model on the meta device. Raises UserError, which `origin` begins, for what cannot be used."""
        self.config, self.trusts_code, self.logit_change = config, trusts_code, change_of(config)
        try:
            with init_empty_weights():
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
        self._whole, self._prefix = whole, f"{whole.base_model_prefix}."
        list_name, blocks = lists[0]
        self.num_blocks, self.block_prefix, self.block_class = len(blocks), f"{list_name}.", type(blocks[0]).__name__
        self.num_blocks_of_all_kinds = _num_blocks_of_all_kinds(config, blocks)
        self.hidden_size, self.vocabulary = head.in_features, head.out_features
        names = {id(part): name for name, part in whole.named_modules()}
        own = f"{names[id(head)]}.weight"
        self.head_names = tuple(dict.fromkeys([own, whole.all_tied_weights_keys.get(own, own)]))
        self.head_bias = None if head.bias is None else f"{names[id(head)]}.bias"
        parts = (self._prefix, *self.head_names, *([self.head_bias] if self.head_bias else []))
        if others := [name for name, _ in whole.named_parameters() if not name.startswith(parts)]:
            raise UserError(
                f"{origin}: {type(whole).__name__} has {others[0]} between its blocks and its output layer, which this "
                "task cannot apply; give a model without it"
            )
        self._known = set(dict(whole.named_parameters())) | set(whole.state_dict())
        self._ignored = [*(whole._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]

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

    def new_skeleton(self) -> Any:
        """The whole model on the meta device, with trainable weights, tied ones as one."""
        with init_empty_weights():
            whole: Any = new_model(self.config, self.trusts_code)
        whole.tie_weights()
        return whole

    def body_skeleton(self, dtype: torch.dtype) -> nn.Module:
        """The model without its output layer, as `distiller.teachers.base.Network.skeleton` wants it."""
        with init_empty_weights():
            body: Any = new_model(self.config, self.trusts_code).base_model
        for module in body.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta and tensor.is_floating_point():
                        changed = tensor.detach().to(dtype)
                        is_parameter = table is module._parameters
                        table[name] = nn.Parameter(changed, requires_grad=False) if is_parameter else changed
        return body.eval()

    def whole_name(self, stored: str) -> str | None:
        """What a tensor of the files is called in the whole model; None for what the library ignores.

        Files of a model that was saved as a body alone (GPT-2's on the hub) lack the prefix.
        """
        for name in (stored, f"{self._prefix}{stored}"):
            if name in self._known:
                return name
        if any(re.search(pattern, stored) for pattern in self._ignored):
            return None
        return stored

    def body_name(self, stored: str) -> str | None:
        """What a tensor of the files is called in the body; None for the output layer's and what is ignored."""
        name = self.whole_name(stored)
        if name is None or name.startswith(self._prefix):
            return name and name.removeprefix(self._prefix)
        # An unknown name goes on as it is, so that it is reported.
        return None if name in self._known else name


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


def new_model(config: Any, trusts_code: bool) -> Any:
    """A model of the library with new weights in float32, drawn from torch's global random state."""
    # Under ZeRO-3 the library would otherwise make it of shards, whose values nobody can fill in.
    unset_hf_deepspeed_config()
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trusts_code)
