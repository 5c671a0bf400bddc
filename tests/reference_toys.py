"""Pipelines, students and data of the diffusion task's reference tests, and the product's run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import save_file

from distiller.build import build
from distiller.config.diffusion import DiffusionRecipe
from distiller.training.loop import train
from distiller.training.run import Run
from tests import toy_pictures, toys
from tests.key_changes import parsed
from tests.reference_diffusion import Result

PROMPTS = toys.PROMPTS[:12]
BASE: dict[str, Any] = {
    "seed": 3,
    "task.height": 32,
    "task.width": 32,
    "task.num_frames": 1,
    "task.max_sequence_length": 12,
    "sampling.num_inference_steps": 3,
    "sampling.guidance_scale": 1.0,
    "rollout.batch_size": 8,
    "train.max_steps": 4,
    "train.batch_size": 4,
    "train.log_every": 1,
    "optim.lr": 1e-3,
    # Large, so that a wrong scale of the gradient shows in the student, and rounding does not.
    "optim.eps": 1e-2,
    "checkpoint.at_end": False,
}

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("DDIMScheduler", {"set_alpha_to_one": False}),
    "sd-v": ("DDIMScheduler", {"set_alpha_to_one": False, "prediction_type": "v_prediction"}),
    "sd-euler": ("EulerDiscreteScheduler", {}),
    "sd-pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "sd-ancestral": ("EulerAncestralDiscreteScheduler", {}),
}
"""Of Stable Diffusion's teachers."""


def make_folder(root: Path) -> Path:
    """Students and data of all rows."""
    toys.write_student_config(root / "student-wan.json")
    for kind in ("sd3", "sd"):
        toy_pictures.write_student_config(kind, root / f"student-{kind}.json")
    toys.write_prompts(root / "prompts.txt", PROMPTS)
    toys.write_prompts(root / "repeated.txt", [PROMPTS[i] for i in (0, 3, 3, 1, 0, 5, 2, 5)])
    write_latents(root / "latents")
    write_images(root / "images")
    return root


def pipeline_in(folder: Path, name: str) -> Path:
    """A teacher, made when it is first asked for."""
    path = folder / name
    if path.exists():
        return path
    if name in ("wan", "wan2"):
        return toys.make_pipeline(path, 2 if name == "wan2" else 1)
    if name.startswith("sd3"):
        dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=2)
        return toy_pictures.make_sd3(path, scheduler=dynamic if name == "sd3-dynamic" else None)
    kind, options = SCHEDULERS[name]
    return toy_pictures.make_sd(path, scheduler=toy_pictures.make_scheduler(kind, **options))


def write_latents(folder: Path) -> None:
    """Two files, whose samples have prompts in another order than their own."""
    folder.mkdir()
    numbers = torch.Generator().manual_seed(0)
    for name, index in (("a", [4, 0, 3, 3, 1]), ("b", [2, 1, 4, 0, 2, 3, 3])):
        latents = torch.randn(len(index), 4, 1, 4, 4, generator=numbers)
        save_file({"latents": latents, "prompt_index": torch.tensor(index)}, folder / f"{name}.safetensors")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS[5:10]))


def write_images(folder: Path) -> None:
    """Upright and wide pictures, in an order that is not that of their names."""
    folder.mkdir()
    numbers, lines = np.random.default_rng(0), []
    for number in (7, 1, 4, 0, 9, 3, 2, 8, 5, 6, 11, 10):
        size = (64, 96) if number % 2 else (80, 64)
        Image.fromarray(numbers.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": PROMPTS[number]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def forget_accelerator() -> None:
    """Resets Accelerate, so that one test can build several Accelerators."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def recipe_of(folder: Path, pipeline: str, output: Path, keys: Mapping[str, Any]) -> DiffusionRecipe:
    """The base recipe with these dotted keys; paths of data are those of `folder`."""
    family = pipeline.partition("-")[0].removesuffix("2")
    given = BASE | {"task.max_sequence_length": {"wan": 12, "sd3": 5, "sd": None}[family]} | dict(keys)
    given["data.path"] = str(folder / given.get("data.path", "prompts.txt"))
    given |= {
        "output_dir": str(output),
        "cache_dir": str(folder / f"stages-{pipeline}"),
        "teacher.path": str(pipeline_in(folder, pipeline)),
        "student.config": str(folder / f"student-{family}.json"),
    }
    return parsed({}, given)


def run_product(recipe: DiffusionRecipe) -> tuple[Result, Run]:
    """The product's own loop, without export and samples."""
    run = build(recipe)
    assert isinstance(run, Run)
    train(run)
    run.tracker.close()
    result = Result()
    for line in toys.read_metrics(Path(recipe.output_dir)):
        result.losses.append(line["loss"])
        result.gradient_norms.append(line["grad_norm"])
        result.terms.append({name.removeprefix("loss/"): line[name] for name in line if name.startswith("loss/")})
    state = run.student.state_dict()
    result.student = {n.removeprefix("model."): v for n, v in state.items() if n.startswith("model.")}
    return result, run


def assert_same(ours: Result, theirs: Result, tolerance: float = 2e-6) -> None:
    """Equal losses, terms and gradient norms, and students by the norm of all their weights."""
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.gradient_norms == pytest.approx(theirs.gradient_norms, rel=tolerance)
    for own, other in zip(ours.terms, theirs.terms, strict=True):
        assert own == pytest.approx(other, rel=tolerance)
    assert ours.student.keys() == theirs.student.keys()
    own, other = (torch.cat([r.student[n].double().flatten() for n in sorted(ours.student)]) for r in (ours, theirs))
    assert ((own - other).norm() / other.norm()).item() <= tolerance / 10
