"""`WanTransformer3DModel`: a stack of blocks over patches of a video, with cross-attention to text of any length."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.architecture import Architecture, LatentShape, Origin, check_whole_numbers
from distiller.diffusion.wan.short_text import install_short_text
from distiller.errors import UserError
from distiller.tasks.layer_selection import evenly_spaced

WHOLE_NUMBERS = (
    *("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim"),
    *("num_layers", "rope_max_seq_len"),
)


class WanArchitecture(Architecture):
    """See `Architecture`; conditions: `text` [B, L, D], real rows, then at least one zero row (see `short_text`)."""

    model_class = WanTransformer3DModel
    part = "transformer"
    sizes_vary = True  # text has the length of the batch's longest prompt, and two experts share a batch
    keys_equal_to_teacher: ClassVar = {
        "in_channels": "input channels",
        "out_channels": "output channels",
        "text_dim": "text width",
    }
    cut_keys: ClassVar = {
        "num_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "ffn_dim": "ffn_dim",
    }

    def check_numbers(self, config: Mapping[str, Any], origin: str) -> None:
        check_whole_numbers(config, WHOLE_NUMBERS, origin)
        patch = config["patch_size"]
        if not isinstance(patch, list | tuple) or len(patch) != 3 or any(type(n) is not int or n < 1 for n in patch):
            raise UserError(f"{origin}: patch_size is {patch!r}; it must be three whole numbers above 0")
        if config["attention_head_dim"] % 2:
            raise UserError(f"{origin}: attention_head_dim is {config['attention_head_dim']}; it must be even")
        if not isinstance(config["eps"], int | float):
            raise UserError(f"{origin}: eps is {config['eps']!r}; it must be a number")
        if config["image_dim"] or config["added_kv_proj_dim"]:
            raise UserError(f"{origin} is of an image-to-video model; give a text-to-image/video one")

    def check_student(self, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> None:
        if list(config["patch_size"]) != list(teacher["patch_size"]):
            frame, height, width = config["patch_size"]
            if frame != 1 or height != width:
                raise UserError(
                    f"the student's patch_size {config['patch_size']} is neither the teacher's nor (1, n, n)"
                )

    def check_size(self, owner: str, config: Mapping[str, Any], task: DiffusionOptions, shape: LatentShape) -> None:
        patch, limit = config["patch_size"], config["rope_max_seq_len"]
        for name, size, step in zip(("num_frames", "height", "width"), shape[1:], patch, strict=True):
            if size % step:
                raise UserError(
                    f"the {owner}'s patch_size {list(patch)} does not divide the {size} latents of task.{name} "
                    f"{getattr(task, name)}; change one of them"
                )
            if size // step > limit:
                raise UserError(
                    f"task.{name} {getattr(task, name)} makes {size // step} patches and the {owner}'s "
                    f"rope_max_seq_len is {limit}; lower it"
                )

    def block_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(f"blocks.{index}" for index in range(config["num_layers"]))

    def num_tokens(self, config: Mapping[str, Any], shape: LatentShape) -> int:
        return math.prod(size // patch for size, patch in zip(shape[1:], config["patch_size"], strict=True))

    def feature_shape(self, config: Mapping[str, Any], block: int, shape: LatentShape) -> tuple[int, int]:
        del block
        return self.num_tokens(config, shape), config["num_attention_heads"] * config["attention_head_dim"]

    def feature(self, output: Any) -> Tensor:
        return output

    def prepare(self, model: nn.Module, max_sequence_length: int) -> None:
        assert isinstance(model, WanTransformer3DModel)
        install_short_text(model, max_sequence_length)

    def input_layer(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("patch_embedding")

    def forward(self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return model(latents, timesteps, conditions["text"], return_dict=False)[0]

    def finish_cut(self, config: dict[str, Any], teacher: Mapping[str, Any]) -> None:
        del config, teacher

    def origin(self, name: str, target: Tensor, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> Origin | None:
        if name.startswith("blocks."):
            _, index, rest = name.split(".", 2)
            kept = evenly_spaced(config["num_layers"], teacher["num_layers"])
            return Origin(f"blocks.{kept[int(index)]}.{rest}")
        # The output of `time_proj` concatenates six vectors of the model's width.
        return Origin(name, 6 if name.startswith("condition_embedder.time_proj.") else 1)
