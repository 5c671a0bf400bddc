"""What a recipe leaves out, filled in: the pipeline's own size and way of drawing, and how many samples at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from distiller.config.diffusion import DiffusionRecipe
from distiller.config.sections import Section
from distiller.data.latents import LatentStore
from distiller.diffusion.family import Family
from distiller.storage.packaged_files import local_path

SIZE = ("num_frames", "height", "width")
SAMPLING = ("num_inference_steps", "guidance_scale")
"""Keys of `task`, and of `sampling`; the second are arguments of every pipeline's call."""
TOKENS_AT_ONCE = 32_768
"""Of the latents, as the first block sees them: one video of 81 frames in 480 x 832 pixels by Wan."""
MOST_ROLLED_OUT, MOST_EVALUATED = 64, 50
"""Samples of a forward pass, however few tokens they have."""


def with_pipeline_defaults(recipe: DiffusionRecipe, family: Family) -> tuple[DiffusionRecipe, list[str]]:
    """The recipe with a number under every such key that it leaves out, and lines that say which and where from.

    The size is that of the latents where they are the data, else the pipeline's own, and pictures have one frame. Reads
    no weights. Raises UserError where the pipeline's files do not say it.
    """
    task, sampling, said = recipe.task, recipe.sampling, defaultdict[str, list[str]](list)
    by_itself = f"as {family.name} draws by itself"
    if size := _left_out(task, SIZE, lambda: _size(recipe, family)):
        origin = {
            "latents": "as the latents of data.path are",
            "images": f"{by_itself}, and pictures have one frame",
        }.get(recipe.data.kind, by_itself)
        said[origin] += _shown("task", size)
        task = task.model_copy(update=size)
    if drawing := _left_out(sampling, SAMPLING, lambda: {key: family.call_defaults[key] for key in SAMPLING}):
        said[by_itself] += _shown("sampling", drawing)
        sampling = sampling.model_copy(update=drawing)
    tokens = family.architecture.num_tokens(family.teacher_config, family.latent_shape(*task.size))
    # Patches larger than the latents, which have no token, are refused later.
    at_once = max(1, TOKENS_AT_ONCE // max(1, tokens))
    sections: dict[str, Section] = {"task": task, "sampling": sampling}
    for name, most in (("rollout", MOST_ROLLED_OUT), ("evaluation", MOST_EVALUATED)):
        if getattr(recipe, name).batch_size is None:
            sections[name] = getattr(recipe, name).model_copy(update={"batch_size": min(at_once, most)})
            if at_once < most:
                said[f"for about {TOKENS_AT_ONCE:,} tokens a forward pass"] += [f"{name}.batch_size {at_once}"]
    return recipe.model_copy(update=sections), [f"{origin}: {', '.join(keys)}" for origin, keys in said.items()]


def _left_out(section: Section, keys: tuple[str, ...], found: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Those of the keys that a section has no value for, with what is found for them."""
    missing = [key for key in keys if getattr(section, key) is None]
    values = found() if missing else {}
    return {key: values[key] for key in missing}


def _size(recipe: DiffusionRecipe, family: Family) -> dict[str, int]:
    if recipe.data.kind == "latents":
        channels, num_frames, height, width = LatentStore(local_path(recipe.data.path)).shape
        num_frames, height, width = family.drawn_size((channels, num_frames, height, width))
    else:
        num_frames, height, width = family.own_size()
    if recipe.data.kind == "images":
        num_frames = 1
    return {"num_frames": num_frames, "height": height, "width": width}


def _shown(section: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{section}.{key} {value:g}" for key, value in values.items()]
