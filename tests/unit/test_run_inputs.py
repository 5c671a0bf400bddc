"""Where a run's files lie may change between its starts and for the commands that read it; what they hold may not."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from distiller import commands
from distiller.config.loading import load
from distiller.config.recipe import Recipe
from distiller.config.sections import flatten
from distiller.errors import UserError
from distiller.run_folder.input_files import digest_input
from distiller.run_folder.inputs import INPUTS, check_same_inputs, record_inputs, with_absolute_paths
from distiller.storage.yaml_files import parse_yaml
from tests import toys

WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")


@pytest.fixture
def work(tmp_path, pipelines, monkeypatch) -> Path:
    """A working directory with a teacher, prompts and a student's config, to be named by relative paths."""
    folder = tmp_path / "work"
    shutil.copytree(pipelines[1], folder / "models" / "teacher")
    toys.write_recipe(folder / "toy")
    shutil.copyfile(folder / "toy" / "prompts.txt", folder / "prompts.txt")
    shutil.copyfile(folder / "toy" / "student.json", folder / "student.json")
    monkeypatch.chdir(folder)
    return folder


def recipe_of(*overrides: str, steps: int = 2) -> Recipe:
    return load(
        "toy/recipe.yaml",
        [
            *("teacher.path=models/teacher", "data.path=prompts.txt", "student.config=student.json", "output_dir=run"),
            *(f"train.max_steps={steps}", "train.batch_size=8", *overrides),
        ],
    )


@pytest.mark.parametrize("place", ["absolute", "copied"])
def test_a_run_is_resumed_with_its_files_in_another_place(work, fresh, place):
    commands.train(recipe_of(), resume=False)
    fresh()
    folder = work
    if place == "copied":
        folder = work.parent / "mount"
        shutil.move(work / "models", folder / "models")
        for name in ("prompts.txt", "student.json"):
            shutil.move(work / name, folder / name)
    paths = {"teacher.path": "models/teacher", "data.path": "prompts.txt", "student.config": "student.json"}
    commands.train(recipe_of(*(f"{key}={folder / path}" for key, path in paths.items()), steps=3), resume=True)
    assert [line["step"] for line in toys.read_metrics(work / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("teacher.path", WEIGHTS),
        ("teacher.path", Path("scheduler", "scheduler_config.json")),
        ("data.path", Path("prompts.txt")),
        ("student.config", Path("student.json")),
    ],
)
def test_a_file_of_other_content_in_another_place_is_refused(work, fresh, key, file):
    commands.train(recipe_of(), resume=False)
    fresh()
    old = work / {"teacher.path": "models/teacher", "data.path": "", "student.config": ""}[key]
    other = work / "other"
    shutil.copytree(old, other, ignore=shutil.ignore_patterns("run", "toy", "models"))
    change(other / file)
    given = other if key == "teacher.path" else other / file
    with pytest.raises(UserError, match=rf"--resume: {key} was .* and is .*other.*differs; give the same files"):
        commands.train(recipe_of(f"{key}={given}", steps=3), resume=True)


def test_a_teacher_that_was_replaced_in_its_place_is_refused(work, fresh):
    commands.train(recipe_of(), resume=False)
    fresh()
    change(work / "models" / "teacher" / WEIGHTS)
    with pytest.raises(UserError, match=r"is no longer what the run began with: .*transformer/.* differs"):
        commands.train(recipe_of(steps=3), resume=True)


def test_a_run_that_remembers_nothing_is_compared_with_what_lies_where_it_began(work, fresh):
    """As runs of older versions, which kept their paths as they were given."""
    commands.train(recipe_of(), resume=False)
    fresh()
    (work / "run" / "inputs.json").unlink()
    held = work / "run" / "recipe.yaml"
    held.write_text(held.read_text().replace(f"{work}/", ""))
    commands.train(recipe_of(f"data.path={work / 'prompts.txt'}", steps=3), resume=True)
    fresh()
    (work / "run" / "inputs.json").unlink()
    shutil.move(work / "prompts.txt", work / "mine.txt")
    with pytest.raises(UserError, match=r"data.path was .*prompts.txt and is .*mine.txt now, and what the first held"):
        commands.train(recipe_of("data.path=mine.txt", steps=4), resume=True)


def test_commands_read_a_run_from_any_folder_and_after_it_was_moved(work, tmp_path, monkeypatch, capsys):
    commands.train(recipe_of(), resume=False)
    held = parse_yaml((work / "run" / "recipe.yaml").read_text())
    assert held["teacher"]["path"] == str(work / "models" / "teacher")
    assert held["data"]["path"] == str(work / "prompts.txt")
    assert held["student"]["config"] == str(work / "student.json")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    few = ["evaluation.num_samples=2", "evaluation.batch_size=2", "sampling.num_inference_steps=1"]
    commands.evaluate(work / "run", few)
    moved = Path(shutil.move(work / "run", elsewhere / "moved"))
    commands.sample(Path("moved"), few[2:], ["a red cat"], 0, None)
    commands.export(moved, None)
    assert (moved / "student-step-2" / "config.json").is_file()
    assert not (work / "run").exists()
    assert os.listdir(elsewhere) == ["moved"]


def test_names_that_are_no_paths_of_this_machine_stay_as_they_are(work):
    recipe = with_absolute_paths(
        recipe_of(
            "task.kind=diffusion", "teacher.path=owner/name", "data.path=asset:digits-prompts.txt", "cache_dir=~/stages"
        )
    )
    assert (recipe.teacher.path, recipe.data.path) == ("owner/name", "asset:digits-prompts.txt")
    assert recipe.cache_dir == os.path.expanduser("~/stages")
    assert recipe.output_dir == str(work / "run")


def test_a_small_change_of_one_tensor_of_many_is_seen(work):
    """Merged adapters leave most tensors, and every size, as they are."""
    folder = work / "models" / "teacher"
    tensors = load_file(folder / WEIGHTS) | {f"filler.{n}": toys.torch.zeros(20_000) for n in range(20)}
    save_file(tensors, folder / WEIGHTS)
    before = {key: digest_input(recipe_of(), key) for key in INPUTS}
    assert before["student.path"] is None
    save_file(tensors | {"filler.7": tensors["filler.7"] + 1}, folder / WEIGHTS)
    after = {key: digest_input(recipe_of(), key) for key in INPUTS}
    assert [key for key in INPUTS if after[key] != before[key]] == ["teacher.path"]
    assert before["teacher.path"] is not None
    changed = [name for name, digest in before["teacher.path"].items() if (after["teacher.path"] or {})[name] != digest]
    assert changed == [str(WEIGHTS)]


def change(file: Path) -> None:
    if file.suffix == ".safetensors":
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    else:
        file.write_text(file.read_text().replace("a red cat", "a blue cat", 1) + "\n")


def test_files_beside_a_model_are_no_part_of_it(work):
    """Results, notes, and the checkpoints of whoever trained the teacher."""
    folder = work / "models" / "teacher"
    before = digest_input(recipe_of(), "teacher.path")
    assert before is not None
    assert {"model_index.json", str(WEIGHTS), "scheduler/scheduler_config.json"} <= before.keys()
    for name in ("eval_results.json", "notes.txt", "transformer/all_results.json", "checkpoint-5/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert digest_input(recipe_of(), "teacher.path") == before


def test_a_hubs_model_is_compared_as_it_is_fetched(work, tmp_path, monkeypatch):
    """At the beginning of a resumed run, its JSON files alone may be in the local cache."""
    hub, cached = work / "models" / "teacher", tmp_path / "cached"
    monkeypatch.setattr("distiller.run_folder.input_files.snapshot_download", lambda *_, **__: str(cached))
    recipe = recipe_of("task.kind=diffusion", "teacher.path=owner/name")
    held = flatten(json.loads(recipe.model_dump_json()))
    shutil.copytree(hub, cached)
    (work / "run").mkdir()
    record_inputs(recipe, work / "run")
    shutil.rmtree(cached)
    shutil.copytree(hub, cached, ignore=shutil.ignore_patterns("*.safetensors"))
    check_same_inputs(work / "run", held, recipe)
    (cached / WEIGHTS).parent.mkdir(exist_ok=True)
    shutil.copyfile(hub / WEIGHTS, cached / WEIGHTS)
    record_inputs(recipe, work / "run")
    change(cached / WEIGHTS)
    with pytest.raises(UserError, match=r"teacher.path owner/name is no longer what the run .*safetensors differs"):
        record_inputs(recipe, work / "run")
    change(cached / "scheduler" / "scheduler_config.json")
    with pytest.raises(UserError, match=r"scheduler_config.json differs"):
        check_same_inputs(work / "run", held, recipe)


def test_a_run_with_a_device_map_goes_on_without_it(work, fresh):
    """A key that may change on resume may hold a mapping."""
    commands.train(recipe_of("teacher.placement=custom", "teacher.device_map={'': 0}"), resume=False)
    fresh()
    commands.train(recipe_of("teacher.placement=replicated", steps=3), resume=True)
