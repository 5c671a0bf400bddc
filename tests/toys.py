"""Small random WanPipelines with the real module layout: Wan 2.1 (one transformer) and Wan 2.2 (two experts)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from distiller.distributed.ranks import Ranks

ALONE = Ranks(torch.device("cpu"), 0, 1, 0, 1, None, None)
"""One process on the CPU."""

WORDS = ("a", "red", "blue", "green", "cat", "dog", "bird", "runs", "sits", "flies")
TEXT_DIM = 16
PROMPTS = [f"a {colour} {animal} {verb}" for colour in WORDS[1:4] for animal in WORDS[4:7] for verb in WORDS[7:]]


def transformer(num_layers: int = 3, num_heads: int = 2, seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    """A random transformer; its output layer is not zero, so that targets and gradients are not either."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = {
            "patch_size": (1, 2, 2),
            "num_attention_heads": num_heads,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": TEXT_DIM,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": num_layers,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        }
        return WanTransformer3DModel(**{**config, **changes})


def make_pipeline(folder: Path, num_experts: int = 1, **changes: Any) -> Path:
    """Saves a pipeline: 32x32 pixels become 4x4x4 latents."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        text_encoder = UMT5EncoderModel(
            UMT5Config(vocab_size=len(WORDS) + 3, d_model=TEXT_DIM, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        )
        vae = AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.0, 0.3],
            latents_std=[1.5, 0.8, 1.0, 1.2],
        )
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: i + 3 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    experts = [transformer(seed=10 + number, **changes) for number in range(num_experts)]
    pipeline = WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=experts[0],
        transformer_2=experts[1] if num_experts == 2 else None,
        boundary_ratio=0.6 if num_experts == 2 else None,
    )
    pipeline.save_pretrained(folder)
    return folder


def write_prompts(file: Path, prompts: list[str] | None = None) -> Path:
    """A prompt file."""
    file.write_text("\n".join(prompts or PROMPTS) + "\n", encoding="utf-8")
    return file


def write_student_config(file: Path, **changes: Any) -> Path:
    """A student's config.json: one head, two layers."""
    config = dict(transformer().config) | {"num_attention_heads": 1, "num_layers": 2, "ffn_dim": 24} | changes
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def recipe(folder: Path, pipeline: Path, **sections: Any) -> dict[str, Any]:
    """A recipe that trains in seconds and writes under `folder`; `sections` are merged over it."""
    base: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "seed": 3,
        "task": {"height": 32, "width": 32, "num_frames": 1},
        "sampling": {"num_inference_steps": 3, "guidance_scale": 1.0},
        "rollout": {"batch_size": 8},
        "teacher": {"path": str(pipeline)},
        "student": {"config": str(write_student_config(folder / "student.json"))},
        "data": {"path": str(write_prompts(folder / "prompts.txt"))},
        "train": {"max_steps": 6, "batch_size": 8, "log_every": 1},
        "optim": {"lr": 1e-3, "max_grad_norm": 1.0},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


def write_recipe(folder: Path, num_experts: int = 1) -> Path:
    """A folder for launches: recipe.yaml with six updates of 8 samples, and a cache of its own."""
    pipeline = make_pipeline(folder / "pipeline", num_experts)
    options = {"cache_dir": str(folder / "cache"), "train": {"max_steps": 6, "batch_size": 8, "log_every": 1}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder, pipeline, **options)))
    return folder


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def student_vector(run_dir: Path) -> torch.Tensor:
    """All weights of the exported student as one float64 vector."""
    state = load_file(run_dir / "student" / "diffusion_pytorch_model.safetensors")
    return torch.cat([state[name].flatten().double() for name in sorted(state)])


def assert_same_run(run_dir: Path, reference_dir: Path, loss_tolerance: float = 2e-5, tolerance: float = 1e-5) -> None:
    """The sameness promise: equal series of losses, also on held-out samples, and equal students by their norm."""
    for name in ("loss", "eval/loss"):
        ours, theirs = (
            [line[name] for line in read_metrics(folder) if name in line] for folder in (run_dir, reference_dir)
        )
        assert len(ours) == len(theirs)
        assert max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0) <= loss_tolerance
    ours, theirs = student_vector(run_dir), student_vector(reference_dir)
    assert ((ours - theirs).norm() / theirs.norm()).item() <= tolerance
