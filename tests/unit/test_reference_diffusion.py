"""Every key of the diffusion task against a plain loop of its own (`tests.reference_diffusion`).

A row changes one key of a recipe. The product's loss, gradient norm and student after a few updates are the reference's
with that key, and the reference's own loss moves with the key: a product that ignored it would fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from pydantic import BaseModel
from safetensors.torch import save_file

from distiller import caching
from distiller.build import build
from distiller.diffusion_config import DiffusionRecipe
from distiller.recipe_file import parse
from distiller.trainer import Run, train
from tests import reference_diffusion, toy_pictures, toys
from tests.reference_diffusion import Result

# What diffusers' schedulers do with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")

SECTIONS = ("task", "sampling", "rollout", "data", "cache")
"""Those whose every key is held here; `optim` and `train` are held by tests/unit/test_reference_training.py."""
PROMPTS = toys.PROMPTS[:12]
BASE: dict[str, Any] = {
    "seed": 3,
    "task.height": 32,
    "task.width": 32,
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
NO_RESULT = {
    "task.kind": "which task it is",
    "data.path": "every row has one",
    "cache.shard_mib": "test_a_cache_in_several_files_is_the_same_cache",
}
"""Keys that no row changes, and why."""
FEATURES = {
    "task.losses.features.weight": 0.5,
    "task.losses.features.student_blocks": [0],
    "task.losses.features.teacher_blocks": [1],
}
TWO_FEATURES = FEATURES | {
    "task.losses.features.student_blocks": [0, 1],
    "task.losses.features.teacher_blocks": [2, 0],
}
HUBER = {"task.losses.prediction.kind": "huber"}
STORED = {"task.targets": "stored"}
LOGIT_NORMAL = {"task.timesteps.sampling": "logit_normal"}
GUIDED = {"task.guidance.scale": 4.0}
DRAWN_GUIDED = {"sampling.guidance_scale": 3.0}
TRUE_DATA = {"task.losses.true_data.weight": 0.5}
FIVE_STEPS = {"sampling.num_inference_steps": 5}
LATENTS, IMAGES = {"data.kind": "latents", "data.path": "latents"}, {"data.kind": "images", "data.path": "images"}


@dataclass(frozen=True)
class Row:
    """A recipe `given`, and what is changed in it; `keeps` says that no number moves by that."""

    pipeline: str
    changed: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False

    @property
    def name(self) -> str:
        def of(keys: Mapping[str, Any]) -> str:
            return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in keys.items())

        return f"{self.pipeline}:{of(self.changed) or 'base'}" + (f"|{of(self.given)}" if self.given else "")


ROWS = [
    # What is learnt.
    Row("wan", {}),
    Row("wan", {"seed": 4}),
    Row("wan", {"task.height": 48}),
    Row("wan", {"task.width": 48}),
    Row("wan", {"task.num_frames": 5}),
    Row("wan", {"task.max_sequence_length": None}),
    Row("wan", {"task.condition_dropout": 0.4}),
    Row("wan", {"task.condition_dropout": 0.4}, GUIDED),
    # Noise levels.
    Row("wan", LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_mean": 0.8}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_mean": 12.0}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_mean": -12.0}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.logit_std": 0.3}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.shift": 1.0}),
    Row("wan", {"task.timesteps.shift": 5.0}, LOGIT_NORMAL),
    Row("wan", {"task.timesteps.weighting": "sigma_sqrt"}),
    Row("wan", {"task.timesteps.weighting": "cosmap"}),
    Row("wan", {"task.timesteps.weighting": "cosmap"}, LATENTS | TRUE_DATA | FEATURES),
    # Guidance that is learnt.
    Row("wan", GUIDED),
    Row("wan", {"task.guidance.scale": [1.5, 6.0]}),
    Row("wan", {"task.guidance.negative_prompt": "blue dog flies"}, GUIDED),
    Row("wan", {"task.guidance.negative_prompt": "blue dog flies"}, DRAWN_GUIDED),
    # Losses.
    Row("wan", {"task.losses.prediction.weight": 0.25}),
    Row("wan", {"task.losses.prediction.weight": 0.25}, FEATURES),
    Row("wan", HUBER),
    Row("wan", {"task.losses.prediction.huber_delta": 0.2}, HUBER),
    Row("wan", FEATURES),
    Row("wan", {"task.losses.features.weight": 2.0}, FEATURES),
    Row("wan", {"task.losses.features.student_blocks": [1]}, FEATURES),
    Row("wan", {"task.losses.features.teacher_blocks": [2]}, FEATURES),
    Row("wan", TWO_FEATURES, FEATURES),
    Row("wan", {"task.losses.prediction.weight": 0.0}, TWO_FEATURES),
    Row("wan", FEATURES, GUIDED | {"task.condition_dropout": 0.4}),
    Row("wan", TRUE_DATA, LATENTS),
    Row("wan", {"task.losses.prediction.weight": 0.0}, LATENTS | TRUE_DATA),
    # Data.
    Row("wan", LATENTS),
    Row("wan", IMAGES),
    Row("wan", TRUE_DATA, IMAGES),
    Row("wan", {"data.max_samples": 8}),
    Row("wan", {"data.max_samples": 8}, LATENTS),
    Row("wan", {"data.max_samples": 8}, IMAGES),
    # The rollout, and what is drawn there.
    Row("wan", {"rollout.enabled": False}),
    Row("wan", {"rollout.samples_per_prompt": 2}),
    Row("wan", {"rollout.samples_per_prompt": 2}, STORED),
    Row("wan", {"rollout.batch_size": 5}, keeps=True),
    Row("wan", {"rollout.dtype": "bfloat16"}),
    Row("wan", {"rollout.dtype": "bfloat16"}, STORED),
    Row("wan", {"sampling.num_inference_steps": 5}),
    Row("wan", {"sampling.num_inference_steps": 5}, STORED),
    Row("wan", DRAWN_GUIDED),
    Row("wan", DRAWN_GUIDED, STORED),
    Row("wan", STORED),
    Row("wan", {"task.timesteps.weighting": "sigma_sqrt"}, STORED),
    # A run of four updates of four samples begins a second epoch.
    Row("wan", {"cache.draws": 1}),
    Row("wan", {"cache.draws": 1}, STORED),
    # Two experts.
    Row("wan2", {}, FIVE_STEPS),
    Row("wan2", GUIDED, FIVE_STEPS),
    Row("wan2", {"task.guidance.scale_2": 2.0}, FIVE_STEPS | GUIDED),
    Row("wan2", {"task.guidance.scale": [1.5, 6.0]}, FIVE_STEPS),
    Row("wan2", TWO_FEATURES, FIVE_STEPS | GUIDED),
    Row("wan2", {"sampling.guidance_scale": 4.0}, FIVE_STEPS),
    Row("wan2", {"sampling.guidance_scale_2": 2.0}, FIVE_STEPS | {"sampling.guidance_scale": 4.0}),
    Row("wan2", {"sampling.guidance_scale_2": 2.0}, FIVE_STEPS | {"sampling.guidance_scale": 4.0} | STORED),
    # Stable Diffusion 3.
    Row("sd3", {}),
    Row("sd3-dynamic", {}),
    Row("sd3-dynamic", {"task.timesteps.shift": 1.0}),
    Row("sd3", {"task.max_sequence_length": 9}),
    Row("sd3", {"task.condition_dropout": 0.4}),
    Row("sd3", GUIDED),
    Row(
        "sd3",
        {"task.guidance.negative_prompt": "blue dog flies"},
        GUIDED | DRAWN_GUIDED | STORED | {"task.guidance.scale": None},
    ),
    Row("sd3", DRAWN_GUIDED, STORED),
    Row("sd3", {"task.timesteps.weighting": "cosmap"}),
    Row("sd3", TWO_FEATURES),
    Row("sd3", TRUE_DATA, IMAGES),
    Row("sd3", {"train.mixed_precision": "bf16"}, LATENTS | GUIDED),
    Row("sd3", {"teacher.dtype": "bfloat16"}, LATENTS | GUIDED | TWO_FEATURES),
    # Stable Diffusion, whose network predicts the noise, or v.
    *(
        row
        for name in ("sd", "sd-v")
        for row in (
            Row(name, {}),
            Row(name, GUIDED),
            Row(name, LOGIT_NORMAL),
            Row(name, {"task.timesteps.shift": 3.0}),
            Row(name, DRAWN_GUIDED, STORED),
            Row(name, TRUE_DATA, LATENTS),
        )
    ),
    Row("sd", {"task.condition_dropout": 0.4}),
    Row("sd", TRUE_DATA, IMAGES),
    Row("sd", TWO_FEATURES),
    Row("sd", {"rollout.enabled": False}),
    # Samplers in another scale, that ask more often than they step, and that draw noise on the way.
    Row("sd-euler", DRAWN_GUIDED, STORED),
    Row("sd-pndm", DRAWN_GUIDED, STORED),
    Row("sd-ancestral", DRAWN_GUIDED),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pipelines, pictures) -> Path:
    """Pipelines, students and data of all rows."""
    root = tmp_path_factory.mktemp("reference")
    found = {"wan": pipelines[1], "wan2": pipelines[2], "sd3": pictures["sd3"], "sd": pictures["sd"]}
    for name, path in found.items():
        (root / name).symlink_to(path)
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=2)
    toy_pictures.make_sd3(root / "sd3-dynamic", scheduler=dynamic)
    schedulers = {
        "sd-v": toy_pictures.make_scheduler("DDIMScheduler", prediction_type="v_prediction", set_alpha_to_one=False),
        "sd-euler": toy_pictures.make_scheduler("EulerDiscreteScheduler"),
        "sd-pndm": toy_pictures.make_scheduler("PNDMScheduler", skip_prk_steps=True),
        "sd-ancestral": toy_pictures.make_scheduler("EulerAncestralDiscreteScheduler"),
    }
    for name, scheduler in schedulers.items():
        toy_pictures.make_sd(root / name, scheduler=scheduler)
    toys.write_student_config(root / "student-wan.json")
    for kind in ("sd3", "sd"):
        toy_pictures.write_student_config(kind, root / f"student-{kind}.json")
    toys.write_prompts(root / "prompts.txt", PROMPTS)
    write_latents(root / "latents")
    write_images(root / "images")
    return root


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
    """Lets one test build several."""
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
        "teacher.path": str(folder / pipeline),
        "student.config": str(folder / f"student-{family}.json"),
    }
    tree: dict[str, Any] = {}
    for key, value in given.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return parse(tree)


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


_REFERENCES: dict[str, Result] = {}


def reference(recipe: DiffusionRecipe) -> Result:
    """What the recipe comes to; kept, since many rows are compared with the same one."""
    options = recipe.model_dump(mode="json")
    name = json.dumps({key: value for key, value in options.items() if key != "output_dir"})
    if name not in _REFERENCES:
        _REFERENCES[name] = reference_diffusion.run(options)
    return _REFERENCES[name]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_key_means_what_the_reference_says(folder, tmp_path, row):
    recipe = recipe_of(folder, row.pipeline, tmp_path / "run", {**row.given, **row.changed})
    theirs = reference(recipe)
    ours, _ = run_product(recipe)
    assert_same(ours, theirs)
    if row.changed:
        without = reference(recipe_of(folder, row.pipeline, tmp_path / "without", row.given))
        moved = max(abs(a - b) / abs(b) for a, b in zip(theirs.losses, without.losses, strict=True))
        assert moved < 2e-6 if row.keeps else moved > 2e-5


@pytest.mark.parametrize("given", [GUIDED | TWO_FEATURES | {"task.condition_dropout": 0.4}, FIVE_STEPS | GUIDED])
@pytest.mark.parametrize("pipeline", ["wan2", "sd3"])
def test_training_from_a_cache_is_the_reference_s_training(folder, tmp_path, pipeline, given):
    """Two epochs, each with draws of its own."""
    recipe = recipe_of(folder, pipeline, tmp_path / "run", {**given, "teacher.cache": str(tmp_path / "cache")})
    caching.make_cache(recipe)
    forget_accelerator()
    cached = recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "cached"})})
    assert_same(run_product(cached)[0], reference(recipe))


def test_a_cache_in_several_files_is_the_same_cache(folder, tmp_path):
    given = FEATURES | {"task.height": 256, "task.width": 256, "rollout.samples_per_prompt": 4, "cache.draws": 1}
    given |= {"sampling.num_inference_steps": 1, "train.max_steps": 2}
    results = []
    for shard_mib, num_files in ((1, 2), (256, 1)):
        keys = {"teacher.cache": str(tmp_path / f"cache-{shard_mib}"), "cache.shard_mib": shard_mib}
        recipe = recipe_of(folder, "wan", tmp_path / f"run-{shard_mib}", given | keys)
        caching.make_cache(recipe)
        assert len(list((tmp_path / f"cache-{shard_mib}").glob("outputs-*"))) == num_files
        forget_accelerator()
        cached = recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"placement": "cached"})})
        results.append(run_product(cached)[0])
        forget_accelerator()
    assert_same(results[0], results[1], tolerance=0.0)


def leaves_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_key_has_a_row():
    """A key whose value no row changes is a key that may be ignored."""
    keys = {leaf for name in SECTIONS for leaf in leaves_of(DiffusionRecipe.model_fields[name].annotation, f"{name}.")}
    changed = {key for row in ROWS for key in row.changed} | NO_RESULT.keys()
    assert len(keys) > 30
    assert sorted(keys - changed) == []
    assert sorted(NO_RESULT.keys() - keys) == []
