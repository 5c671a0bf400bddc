"""Small random pipelines of the picture families with the real module layout: Stable Diffusion 3, Stable Diffusion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from tests import toys

CLIP_LENGTH, CLIP_WIDTH, T5_WIDTH = 8, 8, 16
POOLED_WIDTH = 12
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SD3_CONFIG: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": T5_WIDTH,
    "caption_projection_dim": 16,
    "pooled_projection_dim": POOLED_WIDTH,
    "pos_embed_max_size": 6,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
UNET_CONFIG: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (8, 16),
    "layers_per_block": 2,
    "norm_num_groups": 2,
    "cross_attention_dim": CLIP_WIDTH,
    "attention_head_dim": 2,
}
KINDS = ("sd3", "sd")


def transformer(seed: int = 20, **changes: Any) -> SD3Transformer2DModel:
    """A random SD3 transformer: three blocks, of which the first attends twice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SD3Transformer2DModel(**(SD3_CONFIG | changes))


def unet(seed: int = 30, **changes: Any) -> UNet2DConditionModel:
    """A random UNet of two levels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UNet2DConditionModel(**(UNET_CONFIG | changes))


def make_scheduler(kind: str, **options: Any) -> Any:
    """A scheduler as Stable Diffusion's are saved: samples are not clipped."""
    clipping = {"clip_sample": False} if kind in ("DDIMScheduler", "DDPMScheduler") else {}
    return getattr(diffusers, kind)(**BETAS, **clipping, **options)


def make_sd3(folder: Path, has_third: bool = True, scheduler: Any = None, **changes: Any) -> Path:
    """Saves a Stable Diffusion 3 pipeline: 32x32 pixels become 4 x 4 x 4 latents and 2 x 2 patches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        first, second = (CLIPTextModelWithProjection(_clip_config(width)) for width in (4, 8))
        third = T5EncoderModel(T5Config(**_t5())) if has_third else None
        vae = AutoencoderKL(**_vae(), scaling_factor=1.3, shift_factor=0.1, use_quant_conv=False)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer(**changes),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=first,
        tokenizer=tokenizer(),
        text_encoder_2=second,
        tokenizer_2=tokenizer(),
        text_encoder_3=third,
        tokenizer_3=tokenizer() if has_third else None,
    )
    pipeline.save_pretrained(folder)
    return folder


def make_sd(folder: Path, scheduler: Any = None, **changes: Any) -> Path:
    """Saves a Stable Diffusion pipeline: 32x32 pixels become 4 x 4 x 4 latents."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        text_encoder = CLIPTextModel(_clip_config(None))
        vae = AutoencoderKL(**_vae(), scaling_factor=0.18215)
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer(),
        unet=unet(**changes),
        scheduler=scheduler or make_scheduler("DDIMScheduler", set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def make(kind: str, folder: Path, **options: Any) -> Path:
    """A pipeline of a kind."""
    return {"sd3": make_sd3, "sd": make_sd}[kind](folder, **options)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of the toy prompts; as CLIP's, its limit is that of the encoder's positions."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: i + 3 for i, word in enumerate(toys.WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=CLIP_LENGTH
    )


def write_student_config(kind: str, file: Path, **changes: Any) -> Path:
    """A student's config.json: two blocks of one head, or one layer a block."""
    if kind == "sd3":
        config = dict(transformer().config) | {"num_layers": 2, "num_attention_heads": 1, "caption_projection_dim": 8}
    else:
        config = dict(unet().config) | {"layers_per_block": 1, "block_out_channels": (4, 8)}
    file.write_text(json.dumps(config | changes), encoding="utf-8")
    return file


def recipe(kind: str, folder: Path, pipeline: Path, **sections: Any) -> dict[str, Any]:
    """As `toys.recipe`, for a pipeline of a kind."""
    task = (
        {"height": 32, "width": 32} | ({"max_sequence_length": 5} if kind == "sd3" else {}) | sections.pop("task", {})
    )
    student = {"config": str(write_student_config(kind, folder / "own-student.json"))} | sections.pop("student", {})
    return toys.recipe(folder, pipeline, task=task, student=student, **sections)


def _clip_config(projection: int | None) -> CLIPTextConfig:
    width = {} if projection is None else {"projection_dim": projection}
    return CLIPTextConfig(
        vocab_size=len(toys.WORDS) + 3,
        hidden_size=CLIP_WIDTH,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **width,
    )


def _t5() -> dict[str, Any]:
    return {
        "vocab_size": len(toys.WORDS) + 3,
        "d_model": T5_WIDTH,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
    }


def _vae() -> dict[str, Any]:
    return {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (4,) * 4,
        "norm_num_groups": 2,
        "latent_channels": 4,
        "sample_size": 32,
    }
