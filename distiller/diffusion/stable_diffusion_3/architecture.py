"""`SD3Transformer2DModel`: a stack of blocks in which tokens of picture and text attend to each other."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.architecture import Architecture, LatentShape, Origin, check_builds, check_whole_numbers
from distiller.errors import UserError
from distiller.tasks.layer_selection import evenly_spaced

WHOLE_NUMBERS = (
    *("sample_size", "patch_size", "in_channels", "num_layers", "attention_head_dim", "num_attention_heads"),
    *("joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "pos_embed_max_size"),
)
MODULATIONS = ("norm1.linear.", "norm1_context.linear.", "norm_out.linear.")
"""In the names of layers whose outputs concatenate vectors of the model's width: shifts, scales and gates."""


class SD3Architecture(Architecture):
    """See `Architecture`; conditions: `text` [B, L, D] and `pooled` [B, P]."""

    model_class = SD3Transformer2DModel
    part = "transformer"
    sizes_vary = False
    keys_equal_to_teacher: ClassVar = {
        "in_channels": "input channels",
        "out_channels": "output channels",
        "patch_size": "latents a patch",
        "joint_attention_dim": "text width",
        "pooled_projection_dim": "width of the pooled text",
    }
    cut_keys: ClassVar = {"num_layers": "num_layers", "num_attention_heads": "num_attention_heads"}

    def check_numbers(self, config: Mapping[str, Any], origin: str) -> None:
        check_whole_numbers(config, WHOLE_NUMBERS, origin)
        width = _width(config)
        if config["caption_projection_dim"] != width:
            raise UserError(
                f"{origin}: caption_projection_dim is {config['caption_projection_dim']}; it must be "
                f"num_attention_heads x attention_head_dim, {width}, since text and picture attend to each other"
            )
        check_builds(self, config, origin)

    def check_student(self, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> None:
        del config, teacher

    def check_size(self, owner: str, config: Mapping[str, Any], task: DiffusionOptions, shape: LatentShape) -> None:
        patch, limit = config["patch_size"], config["pos_embed_max_size"]
        for name, size in zip(("height", "width"), shape[2:], strict=True):
            if size // patch > limit:
                raise UserError(
                    f"task.{name} {getattr(task, name)} makes {size // patch} patches and the {owner}'s "
                    f"pos_embed_max_size is {limit}; lower it"
                )

    def block_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(f"transformer_blocks.{index}" for index in range(config["num_layers"]))

    def num_tokens(self, config: Mapping[str, Any], shape: LatentShape) -> int:
        return (shape[2] // config["patch_size"]) * (shape[3] // config["patch_size"])

    def feature_shape(self, config: Mapping[str, Any], block: int, shape: LatentShape) -> tuple[int, int]:
        del block
        return self.num_tokens(config, shape), _width(config)

    def feature(self, output: Any) -> Tensor:
        # A block returns (text, picture); the last one returns None for the text.
        return output[1]

    def prepare(self, model: nn.Module, max_sequence_length: int) -> None:
        del model, max_sequence_length

    def input_layer(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("pos_embed.proj")

    def forward(self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        prediction = model(
            hidden_states=latents.squeeze(2),
            encoder_hidden_states=conditions["text"],
            pooled_projections=conditions["pooled"],
            timestep=timesteps,
            return_dict=False,
        )[0]
        return prediction.unsqueeze(2)

    def finish_cut(self, config: dict[str, Any], teacher: Mapping[str, Any]) -> None:
        config["caption_projection_dim"] = _width(config)
        kept = _kept(config, teacher)
        dual = set(teacher["dual_attention_layers"])
        config["dual_attention_layers"] = tuple(
            index for index, teacher_index in enumerate(kept) if teacher_index in dual
        )

    def origin(self, name: str, target: Tensor, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> Origin | None:
        if name == "pos_embed.pos_embed" and _width(config) != _width(teacher):
            # A fixed table of sines: the leading channels of a wider table hold the positions along one axis only.
            return None
        stacked = target.shape[0] // _width(config) if any(part in name for part in MODULATIONS) else 1
        if name.startswith("transformer_blocks."):
            _, index, rest = name.split(".", 2)
            return Origin(f"transformer_blocks.{_kept(config, teacher)[int(index)]}.{rest}", stacked)
        return Origin(name, stacked)


def _width(config: Mapping[str, Any]) -> int:
    """The width of the model."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def _kept(config: Mapping[str, Any], teacher: Mapping[str, Any]) -> list[int]:
    """Indices of the teacher's blocks that a student has. The last is always kept: it alone returns no text."""
    count = config["num_layers"]
    return [teacher["num_layers"] - 1] if count == 1 else evenly_spaced(count, teacher["num_layers"])
