"""Teachers and students in the layouts of published models, for benchmarks: recipes first, weights only where needed.

`write_recipe` makes what a plan needs, which is config files alone; `write_weights` adds random weights. Every sample
of Wan is one picture of 640 x 640 pixels, 1,600 tokens; of a language model a row of 2,048 tokens; of a classifier a
picture of 224 x 224.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import WanTransformer3DModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ViTImageProcessor,
)

from distiller.storage.packaged_files import ASSETS_DIR

WAN = {
    # The published transformer/config.json of Wan 2.1 T2V, but for text_dim and the latents' channels.
    "toy": {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 256, "num_layers": 4},
    "wan-1.3b": {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40},
}
WAN_STUDENTS = {"toy": {"num_layers": 2}, "wan-1.3b": {"num_layers": 10}}
WAN_STUDENTS["wan-14b"] = {"num_layers": 10, "num_attention_heads": 12}
LLAMA_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "tie_word_embeddings",
)
LLAMA = {
    # Of the published config.json files of Llama 3.1 8B and 3.2 1B; the student of the second is a quarter of it.
    "llama-8b": ((4096, 14336, 32, 32, 8, False), (2048, 8192, 16, 32, 8, True)),
    "llama-1b": ((2048, 8192, 16, 32, 8, True), (1024, 4096, 8, 16, 4, True)),
}
VOCABULARY, ROW = 128_256, 2048
RESNET = {
    # ResNet-50 into ResNet-18, as transformers' docs describe them.
    "resnet-50": (
        {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck"},
        {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    )
}
MODELS = (*WAN, *LLAMA, *RESNET)


def write_recipe(model: str, folder: Path) -> Path:
    """Writes the models' descriptions and data, without weights; returns the path of a recipe of 16 updates."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = _wan(model, folder) if model in WAN else _llama(model, folder) if model in LLAMA else _resnet(folder)
    recipe = {
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "stages"),
        **sections,
        "tracking": {"trackers": []},
        "checkpoint": {"at_end": False, "every_minutes": None},
    }
    precision = "bf16" if torch.cuda.is_available() else "auto"
    recipe["train"] = {"max_steps": 16, "log_every": 8, "compile": "none", "mixed_precision": precision} | {
        **recipe["train"]
    }
    recipe["teacher"] = {"compile": "none"} | recipe["teacher"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder / "recipe.yaml"


def write_weights(model: str, folder: Path) -> int:
    """Adds random bfloat16 weights, made on the GPU where there is one; returns the teacher's number of parameters."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if model in WAN:
            copy_pipeline(folder / "teacher", with_weights=True)
            module: Any = WanTransformer3DModel.from_config(wan_config(model))
            target = folder / "teacher" / "transformer"
        elif model in LLAMA:
            module, target = AutoModelForCausalLM.from_config(_llama_config(model, 0)), folder / "teacher"
        else:
            config = ResNetConfig.from_pretrained(folder / "teacher")
            module, target = AutoModelForImageClassification.from_config(config), folder / "teacher"
    module.to(torch.bfloat16).save_pretrained(target)
    return sum(parameter.numel() for parameter in module.parameters())


def copy_pipeline(folder: Path, *, with_weights: bool) -> None:
    """The packaged digits' text encoder, tokenizer and VAE: text is 64 wide and latents have 4 channels."""
    left_out = ["transformer"] if with_weights else ["transformer", "*.safetensors"]
    shutil.copytree(ASSETS_DIR / "digits-wan", folder, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)


def wan_config(model: str) -> dict[str, Any]:
    """The transformer's config.json."""
    config = json.loads((ASSETS_DIR / "digits-wan" / "transformer" / "config.json").read_text())
    return config | WAN[model] | {"rope_max_seq_len": 1024}


def _wan(model: str, folder: Path) -> dict[str, Any]:
    copy_pipeline(folder / "teacher", with_weights=False)
    (folder / "teacher" / "transformer").mkdir(exist_ok=True)
    (folder / "teacher" / "transformer" / "config.json").write_text(json.dumps(wan_config(model)))
    return {
        "task": {"kind": "diffusion", "height": 640, "width": 640, "num_frames": 1},
        "teacher": {"path": str(folder / "teacher")},
        "student": WAN_STUDENTS[model],
        "data": {"kind": "prompts", "path": "asset:digits-prompts.txt", "max_samples": 256},
        # Random weights draw nothing: noise costs the loop the same as a rollout's latents would.
        "rollout": {"enabled": False},
        "sampling": {"num_inference_steps": 2, "guidance_scale": 1.0},
        "train": {"batch_size": 4},
    }


def _llama_config(model: str, which: int) -> LlamaConfig:
    sizes = dict(zip(LLAMA_SIZES, LLAMA[model][which], strict=True))
    return LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, **sizes)


def _llama(model: str, folder: Path) -> dict[str, Any]:
    for which, name in enumerate(("teacher", "student")):
        _llama_config(model, which).save_pretrained(folder / name)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1").save_pretrained(
        folder / "teacher"
    )
    numbers = random.Random(0)
    rows = (" ".join(f"w{numbers.randrange(2, VOCABULARY)}" for _ in range(ROW - 1)) for _ in range(32))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = {"kind": "jsonl", "path": str(folder / "texts.jsonl"), "max_length": ROW, "packing": False, "held_out": 0}
    return {
        "task": {"kind": "causal_lm"},
        "teacher": {"path": str(folder / "teacher")},
        "student": {"config": str(folder / "student" / "config.json")},
        "data": data,
        "train": {"batch_size": 4},
    }


def _resnet(folder: Path) -> dict[str, Any]:
    from PIL import Image

    labels = {f"class{number}": number for number in range(10)}
    names = {"label2id": labels, "id2label": {number: name for name, number in labels.items()}}
    for name, sizes in zip(("teacher", "student"), RESNET["resnet-50"], strict=True):
        ResNetConfig(**sizes, **names, architectures=["ResNetForImageClassification"]).save_pretrained(folder / name)
    ViTImageProcessor().save_pretrained(folder / "teacher")
    numbers = random.Random(0)
    for label in labels:
        (folder / "pictures" / label).mkdir(parents=True, exist_ok=True)
        for place in range(32):
            picture = Image.frombytes("RGB", (224, 224), numbers.randbytes(224 * 224 * 3))
            picture.save(folder / "pictures" / label / f"{place}.png", compress_level=0)
    return {
        "task": {"kind": "classification"},
        "teacher": {"path": str(folder / "teacher")},
        "student": {"config": str(folder / "student" / "config.json")},
        "data": {"path": str(folder / "pictures")},
        "train": {"batch_size": 64, "num_workers": 4},
    }
