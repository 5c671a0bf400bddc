"""Texts that a pipeline's tokenizers cut are counted, already by --check, whatever they are read from."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from distiller import commands
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.tasks import open_task
from tests import toy_pictures, toys

LONG = "a red cat runs a red cat sits"
"""Eight words and the end: nine tokens."""


def picture_recipe(kind, pipeline, folder, **sections):
    return parse(toy_pictures.recipe(kind, folder, pipeline, **sections))


def test_texts_that_fit_are_not_mentioned(make_recipe, pictures, tmp_path, capsys):
    assert open_task(make_recipe()).notices() == []
    commands.check(make_recipe(task={"max_sequence_length": 5}), None)
    assert "tokens" not in capsys.readouterr().out
    for kind in toy_pictures.KINDS:
        assert open_task(picture_recipe(kind, pictures[kind], tmp_path)).notices() == []


def test_check_counts_the_prompts_that_are_cut_and_names_the_first(make_recipe, tmp_path, capsys):
    path = toys.write_prompts(tmp_path / "long.txt", ["a cat", LONG, "a red dog", LONG] * 2)
    commands.check(make_recipe(data={"path": str(path)}, task={"max_sequence_length": 4}), None)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert "data.path (prompts): 4 of 8 texts lose 20 tokens in all, since the pipeline's tokenizer keeps 4" in line
    assert f"the first, number 2, loses 5: '{LONG}'" in line
    assert line.endswith("shorten them, or raise task.max_sequence_length")


def test_the_pipeline_s_own_length_cuts_too(make_recipe, tmp_path):
    """2,000 words, of which WanPipeline keeps 511 and the end."""
    path = toys.write_prompts(tmp_path / "long.txt", [" ".join(["cat"] * 2000), "a bird"])
    (notice,) = open_task(make_recipe(data={"path": str(path)})).notices()
    assert "1 of 2 texts lose 1,489 tokens in all" in notice
    assert "keeps 512 of each" in notice
    assert notice.endswith("shorten them")


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("task.guidance.negative_prompt", {"task": {"guidance": {"negative_prompt": LONG}, "max_sequence_length": 5}}),
        (
            "evaluation.sample_prompts",
            {"task": {"max_sequence_length": 5}, "evaluation": {"sample_prompts": ["a", LONG]}},
        ),
    ],
)
def test_negative_and_sample_prompts_are_counted_under_their_keys(make_recipe, key, sections):
    (notice,) = open_task(make_recipe(**sections)).notices()
    assert notice.startswith(f"{key}: 1 of ")
    assert "lose 4 tokens in all" in notice


def test_captions_are_counted(make_recipe, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number, caption in enumerate(["a cat", LONG]):
        Image.new("RGB", (32, 32)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    data = {"kind": "images", "path": str(folder)}
    (notice,) = open_task(make_recipe(data=data, task={"max_sequence_length": 5})).notices()
    assert notice.startswith("data.path (captions): 1 of 2 texts lose 4 tokens")


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("sd", {"tokenizer": (8, 1)}),
        ("sd3", {"tokenizer": (8, 1), "tokenizer_2": (8, 1), "tokenizer_3": (5, 4)}),
    ],
)
def test_each_tokenizer_of_the_picture_families_has_its_own_limit(pictures, tmp_path, kind, counts):
    path = toys.write_prompts(tmp_path / "long.txt", ["a cat", LONG])
    notices = open_task(picture_recipe(kind, pictures[kind], tmp_path, data={"path": str(path)})).notices()
    assert len(notices) == len(counts)
    for notice, (name, (kept, lost)) in zip(notices, counts.items(), strict=True):
        assert f"1 of 2 texts lose {lost} tokens in all, since the pipeline's {name} keeps {kept} of each" in notice
        # The length of CLIP's tokenizers is their own.
        assert notice.endswith("raise task.max_sequence_length") == (name == "tokenizer_3")


def test_a_length_that_the_pipeline_refuses_is_not_advised(pictures, tmp_path):
    path = toys.write_prompts(tmp_path / "long.txt", ["a cat", " ".join(["cat"] * 600)])
    sections = {"data": {"path": str(path)}, "task": {"max_sequence_length": 512}}
    *_, notice = open_task(picture_recipe("sd3", pictures["sd3"], tmp_path, **sections)).notices()
    assert "tokenizer_3 keeps 512 of each" in notice
    assert notice.endswith("; shorten them")


def test_what_is_said_is_what_the_encoder_gets(make_recipe, tmp_path):
    """Texts that differ in what is cut alone are one text to the pipeline: `a red cat runs` and `a red cat sits`."""
    import torch

    prompts = ["a red cat runs", "a red cat sits"]
    path = toys.write_prompts(tmp_path / "long.txt", prompts)
    task = open_task(make_recipe(data={"path": str(path)}, task={"max_sequence_length": 3}))
    assert "2 of 2 texts lose 4 tokens" in task.notices()[0]
    encoder = task.family.load_text_encoder(torch.float32, torch.device("cpu"))
    first, second = (one["text"] for one in task.family.embed(encoder, prompts, 3))
    assert torch.equal(first, second)
    assert len(first) == 3


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(make_recipe, pipelines, tmp_path):
    folder = shutil.copytree(pipelines[1], tmp_path / "damaged")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    task = open_task(make_recipe(teacher={"path": str(folder)}))
    with pytest.raises(UserError, match=r"its tokenizer cannot be loaded .* copy the folder again"):
        task.notices()


def test_a_run_that_is_refused_for_its_tokenizer_leaves_no_folder(make_recipe, pipelines, tmp_path):
    folder = shutil.copytree(pipelines[1], tmp_path / "damaged")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    recipe = make_recipe(teacher={"path": str(folder)})
    with pytest.raises(UserError, match=r"its tokenizer cannot be loaded"):
        commands.train(recipe, False)
    assert not Path(recipe.output_dir).exists()
