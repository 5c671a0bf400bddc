"""`UNet2DConditionModel`: down blocks, a middle block and up blocks, with skip connections from down to up blocks."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.architecture import Architecture, LatentShape, Origin, check_builds, check_whole_numbers
from distiller.errors import UserError
from distiller.tasks.layer_selection import evenly_spaced

BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
"""Config key -> the supported types of blocks."""
OTHER_INPUTS = (
    *("class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim", "encoder_hid_dim_type"),
    "time_cond_proj_dim",
)
"""Config keys of models that take more inputs than latents, timestep and text; they must be None."""


class UNetArchitecture(Architecture):
    """See `Architecture`; conditions: `text` [B, L, D]."""

    model_class = UNet2DConditionModel
    part = "unet"
    sizes_vary = False
    keys_equal_to_teacher: ClassVar = {
        "in_channels": "input channels",
        "out_channels": "output channels",
        "cross_attention_dim": "text width",
    }
    cut_keys: ClassVar = {"num_layers": "layers_per_block"}

    def check_numbers(self, config: Mapping[str, Any], origin: str) -> None:
        check_whole_numbers(config, ("in_channels", "out_channels"), origin)
        if given := [key for key in OTHER_INPUTS if config[key] is not None]:
            raise UserError(
                f"{origin}: {given[0]} is {config[given[0]]!r}; a model is distilled that takes latents, timestep and "
                "text alone"
            )
        if config["in_channels"] != config["out_channels"]:
            raise UserError(
                f"{origin} has {config['in_channels']} input and {config['out_channels']} output channels, so it takes "
                "a picture beside the latents; give a text-to-image model"
            )
        for key, known in BLOCKS.items():
            if not isinstance(config[key], list | tuple):
                raise UserError(f"{origin}: {key} is {config[key]!r}; give a list of names")
            if other := [name for name in config[key] if name not in known]:
                raise UserError(f"{origin}: {key} names {other[0]}; distilled are {', '.join(known)}")
        if config["mid_block_type"] not in ("UNetMidBlock2DCrossAttn", None):
            raise UserError(
                f"{origin}: mid_block_type is {config['mid_block_type']}; it must be UNetMidBlock2DCrossAttn or null"
            )
        if config["dropout"]:
            raise UserError(f"{origin}: dropout is {config['dropout']}; set it to 0")
        check_builds(self, config, origin)

    def check_student(self, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> None:
        del config, teacher

    def check_size(self, owner: str, config: Mapping[str, Any], task: DiffusionOptions, shape: LatentShape) -> None:
        halvings = len(config["block_out_channels"]) - 1
        for name, size in zip(("height", "width"), shape[2:], strict=True):
            if size % 2**halvings:
                raise UserError(
                    f"task.{name} {getattr(task, name)} makes {size} latents, and the {owner}'s UNet halves them "
                    f"{halvings} times; give a size whose latents are a multiple of {2**halvings}"
                )

    def block_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        levels = range(len(config["block_out_channels"]))
        middle = () if config["mid_block_type"] is None else ("mid_block",)
        return (*(f"down_blocks.{level}" for level in levels), *middle, *(f"up_blocks.{level}" for level in levels))

    def num_tokens(self, config: Mapping[str, Any], shape: LatentShape) -> int:
        del config
        return shape[2] * shape[3]

    def feature_shape(self, config: Mapping[str, Any], block: int, shape: LatentShape) -> tuple[int, int]:
        channels, name = config["block_out_channels"], self.block_names(config)[block]
        last = len(channels) - 1
        if name == "mid_block":
            level, width = last, channels[last]
        else:
            index = int(name.rpartition(".")[2])
            is_down = name.startswith("down")
            # A block changes the resolution at its end, except for the last down block and the last up block.
            level = min(index + 1, last) if is_down else max(last - 1 - index, 0)
            width = channels[index if is_down else last - index]
        return (shape[2] >> level) * (shape[3] >> level), width

    def feature(self, output: Any) -> Tensor:
        # A down block also returns the tensors of its skip connections.
        activations: Tensor = output[0] if isinstance(output, tuple) else output
        return activations.flatten(2).transpose(1, 2)

    def prepare(self, model: nn.Module, max_sequence_length: int) -> None:
        del max_sequence_length
        # Device maps assign modules to devices in the order of registration. It must be that of the forward pass, so
        # that this goes from each device to the next only once; diffusers registers mid_block after up_blocks.
        modules = list(model._modules)
        for name in modules[modules.index("up_blocks") :]:
            if name != "mid_block":
                model._modules[name] = model._modules.pop(name)

    def input_layer(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("conv_in")

    def forward(self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        prediction = model(latents.squeeze(2), timesteps, conditions["text"], return_dict=False)[0]
        return prediction.unsqueeze(2)

    def finish_cut(self, config: dict[str, Any], teacher: Mapping[str, Any]) -> None:
        del config, teacher

    def origin(self, name: str, target: Tensor, config: Mapping[str, Any], teacher: Mapping[str, Any]) -> Origin | None:
        """See `Architecture.origin`.

        A down block keeps its first layer. An up block keeps its first and its last, whose input channels differ from
        those of other layers. With one layer a block this is the choice of BK-SDM (Kim et al. 2023, arXiv 2305.15798).
        """
        path = name.split(".")
        if path[0] not in ("down_blocks", "up_blocks") or path[2] not in ("resnets", "attentions"):
            return Origin(name)
        more = 1 if path[0] == "up_blocks" else 0
        kept = evenly_spaced(config["layers_per_block"] + more, teacher["layers_per_block"] + more)
        return Origin(".".join([*path[:3], str(kept[int(path[3])]), *path[4:]]))
