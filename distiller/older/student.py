"""Translates an older student config (`hidden_size`, `depth`, ...) into a Wan transformer's config. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distiller.errors import UserError

OLDER_KEYS = ("hidden_size", "depth")
"""Keys that an older config has and diffusers' config has not."""
REQUIRED = ("hidden_size", "depth", "num_heads")
NUMBERS = (
    *REQUIRED,
    *("num_channels", "image_size", "patch_size", "text_max_length", "text_encoder_output_dim"),
)
UNUSED = ("model_type", "projection_factor")
PIPELINE_LENGTH = 512
"""Text tokens to which WanPipeline pads prompts by default."""
SMALLEST_HEAD = 6
"""Fewest channels of a head: Wan's rotary embedding gives height and width 2 * (channels // 6) each, below 6 none."""


@dataclass(frozen=True)
class TranslatedStudent:
    """A `WanTransformer3DModel`'s config, and what the older config says about the task.

    Attributes:
        image_size: height and width in pixels; None if the older config has none.
        max_sequence_length: text tokens; None if the older config has none.
    """

    config: dict[str, Any]
    image_size: int | None
    max_sequence_length: int | None
    notices: tuple[str, ...]


def is_older(config: Any) -> bool:
    """Whether this is an older config and not one of diffusers."""
    return isinstance(config, Mapping) and any(key in config for key in OLDER_KEYS)


def translate_student(
    older: Mapping[str, Any], teacher: Mapping[str, Any], latent_pixels: int, origin: str
) -> TranslatedStudent:
    """Translates an older config.

    Args:
        older: the older config.
        teacher: the whole config of the teacher's transformer, for all values that the older config does not have.
        latent_pixels: height, and width, in pixels of the square that one latent of the teacher's VAE stands for.
        origin: the flag and file, for errors.

    Raises:
        UserError: a key is missing, unknown or not a positive integer, or no Wan transformer has these sizes.
    """
    _check_keys(older, origin)
    hidden_size, num_heads = older["hidden_size"], older["num_heads"]
    _check_heads(hidden_size, num_heads, origin)
    notices: list[str] = []
    config = {
        "_class_name": "WanTransformer3DModel",
        **teacher,
        "num_layers": older["depth"],
        "num_attention_heads": num_heads,
        "attention_head_dim": hidden_size // num_heads,
        "ffn_dim": 4 * hidden_size,
    }
    if "patch_size" in older:
        patch = _patch_in_latents(older["patch_size"], latent_pixels, origin, notices)
        config["patch_size"] = [1, patch, patch]
    if "num_channels" in older:
        notices.append(
            f"the student's num_channels {older['num_channels']} became the teacher's in_channels "
            f"{teacher['in_channels']} and out_channels {teacher['out_channels']}: a projection in front of the "
            "teacher would change what it is asked"
        )
    text_dim = older.get("text_encoder_output_dim", teacher["text_dim"])
    if text_dim != teacher["text_dim"]:
        notices.append(
            f"the student's text_encoder_output_dim {text_dim} became the teacher's text_dim {teacher['text_dim']}: "
            "both read the teacher's text encoder"
        )
    length = older.get("text_max_length")
    if length not in (None, PIPELINE_LENGTH):
        notices.append(
            f"text_max_length {length}: prompts are cut and padded to {length} tokens for teacher and student; draw "
            f"with max_sequence_length={length} in the pipeline, whose own is {PIPELINE_LENGTH}"
        )
    if older.get("projection_factor") not in (None, 1):
        notices.append(
            f"the student's projection_factor {older['projection_factor']} is not used: nothing is projected"
        )
    return TranslatedStudent(config, older.get("image_size"), length, tuple(notices))


def _check_keys(older: Mapping[str, Any], origin: str) -> None:
    if missing := [key for key in REQUIRED if key not in older]:
        raise UserError(f"{origin} lacks {', '.join(missing)}; an older config needs {', '.join(REQUIRED)}")
    known = (*NUMBERS, *UNUSED)
    if unknown := [key for key in older if key not in known and not key.startswith("_")]:
        raise UserError(
            f"{origin} has keys that an older config does not know: {', '.join(unknown)}; remove them, or give the "
            "config.json of a WanTransformer3DModel"
        )
    for key in NUMBERS:
        if key in older and (type(older[key]) is not int or older[key] < 1):
            raise UserError(f"{origin}: {key} is {older[key]!r}; it must be a whole number above 0")


def _check_heads(hidden_size: int, num_heads: int, origin: str) -> None:
    if _is_head(hidden_size, num_heads):
        return
    step, least = 2 * num_heads, SMALLEST_HEAD * num_heads
    below = hidden_size // step * step
    sizes = [str(size) for size in (below, max(below + step, least)) if size >= least]
    fitting = [heads for heads in range(1, hidden_size + 1) if _is_head(hidden_size, heads)]
    nearest = sorted(fitting, key=lambda heads: abs(heads - num_heads))[:2]
    or_heads = f", or num_heads {' or '.join(str(heads) for heads in sorted(nearest))}" if nearest else ""
    raise UserError(
        f"{origin}: hidden_size {hidden_size} over num_heads {num_heads} makes heads of {hidden_size / num_heads:g} "
        f"channels; Wan needs an even number from {SMALLEST_HEAD} up: give hidden_size {' or '.join(sizes)}{or_heads}"
    )


def _is_head(hidden_size: int, num_heads: int) -> bool:
    return hidden_size % (2 * num_heads) == 0 and hidden_size // num_heads >= SMALLEST_HEAD


def _patch_in_latents(patch_size: int, latent_pixels: int, origin: str, notices: list[str]) -> int:
    """The patch's edge in latents, as Wan counts it. Raises UserError.

    The older config counts it in pixels: it has (image_size / patch_size)^2 tokens.
    """
    if patch_size < latent_pixels:
        notices.append(
            f"the student's patch_size {patch_size} is read in latents, since one latent is {latent_pixels} pixels"
        )
        return patch_size
    if patch_size % latent_pixels:
        below = patch_size // latent_pixels * latent_pixels
        raise UserError(
            f"{origin}: patch_size {patch_size} pixels is no multiple of {latent_pixels}, the pixels of one latent; "
            f"give {below} or {below + latent_pixels}"
        )
    return patch_size // latent_pixels
