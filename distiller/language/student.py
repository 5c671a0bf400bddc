"""The student model: new from a config, loaded from a saved model, or made of the teacher's layers and channels."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distiller.config.causal_lm import LanguageStudent
from distiller.data import rng
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
"""Keys of the recipe's `student` that make the student narrower than the teacher."""
SLICED = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "up_proj", "down_proj"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("embed_tokens", "norm", "lm_head"),
}
"""Layers whose leading slice holds the first heads and channels; that of a fused layer (query, key, value) does not."""


@final
class StudentModel:
    """The student of a recipe: its structure from the start, its initial weights from `build`.

    Attributes:
        origin: the student's name in messages.
        spec: the structure that the config describes.
        files: the saved model whose weights the student begins with; None for a new one and for a part of the teacher.
        dropout: the config's dropout keys that were above 0 and have been set to 0.
    """

    def __init__(
        self,
        options: LanguageStudent,
        teacher: LanguageFiles,
        stages_dir: Path | StageFolders,
        trusts_code: bool,
        seed: int,
    ) -> None:
        """Reads configs and tokenizers; weights are read by `build`. Does not communicate.

        Args:
            options: the recipe's `student` section.
            teacher: the saved teacher, from whose layers the student may be made.
            stages_dir: where a GGUF file is converted.
            trusts_code: whether Python files beside a model may be run.
            seed: new weights are drawn from it.

        Raises:
            UserError: the student cannot be found or read, or cannot be made from the teacher.
        """
        self._options, self._teacher, self._trusts_code, self._seed = options, teacher, trusts_code, seed
        self.files = None
        if options.path is not None:
            self.files = find_model("student", options.path, None, None, stages_dir, trusts_code)
            config, self.origin = self.files.spec.config, self.files.origin
        elif options.config is not None:
            self.origin = f"student.config: {options.config}"
            config = read_config(local_path(options.config), self.origin, trusts_code)
        else:
            config, self.origin = cut_config(options, teacher), "student"
        self.dropout = remove_dropout(config)
        self.spec = ModelSpec(config, trusts_code, self.origin)

    def skeleton(self) -> Any:
        """The whole model on the meta device, in float32."""
        return self.spec.new_skeleton()

    def build(self, token_ids: TokenIds) -> Any:
        """The model with its initial weights, on the CPU in float32, the same on every rank.

        Does not communicate, and does not change the global random state.

        In the output layer, the row of every id that stands for no token is set to the mean of the tokens' rows. The
        layer's logit of such an id is then the mean of the tokens' logits, and its probability (without a soft cap) the
        geometric mean of theirs. Training lowers it further.

        Args:
            token_ids: the ids that stand for a token, all of them below the model's vocabulary.

        Raises:
            UserError: the weights cannot be read, or lack a tensor.
        """
        model = self._made()
        _average_unused_rows(model.get_output_embeddings(), token_ids)
        return model

    def _made(self) -> Any:
        """The model with loaded, copied or new weights."""
        if self.files is not None:
            return self._load(self.files)
        with rng.seeded(self._seed):
            model = new_model(self.spec.config, self._trusts_code)
        if self._options.from_teacher:
            self._copy_from_teacher(model)
        return model

    def _load(self, files: LanguageFiles) -> Any:
        unset_hf_deepspeed_config()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.fetch(),
                config=self.spec.config,
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
        """Copies the teacher's evenly spaced layers, cut to their first heads and channels, one tensor at a time.

        Buffers that models save are copied too, such as the experts' biases of DeepSeek-V3.
        """
        teacher, student = self._teacher.spec, self.spec
        kept = evenly_spaced(student.num_blocks, teacher.num_blocks)
        blocks_prefix = f"{model.base_model_prefix}.{student.block_prefix}"
        saved = model.state_dict()
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
        files = WeightFiles(self._teacher.weight_files(), teacher.tensor_names.name)
        try:
            with torch.no_grad():
                for name, target in (*model.named_parameters(), *buffers):
                    source = name
                    if name.startswith(blocks_prefix):
                        index, _, rest = name.removeprefix(blocks_prefix).partition(".")
                        source = f"{blocks_prefix}{kept[int(index)]}.{rest}"
                    names = teacher.head_names if source in teacher.head_names else (source,)
                    stored = next((name for name in names if name in files.tensors), None)
                    if stored is None:
                        raise UserError(f"{self._teacher.origin}: its weights lack {source}; copy it again")
                    stored_weight = torch.empty(files.tensors[stored].shape, dtype=target.dtype)
                    files.read(stored, stored_weight)
                    target.copy_(_leading(stored_weight, target))
        finally:
            files.close()


def cut_config(options: LanguageStudent, teacher: LanguageFiles) -> Any:
    """The teacher's config with fewer layers, heads or channels. Raises UserError where that is impossible."""
    spec = teacher.spec
    config = copy.deepcopy(spec.config)
    if options.num_layers is not None:
        _check_at_most("num_layers", options.num_layers, spec.num_blocks)
        kept = evenly_spaced(options.num_layers, spec.num_blocks)
        try:
            keep_layers(config, kept, spec.num_blocks)
        except NotImplementedError as error:
            raise UserError(
                f"student.num_layers is {options.num_layers} and a {type(config).__name__} cannot be cut to so many "
                f"({error}); give student.config"
            ) from error
    widths = [key for key in WIDTHS if getattr(options, key) is not None]
    if not widths:
        return config
    for name in spec.parameter_names:
        layer = name.rsplit(".", 2)[-2]
        if layer not in SLICED:
            raise UserError(
                f"student.{widths[0]}: the teacher's {name} does not belong to separate heads and channels, of which "
                "the first could be kept; give num_layers alone, or student.config"
            )
    num_heads = config.num_attention_heads
    num_groups = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    for key in widths:
        _check_at_most(key, getattr(options, key), getattr(config, key, None) or num_groups)
    if options.num_attention_heads or options.num_key_value_heads:
        heads_per_group = num_heads // num_groups
        new_groups = options.num_key_value_heads or (options.num_attention_heads or num_heads) // heads_per_group
        new_heads = options.num_attention_heads or new_groups * heads_per_group
        if new_heads != new_groups * heads_per_group:
            raise UserError(
                f"student.num_attention_heads {new_heads} and num_key_value_heads {new_groups}: in the teacher "
                f"{heads_per_group} heads share a key and value; give {heads_per_group} times as many heads as "
                "key-value heads"
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
def _average_unused_rows(output: Any, ids: TokenIds) -> None:
    """Sets the rows and biases of ids that stand for no token to the mean of all other rows and biases, in place."""
    tensors = [tensor for tensor in (output.weight, output.bias) if tensor is not None]
    if unused := ids.unused(len(output.weight)):
        for tensor in tensors:
            # Zeroed before the sum: it then holds the other rows only, without a copy of the tensor, even if the unused
            # rows held infinities.
            tensor[unused] = 0
            mean = tensor.sum(0, dtype=torch.float64) / (len(tensor) - len(unused))
            tensor[unused] = mean.to(tensor.dtype)


def _leading(source: Tensor, target: Tensor) -> Tensor:
    """The leading slice of `source` with the shape of `target`."""
    return source[tuple(slice(0, size) for size in target.shape)]
