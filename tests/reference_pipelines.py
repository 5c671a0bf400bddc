"""Pipelines as the plain references use them: diffusers' own classes, by their public methods, in float32 on the CPU.

Text is padded as the pipelines pad it; options are a resolved recipe as nested dictionaries; latents [B, C, F, H, W].
"""

from __future__ import annotations

import functools
import hashlib
import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

Options = dict[str, Any]


def generator(seed: int, epoch: int, sample: int, purpose: str) -> torch.Generator:
    """A CPU generator seeded by 63 bits of the BLAKE2b digest of "seed/epoch/sample/purpose"."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{sample}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)


@functools.cache
def load(folder: str, dtype: str = "auto") -> Any:
    """The pipeline, in float32 unless `dtype` says otherwise."""
    dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def kind_of(pipeline: Any) -> str:
    return {"WanPipeline": "wan", "StableDiffusion3Pipeline": "sd3", "StableDiffusionPipeline": "sd"}[
        type(pipeline).__name__
    ]


def encode(pipeline: Any, texts: list[str], length: int | None) -> dict[str, dict[str, Tensor]]:
    """Each text's embeddings, by the pipeline's own method."""
    kind = kind_of(pipeline)
    with torch.no_grad():
        if kind == "wan":
            text, _ = pipeline.encode_prompt(
                texts, do_classifier_free_guidance=False, max_sequence_length=length or 512
            )
            return {name: {"text": row} for name, row in zip(texts, text, strict=True)}
        if kind == "sd":
            text, _ = pipeline.encode_prompt(texts, torch.device("cpu"), 1, False)
            return {name: {"text": row} for name, row in zip(texts, text, strict=True)}
        text, _, pooled, _ = pipeline.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=length or 256
        )
        return {name: {"text": text[i], "pooled": pooled[i]} for i, name in enumerate(texts)}


def predict(kind: str, model: Any, latents: Tensor, timesteps: Tensor, condition: dict[str, Tensor]) -> Tensor:
    """A plain forward of the library's model."""
    text = condition["text"]
    if kind == "wan":
        return model(latents, timesteps, text, return_dict=False)[0]
    if kind == "sd3":
        return model(latents[:, :, 0], text, condition["pooled"], timesteps, return_dict=False)[0][:, :, None]
    return model(latents[:, :, 0], timesteps, text, return_dict=False)[0][:, :, None]


def stack(conditions: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]}


def latent_shape(task: Options) -> tuple[int, ...]:
    channels, height, width = 4, task["height"] // 8, task["width"] // 8
    return channels, (task["num_frames"] - 1) // 4 + 1, height, width


def roll_out(
    pipeline: Any,
    options: Options,
    prompts: list[str],
    texts: dict[str, dict[str, Tensor]],
    purpose: str = "rollout",
) -> Options:
    """What the pipeline itself draws, one drawing for each entry of `prompts`, and every step's input and output."""
    kind, sampling, seed, count = kind_of(pipeline), options["sampling"], options["seed"], len(prompts)
    task, negative = options["task"], texts[options["task"]["guidance"]["negative_prompt"]]
    shape = latent_shape(task)
    noise = torch.stack([torch.randn(shape, generator=generator(seed, 0, i, purpose)) for i in range(count)])
    condition = stack([texts[prompt] for prompt in prompts])
    call: Options = {
        "prompt_embeds": condition["text"],
        "negative_prompt_embeds": negative["text"].expand_as(condition["text"]),
        "height": task["height"],
        "width": task["width"],
        "num_inference_steps": sampling["num_inference_steps"],
        "guidance_scale": sampling["guidance_scale"],
        "latents": noise if kind == "wan" else noise[:, :, 0],
        "output_type": "latent",
    }
    if kind == "wan":
        call |= {"num_frames": task["num_frames"]}
        if pipeline.config.boundary_ratio is not None:
            call["guidance_scale_2"] = sampling["guidance_scale_2"]
    elif kind == "sd3":
        call["pooled_prompt_embeds"] = condition["pooled"]
        call["negative_pooled_prompt_embeds"] = negative["pooled"].expand_as(condition["pooled"])
    else:
        call["generator"] = [generator(seed, 0, i, f"{purpose} steps") for i in range(count)]
    inputs, outputs, timesteps = [], [], []
    scheduler = pipeline.scheduler
    step, scale = scheduler.step, scheduler.scale_model_input if kind == "sd" else None

    def recorded_scale(sample: Tensor, timestep: Any) -> Tensor:
        inputs.append(scale(sample, timestep)[:count])
        return scale(sample, timestep)

    def recorded_step(output: Tensor, timestep: Any, sample: Tensor, **others: Any) -> Any:
        if scale is None:
            inputs.append(sample)
        outputs.append(output)
        timesteps.append(float(timestep))
        return step(output, timestep, sample, **others)

    functools.update_wrapper(recorded_step, step)
    scheduler.step = recorded_step
    if scale is not None:
        scheduler.scale_model_input = recorded_scale
    try:
        drawn = pipeline(**call)
    finally:
        vars(scheduler).pop("step")
        vars(scheduler).pop("scale_model_input", None)
    as_video = (lambda tensor: tensor) if kind == "wan" else (lambda tensor: tensor[:, :, None])
    rounded = getattr(torch, options["rollout"]["dtype"])
    return {
        "latents": as_video(drawn.frames if kind == "wan" else drawn.images).to(rounded).float(),
        "inputs": torch.stack([as_video(one) for one in inputs], 1).to(rounded).float(),
        "outputs": torch.stack([as_video(one) for one in outputs], 1).to(rounded).float(),
        "timesteps": timesteps,
    }


def encode_picture(pipeline: Any, file: Path, height: int, width: int) -> Tensor:
    """A picture that covers height x width exactly after scaling one side, cut at the centre, as latents."""
    image = Image.open(file).convert("RGB")
    scale = max(height / image.height, width / image.width)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255 * 2 - 1
    video = torch.from_numpy(pixels).permute(2, 0, 1)[None, :, None]
    config = pipeline.vae.config
    with torch.no_grad():
        if kind_of(pipeline) == "wan":
            mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
            return (pipeline.vae.encode(video).latent_dist.mode() - mean)[0] / std[0]
        latents = pipeline.vae.encode(video[:, :, 0]).latent_dist.mode() - (config.shift_factor or 0.0)
        return (latents * config.scaling_factor)[0][:, None]


def feature_of(kind: str, output: Any) -> Tensor:
    """A block's output as [B, tokens, width]."""
    if kind == "wan":
        return output
    if kind == "sd3":
        return output[1]
    picture = output[0] if isinstance(output, tuple) else output
    return picture.flatten(2).transpose(1, 2)


def blocks_of(kind: str, model: Any) -> list[nn.Module]:
    if kind == "wan":
        return list(model.blocks)
    return list(model.transformer_blocks) if kind == "sd3" else [*model.down_blocks, model.mid_block, *model.up_blocks]


def with_features(kind: str, model: Any, numbers: list[int], inputs: tuple[Any, ...]) -> tuple[Tensor, list[Tensor]]:
    """A forward's prediction, and what the numbered blocks gave in it; `inputs` are those of `predict`."""
    kept: dict[int, Any] = {}
    blocks = blocks_of(kind, model)
    handles = [
        blocks[n].register_forward_hook(lambda module, args, output, n=n: kept.update({n: output}))
        for n in set(numbers)
    ]
    prediction = predict(kind, model, *inputs)
    for handle in handles:
        handle.remove()
    return prediction, [feature_of(kind, kept[n]) for n in numbers]


def scheduler_shift(pipeline: Any, task: Options) -> float:
    """The shift of the pipeline's own schedule."""
    config = pipeline.scheduler.config
    if kind_of(pipeline) == "sd":
        return 1.0
    if not config.get("use_dynamic_shifting"):
        return config.get("shift", config.get("flow_shift"))
    tokens = (task["height"] // 16) * (task["width"] // 16)
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return math.exp(config.base_shift + slope * (tokens - config.base_image_seq_len))
