"""Data of the wrong form, or too few: what is said tells what to change."""

import json

import pytest

from distiller.build import plan_updates
from distiller.config.causal_lm import LanguageData
from distiller.config.loading import parse
from distiller.data.prompts import read_prompts
from distiller.errors import UserError
from distiller.language.data.corpus import open_corpus
from distiller.language.data.source import LanguageSource
from distiller.vision.files import read_config
from tests.toy_language import language_recipe, word_level


@pytest.mark.parametrize(
    ("samples", "batch_size", "accumulation", "processes", "advice"),
    [
        (1, 1, 1, 3, "start at most 1 process, or give more data"),
        (2, 4, 2, 3, "start at most 2 processes, or give more data"),
        (7, 4, 4, 2, "lower train.gradient_accumulation_steps .* accumulation 3 or less"),
        (27, 28, 1, 1, "lower batch_size to 27 or less"),
        (27, 8, 2, 2, "lower batch_size to 6 or less"),
    ],
)
def test_an_update_that_is_larger_than_the_data(make_recipe, samples, batch_size, accumulation, processes, advice):
    recipe = make_recipe(train={"batch_size": batch_size})
    with pytest.raises(UserError, match=f"and the data has {samples}; {advice}$"):
        plan_updates(recipe, samples, accumulation, processes)
    if "batch_size to" in advice:
        fitting = make_recipe(train={"batch_size": int(advice.split()[3])})
        assert plan_updates(fitting, samples, accumulation, processes).updates_per_epoch == 1


def test_completions_that_were_all_cut_away_name_the_key(tmp_path):
    rows = [{"prompt": "a " * 30, "completion": "dog"} for _ in range(4)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = language_recipe(tmp_path, kind="jsonl", path=str(tmp_path / "x.jsonl"), max_length=8)
    with pytest.raises(
        UserError, match=r"in 3 documents, .* within data\.max_length 8 tokens .*; raise data\.max_length"
    ):
        LanguageSource(recipe, word_level(tmp_path / "tokenizer", begins=False))


@pytest.mark.parametrize(
    ("name", "kind"), [("x.jsonl", "jsonl"), ("X.JSONL", "jsonl"), ("x.parquet", "datasets"), ("x.arrow", "datasets")]
)
def test_rows_are_not_learnt_as_text(tmp_path, name, kind):
    (tmp_path / name).write_text('{"text": "a"}')
    for path in (tmp_path / name, f"{tmp_path}/*.*"):
        with pytest.raises(UserError, match=rf"{name} is no plain text.*set data.kind={kind}"):
            open_corpus(LanguageData(kind="text", path=str(path)))
    with pytest.raises(UserError, match=rf"holds no \*\.txt; set data.kind={kind}"):
        open_corpus(LanguageData(kind="text", path=str(tmp_path)))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_rows_are_no_prompts(tmp_path, suffix):
    (tmp_path / f"x.{suffix}").write_text('{"text": "a"}')
    with pytest.raises(UserError, match=rf"x.{suffix} is no plain text, and a line of it no prompt; give"):
        read_prompts(tmp_path / f"x.{suffix}")


def test_null_is_not_put_in_quotes():
    data = {"teacher": {"path": "asset:digits-wan"}, "student": {"num_layers": 1}, "train": {"max_steps": 1}}
    with pytest.raises(UserError, match=r"data\.path: given nothing; it must be text, and null is none: give some, or"):
        parse(data | {"data": {"path": None}})
    with pytest.raises(UserError, match=r"data\.path: given 3; it must be text \(put it in quotes\)"):
        parse(data | {"data": {"path": 3}})


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_classes_that_do_not_exclude_each_other_are_refused(tmp_path, problem):
    file = tmp_path / "config.json"
    content = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    file.write_text(json.dumps(content | {"problem_type": problem}))
    with pytest.raises(UserError, match=f"problem_type of config.json is {problem}, .* single_label_classification"):
        read_config(file, "teacher.path: x")
    file.write_text(json.dumps(content | {"problem_type": "single_label_classification"}))
    assert read_config(file, "teacher.path: x").model_type == "vit"
