"""A cache's folder is all that a run needs beside teacher and data: it can be moved, and its first run forgotten."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ResNetConfig

from distiller import commands
from distiller.commands.caching import make_cache
from distiller.config.loading import parse
from distiller.storage.stage_folders import CACHED_STAGES, StageFolders
from distiller.storage.stages import Stage
from tests import classifiers, toy_causal_lm, toys


def diffusion(folder: Path, **options: Any) -> dict[str, Any]:
    pipeline = toys.make_pipeline(folder / "teacher")
    evaluation = {"sample_prompts": ["a dog flies"]}
    return toys.recipe(folder, pipeline, evaluation=evaluation, cache={"draws": 1}, **options)


def images(folder: Path) -> dict[str, Any]:
    classifiers.save_pictures(folder / "pictures", count=4)
    for file in (folder / "pictures").rglob("*.png"):
        file.with_suffix(".txt").write_text("a red cat sits")
    return diffusion(folder, data={"kind": "images", "path": str(folder / "pictures")})


def language(folder: Path) -> dict[str, Any]:
    return toy_causal_lm.recipe(folder, toy_causal_lm.save_model(folder / "teacher"))


def classification(folder: Path) -> dict[str, Any]:
    config = ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        id2label=dict(enumerate(classifiers.LABELS)),
        label2id={name: index for index, name in enumerate(classifiers.LABELS)},
    )
    teacher = classifiers.save_classifier(folder / "teacher", config)
    (teacher / "model.safetensors").unlink()
    pictures = classifiers.save_pictures(folder / "pictures")
    data = classifiers.recipe(folder, teacher, pictures, config, teacher_training={"max_steps": 2, "batch_size": 8})
    return data | {"cache_dir": None}


@pytest.mark.parametrize("recipe_of", [diffusion, images, language, classification])
def test_a_cache_is_moved_and_trained_from_with_another_output_dir(tmp_path, fresh, monkeypatch, recipe_of):
    data = recipe_of(tmp_path)
    first, cached = tmp_path / "first", {"placement": "cached", "cache": str(tmp_path / "cached")}

    def train(name: str, **teacher: str) -> Path:
        fresh()
        recipe = parse(data | {"output_dir": str(tmp_path / name), "teacher": data["teacher"] | teacher})
        commands.train(recipe, resume=False)
        return Path(recipe.output_dir)

    live = train("live")
    fresh()
    make_cache(parse(data | {"output_dir": str(first), "teacher": data["teacher"] | {"cache": cached["cache"]}}))
    shutil.rmtree(first)
    (tmp_path / "cached").rename(tmp_path / "moved")
    # The data lie elsewhere too, as copies without their times.
    given = Path(data["data"]["path"])
    elsewhere = tmp_path / "elsewhere" / given.name
    elsewhere.parent.mkdir()
    if given.is_dir():
        shutil.copytree(given, elsewhere, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(given, elsewhere)
    data["data"] = data["data"] | {"path": str(elsewhere)}
    monkeypatch.setattr("distiller.diffusion.family.Family.load_text_encoder", refuse)
    monkeypatch.setattr("distiller.language.data.source.tokenise_corpus", refuse)
    read = train("read", placement="cached", cache=str(tmp_path / "moved"))
    losses = [[line["loss"] for line in toys.read_metrics(folder)] for folder in (read, live)]
    assert losses[0][0] == losses[1][0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert not list((read / "stages").glob("[!.]*"))


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the cache holds it")


def test_stages_are_found_in_the_cache_and_made_in_the_run_s_own_folder(tmp_path):
    places = StageFolders(tmp_path / "run" / "stages", tmp_path / "cache" / CACHED_STAGES)
    made = Stage("made", {"by": "the first run"}, tmp_path / "first")
    made.partial.mkdir(parents=True)
    (made.partial / "content").write_text("x")
    made.finish()
    made.copy_into(places.cached)
    made.copy_into(places.cached)
    found = Stage("made", made.key, places)
    assert found.is_complete
    assert found.folder.parent == places.cached
    assert (found.folder / "content").stat().st_ino == (made.folder / "content").stat().st_ino
    found.make_once(True, lambda: refuse())
    other = Stage("made", {"by": "the second run"}, places)
    assert not other.is_complete
    assert other.folder.parent == places.primary
    other.partial.mkdir(parents=True)
    other.finish()
    assert other.is_complete
    assert [folder.name for folder in places.cached.iterdir()] == [made.folder.name]


def test_other_file_systems_get_copies(tmp_path, monkeypatch):
    def refuse_links(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse_links)
    stage = Stage("made", {}, tmp_path / "one")
    stage.partial.mkdir(parents=True)
    torch.save(torch.ones(3), stage.partial / "content")
    stage.finish()
    stage.copy_into(tmp_path / "two")
    assert torch.equal(torch.load(tmp_path / "two" / stage.folder.name / "content"), torch.ones(3))
