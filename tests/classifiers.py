"""Small random classifiers with the library's real module layout, pictures for them, and recipes over both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ResNetConfig, ViTConfig

LABELS = ("cat", "dog", "owl")
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
PROCESSOR = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "ViTImageProcessor",
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": 32, "width": 32},
}


def resnet_config(**changes: Any) -> ResNetConfig:
    """Two stages of two layers, three classes."""
    values = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "layer_type": "basic", **NAMES}
    return ResNetConfig(**(values | changes))


def vit_config(**changes: Any) -> ViTConfig:
    """Four layers, 17 tokens."""
    values = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTConfig(**(values | {"image_size": 32, "patch_size": 8, **NAMES} | changes))


def save_classifier(folder: Path, config: Any, seed: int = 0) -> Path:
    """Random weights; running statistics differ from a new layer's, so that not reading them is noticed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageClassification.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
            elif name.endswith("num_batches_tracked"):
                buffer.fill_(7)
        for name, parameter in model.named_parameters():
            if name.startswith("classifier"):
                parameter.data.normal_(0, 0.5)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def save_pictures(folder: Path, count: int = 10) -> Path:
    """`count` noisy pictures of each class, each class in its own colour, in different sizes."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(LABELS):
        (folder / name).mkdir(parents=True)
        for place in range(count):
            pixels = generator.integers(0, 128, (36 + place % 3, 40, 3), dtype=np.uint8)
            pixels[:, :, number] += 100
            Image.fromarray(pixels).save(folder / name / f"{place:03}.png")
    return folder


def recipe(folder: Path, classifier: Path, pictures: Path, config: Any, **sections: Any) -> dict[str, Any]:
    """A recipe that trains in seconds under `folder`, for a student of this config; `sections` go over it."""
    config.to_json_file(folder / "student.json")
    base: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "seed": 3,
        "task": {"kind": "classification"},
        "teacher": {"path": str(classifier)},
        "student": {"config": str(folder / "student.json")},
        "data": {"path": str(pictures)},
        "train": {"max_steps": 6, "batch_size": 8, "log_every": 1},
        "optim": {"lr": 1e-3, "max_grad_norm": 1.0},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


def student_vector(run_dir: Path) -> torch.Tensor:
    """All weights and running statistics of the exported student as one float64 vector."""
    state = load_file(run_dir / "student" / "model.safetensors")
    return torch.cat([state[name].flatten().double() for name in sorted(state)])
