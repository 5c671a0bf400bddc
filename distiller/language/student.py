"""The student model: from a config, from a saved model, or cut out of the teacher."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer

from distiller.config.causal_lm import LanguageStudent
from distiller.errors import UserError
from distiller.language.model.files import LanguageFiles, find_model, read_config
from distiller.language.model.layer_subset import keep_layers
from distiller.language.model.logits import TokenIds
from distiller.language.model.spec import ModelSpec, new_model
from distiller.storage.packaged_files import local_path
from distiller.storage.stage_folders import StageFolders
from distiller.storage.weight_files import WeightFiles
from distiller.tasks.dropout import remove_dropout
from distiller.tasks.layer_selection import evenly_spaced

WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SLICED = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "up_proj", "down_proj"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("embed_tokens", "norm", "lm_head"),
}
"""Layers whose leading slice is what the first heads and channels need; a fused layer's is not."""


@final
class StudentModel:
    """What the recipe's student is, before any weight is read.

    Attributes:
        origin: how messages name it.
        anatomy: what its config describes.
        files: the saved model that it starts from; None for a new one and for a part of the teacher.
        dropout: keys of the config that were above 0 and are 0 now.
    """

    def __init__(
        self,
        options: LanguageStudent,
        teacher: LanguageFiles,
        stages_dir: Path | StageFolders,
        trusts_code: bool,
        seed: int,
    ) -> None:
        """Reads descriptions. Raises UserError."""
        self._options, self._teacher, self._trusts_code, self._seed = options, teacher, trusts_code, seed
        self.files = None
        if options.path is not None:
            self.files = find_model("student", options.path, None, None, stages_dir, trusts_code)
            config, self.origin = self.files.anatomy.config, self.files.origin
        elif options.config is not None:
            self.origin = f"student.config: {options.config}"
            config = read_config(local_path(options.config), self.origin, trusts_code)
        else:
            config, self.origin = cut_config(options, teacher), "student"
        self.dropout = remove_dropout(config)
        self.anatomy = ModelSpec(config, trusts_code, self.origin)

    def skeleton(self) -> Any:
        """The model on the meta device."""
        return self.anatomy.new_skeleton()

    def build(self, known: TokenIds) -> Any:
        """The model on the CPU in float32, the same on every rank; the global random state is left as it was.

        `known` are the ids that stand for a token, all of them below the model's vocabulary.

        Ids that stand for no token begin with the mean of the tokens' rows in the output layer, whatever they had:
        none is then likelier than the tokens' geometric mean, and training keeps them further down.
        """
        model = self._made()
        _level_unused(model.get_output_embeddings(), known)
        return model

    def _made(self) -> Any:
        if self.files is not None:
            return self._load(self.files)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = new_model(self.anatomy.config, self._trusts_code)
        if self._options.from_teacher:
            self._copy_from_teacher(model)
        return model

    def _load(self, files: LanguageFiles) -> Any:
        unset_hf_deepspeed_config()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.fetch(),
                config=self.anatomy.config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=self._trusts_code,
                output_loading_info=True,
            )
            model, report = loaded
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{files.origin}: cannot be loaded ({' '.join(str(error).split())})") from error
        if missing := sorted(report["missing_keys"]):
            raise UserError(f"{files.origin}: its weights lack {missing[0]}; copy it again")
        return model

    def _copy_from_teacher(self, model: Any) -> None:
        """Fills the student with the teacher's evenly spaced layers and leading channels, tensor by tensor."""
        theirs, ours = self._teacher.anatomy, self.anatomy
        kept = evenly_spaced(ours.num_blocks, theirs.num_blocks)
        inside = f"{model.base_model_prefix}.{ours.block_prefix}"
        files = WeightFiles(self._teacher.weight_files(), theirs.renaming.name)
        try:
            with torch.no_grad():
                for name, target in model.named_parameters():
                    source = name
                    if name.startswith(inside):
                        number, _, rest = name.removeprefix(inside).partition(".")
                        source = f"{inside}{kept[int(number)]}.{rest}"
                    names = theirs.head_names if source in theirs.head_names else (source,)
                    stored = next((name for name in names if name in files.tensors), None)
                    if stored is None:
                        raise UserError(f"{self._teacher.origin}: its weights lack {source}; copy it again")
                    whole = torch.empty(files.tensors[stored].shape)
                    files.read(stored, whole)
                    target.copy_(_leading(whole, target))
        finally:
            files.close()


def enable_checkpointing(model: Any) -> None:
    """Lets the model's blocks recompute their activations. Raises UserError for blocks that cannot.

    By the blocks' own switch: the model's is named differently from version to version.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(
            f"train.gradient_checkpointing is true and the blocks of {type(model).__name__} cannot recompute their "
            "activations; set it to false"
        )
    for block in blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def cut_config(options: LanguageStudent, teacher: LanguageFiles) -> Any:
    """The config of a student that is cut out of the teacher. Raises UserError where it cannot be."""
    anatomy = teacher.anatomy
    config = copy.deepcopy(anatomy.config)
    if options.num_layers is not None:
        _check_at_most("num_layers", options.num_layers, anatomy.num_blocks)
        kept = evenly_spaced(options.num_layers, anatomy.num_blocks)
        try:
            keep_layers(config, kept, anatomy.num_blocks)
        except NotImplementedError as error:
            raise UserError(
                f"student.num_layers is {options.num_layers} and a {type(config).__name__} cannot be cut to so many "
                f"({error}); give student.config"
            ) from error
    asked = [key for key in WIDTHS if getattr(options, key) is not None]
    if not asked:
        return config
    for name in anatomy.parameter_names:
        layer = name.rsplit(".", 2)[-2]
        if layer not in SLICED:
            raise UserError(
                f"student.{asked[0]}: the teacher's {name} does not belong to separate heads and channels, of which "
                "the first could be kept; give num_layers alone, or student.config"
            )
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for key in asked:
        _check_at_most(key, getattr(options, key), getattr(config, key, None) or groups)
    if options.num_attention_heads or options.num_key_value_heads:
        share = heads // groups
        new_groups = options.num_key_value_heads or (options.num_attention_heads or heads) // share
        new_heads = options.num_attention_heads or new_groups * share
        if new_heads != new_groups * share:
            raise UserError(
                f"student.num_attention_heads {new_heads} and num_key_value_heads {new_groups}: in the teacher {share} "
                f"heads share a key and value; give {share} times as many heads as key-value heads"
            )
        config.num_attention_heads, config.num_key_value_heads = new_heads, new_groups
    for key in ("hidden_size", "intermediate_size"):
        if getattr(options, key) is not None:
            setattr(config, key, getattr(options, key))
    if "head_dim" in config.to_dict():
        config.head_dim = head_dim
    elif config.hidden_size != config.num_attention_heads * head_dim:
        raise UserError(
            f"student.hidden_size {config.hidden_size}: this model's heads have hidden_size / num_attention_heads "
            f"channels and the teacher's {head_dim}; give {head_dim} times as many channels as heads"
        )
    return config


def _check_at_most(key: str, wanted: int, limit: int) -> None:
    if wanted > limit:
        raise UserError(f"student.{key} is {wanted} and the teacher has only {limit}; lower it")


@torch.no_grad()
def _level_unused(output: Any, ids: TokenIds) -> None:
    """Gives the ids of an output layer that stand for no token the mean of all others' rows and biases."""
    tensors = [tensor for tensor in (output.weight, output.bias) if tensor is not None]
    if unused := ids.unused(len(output.weight)):
        for tensor in tensors:
            # Emptied first: whatever was there, infinities included, is not in the sum, and nothing large is copied.
            tensor[unused] = 0
            mean = tensor.sum(0, dtype=torch.float64) / (len(tensor) - len(unused))
            tensor[unused] = mean.to(tensor.dtype)


def _leading(source: Tensor, target: Tensor) -> Tensor:
    return source[tuple(slice(0, size) for size in target.shape)]
