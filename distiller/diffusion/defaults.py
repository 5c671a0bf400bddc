"""Fills in what a recipe leaves out: size and sampling options as the pipeline has them, and batch sizes."""

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
"""Keys of the recipe's `task` (`SIZE`) and `sampling`. The latter are arguments of every pipeline's `__call__`."""
DEFAULT_TOKENS_PER_FORWARD = 32_768
"""Default for the tokens of a forward pass: about those of a Wan video of 81 frames of 480 x 832 pixels (32,760)."""
MAX_ROLLOUT_BATCH, MAX_EVALUATION_BATCH = 64, 50
"""Limits of the default batch sizes of `rollout` and `evaluation`, in samples."""


def with_pipeline_defaults(recipe: DiffusionRecipe, family: Family) -> tuple[DiffusionRecipe, list[str]]:
    """The recipe with a value for every such key that it leaves out, and notices: the keys filled in, and from where.

    The size is that of the latents if the data are latents, otherwise the pipeline's own; images have one frame. Reads
    no weights. Raises UserError where the pipeline's files do not say its size.
    """
    task, sampling, filled_keys = recipe.task, recipe.sampling, defaultdict[str, list[str]](list)
    pipeline_default = f"as {family.name} draws by itself"
    if size := _left_out(task, SIZE, lambda: _size(recipe, family)):
        origin = {
            "latents": "as the latents of data.path are",
            "images": f"{pipeline_default}, and pictures have one frame",
        }.get(recipe.data.kind, pipeline_default)
        filled_keys[origin] += _shown("task", size)
        task = task.model_copy(update=size)
    if options := _left_out(sampling, SAMPLING, lambda: {key: family.call_defaults[key] for key in SAMPLING}):
        filled_keys[pipeline_default] += _shown("sampling", options)
        sampling = sampling.model_copy(update=options)
    tokens = family.architecture.num_tokens(family.teacher_config, family.latent_shape(*task.size))
    # Latents smaller than a patch have 0 tokens here; `check_size` refuses them later.
    num_samples = max(1, DEFAULT_TOKENS_PER_FORWARD // max(1, tokens))
    sections: dict[str, Section] = {"task": task, "sampling": sampling}
    for name, limit in (("rollout", MAX_ROLLOUT_BATCH), ("evaluation", MAX_EVALUATION_BATCH)):
        if getattr(recipe, name).batch_size is None:
            sections[name] = getattr(recipe, name).model_copy(update={"batch_size": min(num_samples, limit)})
            if num_samples < limit:
                filled_keys[f"for about {DEFAULT_TOKENS_PER_FORWARD:,} tokens a forward pass"] += [
                    f"{name}.batch_size {num_samples}"
                ]
    return recipe.model_copy(update=sections), [f"{origin}: {', '.join(keys)}" for origin, keys in filled_keys.items()]


def _left_out(section: Section, keys: tuple[str, ...], found: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The keys that a section has no value for, with their values from `found`, called if there are such keys."""
    missing = [key for key in keys if getattr(section, key) is None]
    values = found() if missing else {}
    return {key: values[key] for key in missing}


def _size(recipe: DiffusionRecipe, family: Family) -> dict[str, int]:
    """Default values of the keys `SIZE`. Raises UserError."""
    if recipe.data.kind == "latents":
        channels, num_frames, height, width = LatentStore(local_path(recipe.data.path)).shape
        num_frames, height, width = family.pixel_size((channels, num_frames, height, width))
    else:
        num_frames, height, width = family.default_size()
    if recipe.data.kind == "images":
        num_frames = 1
    return {"num_frames": num_frames, "height": height, "width": width}


def _shown(section: str, values: Mapping[str, Any]) -> list[str]:
    """Keys and values as the notices name them."""
    return [f"{section}.{key} {value:g}" for key, value in values.items()]
