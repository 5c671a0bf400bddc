"""Whole runs in one process on toy pipelines: what they leave, that they are the same however the work is split."""

import json
import math
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file, save_file

from distiller import commands
from distiller.checkpoint.reading import CheckpointReader
from distiller.config.recipe import Recipe
from distiller.data import rng
from distiller.data.latents import LatentStore
from distiller.diffusion import text
from distiller.diffusion.rollout import RolloutPlan
from distiller.errors import RunError, UserError
from distiller.storage.stages import Stage
from distiller.tasks import open_task
from distiller.tasks.labelled_grid import labelled_grid
from distiller.teachers.base import Teacher
from distiller.teachers.factory import open_teacher
from tests import toys
from tests.toy_network import setup

ONLY_FILE = "rank-00000-of-00001.safetensors"
REFERENCES = Path(__file__).parent.parent / "references"


def run(recipe: Recipe, resume: bool = False) -> Path:
    commands.train(recipe, resume)
    return Path(recipe.output_dir)


def test_a_run_leaves_the_contracts_files(make_recipe, capsys):
    folder = run(make_recipe(checkpoint={"every_steps": 2, "keep": 2}))
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints", "environment.json", "inputs.json", "metrics.jsonl", "recipe.yaml", "report.html", "samples.png",
        "stages", "student", "summary.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-4", "step-6"]
    assert (folder / "checkpoints" / "latest").read_text() == "step-6"
    summary = json.loads((folder / "summary.json").read_text())
    metrics = toys.read_metrics(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert summary["final_loss"] == metrics[-1]["loss"]
    assert summary["teacher_quantization_error"] is None
    assert (summary["engine"], summary["placement"], summary["world_size"]) == ("single", "replicated", 1)
    student = WanTransformer3DModel.from_pretrained(folder / "student")
    assert summary["student_params"] == sum(p.numel() for p in student.parameters())
    assert all((file.stat().st_mode & 0o777) == 0o644 for file in (folder / "student").iterdir())
    assert {"loss/prediction", "lr", "grad_norm", "perf/teacher_ms", "memory/teacher_host_gib"} <= metrics[0].keys()
    assert metrics[0]["perf/mfu"] is None


@pytest.mark.parametrize("num_experts", [1, 2])
def test_the_loss_series_is_the_recorded_one(make_recipe, num_experts):
    """A change of any draw, order, target or weight shows here. Recorded with torch 2.13 on a CPU, float32."""
    folder = run(make_recipe(num_experts))
    recorded = json.loads((REFERENCES / f"toy-{num_experts}-experts.json").read_text())
    assert [line["loss"] for line in toys.read_metrics(folder)] == pytest.approx(recorded["loss"], abs=5e-5)
    assert toys.student_vector(folder).norm().item() == pytest.approx(recorded["student_norm"], rel=1e-5)


def test_accumulation_and_loader_workers_change_nothing(make_recipe, tmp_path, fresh):
    cache = str(tmp_path / "cache")
    whole = run(make_recipe(cache_dir=cache, output_dir=str(tmp_path / "whole")))
    fresh()
    split = {"batch_size": 2, "samples_per_update": 8, "num_workers": 2, "gradient_checkpointing": True}
    parts = run(make_recipe(cache_dir=cache, output_dir=str(tmp_path / "parts"), train=split))
    toys.assert_same_run(parts, whole)


def test_a_resumed_run_equals_an_unbroken_one(make_recipe, tmp_path, fresh):
    options = {"cache_dir": str(tmp_path / "cache"), "checkpoint": {"every_steps": 2}}
    features = {"task": {"losses": {"features": {"weight": 0.1, "student_blocks": [0], "teacher_blocks": [1]}},
                         "height": 32, "width": 32}}  # fmt: skip
    train = {"ema_decay": 0.9}
    whole = run(make_recipe(output_dir=str(tmp_path / "whole"), train=train, **features, **options))
    fresh()
    broken = {"output_dir": str(tmp_path / "broken"), **features, **options}
    run(make_recipe(train=train | {"max_steps": 4}, **broken))
    fresh()
    resumed = run(make_recipe(train=train, **broken), resume=True)
    toys.assert_same_run(resumed, whole, loss_tolerance=0.0, tolerance=0.0)
    fresh()
    before = (resumed / "summary.json").read_bytes()
    run(make_recipe(train=train, **broken), resume=True)
    assert (resumed / "summary.json").read_bytes() == before


def test_a_resumed_run_says_from_where_and_its_summary_covers_all_sessions(make_recipe, tmp_path, fresh, capsys):
    """The time of both sessions, and the throughput of both; each's first update warms up, its second is profiled."""
    train = {"batch_size": 8, "log_every": 1}
    options = {"cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "mine")}
    folder = run(make_recipe(train=train | {"max_steps": 3}, **options))
    first = json.loads((folder / "summary.json").read_text())
    assert "--resume" not in capsys.readouterr().err
    fresh()
    began = time.perf_counter()
    run(make_recipe(train=train | {"max_steps": 6}, **options), resume=True)
    second_s = time.perf_counter() - began
    said = capsys.readouterr().err
    assert said.count("note: --resume: ") == 1
    assert f"note: --resume: continues from {folder}/checkpoints/step-3, with step 4 of 6\n" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert (first["sessions"], summary["sessions"]) == (1, 2)
    progress = CheckpointReader(folder / "checkpoints" / "step-3").progress
    assert progress.spent.wall_s + 0.5 * second_s < summary["wall_s"] < progress.spent.wall_s + second_s
    steps_s = [8 / line["perf/samples_per_s"] for line in toys.read_metrics(folder)]
    timed = [steps_s[2], steps_s[5]]
    assert summary["samples_per_s"] == pytest.approx(8 * len(timed) / sum(timed), rel=1e-3)
    assert first["samples_per_s"] == pytest.approx(8 / steps_s[2], rel=1e-3)


def test_resume_is_loud_where_there_is_nothing_to_resume(make_recipe, tmp_path, fresh, capsys):
    """As with a misspelt output_dir; the contract is that it starts at step 1."""
    options = {"cache_dir": str(tmp_path / "cache"), "checkpoint": {"at_end": False}, "train": {"max_steps": 1}}
    folder = run(make_recipe(**options), resume=True)
    words = f"warning: --resume: {folder} holds no run (is output_dir right?); this is a new one, from step 1\n"
    assert words in capsys.readouterr().err
    fresh()
    run(make_recipe(**(options | {"train": {"max_steps": 2}})), resume=True)
    words = f"warning: --resume: the run in {folder} has no complete checkpoint yet; it starts again at step 1\n"
    assert words in capsys.readouterr().err
    fresh()
    commands.train(make_recipe(**(options | {"checkpoint": {}, "train": {"max_steps": 3}})), resume=True)
    (folder / "summary.json").unlink()
    capsys.readouterr()
    fresh()
    commands.train(make_recipe(**(options | {"checkpoint": {}, "train": {"max_steps": 3}})), resume=True)
    words = f"--resume: training has come to its end, {folder}/checkpoints/step-3; what follows it is left\n"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "progress"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(make_recipe, fresh, damage):
    options = {"checkpoint": {"every_steps": 1}}
    folder = run(make_recipe(train={"max_steps": 2, "batch_size": 8}, **options))
    fresh()
    file = folder / "checkpoints" / "step-2" / ("progress.json" if damage == "progress" else ONLY_FILE)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    longer = make_recipe(train={"max_steps": 4, "batch_size": 8}, **options)
    with pytest.raises(UserError, match=rf"{file} is damaged .* remove .*step-2 .* continue from .*step-1"):
        run(longer, resume=True)
    fresh()
    shutil.rmtree(file.parent)
    run(longer, resume=True)
    assert [line["step"] for line in toys.read_metrics(folder)] == [1, 2, 3, 4]


@pytest.mark.parametrize("place", ["optimizer.pt", "engine/mp_rank_00_model_states.pt"])
def test_an_older_checkpoint_is_refused_by_name_and_its_pickle_never_opened(make_recipe, tmp_path, fresh, place):
    folder = run(make_recipe(train={"max_steps": 2, "batch_size": 8}))
    fresh()
    pickle = folder / "checkpoints" / "step-2" / place
    pickle.parent.mkdir(exist_ok=True)
    torch.save(Malicious(tmp_path / "pwned"), pickle)
    with pytest.raises(UserError, match=f"step-2 is of an older version of distiller .{place.split('/')[0]}."):
        run(make_recipe(train={"max_steps": 4, "batch_size": 8}), resume=True)
    with pytest.raises(UserError, match="older version"):
        commands.export(folder, tmp_path / "exported")
    assert not (tmp_path / "pwned").exists()


def test_any_checkpoint_is_exported(make_recipe, tmp_path, fresh, capsys):
    folder = run(make_recipe(train={"ema_decay": 0.9}, checkpoint={"every_steps": 3, "at_end": False}))
    fresh()
    assert not list((folder / "checkpoints").glob("export*"))
    commands.export(folder, None)
    assert capsys.readouterr().out.strip().endswith("student-step-3")
    assert not torch.equal(toys.student_vector(folder), vector_of(folder / "student-step-3"))
    run(make_recipe(train={"ema_decay": 0.9}, checkpoint={"every_steps": 3}), resume=True)
    # Finished without a checkpoint of its last step, it stays so.
    assert commands.export(folder / "checkpoints" / "step-3", tmp_path / "again") is None
    ours, theirs = tmp_path / "again", folder / "student-step-3"
    assert all((ours / file.name).read_bytes() == file.read_bytes() for file in theirs.iterdir())
    for output, word in ((tmp_path / "again", "already there"), (tmp_path / "no" / "where", "is not a folder")):
        with pytest.raises(UserError, match=word):
            commands.export(folder, output)
    with pytest.raises(UserError, match="neither a checkpoint"):
        commands.export(tmp_path, tmp_path / "other")
    file = folder / "checkpoints" / "step-3" / ONLY_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"is damaged .* export another"):
        commands.export(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def vector_of(student: Path) -> torch.Tensor:
    state = load_file(student / "diffusion_pytorch_model.safetensors")
    return torch.cat([state[name].flatten().double() for name in sorted(state)])


class Malicious:
    """A pickle that would make a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_resume_without_a_checkpoint_starts_at_step_1(make_recipe, tmp_path):
    recipe = make_recipe()
    folder = Path(recipe.output_dir)
    folder.mkdir()
    from distiller.config.loading import dump

    (folder / "recipe.yaml").write_text(dump(recipe))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    run(recipe, resume=True)
    assert [line["step"] for line in toys.read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_the_average_is_exported_and_differs_from_the_weights(make_recipe):
    folder = run(make_recipe(train={"ema_decay": 0.9}))
    checkpoint = load_file(folder / "checkpoints" / "step-6" / ONLY_FILE)
    student = load_file(folder / "student" / "diffusion_pytorch_model.safetensors")
    name = "blocks.0.attn1.to_q.weight"
    assert torch.equal(student[name].flatten(), checkpoint[f"average/model.{name}:0"])
    assert not torch.equal(student[name].flatten(), checkpoint[f"weights/model.{name}:0"])


def test_projections_are_trained_and_saved_but_not_exported(make_recipe, tmp_path):
    losses = {"features": {"weight": 0.5, "student_blocks": [0, 1], "teacher_blocks": [0, 2]}}
    folder = run(make_recipe(task={"losses": losses, "height": 32, "width": 32}))
    reader = CheckpointReader(folder / "checkpoints" / "step-6")
    assert reader.progress.shapes["projections.1.weight"] == (24, 12)
    assert len(reader.read("exp_avg", "projections.1.weight", 0, 24 * 12)) == 24 * 12
    assert not [key for key in load_file(folder / "student" / "diffusion_pytorch_model.safetensors") if "proj" in key
                and "projections" in key]  # fmt: skip
    line = toys.read_metrics(folder)[0]
    assert line["loss"] == pytest.approx(line["loss/prediction"] + 0.5 * line["loss/features"], rel=1e-6)


def test_the_teacher_is_in_no_checkpoint(make_recipe):
    folder = run(make_recipe())
    shapes = CheckpointReader(folder / "checkpoints" / "step-6").progress.shapes
    assert {name.split(".")[0] for name in shapes} == {"model"}


def test_stored_targets_need_no_teacher_in_the_loop(make_recipe):
    task = {"height": 32, "width": 32, "targets": "stored"}
    folder = run(make_recipe(task=task))
    metrics = toys.read_metrics(folder)
    assert metrics[0]["perf/teacher_ms"] is None
    assert metrics[0]["memory/teacher_host_gib"] is None
    store = LatentStore(next((folder / "stages").glob("rollout-*")))
    points = [store.trajectory_point(0, step)[0] for step in range(3)]
    assert torch.equal(points[0], rng.noise(3, 0, 0, (4, 1, 4, 4), "rollout"))
    assert (folder / "samples.png").is_file()


@pytest.mark.parametrize(("targets", "num_tensors"), [("live", 1), ("stored", 1 + 2 * 5)])
@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_size_of_a_rollout_counts_every_stored_tensor(make_recipe, targets, num_tensors, dtype, element_bytes):
    """Of each sample its latent and, with stored targets, an input and a prediction at each of five timesteps."""
    recipe = make_recipe(task={"targets": targets}, rollout={"samples_per_prompt": 3, "dtype": dtype})
    plan = RolloutPlan(("a cat", "a dog"), (0, 1), (4, 1, 8, 8), recipe, num_predictions=5, num_passes=10)
    assert plan.num_bytes == 2 * 3 * num_tensors * (4 * 1 * 8 * 8) * element_bytes


def test_the_rollout_is_reused_under_its_key_and_drawn_again_under_another(make_recipe, tmp_path, capsys, fresh):
    cache = tmp_path / "cache"
    for name, steps in (("a", 3), ("b", 3), ("c", 4)):
        sampling = {"num_inference_steps": steps}
        run(make_recipe(cache_dir=str(cache), output_dir=str(tmp_path / name), sampling=sampling))
        assert ("reusing" in capsys.readouterr().out) == (name == "b")
        fresh()
    assert len(list(cache.glob("rollout-*/"))) == 2
    # The data's texts, and the sample prompts' (none: the empty prompt).
    assert len(list(cache.glob("text-*/"))) == 2


def test_an_interrupted_rollout_keeps_its_shards(make_recipe, tmp_path, capsys, fresh):
    cache = tmp_path / "cache"
    run(make_recipe(cache_dir=str(cache), output_dir=str(tmp_path / "a")))
    fresh()
    stage = next(cache.glob("rollout-*"))
    whole = load_file(stage / "rollout-000001.safetensors")
    stage.rename(stage.with_name(stage.name + ".partial"))
    partial = stage.with_name(stage.name + ".partial")
    (partial / "key.json").unlink()
    (partial / "rollout-000001.safetensors").unlink()
    capsys.readouterr()
    run(make_recipe(cache_dir=str(cache), output_dir=str(tmp_path / "b")))
    assert "1 of 4 shards to draw" in capsys.readouterr().out
    assert torch.equal(load_file(stage / "rollout-000001.safetensors")["latents"], whole["latents"])


def test_a_rollout_has_as_many_rounds_as_its_shards_fill_ranks(make_recipe):
    """One shard of two ranks is one round of three steps. Rank 0 draws it; nothing is communicated here."""
    task = open_task(make_recipe(rollout={"batch_size": 32}))
    assert task.prepare_stages(toys.ALONE, torch.float32)
    teacher, asked = open_teacher(task.network, setup()), []

    class Counted(Teacher):
        def predict(self, requests):
            asked.extend(requests)
            return teacher.predict(requests)

        def memory(self):
            return teacher.memory()

        def close(self):
            teacher.close()

    first_of_two = replace(toys.ALONE, world_size=2, local_world_size=2)
    assert len(task.load_data(first_of_two, Counted())) == 27
    assert [len(request.sample_ids) for request in asked] == [27, 27, 27]


def test_other_sample_prompts_leave_the_rollout_alone(make_recipe, tmp_path, capsys, fresh):
    cache = str(tmp_path / "cache")
    run(make_recipe(cache_dir=cache, output_dir=str(tmp_path / "a")))
    fresh()
    capsys.readouterr()
    evaluation = {"sample_prompts": ["a prompt of its own", "a red cat sits"]}
    folder = run(make_recipe(cache_dir=cache, output_dir=str(tmp_path / "b"), evaluation=evaluation))
    assert "reusing" in capsys.readouterr().out
    assert (folder / "samples.png").is_file()


def test_what_follows_the_loop_is_done_on_resume_if_it_was_cut_short(make_recipe, fresh):
    recipe = make_recipe()
    folder = run(recipe)
    whole = toys.student_vector(folder)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "student")
    fresh()
    run(recipe, resume=True)
    assert torch.equal(toys.student_vector(folder), whole)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


def test_a_run_is_not_continued_with_other_data_or_another_global_batch(make_recipe, fresh):
    recipe = make_recipe(train={"max_steps": 2, "batch_size": 8})
    run(recipe)
    longer = {"max_steps": 4, "batch_size": 8}
    fresh()
    other = longer | {"batch_size": 16}
    with pytest.raises(UserError, match=r"has samples_per_update 8 and this run 16; set train\.samples_per_update"):
        run(make_recipe(train=other), resume=True)
    fresh()
    recipe = make_recipe(train=longer)
    prompts = Path(recipe.data.path)
    prompts.write_text(prompts.read_text().replace("a red cat", "a blue cat", 1))
    with pytest.raises(UserError, match="data_digest"):
        run(recipe, resume=True)


@pytest.mark.parametrize("kind", ["latents", "images"])
def test_a_run_is_not_continued_with_other_latents_or_pictures(make_recipe, fresh, tmp_path, kind):
    """Under the same captions."""
    folder = tmp_path / kind
    folder.mkdir()
    if kind == "latents":
        write_latents(folder)
    else:
        write_images(folder)
    task, data = {"height": 32, "width": 32}, {"kind": kind, "path": str(folder)}
    run(make_recipe(task=task, data=data, train={"max_steps": 2}))
    fresh()
    longer = make_recipe(task=task, data=data, train={"max_steps": 3})
    run(longer, resume=True)
    fresh()
    if kind == "latents":
        write_latents(folder, seed=1)
    else:
        Image.new("RGB", (40, 50)).save(folder / "8.png")
    with pytest.raises(UserError, match="data_digest"):
        run(make_recipe(task=task, data=data, train={"max_steps": 4}), resume=True)


def test_a_run_is_continued_in_the_precision_that_it_was_begun_in(make_recipe, fresh):
    """Whether `auto` came out as it on other hardware, or the recipe says so."""
    run(make_recipe(train={"max_steps": 2}))
    fresh()
    longer = {"max_steps": 3, "mixed_precision": "bf16"}
    with pytest.raises(UserError, match=r"has mixed_precision no and this run bf16; set train.mixed_precision to it"):
        run(make_recipe(train=longer), resume=True)
    fresh()
    teacher = {"dtype": "bfloat16"}
    with pytest.raises(UserError, match=r"teacher_dtype float32 and this run bfloat16; set teacher.dtype to it"):
        run(make_recipe(train={"max_steps": 3}, teacher=teacher), resume=True)
    fresh()
    run(make_recipe(train={"max_steps": 3, "mixed_precision": "no"}, teacher={"dtype": "float32"}), resume=True)


def write_latents(folder: Path, seed: int = 0, num_frames: int = 1) -> None:
    latents = torch.randn(10, 4, num_frames, 4, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"latents": latents}, folder / "a.safetensors")
    (folder / "prompts.txt").write_text("a cat\n" * 10)


def write_images(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(9):
        Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red cat sits")


def test_video_latents_from_disk(make_recipe, tmp_path):
    latents = tmp_path / "latents"
    latents.mkdir()
    write_latents(latents, num_frames=2)
    task = {"height": 32, "width": 32, "num_frames": 5, "losses": {"prediction": {"kind": "huber"}}}
    folder = run(make_recipe(task=task, data={"kind": "latents", "path": str(latents)}))
    metrics = toys.read_metrics(folder)
    assert metrics[0]["perf/tokens_per_s"] == pytest.approx(8 * metrics[0]["perf/samples_per_s"])


@pytest.mark.parametrize(("kind", "name"), [("prompts", "teacher"), ("latents", "data")])
def test_samples_say_where_latents_are_from_that_no_teacher_drew_for_them(make_recipe, tmp_path, kind, name):
    """The names of the rows are at the left of the pictures, 80 pixels wide."""
    if kind == "prompts":
        sections: dict[str, Any] = {"task": {"targets": "stored"}}
    else:
        (tmp_path / "latents").mkdir()
        write_latents(tmp_path / "latents")
        losses = {"prediction": {"weight": 0.0}, "true_data": {"weight": 1.0}}
        sections = {"task": {"losses": losses}, "data": {"kind": "latents", "path": str(tmp_path / "latents")}}
    folder = run(make_recipe(train={"max_steps": 1}, **sections))
    square = [np.zeros((32, 32, 3), np.uint8)]
    with Image.open(folder / "samples.png") as picture:
        names = np.asarray(picture)[:, :80]
    assert np.array_equal(names, np.asarray(labelled_grid({name: square, "student": square}, [""]))[:, :80])


def test_evaluate_and_sample_read_what_train_left(make_recipe, capsys):
    folder, threads = run(make_recipe(num_experts=2)), set(threading.enumerate())
    commands.evaluate(folder, ["evaluation.num_samples=4", "sampling.guidance_scale=4", "sampling.guidance_scale_2=2"])
    commands.evaluate(folder, ["evaluation.num_samples=4", "teacher.placement=disk"])
    assert "final_latent_mse" in capsys.readouterr().out
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    assert evaluation["num_samples"] == 4
    assert evaluation["velocity_mse_last_step"] > 0
    pictures = []
    for overrides in ([], ["sampling.num_inference_steps=1"], ["teacher.placement=disk"]):
        commands.sample(folder, overrides, ["a red cat", "a bird"], 0, folder / "two.png")
        with Image.open(folder / "two.png") as picture:
            assert picture.size[0] > 300
            pictures.append(np.asarray(picture))
    assert np.array_equal(pictures[0], pictures[2])
    assert not np.array_equal(pictures[0], pictures[1])
    # The teacher reads its files in threads of its own.
    assert set(threading.enumerate()) <= threads


def test_the_error_of_an_int8_teacher_is_on_record(make_recipe, capsys, fresh):
    """Also where the teacher answers in a rollout alone, none of whose steps is in the middle of the timesteps."""
    for task, bands in (
        ({}, ("0 to 333", "333 to 666", "666 to 1000")),
        ({"targets": "stored"}, ("0 to 333", "666 to 1000")),
    ):
        recipe = make_recipe(teacher={"quantization": "int8"}, task=task, train={"max_steps": 1})
        folder = run(recipe)
        error = json.loads((folder / "summary.json").read_text())["teacher_quantization_error"]
        assert 1e-4 < error < 0.05
        figures = json.loads((folder / "summary.json").read_text())["teacher_quantization_figures"]
        assert set(figures) == {f"timesteps {band}" for band in bands}
        line = f"int8 teacher: its outputs differ from float32's by {error:.1%} (relative, "
        assert capsys.readouterr().out.count(line) == 1
        shutil.rmtree(folder)
        fresh()


def test_a_dry_run_leaves_nothing(make_recipe, capsys):
    recipe = make_recipe()
    commands.dry_run(recipe)
    assert "ms a step" in capsys.readouterr().out
    assert not Path(recipe.output_dir).exists()
    assert not Path(f"{recipe.output_dir}.dry-run").exists()


def test_a_student_that_is_the_teacher_has_no_loss(make_recipe, pipelines):
    """The whole path from prompt to loss is exact, or this would not be zero."""
    folder = run(make_recipe(student={"config": None, "path": str(pipelines[1])}, optim={"lr": 1e-12}))
    assert toys.read_metrics(folder)[0]["loss"] < 1e-9


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_stage_of_numbers_that_are_not_finite_is_not_kept(make_recipe, pipelines, tmp_path, part):
    """Of a teacher in float16, say: every later run would take them, and be told to lower its learning rate."""
    folder = Path(shutil.copytree(pipelines[1], tmp_path / "teacher"))
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in sorted(weights, reverse=True) if weights[name].ndim == 1)
    save_file(weights | {name: torch.full_like(weights[name], torch.nan)}, file, {"format": "pt"})
    recipe = make_recipe(teacher={"path": str(folder)}, task={"height": 32, "width": 32, "targets": "stored"})
    words = "the teacher's drawing of sample 0" if part == "transformer" else "the embedding of prompt 1"
    with pytest.raises(RunError, match=rf"{words} is not finite; set teacher\.dtype to float32 or bfloat16"):
        run(recipe)
    kind = "rollout" if part == "transformer" else "text"
    assert [path.suffix for path in (tmp_path / "run" / "stages").glob(f"{kind}-*")] == [".partial"]


def test_prompts_are_numbered_over_the_text_stage_s_files(tmp_path, monkeypatch):
    """Ten prompts in files of four, of which two at a time are embedded; the first and second file are kept."""
    monkeypatch.setattr(text, "SHARD_PROMPTS", 4)
    monkeypatch.setattr(text, "BATCH_PROMPTS", 2)
    prompts, embedded = [f"prompt {number}" for number in range(1, 11)], []

    def embed(pipeline: None, batch: Sequence[str], length: int) -> list[dict[str, torch.Tensor]]:
        embedded.append(tuple(batch))
        return [condition_of(torch.nan if prompt == bad else float(prompt.split()[1])) for prompt in batch]

    def condition_of(number: float) -> dict[str, torch.Tensor]:
        rows = 1 if math.isnan(number) else 1 + int(number) % 3
        return {"text": torch.full((rows, 3), number), "pooled": torch.tensor([number])}

    family: Any = SimpleNamespace(load_text_encoder=lambda dtype, device: None, embed=embed)
    stage = Stage("text", {"max_sequence_length": 2}, tmp_path)
    for bad in ("prompt 10", "prompt 9", None):
        failing = nullcontext() if bad is None else pytest.raises(RunError, match=f"the embedding of {bad} is not")
        with failing:
            text.encode_prompts(stage, family, prompts, torch.float32, torch.device("cpu"))
    pairs = [tuple(prompts[first : first + 2]) for first in range(0, 10, 2)]
    assert embedded == [*pairs, pairs[-1], pairs[-1]]
    store = text.TextStore(stage)
    assert len(store) == 10
    for index in range(10):
        expected, found = condition_of(index + 1.0), store[index]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
