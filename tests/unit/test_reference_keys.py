"""Every key of the diffusion task's stages and caches: changed by all that its content depends on, by nothing else."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from distiller.config.diffusion import DiffusionRecipe
from distiller.config.recipe import Evaluation
from distiller.diffusion.wan import family as wan_family
from tests import toy_pictures, toys
from tests.key_changes import Change, change_json, change_weights, differing, keys_of, leaves_of, parsed

GUIDED = {"task.guidance.scale": 4.0}
DRAWN_GUIDED = {"sampling.guidance_scale": 3.0}
LOGIT_NORMAL = {"task.timesteps.sampling": "logit_normal"}
ALL = "text rollout content"
IMAGES = {"data.kind": "images", "data.path": "images"}
LATENTS = {"data.kind": "latents", "data.path": "latents"}
TWO = {"teacher.path": "wan2"}
SD = {"teacher.path": "sd", "task.max_sequence_length": None, "student.config": "student-sd.json"}
ROWS = (("a", "a cat"), ("b", "a dog"), ("a", "a cat"))
OTHER_ORDER = (("b", "a cat"), ("a", "a dog"), ("a", "a cat"))
OTHER_CAPTIONS = (("a", "a cat"), ("b", "a bird"), ("a", "a cat"))
OUTSIDE = {
    "output_dir": "where",
    "cache_dir": "where",
    "task.kind": "the class of the recipe",
    "teacher.revision": "of a hub id, whose files count",
    "teacher.subfolder": "where the files lie, which count",
    "teacher.prefetch_steps": "0",
    "teacher.max_quantization_error": "refuses a run, changes none",
    "teacher.compile": "as placement: other roundings of the same numbers",
    "teacher.placement": "placements agree, which has tests of its own",
    **dict.fromkeys(
        ("teacher.pin_memory", "teacher.ring_blocks", "teacher.resident_blocks", "teacher.shard_transfers"), "placement"
    ),
    **dict.fromkeys(("teacher.amortise", "teacher.read_threads", "teacher.device_map", "teacher.rank"), "placement"),
    **dict.fromkeys(("teacher.devices", "teacher.inner"), "placement"),
    **dict.fromkeys(("teacher.micro_batch", "teacher.offload", "teacher.nvme_path", "teacher.cache"), "placement"),
    **dict.fromkeys(("checkpoint", "tracking", "profile"), "after the fact"),
    **dict.fromkeys((f"evaluation.{name}" for name in Evaluation.model_fields), "measures, and changes nothing"),
}
"""Keys, or sections, that have no row, and why."""
CONSTANTS = {"format", "reader", "task.kind", "form.kind"}
"""Fields that only another version of the code, or another task, changes."""


def other_scheduler(folder: Path) -> None:
    change_json(folder / "wan" / "scheduler" / "scheduler_config.json", shift=5.0)


def other_prompts(folder: Path) -> None:
    lines = (folder / "prompts.txt").read_text().splitlines()
    (folder / "prompts.txt").write_text("\n".join([lines[1], lines[0], *lines[2:]]))


def other_picture(folder: Path) -> None:
    picture = Image.open(folder / "images" / "a" / "1.bmp")
    picture.putpixel((0, 0), (1, 2, 3))
    picture.save(folder / "images" / "a" / "1.bmp")


def other_rows(folder: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Writes metadata.jsonl: of each picture its folder, since both are called 1.bmp, and its caption."""
    lines = [json.dumps({"file_name": f"{name}/1.bmp", "text": text}) for name, text in rows]
    (folder / "images" / "metadata.jsonl").write_text("\n".join(lines))


def other_latents(folder: Path, seed: int = 1) -> None:
    latents = torch.randn(4, 4, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"latents": latents}, folder / "latents" / "a.safetensors")


CHANGES = [
    Change("nothing", ""),
    Change("seed", "rollout content", {"seed": 4}),
    # What the teacher is asked about.
    Change("height", "rollout content", {"task.height": 48}),
    Change("width", "rollout content", {"task.width": 48}),
    Change("frames", "rollout content", {"task.num_frames": 5}),
    Change("targets", "rollout", {"task.targets": "stored"}),
    Change("sampling of levels", "content", LOGIT_NORMAL),
    Change("mean of levels", "content", {"task.timesteps.logit_mean": 0.5}, LOGIT_NORMAL),
    Change("spread of levels", "content", {"task.timesteps.logit_std": 0.5}, LOGIT_NORMAL),
    Change("shift", "content", {"task.timesteps.shift": 2.0}),
    Change("guidance", "content", GUIDED),
    Change("another guidance", "content", {"task.guidance.scale": 5.0}, GUIDED),
    Change("a range of guidance", "content", {"task.guidance.scale": [1.0, 5.0]}, GUIDED),
    Change("guidance of the second expert", "content", {"task.guidance.scale_2": 2.0}, GUIDED | TWO),
    Change("negative prompt", ALL, {"task.guidance.negative_prompt": "a dog"}),
    Change("dropout", "content", {"task.condition_dropout": 0.1}),
    Change("length of text", ALL, {"task.max_sequence_length": 13}),
    # How the rollout is drawn.
    Change("steps", "rollout", {"sampling.num_inference_steps": 4}),
    Change("scale of drawing", "rollout", {"sampling.guidance_scale": 2.0}),
    Change("second scale of drawing", "rollout", {"sampling.guidance_scale_2": 2.0}, TWO | DRAWN_GUIDED),
    Change("second scale without a first", "rollout", {"sampling.guidance_scale_2": 2.0}, TWO),
    Change("no rollout", "rollout", {"rollout.enabled": False}),
    Change("samples of a prompt", "rollout content", {"rollout.samples_per_prompt": 2}),
    Change("batch of the rollout", "rollout", {"rollout.batch_size": 9}),
    Change("dtype of the rollout", "rollout", {"rollout.dtype": "bfloat16"}),
    # The data.
    Change("fewer prompts", ALL, {"data.max_samples": 5}),
    Change("fewer pictures", "text images content", {"data.max_samples": 1}, IMAGES),
    Change("fewer latents", "content", {"data.max_samples": 3}, LATENTS),
    Change("samples that are held out", "content", {"data.held_out": 0.2}),
    Change("order of prompts", ALL, files=other_prompts),
    Change("prompts that stand twice", ALL, {"data.path": "repeated.txt"}),
    Change("a picture", "images", given=IMAGES, files=other_picture),
    Change("order of pictures", "images content", given=IMAGES, files=lambda folder: other_rows(folder, OTHER_ORDER)),
    Change("a caption", "text images content", given=IMAGES, files=lambda folder: other_rows(folder, OTHER_CAPTIONS)),
    Change("latents", "content", given=LATENTS, files=other_latents),
    Change("size of pictures", "images content", {"task.height": 48}, IMAGES),
    Change("width of pictures", "images content", {"task.width": 48}, IMAGES),
    Change("pictures under another seed", "content", {"seed": 4}, IMAGES),
    Change("pictures in tf32", "text images content", {"train.tf32": True}, IMAGES),
    # The teacher.
    Change("dtype", ALL, {"teacher.dtype": "bfloat16"}),
    Change("quantization", "rollout content", {"teacher.quantization": "int8"}),
    Change("tf32", ALL, {"train.tf32": True}),
    Change("weights", "rollout content", files=lambda folder: change_weights(folder / "wan" / "transformer")),
    Change("weights of the second expert", "rollout content", given=TWO,
           files=lambda folder: change_weights(folder / "wan2" / "transformer_2")),
    Change("boundary of the experts", "rollout content", given=TWO,
           files=lambda folder: change_json(folder / "wan2" / "model_index.json", boundary_ratio=0.5)),
    Change("config", "rollout content",
           files=lambda folder: change_json(folder / "wan" / "transformer" / "config.json", eps=1e-3)),
    Change("scheduler", "rollout content", files=other_scheduler),
    Change("number of timesteps", "rollout content", files=lambda folder: change_json(
        folder / "wan" / "scheduler" / "scheduler_config.json", num_train_timesteps=500)),
    Change("alphas", "rollout content", given=SD, files=lambda folder: change_json(
        folder / "sd" / "scheduler" / "scheduler_config.json", beta_end=0.02)),
    Change("what is predicted", "rollout content", given=SD, files=lambda folder: change_json(
        folder / "sd" / "scheduler" / "scheduler_config.json", prediction_type="v_prediction")),
    Change("text encoder", "text rollout", files=lambda folder: change_weights(folder / "wan" / "text_encoder")),
    Change("tokenizer", "text rollout", files=lambda folder: change_json(
        folder / "wan" / "tokenizer" / "tokenizer_config.json", padding_side="left")),
    Change("VAE", "images", given=IMAGES, files=lambda folder: change_weights(folder / "wan" / "vae")),
    Change("VAE of a rollout", "", files=lambda folder: change_weights(folder / "wan" / "vae")),
    # What is made of the teacher's answers, and by whom.
    Change("another path to the same teacher", "", {"teacher.path": "wan-again"}),
    Change("another path to the same prompts", "", {"data.path": "prompts-again.txt"}),
    Change("weighting", "", {"task.timesteps.weighting": "cosmap"}),
    Change("losses", "", {
        "task.losses.prediction.weight": 0.5, "task.losses.prediction.kind": "huber",
        "task.losses.prediction.huber_delta": 0.5, "task.losses.features.weight": 1.0,
        "task.losses.features.student_blocks": [0], "task.losses.features.teacher_blocks": [0]}),
    Change("true data", "", {"task.losses.true_data.weight": 1.0}, IMAGES),
    Change("kind of data", "rollout images text content", IMAGES),
    Change("student", "", {"student.config": None, "student.num_layers": 2, "student.num_attention_heads": 1,
                           "student.ffn_dim": 16}),
    Change("student's path", "", {"student.config": None, "student.path": "wan"}),
    Change("cache", "", {"cache.draws": 2, "cache.shard_mib": 1}),
    Change("training", "", {
        "train.max_steps": 9, "train.num_epochs": 3, "train.batch_size": 2, "train.gradient_accumulation_steps": 2,
        "train.mixed_precision": "bf16", "train.gradient_checkpointing": True, "train.compile": "none",
        "train.ema_decay": 0.9, "train.log_every": 3, "train.num_workers": 1}),
    Change("batches", "", {"train.samples_per_update": 16}),
    Change("optimizer", "", {
        "optim.lr": 0.1, "optim.betas": [0.8, 0.9], "optim.eps": 1e-3, "optim.weight_decay": 0.1,
        "optim.max_grad_norm": 2.0, "optim.max_bad_steps": 2, "optim.schedule": "cosine", "optim.warmup_steps": 2,
        "optim.fused": False}),
    Change("evaluation", "", {
        "evaluation.judge": "none", "evaluation.num_samples": 3, "evaluation.batch_size": 2,
        "evaluation.sample_prompts": ["a dog"], "evaluation.min_recognised": None, "evaluation.seeds": 2,
        "evaluation.features": "elsewhere", "evaluation.clip": "elsewhere"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory, pipelines, pictures) -> Path:
    """Teachers and data of all rows, of which each row changes a copy."""
    root = tmp_path_factory.mktemp("keys")
    for name, path in (
        ("wan", pipelines[1]),
        ("wan2", pipelines[2]),
        ("wan-again", pipelines[1]),
        ("sd", pictures["sd"]),
    ):
        shutil.copytree(path, root / name)
    toys.write_student_config(root / "student.json")
    toy_pictures.write_student_config("sd", root / "student-sd.json")
    for name in ("prompts.txt", "prompts-again.txt"):
        toys.write_prompts(root / name)
    toys.write_prompts(root / "repeated.txt", ["a red cat", "a dog", "a dog", "a red cat"])
    for number, name in enumerate("ab"):
        (root / "images" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (number, 50, 90)).save(root / "images" / name / "1.bmp")
    other_rows(root, ROWS)
    (root / "latents").mkdir()
    other_latents(root, seed=0)
    (root / "latents" / "prompts.txt").write_text("a red cat\n" * 4)
    return root


def recipe_in(root: Path, keys: Mapping[str, Any]) -> DiffusionRecipe:
    base = {
        "seed": 3,
        "output_dir": str(root / "run"),
        "task.height": 32,
        "task.width": 32,
        "task.num_frames": 1,
        "task.max_sequence_length": 12,
        "sampling.num_inference_steps": 3,
        "sampling.guidance_scale": 1.0,
        "teacher.path": "wan",
        "student.config": "student.json",
        "data.path": "prompts.txt",
        "train.max_steps": 1,
        "train.batch_size": 1,
    }
    given = base | dict(keys)
    for key in ("teacher.path", "student.config", "student.path", "data.path"):
        if given.get(key) is not None:
            given[key] = str(root / given[key])
    return parsed({}, given)


@functools.cache
def changed_fields(originals: Path, change: Change) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """(key, field) of what differs, and of all fields."""
    before, root = keys_of(recipe_in(originals, change.given)), originals
    if change.files is not None:
        root = shutil.copytree(originals, originals.with_name(f"{originals.name}-{change.name}"))
        change.files(root)
    after = keys_of(recipe_in(root, {**change.given, **change.keys}))
    return differing(before, after), {(key, name) for key, fields in before.items() for name in fields}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_shows_in_the_keys_of_what_depends_on_it(originals, change):
    found, _ = changed_fields(originals, change)
    assert {key for key, _ in found} == set(change.shown.split())


def test_every_field_of_every_key_is_changed_by_a_row(originals, monkeypatch):
    changed = {field for change in CHANGES for field in changed_fields(originals, change)[0]}
    fields = {field for change in CHANGES for field in changed_fields(originals, change)[1]}
    before = keys_of(recipe_in(originals, {}))
    is_there = wan_family.is_ftfy_available()
    monkeypatch.setattr(wan_family, "is_ftfy_available", lambda: not is_there)
    # The pipeline cleans prompts with it where it is installed.
    cleaned = differing(before, keys_of(recipe_in(originals, {})))
    assert {key for key, _ in cleaned} == {"text", "rollout"}
    changed |= cleaned
    assert {key for key, _ in fields} == {"text", "rollout", "images", "content"}
    assert sorted((key, name) for key, name in fields - changed if name not in CONSTANTS) == []


def test_every_key_of_a_recipe_has_a_row():
    rows = {key for change in CHANGES for key in change.keys}
    assert sorted(leaf for leaf in leaves_of(DiffusionRecipe) if leaf not in rows and not is_outside(leaf)) == []


def is_outside(leaf: str) -> bool:
    return any(leaf == name or leaf.startswith(f"{name}.") for name in OUTSIDE)
