"""A toy recipe for a model of each library and family: teacher, student, data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Gemma2Config, Qwen2Config

from tests import classifiers, toy_causal_lm, toy_pictures, toys

FEATURES = {"features": {"weight": 0.3, "student_blocks": [0], "teacher_blocks": [1]}}
LANGUAGE = {
    "llama": toy_causal_lm.llama_config,
    "gpt2": toy_causal_lm.gpt2_config,
    "qwen2": lambda: Qwen2Config(**toy_causal_lm.SIZES, num_hidden_layers=2, num_key_value_heads=2),
    "gemma2": lambda: Gemma2Config(**toy_causal_lm.SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=8),
}
CLASSIFIERS = {"resnet": classifiers.resnet_config, "vit": classifiers.vit_config}


def recipe_of(family: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """A short run with features; the teacher is made when it is first asked for."""
    teacher = folder / "teacher"
    sections["train"] = {"max_steps": 2, "batch_size": 4, "log_every": 1} | sections.get("train", {})
    if family in LANGUAGE:
        if not teacher.exists():
            toy_causal_lm.save_model(teacher, LANGUAGE[family]())
        losses = {"losses": FEATURES}
        return toy_causal_lm.recipe(folder, teacher, task=losses, **sections)
    if family in CLASSIFIERS:
        config = CLASSIFIERS[family]()
        if not teacher.exists():
            classifiers.save_classifier(teacher, config)
            classifiers.save_pictures(folder / "pictures")
        return classifiers.recipe(folder, teacher, folder / "pictures", config, task={"losses": FEATURES}, **sections)
    if family == "wan":
        if not teacher.exists():
            toys.make_pipeline(teacher)
        return toys.recipe(folder, teacher, rollout={"enabled": False}, task={"losses": FEATURES}, **sections)
    if not teacher.exists():
        toy_pictures.make(family, teacher)
    task = {"losses": FEATURES}
    return toy_pictures.recipe(family, folder, teacher, rollout={"enabled": False}, task=task, **sections)
