"""Whatever is wrong with what people give is said in one line on stderr, with exit code 2, and nothing is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors
from PIL import Image
from pydantic import BaseModel
from safetensors.torch import save_file

from distiller.cli import main
from distiller.config.loading import RECIPES, dump, parse
from distiller.storage.yaml_files import dump_yaml
from tests import toys

REMOVED = object()
TRANSFORMER_WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
Changes = dict[str, Any]
MODES = ([], ["--check"], ["--dry-run"])


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file's bytes and every folder below `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def changed(data: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The recipe with dotted keys set, or removed."""
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        if value is REMOVED:
            del node[key]
        else:
            node[key] = value
    return data


def change_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    for key, value in changes.items():
        if value is REMOVED:
            del content[key]
        else:
            content[key] = value
    file.write_text(json.dumps(content))


@pytest.fixture
def refuse(tmp_path, monkeypatch, capfd):
    """Runs a command in tmp_path that must be refused; the words are those that its message cannot do without."""
    monkeypatch.chdir(tmp_path)

    def run(arguments: list[Any], *words: str) -> str:
        before = contents(tmp_path)
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert code == 2, f"exit code {code}: {err}"
        assert err.startswith("distiller: "), err
        assert err.count("\n") == 1, err
        assert err.endswith("\n"), err
        assert "Traceback" not in err
        assert not out
        assert [word for word in words if word not in err] == [], err
        assert contents(tmp_path) == before
        return err

    return run


@pytest.fixture
def refuse_recipe(refuse, tmp_path, pipelines):
    """Trains (and checks, and dry-runs) the toy recipe with changes, which must be refused."""

    def run(changes: Changes, *words: str, modes: typing.Iterable[list[str]] = MODES, num_experts: int = 1) -> None:
        data = changed(toys.recipe(tmp_path, pipelines[num_experts]), changes)
        (tmp_path / "recipe.yaml").write_text(dump_yaml(data), encoding="utf-8")
        for mode in modes:
            refuse(["train", "recipe.yaml", *mode], *words)

    return run


def test_the_toy_recipe_itself_is_accepted(tmp_path, pipelines, capfd):
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_yaml(toys.recipe(tmp_path, pipelines[1])), encoding="utf-8")
    assert main(["train", str(file), "--check"]) == 0
    assert "ok: 27 samples" in capfd.readouterr().out


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], ["COMMAND", "--help"]),
            (["trian"], ["trian", "train", "evaluate", "--help"]),
            (["--bogus", "train", "x.yaml"], ["--bogus", "--help"]),
            (["train"], ["recipe", "distiller train --help"]),
            (["train", "x.yaml", "--bogus"], ["--bogus", "--help"]),
            (["train", "x.yaml", "--bogus=3"], ["--bogus=3", "--help"]),
            (["train", "x.yaml", "--check", "--dry-run"], ["--dry-run", "not allowed", "--check"]),
            (["train", "x.yaml", "--resume", "--dry-run"], ["--resume", "not allowed", "--dry-run"]),
            (["train", "x.yaml", "--check", "--config_file"], ["--config_file", "expected one argument"]),
            (["train", "nosuch.yaml"], ["nosuch.yaml", "no such recipe file", "distiller recipes"]),
            (["train", "nosuch.yml"], ["nosuch.yml", "no such recipe file"]),
            (["train", "folder.yaml"], ["folder.yaml", "no such recipe file"]),
            (["train", "a" * 300 + ".yaml"], ["no such recipe file"]),
            (["train", "a\0b.yaml"], ["no such recipe file"]),
            (["train", "digits-wam"], ["digits-wam", "neither a packaged recipe nor a path", "did you mean"]),
            (["train", "../config"], ["../config", "neither a packaged recipe nor a path"]),
            (["train", "notes.txt"], ["notes.txt", "neither a packaged recipe nor a path", ".yaml"]),
            (["train", ""], ["''", "neither a packaged recipe nor a path"]),
            (["evaluate"], ["RUN", "distiller evaluate --help"]),
            (["evaluate", "nosuch"], ["nosuch", "not a run", "recipe.yaml"]),
            (["evaluate", "folder.yaml"], ["folder.yaml", "not a run", "recipe.yaml"]),
            (["evaluate", "notes.txt"], ["notes.txt", "not a run", "recipe.yaml"]),
            (["evaluate", "a" * 300], ["not a run"]),
            (["evaluate", "nosuch", "--resume"], ["--resume", "--help"]),
            (["sample", "nosuch"], ["--prompts", "distiller sample --help"]),
            (["sample", "nosuch", "--prompts"], ["--prompts", "at least one"]),
            (["sample", "nosuch", "--prompts", "a cat"], ["nosuch", "not a run", "recipe.yaml"]),
            (["sample", "nosuch", "--prompts", "a cat", "--seed", "x"], ["--seed", "'x'", "int"]),
            (["recipes", "digits-wam"], ["digits-wam", "did you mean"]),
            (["recipes", "a", "b"], ["b", "--help"]),
            (["configs", "notes.txt"], ["notes.txt", "cannot be written", "another folder"]),
            (["configs", "taken"], ["taken", "already exists", "another folder"]),
        ],
        ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
    )
    def test_refused(self, refuse, tmp_path, arguments, words):
        (tmp_path / "folder.yaml").mkdir()
        (tmp_path / "notes.txt").write_text("notes")
        (tmp_path / "taken" / "accelerate_configs").mkdir(parents=True)
        (tmp_path / "taken" / "accelerate_configs" / "cpu.yaml").write_text("mine")
        refuse(arguments, *words)

    def test_only_rank_0_speaks(self, monkeypatch, capfd):
        monkeypatch.setenv("RANK", "1")
        assert main(["train", "nosuch.yaml"]) == 2
        assert capfd.readouterr() == ("", "")


class TestRecipeFile:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", ["a mapping of keys", "nothing"]),
            (b"# a comment\n", ["a mapping of keys", "nothing"]),
            (b"hello", ["a mapping of keys", "'hello'"]),
            (b"- seed: 1\n", ["a mapping of keys", "[{'seed': 1}]"]),
            (b"seed: [1\n", ["not valid YAML", "line 2"]),
            (b"seed: 1\n\ttask: 2\n", ["not valid YAML", "line 2"]),
            (b"seed: 1: 2\n", ["not valid YAML", "line 1"]),
            (b"seed: \x00\n", ["not valid YAML"]),
            (b"seed: 1\n---\nseed: 2\n", ["not valid YAML", "line 2", "another document"]),
            (b"seed: *nosuch\n", ["not valid YAML", "undefined alias 'nosuch'"]),
            (b"seed: !!python/object/apply:os.system [ls]\n", ["not valid YAML", "python/object/apply:os.system"]),
            (b"[a]: 1\n", ["not valid YAML", "unhashable"]),
            (b"seed: 1\ntask: {}\nseed: 2\n", ["not valid YAML", "line 3", "'seed'", "twice"]),
            (b"seed: " + b"[" * 1000, ["not valid YAML", "nested too deeply"]),
            (b"seed: " + b"9" * 5000, ["not valid YAML", "limit"]),
            (b"5: 1\n", ["unknown key '5'", "valid here"]),
            (b"seed: \xe9\n", ["UTF-8", "0xe9"]),
            ("seed: 1\n".encode("utf-16"), ["UTF-8"]),
        ],
        ids=lambda value: repr(value)[:40],
    )
    def test_refused(self, refuse, tmp_path, content, words):
        (tmp_path / "recipe.yaml").write_bytes(content)
        refuse(["train", "recipe.yaml"], "recipe.yaml", *words)

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("optim.lr", ["'optim.lr'", "key.sub=value"]),
            ("=5", ["'=5'", "key.sub=value"]),
            (".=5", ["'.=5'", "key.sub=value"]),
            ("optim.=5", ["'optim.=5'", "key.sub=value"]),
            ("optim..lr=5", ["'optim..lr=5'", "key.sub=value"]),
            ("optim.lr=[", ["'optim.lr=['", "not valid YAML"]),
            ("optim.lr=" + "[" * 1000, ["not valid YAML", "nested too deeply"]),
            ("seed=" + "9" * 5000, ["not valid YAML", "limit"]),
            ("optim.lr=", ["optim.lr", "given nothing", "a number"]),
            ("optim.lr=fast", ["optim.lr", "'fast'", "a number"]),
            ("optim.lr='1e-4'", ["optim.lr", "'1e-4'", "a number"]),
            ("optim.lr=.nan", ["optim.lr", "nan", "finite"]),
            ("optim.lr=1e400", ["optim.lr", "inf", "finite"]),
            ("optim.lr={a: 1}", ["optim.lr", "{'a': 1}", "a number"]),
            ("seed=2024-13-45", ["seed", "'2024-13-45'", "a whole number"]),
            ("optim=5", ["optim", "a section with keys", "lr", "given 5"]),
            ("optim.lr.x=5", ["optim.lr is 0.001", "no keys below it"]),
            ("optim.lrr=5", ["'optim.lrr'", "did you mean 'optim.lr'"]),
            ("no.such.key=5", ["unknown key 'no'", "valid here"]),
        ],
        ids=lambda value: value[:30] if isinstance(value, str) else "",
    )
    def test_overrides_are_refused(self, refuse, tmp_path, pipelines, override, words):
        (tmp_path / "recipe.yaml").write_text(dump_yaml(toys.recipe(tmp_path, pipelines[1])))
        error = refuse(["train", "recipe.yaml", override], *words)
        refuse(["train", "recipe.yaml", "--check", override], *words)
        assert "recipe.yaml" not in error
        assert error[:12] in ("distiller: '", 'distiller: "')
        assert error[12:].startswith(override[:8])

    @pytest.mark.parametrize(
        ("overrides", "blamed"),
        [
            (["optim.lr=1e-3", "optim.lrr=5"], "'optim.lrr=5'"),
            (["optim.betas=[0.9, 2]"], "'optim.betas=[0.9, 2]'"),
            (["seed=1", "task.targets=stored", "data.kind=images"], "'data.kind=images'"),
            (["seed=1", "task.guidance.scale_2=3"], "'task.guidance.scale_2=3'"),
            (["teacher.placement=custom"], "'teacher.placement=custom'"),
            (["task.kind=difusion"], "'task.kind=difusion'"),
            (["student={config: a, path: b}"], "'student={config: a, path: b}'"),
            (["train.max_steps=null"], "'train.max_steps=null'"),
            (["seed=2"], "recipe.yaml"),
        ],
        ids=lambda value: value[-1] if isinstance(value, list) else "",
    )
    def test_the_override_is_to_blame_and_not_the_file(self, refuse, tmp_path, pipelines, overrides, blamed):
        data = toys.recipe(tmp_path, pipelines[1]) | ({"no": 1} if blamed == "recipe.yaml" else {})
        (tmp_path / "recipe.yaml").write_text(dump_yaml(data))
        assert refuse(["train", "recipe.yaml", *overrides]).startswith(f"distiller: {blamed}: ")


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the recipe with its type; sections first."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field.annotation
        if is_section(field.annotation):
            yield from walk(field.annotation, f"{prefix}{name}.")


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def scalars(annotation: Any) -> set[Any]:
    """The scalar types that a key's type is made of."""
    if typing.get_origin(annotation) is typing.Literal:
        return {typing.Literal}
    parts = [part for part in typing.get_args(annotation) if part is not Ellipsis]
    return {annotation} if not parts else set().union(*(scalars(part) for part in parts if not _is_constraint(part)))


def _is_constraint(part: Any) -> bool:
    return not isinstance(part, type) and typing.get_origin(part) is None


Recipe = RECIPES["diffusion"]
SECTIONS = [key for key, annotation in walk(Recipe) if is_section(annotation)]
LEAVES = {key: scalars(annotation) for key, annotation in walk(Recipe) if not is_section(annotation)}
NUMBERS = [key for key, types in LEAVES.items() if types & {int, float}]
CHOICES = [key for key, types in LEAVES.items() if types == {typing.Literal}]


class TestEveryKey:
    """What holds for every key of the recipe, also for those that are added later."""

    def test_the_walk_finds_them(self):
        assert "task.losses.features" in SECTIONS
        assert {"optim.lr", "optim.betas", "train.max_steps", "task.guidance.scale"} <= set(NUMBERS)
        assert {"teacher.dtype", "train.mixed_precision"} <= set(CHOICES)

    @pytest.fixture
    def refuse_value(self, refuse, tmp_path):
        def run(key: str, value: Any, *words: str) -> None:
            minimal = {
                "teacher": {"path": "t"},
                "student": {"config": "s"},
                "data": {"path": "d"},
                "train": {"max_steps": 1},
            }
            (tmp_path / "recipe.yaml").write_text(dump_yaml(changed(minimal, {key: value})))
            refuse(["train", "recipe.yaml"], "recipe.yaml", *words)

        return run

    @pytest.mark.parametrize("section", SECTIONS)
    def test_sections_hold_keys(self, refuse_value, section):
        for value, shown in ((None, "nothing"), (5, "5"), ("on", "'on'"), ([1], "[1]"), (True, "true")):
            refuse_value(section, value, f"{section} is a section with keys", f"given {shown}")

    @pytest.mark.parametrize("section", ["", *SECTIONS])
    def test_unknown_keys(self, refuse_value, section):
        prefix = f"{section}." if section else ""
        refuse_value(f"{prefix}zzqq", 1, f"unknown key '{prefix}zzqq'", f"valid here: {prefix}")

    @pytest.mark.parametrize("key", [*LEAVES, *SECTIONS])
    def test_misspelt_keys(self, refuse_value, key):
        refuse_value(f"{key}x", 1, f"unknown key '{key}x'", f"did you mean '{key}'?")

    @pytest.mark.parametrize("key", [key for key in LEAVES if key != "teacher.device_map"])
    def test_only_the_device_map_takes_a_mapping(self, refuse_value, key):
        refuse_value(key, {"a": 1}, key, "given {'a': 1}")

    @pytest.mark.parametrize("key", NUMBERS)
    def test_numbers(self, refuse_value, key):
        for value in ("5", True, False, [["x"]], math.nan, math.inf, -math.inf, "nan"):
            refuse_value(key, value, key, "must be")
        if key != "task.timesteps.logit_mean":
            refuse_value(key, -1, key, "given -1", "must be")
        if int in LEAVES[key]:
            refuse_value(key, 1.5, key, "given 1.5", "must be")

    @pytest.mark.parametrize("key", CHOICES)
    def test_choices(self, refuse_value, key):
        for value in ("zzqq", 5, True, ["x"], ""):
            refuse_value(key, value, key, "must be")

    @pytest.mark.parametrize("key", [key for key, types in LEAVES.items() if bool in types])
    def test_switches(self, refuse_value, key):
        for value in ("yes", "true", 1, 0, [True]):
            refuse_value(key, value, key, "must be true or false")

    @pytest.mark.parametrize("key", [key for key, types in LEAVES.items() if str in types])
    def test_text(self, refuse_value, key):
        for value in (5, True, 1.5):
            refuse_value(key, value, key, "must be")

    @pytest.mark.parametrize("key", ["output_dir", "cache_dir", "teacher.path", "student.config", "data.path"])
    def test_locations_are_not_empty(self, refuse_value, key):
        refuse_value(key, "", key, "given ''", "at least 1 character")
        refuse_value(key, "a\0b", key, "NUL")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 2**80}, ["seed", f"given {2**80}", "less than"]),
        ({"optim.lr": 10**400}, ["optim.lr", "given 1000", "must be"]),
        ({"optim.lr": 0}, ["optim.lr", "given 0", "greater than 0"]),
        ({"train.batch_size": 0}, ["train.batch_size", "given 0", "greater than 0"]),
        ({"train.max_steps": 0}, ["train.max_steps", "given 0", "greater than 0"]),
        ({"task.condition_dropout": 1.0}, ["task.condition_dropout", "given 1.0", "less than 1"]),
        ({"train.ema_decay": 1.0}, ["train.ema_decay", "given 1.0", "less than 1"]),
        ({"optim.betas": [0.9]}, ["optim.betas", "[0.9]", "too few"]),
        ({"optim.betas": [0.9, 0.99, 0.999]}, ["optim.betas", "[0.9, 0.99, 0.999]", "at most 2"]),
        ({"optim.betas": [0.9, 1.0]}, ["optim.betas.1", "given 1.0", "less than 1"]),
        ({"task.guidance.scale": [1, 2, 3]}, ["task.guidance.scale", "a number or a list of at most 2"]),
        ({"task.guidance.scale": [1, "x"]}, ["task.guidance.scale.1", "given 'x'", "a number"]),
        ({"task.timesteps.shift": "atuo"}, ["task.timesteps.shift", "'atuo'", "a number or 'auto'"]),
        ({"tracking.trackers": ["wandbb"]}, ["tracking.trackers.0", "'wandbb'", "'wandb', 'tensorboard'"]),
        ({"lr": 1e-3}, ["unknown key 'lr'", "'optim.lr'"]),
        ({"batch_size": 4}, ["unknown key 'batch_size'", "'train.batch_size' or 'evaluation.batch_size'"]),
        ({"teacher": REMOVED}, ["'teacher'", "missing", "add it"]),
        ({"student": REMOVED}, ["'student'", "missing", "add it"]),
        ({"data": REMOVED}, ["'data'", "missing", "add it"]),
        ({"train": REMOVED}, ["'train'", "missing", "add it"]),
        ({"teacher.path": REMOVED}, ["'teacher.path'", "missing", "add it"]),
        ({"data.path": REMOVED}, ["'data.path'", "missing", "add it"]),
        ({"train.max_steps": REMOVED}, ["no end", "train.max_steps or train.num_epochs"]),
        ({"student.config": REMOVED}, ["exactly one of student.config, student.path", "num_layers"]),
        ({"student.path": "x"}, ["exactly one of student.config, student.path", "num_layers"]),
        ({"student.num_layers": 2}, ["exactly one of student.config, student.path", "num_layers"]),
        ({"task.losses.prediction.weight": 0}, ["every weight is 0", "set one above 0"]),
        (
            {"task.losses.features": {"weight": 1, "student_blocks": [0, 1], "teacher_blocks": [0]}},
            ["2 student_blocks and 1 teacher_blocks", "one teacher block for each"],
        ),
        ({"task.losses.features.weight": 0.5}, ["weight is 0.5", "student_blocks is empty", "name the blocks"]),
        (
            {"task.targets": "stored", "rollout.enabled": False},
            ["task.targets=stored needs", "rollout.enabled=true", "rollout.enabled=false"],
        ),
        (
            {"task.targets": "stored", "data.kind": "images"},
            ["task.targets=stored needs data.kind=prompts", "given data.kind=images"],
        ),
        (
            {
                "task.targets": "stored",
                "task.losses.features": {"weight": 1, "student_blocks": [0], "teacher_blocks": [0]},
            },
            ["task.targets=stored keeps no features", "task.losses.features.weight=0"],
        ),
        (
            {"task.targets": "stored", "task.guidance.scale": 3},
            ["task.targets=stored", "sampling.guidance_scale instead"],
        ),
        (
            {"task.targets": "stored", "task.losses.true_data.weight": 1},
            ["task.targets=stored has no x_0", "task.losses.true_data.weight=0"],
        ),
        ({"task.targets": "stored", "task.condition_dropout": 0.1}, ["task.targets=stored cannot drop conditions"]),
        ({"task.losses.true_data.weight": 1}, ["task.losses.true_data needs data.kind=images or latents", "prompts"]),
        ({"task.guidance.scale_2": 3}, ["task.guidance.scale_2 is 3", "one number", "given nothing"]),
        ({"task.guidance": {"scale": [1, 2], "scale_2": 3}}, ["task.guidance.scale_2 is 3", "given (1.0, 2.0)"]),
        ({"task.guidance.scale": [3, 1]}, ["task.guidance.scale", "low end 3 lies above its high end 1"]),
        (
            {"train.gradient_accumulation_steps": 2, "train.samples_per_update": 16},
            ["gradient_accumulation_steps 2", "samples_per_update 16", "give one"],
        ),
        ({"evaluation.min_recognised": 0.5}, ["evaluation.min_recognised needs a judge", "evaluation.judge=digits"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_values_and_contradictions(refuse_recipe, changes, words):
    refuse_recipe(changes, "recipe.yaml", *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task.height": 40}, ["task.height 40", "multiple of 16"]),
        ({"task.width": 8}, ["task.width 8", "multiple of 16"]),
        ({"task.num_frames": 3}, ["task.num_frames 3", "4 k + 1", "give 1 or 5"]),
        ({"task.width": 1024}, ["task.width 1024 makes 64 patches", "rope_max_seq_len is 32", "lower it"]),
        ({"task.num_frames": 401}, ["task.num_frames 401 makes 101 patches", "rope_max_seq_len is 32", "lower it"]),
        (
            {"task.losses.features": {"weight": 1, "student_blocks": [2], "teacher_blocks": [0]}},
            ["student_blocks names block 2", "there are 2", "0 to 1"],
        ),
        (
            {"task.losses.features": {"weight": 1, "student_blocks": [0], "teacher_blocks": [3]}},
            ["teacher_blocks names block 3", "there are 3", "0 to 2"],
        ),
        (
            {"task.guidance": {"scale": 2, "scale_2": 3}},
            ["task.guidance.scale_2 is 3", "the teacher has one transformer", "remove it"],
        ),
        (
            {"sampling.guidance_scale_2": 3},
            ["sampling.guidance_scale_2 is 3", "the teacher has one transformer", "remove it"],
        ),
        ({"evaluation.judge": "digits"}, ["evaluation.judge=digits", "64 x 64", "task.height 32 and task.width 32"]),
        ({"train.batch_size": 28}, ["one update takes 28 samples", "the data has 27", "lower batch_size"]),
        ({"data.max_samples": 7}, ["one update takes 8 samples", "the data has 7", "lower batch_size"]),
        ({"train.gradient_accumulation_steps": 4}, ["one update takes 32 samples", "accumulation 4", "has 27"]),
        ({"train.samples_per_update": 12}, ["samples_per_update 12", "not a multiple", "8 x 1 processes = 8"]),
        ({"tracking.trackers": ["trackio"]}, ["tracking.trackers names trackio", "not installed", "pip install"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_the_files(refuse_recipe, monkeypatch, changes, words):
    monkeypatch.setattr("distiller.build.get_available_trackers", list)
    refuse_recipe(changes, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has fp16")
def test_fp16_without_a_gpu(refuse_recipe):
    refuse_recipe({"train.mixed_precision": "fp16"}, "train.mixed_precision is fp16", "GPU", "bf16 or no")


def test_what_fsdp_cannot_do_is_refused_before_anything_is_written(refuse_recipe, monkeypatch):
    for name, value in {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "BertLayer")
    refuse_recipe({}, "BertLayer", "WanTransformerBlock", modes=([], ["--dry-run"]))


class TestPromptFile:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", ["holds no prompt", "one a line"]),
            (b"\xef\xbb\xbf", ["holds no prompt", "one a line"]),
            (b"\n \r\n\t\n\r", ["holds no prompt", "one a line"]),
            ("a café\n".encode("latin-1"), ["not UTF-8", "byte 5", "save it as UTF-8"]),
            ("猫\n".encode("cp932"), ["not UTF-8", "save it as UTF-8"]),
            ("a cat\n".encode("utf-16"), ["not UTF-8", "byte 0", "save it as UTF-8"]),
            ("a cat\n".encode("utf-16-le"), ["NUL", "save it as UTF-8"]),
        ],
        ids=repr,
    )
    def test_refused(self, refuse_recipe, tmp_path, content, words):
        (tmp_path / "mine.txt").write_bytes(content)
        refuse_recipe({"data.path": "mine.txt"}, "data.path: mine.txt", *words)

    @pytest.mark.parametrize("path", ["nosuch.txt", "student.json/x", "~nosuchuser/prompts.txt", "a" * 300])
    def test_missing(self, refuse_recipe, path):
        refuse_recipe({"data.path": path}, f"data.path: {path}", "does not exist", "one prompt a line")

    def test_a_folder(self, refuse_recipe, tmp_path):
        (tmp_path / "pictures").mkdir()
        refuse_recipe({"data.path": "pictures"}, "data.path: pictures is a folder", "data.kind", "images or latents")

    @pytest.mark.parametrize("name", ["nosuch", "", "../config.py"])
    def test_no_such_asset(self, refuse_recipe, name):
        refuse_recipe({"data.path": f"asset:{name}"}, f"asset:{name}: no such packaged asset", "digits-wan")


class TestTeacherFolder:
    @pytest.fixture
    def refuse_teacher(self, refuse_recipe, tmp_path, pipelines):
        """Refuses a copy of the toy pipeline after `damage`."""

        def run(damage: Callable[[Path], Any], *words: str, num_experts: int = 1) -> None:
            folder = shutil.copytree(pipelines[num_experts], tmp_path / "teacher")
            damage(folder)
            refuse_recipe({"teacher.path": "teacher"}, "teacher.path: teacher", *words)

        return run

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"path": "/no/such/folder"}, ["/no/such/folder", "neither a folder nor a hub id", "owner/name"]),
            ({"path": "gpt2"}, ["gpt2", "neither a folder nor a hub id", "owner/name"]),
            ({"path": "./nosuch"}, ["./nosuch", "neither a folder nor a hub id"]),
            ({"path": "a" * 300}, ["neither a folder nor a hub id"]),
            ({"path": "~nosuchuser/wan"}, ["~nosuchuser/wan", "neither a folder nor a hub id"]),
            ({"path": "asset:nosuch"}, ["asset:nosuch", "no such packaged asset", "digits-wan"]),
            ({"path": "student.json"}, ["student.json is a file", "the folder that holds model_index.json"]),
            ({"path": "empty"}, ["empty has no model_index.json", "not a diffusers pipeline", "give the folder"]),
            ({"path": "asset:digits-wan", "subfolder": "x"}, ["subfolder x", "no model_index.json"]),
            ({"path": "asset:digits-wan", "revision": "v1"}, ["teacher.revision is v1", "a folder", "remove it"]),
            ({"path": "asset:digits-wan/transformer"}, ["is a single model", "the pipeline folder above it"]),
        ],
        ids=lambda value: str(list(value.values()))[:60] if isinstance(value, dict) else "",
    )
    def test_no_pipeline_there(self, refuse_recipe, tmp_path, changes, words):
        (tmp_path / "empty").mkdir()
        refuse_recipe({f"teacher.{key}": value for key, value in changes.items()}, *words)

    @pytest.mark.parametrize("text", ["", "{", "[]", "5"])
    @pytest.mark.parametrize(
        "name",
        ["model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"],
    )
    def test_damaged_json(self, refuse_teacher, name, text):
        refuse_teacher(lambda folder: (folder / name).write_text(text), name, "not")

    @pytest.mark.parametrize(
        "name",
        [
            "transformer/config.json",
            "vae/config.json",
            "scheduler/scheduler_config.json",
            "tokenizer/tokenizer_config.json",
        ],
    )
    def test_missing_json(self, refuse_teacher, name):
        refuse_teacher(lambda folder: (folder / name).unlink(), f"lacks {name}", "complete pipeline folder")

    @pytest.mark.parametrize("name", ["transformer", "text_encoder", "vae"])
    def test_missing_weights(self, refuse_teacher, name):
        def damage(folder: Path) -> None:
            for file in (folder / name).glob("*.safetensors"):
                file.rename(file.with_suffix(".bin"))

        refuse_teacher(damage, f"{name}: holds no weights in ")

    @pytest.mark.parametrize("size", [0, 5, 500, -1])
    def test_truncated_weights(self, refuse_teacher, size):
        def damage(folder: Path) -> None:
            file = folder / TRANSFORMER_WEIGHTS
            file.write_bytes(file.read_bytes()[:size])

        refuse_teacher(damage, TRANSFORMER_WEIGHTS, "not a complete safetensors file", "copy it again")

    @pytest.mark.parametrize("index", ['{"weight_map": {"a": "lost.safetensors"}}', "{", "{}", "[]"])
    def test_missing_shards(self, refuse_teacher, index):
        def damage(folder: Path) -> None:
            (folder / f"{TRANSFORMER_WEIGHTS}.index.json").write_text(index)

        words = ["lost.safetensors", "No such file"] if "lost" in index else [".index.json", "not readable JSON"]
        refuse_teacher(damage, *words)

    @pytest.mark.parametrize("value", [REMOVED, None, [None, None]])
    def test_no_transformer(self, refuse_teacher, value):
        refuse_teacher(
            lambda folder: change_json(folder / "model_index.json", transformer=value),
            "has no transformer",
            "model_index.json must name one",
        )

    @pytest.mark.parametrize("mark", ["Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth", "low_noise_model", "config"])
    def test_original_layout(self, refuse_teacher, mark):
        def damage(folder: Path) -> None:
            (folder / "model_index.json").unlink()
            if mark == "config":
                (folder / "config.json").write_text('{"_class_name": "WanModel"}')
            else:
                (folder / mark).mkdir()

        refuse_teacher(damage, "Wan's original layout", "-Diffusers", "convert_wan_to_diffusers.py")

    def test_another_pipeline(self, refuse_teacher):
        refuse_teacher(
            lambda folder: change_json(folder / "model_index.json", _class_name="WanImageToVideoPipeline"),
            "is a WanImageToVideoPipeline",
            "WanPipeline",
        )

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"image_dim": 1280}, ["image-to-video", "give a text-to-image/video one"]),
            ({"added_kv_proj_dim": 24}, ["image-to-video", "give a text-to-image/video one"]),
            ({"_class_name": "WanVACETransformer3DModel"}, ["a WanVACETransformer3DModel", "WanTransformer3DModel"]),
            ({"patch_size": 2}, ["patch_size is 2", "three whole numbers"]),
            ({"num_layers": "3"}, ["num_layers is '3'", "a whole number above 0"]),
            ({"in_channels": None}, ["in_channels is None", "a whole number above 0"]),
            ({"num_attention_heads": 0}, ["num_attention_heads is 0", "a whole number above 0"]),
        ],
        ids=str,
    )
    def test_unfit_transformer(self, refuse_teacher, changes, words):
        def damage(folder: Path) -> None:
            change_json(folder / "transformer" / "config.json", **changes)

        refuse_teacher(damage, "transformer/config.json", *words)

    @pytest.mark.parametrize(
        "wrong", [{"prediction_type": "epsilon"}, {"use_flow_sigmas": False}, {"prediction_type": "v_prediction"}]
    )
    def test_a_scheduler_that_does_not_sample_by_flow_matching(self, refuse_teacher, wrong):
        published = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"}
        config = published | {"use_flow_sigmas": True, "flow_shift": 3.0} | wrong
        refuse_teacher(
            lambda folder: change_json(folder / "scheduler/scheduler_config.json", **config),
            "its UniPCMultistepScheduler has prediction_type",
            "correct scheduler/scheduler_config.json",
        )

    def test_unknown_scheduler(self, refuse_teacher):
        refuse_teacher(
            lambda folder: change_json(folder / "scheduler/scheduler_config.json", _class_name="NoSuchScheduler"),
            "NoSuchScheduler",
            "upgrade diffusers",
        )

    @pytest.mark.parametrize(
        ("num_experts", "boundary", "words"),
        [
            (1, 0.5, ["1 transformer(s) and boundary_ratio 0.5", "both transformer_2 and boundary_ratio"]),
            (2, None, ["2 transformer(s) and boundary_ratio None", "both transformer_2 and boundary_ratio"]),
            (2, REMOVED, ["2 transformer(s) and boundary_ratio None", "both transformer_2 and boundary_ratio"]),
            (2, 7.0, ["boundary_ratio is 7.0", "between 0 and 1"]),
            (2, "0.9", ["boundary_ratio is '0.9'", "between 0 and 1"]),
        ],
    )
    def test_experts_and_boundary(self, refuse_teacher, num_experts, boundary, words):
        refuse_teacher(
            lambda folder: change_json(folder / "model_index.json", boundary_ratio=boundary),
            *words,
            num_experts=num_experts,
        )

    def test_the_second_expert_is_checked_too(self, refuse_teacher):
        refuse_teacher(
            lambda folder: (folder / "transformer_2" / "config.json").unlink(),
            "lacks transformer_2/config.json",
            num_experts=2,
        )


class TestHub:
    """What the hub says, simulated with the exceptions of huggingface_hub."""

    @pytest.fixture
    def refuse_hub(self, refuse_recipe, monkeypatch):
        def run(error: Exception, *words: str, **teacher: str) -> None:
            def download(*_: Any, **__: Any) -> str:
                raise error

            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            monkeypatch.setattr("distiller.storage.hub.snapshot_download", download)
            changes = {f"teacher.{key}": value for key, value in {"path": "Wan-AI/Wan", **teacher}.items()}
            refuse_recipe(changes, "Wan-AI/Wan", "HF_HUB_OFFLINE=1", "give a folder", *words)

        return run

    @pytest.mark.parametrize(
        ("kind", "status", "words"),
        [
            (hub_errors.GatedRepoError, 403, ["is gated", "accept its terms", "hf auth login"]),
            (hub_errors.RepositoryNotFoundError, 404, ["unknown on the hub", "private", "hf auth login"]),
            (hub_errors.DisabledRepoError, 403, ["cannot be fetched", "DisabledRepoError"]),
            (hub_errors.HfHubHTTPError, 503, ["cannot be fetched", "HfHubHTTPError: several"]),
        ],
    )
    def test_it_refuses(self, refuse_hub, kind, status, words):
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        refuse_hub(kind("several\nlines of\n\nexplanation", response=response), *words)

    def test_unknown_revision(self, refuse_hub):
        response = SimpleNamespace(status_code=404, headers={}, request=None)
        error = hub_errors.RevisionNotFoundError("no", response=response)
        refuse_hub(error, "teacher.revision", "has no revision v9", revision="v9")

    @pytest.mark.parametrize(
        "error",
        [
            hub_errors.LocalEntryNotFoundError("not in the cache"),
            hub_errors.HTTPError("of the HTTP client"),
            ConnectionError("refused"),
            TimeoutError("no answer"),
            OSError(28, "No space left on device"),
            ValueError("unexpected"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_unreachable(self, refuse_hub, error):
        refuse_hub(error, "cannot be fetched", type(error).__name__, str(error))

    def test_offline(self, refuse_recipe, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        refuse_recipe({"teacher.path": "Wan-AI/NoSuch"}, "Wan-AI/NoSuch", "offline mode is on", "local cache")

    @pytest.mark.parametrize("name", ["a b/c", "Wan-AI/..", "Wan-AI/a--b"])
    def test_no_valid_id(self, refuse_recipe, name):
        refuse_recipe({"teacher.path": name}, name, "no folder here and unknown on the hub")

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({}, ["no model_index.json"]),
            ({"config.json": '{"_class_name": "WanModel"}'}, ["original layout", "-Diffusers"]),
            ({"config.json": '{"_class_name": "UNet2DModel"}'}, ["is a single model"]),
            ({"model_index.json": '{"_class_name": "FluxPipeline"}'}, ["is a FluxPipeline", "WanPipeline"]),
        ],
        ids=str,
    )
    def test_another_repository(self, refuse_recipe, monkeypatch, tmp_path, files, words):
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for name, text in files.items():
            (snapshot / name).write_text(text)
        monkeypatch.setattr("distiller.storage.hub.snapshot_download", lambda *_, **__: str(snapshot))
        refuse_recipe({"teacher.path": "owner/name"}, "teacher.path: owner/name", *words)


class TestStudent:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"_class_name": "FluxTransformer2DModel"}, ["FluxTransformer2DModel", "must be a WanTransformer3DModel"]),
            ({"hidden_size": 64, "depth": 2}, ["does not know", "depth, hidden_size"]),
            ({"in_channels": 16}, ["in_channels", "is 16", "teacher's 4", "must be equal"]),
            ({"out_channels": 8}, ["out_channels", "is 8", "teacher's 4", "must be equal"]),
            ({"text_dim": 4096}, ["text_dim", "text width", "is 4096", "teacher's 16", "must be equal"]),
            ({"patch_size": [1, 3, 3]}, ["patch_size [1, 3, 3]", "does not divide the 4 latents of task.height 32"]),
            ({"patch_size": [2, 2, 2]}, ["patch_size [2, 2, 2]", "neither the teacher's nor (1, n, n)"]),
            ({"patch_size": [1, 2, 4]}, ["patch_size [1, 2, 4]", "neither the teacher's nor (1, n, n)"]),
            ({"patch_size": [2, 2]}, ["patch_size is [2, 2]", "three whole numbers above 0"]),
            ({"patch_size": None}, ["patch_size is None", "three whole numbers above 0"]),
            ({"num_layers": 0}, ["num_layers is 0", "a whole number above 0"]),
            ({"ffn_dim": -24}, ["ffn_dim is -24", "a whole number above 0"]),
            ({"num_attention_heads": "2"}, ["num_attention_heads is '2'", "a whole number above 0"]),
            ({"num_layers": True}, ["num_layers is True", "a whole number above 0"]),
            ({"attention_head_dim": 13}, ["attention_head_dim is 13", "even"]),
            ({"eps": "small"}, ["eps is 'small'", "a number"]),
            ({"image_dim": 64}, ["image-to-video", "give a text-to-image/video one"]),
            ({"rope_max_seq_len": 1}, ["task.height 32 makes 2 patches", "student's rope_max_seq_len is 1"]),
        ],
        ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
    )
    def test_unfit_config(self, refuse_recipe, tmp_path, changes, words):
        toys.write_student_config(tmp_path / "mine.json")
        change_json(tmp_path / "mine.json", **changes)
        refuse_recipe({"student.config": "mine.json"}, "student", *words)

    @pytest.mark.parametrize("text", [b"", b"{", b"\xff", b'{"a": 1,}'])
    def test_config_that_is_no_json(self, refuse_recipe, tmp_path, text):
        (tmp_path / "mine.json").write_bytes(text)
        refuse_recipe({"student.config": "mine.json"}, "student.config: mine.json", "not readable JSON")

    @pytest.mark.parametrize("text", ["[]", "5", "null"])
    def test_config_that_is_no_object(self, refuse_recipe, tmp_path, text):
        (tmp_path / "mine.json").write_text(text)
        refuse_recipe({"student.config": "mine.json"}, "student.config: mine.json", "not a JSON object")

    def test_missing_config(self, refuse_recipe):
        refuse_recipe({"student.config": "no.json"}, "student.config: no.json", "does not exist", "config.json")

    def test_config_that_is_a_folder(self, refuse_recipe, tmp_path):
        (tmp_path / "mine").mkdir()
        refuse_recipe({"student.config": "mine"}, "student.config: mine", "Is a directory")

    def test_config_that_diffusers_cannot_build(self, refuse_recipe, monkeypatch):
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("some new rule")

        monkeypatch.setattr("distiller.diffusion.wan.architecture.WanTransformer3DModel.from_config", fail)
        refuse_recipe({}, "diffusers cannot build a student", "some new rule", "correct it")

    @pytest.mark.parametrize("path", ["nosuch", "student.json", "owner/name"])
    def test_path_that_is_no_folder(self, refuse_recipe, path):
        refuse_recipe({"student": {"path": path}}, f"student.path: {path} is not a folder", "saved model's")

    def test_path_without_a_config(self, refuse_recipe, tmp_path):
        (tmp_path / "mine").mkdir()
        refuse_recipe({"student": {"path": "mine"}}, "student.path", "mine/config.json does not exist")

    @pytest.mark.parametrize("size", [None, 300])
    def test_path_without_weights(self, refuse_recipe, tmp_path, pipelines, size):
        folder = shutil.copytree(pipelines[1], tmp_path / "mine")
        weights = folder / TRANSFORMER_WEIGHTS
        if size is None:
            weights.unlink()
        else:
            weights.write_bytes(weights.read_bytes()[:size])
        refuse_recipe({"student": {"path": "mine"}}, "student.path: mine", "safetensors")

    @pytest.mark.parametrize(("key", "limit"), [("num_layers", 3), ("num_attention_heads", 2), ("ffn_dim", 32)])
    def test_more_than_the_teacher_has(self, refuse_recipe, key, limit):
        words = [f"student.{key} is {limit + 1}", f"the teacher has only {limit}", "lower it"]
        refuse_recipe({"student": {key: limit + 1}}, *words)

    def test_features_of_other_patches(self, refuse_recipe, tmp_path):
        toys.write_student_config(tmp_path / "mine.json", patch_size=[1, 4, 4])
        features = {"weight": 1, "student_blocks": [0], "teacher_blocks": [0]}
        changes = {"student.config": "mine.json", "task.losses.features": features}
        refuse_recipe(changes, "task.losses.features needs equal patch sizes")


class TestImages:
    @pytest.fixture
    def refuse_images(self, refuse_recipe, tmp_path):
        """Refuses a folder with one picture after `add`."""

        def run(add: Callable[[Path], Any], *words: str, **changes: Any) -> None:
            folder = tmp_path / "pictures"
            folder.mkdir()
            Image.new("RGB", (32, 32)).save(folder / "a.png")
            add(folder)
            refuse_recipe({"data": {"kind": "images", "path": "pictures"}, **changes}, *words)

        return run

    @pytest.mark.parametrize("path", ["nosuch", "student.json"])
    def test_no_folder(self, refuse_recipe, path):
        changes = {"data": {"kind": "images", "path": path}}
        refuse_recipe(changes, f"data.path: {path} is not a folder", "data.kind=images")

    def test_no_images(self, refuse_images):
        refuse_images(lambda folder: (folder / "a.png").unlink(), "pictures holds no captioned image", ".png")

    def test_no_captions(self, refuse_images):
        refuse_images(lambda folder: None, "a.png has no caption", "add a.txt", "metadata.jsonl")

    @pytest.mark.parametrize("text", ["", " \n\t\n"])
    def test_empty_caption(self, refuse_images, text):
        refuse_images(lambda folder: (folder / "a.txt").write_text(text), "the caption of a.png is empty", "write one")

    @pytest.mark.parametrize("name", ["a.txt", "metadata.jsonl"])
    def test_captions_that_are_not_utf8(self, refuse_images, name):
        refuse_images(lambda folder: (folder / name).write_bytes(b"caf\xe9"), name, "UTF-8", "0xe9")

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ('{"file_name": "a.png"', ["line 2", "not a JSON object", "file_name", "text"]),
            ("a.png", ["line 2", "not a JSON object", "file_name", "text"]),
            ('["a.png", "a cat"]', ["line 2", "not a JSON object"]),
            ('{"file_name": "a.png"}', ["line 2", "not a JSON object", "text"]),
            ('{"text": "a cat"}', ["line 2", "not a JSON object", "file_name"]),
            ('{"file_name": 5, "text": "a cat"}', ["line 2", "not a JSON object"]),
            ('{"file_name": "a.png", "text": null}', ["line 2", "not a JSON object"]),
            ('{"file_name": "a.png", "text": ["a cat"]}', ["line 2", "not a JSON object"]),
            ('{"file_name": "b.png", "text": "a cat"}', ["line 2", "'b.png'", "does not exist"]),
            ('{"file_name": "", "text": "a cat"}', ["line 2", "''", "does not exist"]),
        ],
    )
    def test_metadata(self, refuse_images, line, words):
        good = '{"file_name": "a.png", "text": "a cat"}\n'
        refuse_images(lambda folder: (folder / "metadata.jsonl").write_text(good + line), "metadata.jsonl", *words)

    def test_empty_caption_in_metadata(self, refuse_images):
        line = '{"file_name": "a.png", "text": " "}'
        refuse_images(lambda folder: (folder / "metadata.jsonl").write_text(line), "the caption of a.png is empty")

    def test_empty_metadata(self, refuse_images):
        refuse_images(lambda folder: (folder / "metadata.jsonl").write_text("\n"), "holds no captioned image")

    def test_frames(self, refuse_images):
        changes = {"task.num_frames": 5}
        refuse_images(
            lambda folder: (folder / "a.txt").write_text("a cat"),
            "data.kind=images needs task.num_frames=1",
            "given 5",
            **changes,
        )


class TestLatents:
    LATENTS = torch.zeros(8, 4, 1, 4, 4)

    @pytest.fixture
    def refuse_latents(self, refuse_recipe, tmp_path):
        def run(shards: list[dict[str, torch.Tensor]], *words: str, prompts: int | None = 16) -> None:
            folder = tmp_path / "latents"
            folder.mkdir()
            for number, tensors in enumerate(shards):
                save_file(tensors, folder / f"{number}.safetensors")
            if prompts is not None:
                (folder / "prompts.txt").write_text("a cat\n" * prompts)
            refuse_recipe({"data": {"kind": "latents", "path": "latents"}}, "data.path", *words)

        return run

    @pytest.mark.parametrize("path", ["nosuch", "student.json"])
    def test_no_folder(self, refuse_recipe, path):
        changes = {"data": {"kind": "latents", "path": path}}
        refuse_recipe(changes, f"data.path: {path} is not a folder", "data.kind=latents", "prompts.txt")

    def test_no_prompts(self, refuse_latents):
        refuse_latents([{"latents": self.LATENTS}], "prompts.txt does not exist", prompts=None)

    def test_no_files(self, refuse_latents):
        refuse_latents([], "holds no .safetensors file", "'latents'")

    def test_no_tensor_of_the_name(self, refuse_latents):
        refuse_latents([{"samples": self.LATENTS}], "no tensor 'latents'", "found: samples", "rename it")

    def test_no_samples(self, refuse_latents):
        refuse_latents([{"latents": self.LATENTS[:0]}], "holds 0 latents")

    def test_another_size(self, refuse_latents):
        words = ["shape [4, 1, 8, 8]", "task.height, width and num_frames ask for [4, 1, 4, 4]", "change one"]
        refuse_latents([{"latents": torch.zeros(8, 4, 1, 8, 8)}], *words)

    @pytest.mark.parametrize("shape", [(), (8,), (8, 4, 4, 4), (8, 4, 1, 4, 4, 1)])
    def test_another_number_of_axes(self, refuse_latents, shape):
        refuse_latents([{"latents": torch.zeros(shape)}], f"shape {list(shape)}", "not [n, C, F, H, W]")

    def test_shards_that_differ(self, refuse_latents):
        shards = [{"latents": self.LATENTS}, {"latents": torch.zeros(8, 4, 1, 2, 4)}]
        refuse_latents(shards, "1.safetensors", "[4, 1, 2, 4]", "[4, 1, 4, 4]")

    def test_too_few_prompts(self, refuse_latents):
        refuse_latents([{"latents": self.LATENTS}], "3 prompts", "latents for line 8", "prompts.txt", prompts=3)

    @pytest.mark.parametrize(
        "index",
        [torch.arange(7), torch.arange(8).float(), torch.arange(8) - 1, torch.arange(8).view(8, 1)],
        ids=["short", "float", "negative", "column"],
    )
    def test_prompt_index(self, refuse_latents, index):
        shards = [{"latents": self.LATENTS, "prompt_index": index}]
        refuse_latents(shards, "0.safetensors has 8 latents and a prompt_index", "int64")

    def test_prompt_index_beyond_the_prompts(self, refuse_latents):
        shards = [{"latents": self.LATENTS, "prompt_index": torch.arange(8) + 10}]
        refuse_latents(shards, "16 prompts", "latents for line 18")

    @pytest.mark.parametrize("size", [0, 5, 60, -1])
    def test_truncated(self, refuse_recipe, tmp_path, size):
        folder = tmp_path / "latents"
        folder.mkdir()
        (folder / "prompts.txt").write_text("a cat\n" * 8)
        file = folder / "0.safetensors"
        save_file({"latents": self.LATENTS}, file)
        file.write_bytes(file.read_bytes()[:size])
        changes = {"data": {"kind": "latents", "path": "latents"}}
        refuse_recipe(changes, "data.path: latents/0.safetensors", "not a complete safetensors file")


class TestOutputFolder:
    """`--dry-run` writes elsewhere, and looks at none of this."""

    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("student.json", ["output_dir: student.json is a file", "choose a folder"]),
            ("student.json/run", ["output_dir: student.json/run", "cannot be written", "Not a directory"]),
            ("a" * 300, ["output_dir", "cannot be written", "File name too long"]),
            ("theirs", ["output_dir: theirs holds a 'student'", "no recipe.yaml", "choose another folder"]),
            ("held", ["output_dir: held already holds a run", "--resume", "another folder"]),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_refused(self, refuse_recipe, tmp_path, path, words):
        (tmp_path / "theirs" / "student").mkdir(parents=True)
        (tmp_path / "held").mkdir()
        (tmp_path / "held" / "recipe.yaml").write_text("seed: 1")
        refuse_recipe({"output_dir": path}, *words, modes=[[], ["--check"]])

    @pytest.mark.parametrize("path", ["student.json", "student.json/cache", "a" * 300])
    def test_cache_dir(self, refuse_recipe, path):
        refuse_recipe({"cache_dir": path}, f"cache_dir: {path} cannot be made a folder", modes=[[], ["--check"]])

    def test_fewer_steps_than_are_done(self, refuse_recipe, tmp_path, pipelines):
        (tmp_path / "run" / "checkpoints" / "step-6").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / "step-6" / "progress.json").write_text('{"step": 6}')
        held = parse(toys.recipe(tmp_path, pipelines[1], output_dir="run"))
        (tmp_path / "run" / "recipe.yaml").write_text(dump(held))
        words = ["--resume: run has done 6 steps", "ends after 3", "raise train.max_steps"]
        refuse_recipe({"output_dir": "run", "train.max_steps": 3}, *words, modes=[["--resume"]])

    @pytest.mark.parametrize(
        ("held", "words"),
        [
            ("seed: [", ["--resume: run/recipe.yaml is damaged", "line 1"]),
            ("- 1", ["--resume: run/recipe.yaml is not a recipe"]),
            (b"\xff", ["--resume: run/recipe.yaml is damaged", "utf-8"]),
        ],
    )
    def test_damaged_run(self, refuse_recipe, tmp_path, held, words):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "recipe.yaml").write_bytes(held if isinstance(held, bytes) else held.encode())
        refuse_recipe({"output_dir": "run"}, *words, modes=[["--resume"], ["--resume", "--check"]])

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"optim.lr": 0.5}, ["--resume: optim.lr was 0.001", "is 0.5 now", "may change"]),
            ({"seed": 4}, ["--resume: seed was 3", "is 4 now", "may change"]),
            ({"train.tf32": True}, ["--resume: train.tf32 was False", "is True now", "may change"]),
            (
                {"optim.lr": 0.5, "seed": 4},
                ["--resume: optim.lr was 0.001 and is 0.5 now; seed was 3 and is 4 now", "only train.max_steps, "],
            ),
        ],
        ids=str,
    )
    def test_another_recipe(self, refuse_recipe, tmp_path, pipelines, change, words):
        (tmp_path / "run").mkdir()
        held = parse(toys.recipe(tmp_path, pipelines[1], output_dir="run"))
        (tmp_path / "run" / "recipe.yaml").write_text(dump(held))
        refuse_recipe({"output_dir": "run", **change}, *words, modes=[["--resume"], ["--resume", "--check"]])


class TestLaunchFile:
    LOCAL = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 2\n"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (LOCAL + "distributed_type: DEEPSPEED\nuse_cpu: true\n", ["use_cpu: true", "drop DeepSpeed", "remove it"]),
            (
                LOCAL + "distributed_type: MEGATRON_LM\n",
                ["MEGATRON_LM is not supported", "MULTI_GPU, DEEPSPEED or FSDP"],
            ),
            (LOCAL + "distributed_type: XLA\n", ["XLA is not supported", "MULTI_GPU, DEEPSPEED or FSDP"]),
            (LOCAL + "distributed_type: MULTI_XPU\n", ["MULTI_XPU is not supported", "MULTI_GPU, DEEPSPEED or FSDP"]),
            (LOCAL + "distributed_type: FSDP\nuse_cpu: true\n", ["use_cpu: true", "drop FSDP", "remove it"]),
            (LOCAL + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3\n", ["fsdp_version is 3", "1 or 2"]),
            (LOCAL + "distributed_type: FSDP\nfsdp_config: 5\n", ["fsdp_config is 5", "mapping"]),
            (LOCAL + "distributed_type: NONSENSE\n", ["'NONSENSE'", "accelerate config"]),
            (LOCAL + "distributed_type: 'NO'\n", ["NO starts one process", "num_processes is 2", "MULTI_GPU"]),
            (LOCAL + "distributed_type: NO\n", ["NO starts one process", "num_processes is 2", "MULTI_GPU"]),
            (LOCAL + "distributed_type: MULTI_GPU\nmixed_precision: fp8\n", ["fp8", "no, bf16 or fp16"]),
            (LOCAL + "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", ["is no", "says bf16", "remove it"]),
            (LOCAL + "distributed_type: MULTI_GPU\nno_such_key: 1\n", ["unknown key 'no_such_key'", "valid here: "]),
            (LOCAL.replace("2", "two") + "distributed_type: MULTI_GPU\n", ["num_processes is 'two'", "whole number"]),
            (LOCAL.replace("2", "4") + "distributed_type: MULTI_GPU\n", ["one update takes 32 samples", "has 27"]),
            (
                LOCAL + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: nosuch.json\n",
                ["deepspeed_config_file nosuch.json does not exist", "working directory", "distiller configs"],
            ),
            (
                LOCAL + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: prompts.txt\n",
                ["deepspeed_config_file prompts.txt is not readable JSON"],
            ),
            (LOCAL + "distributed_type: DEEPSPEED\ndeepspeed_config: 5\n", ["deepspeed_config is 5", "mapping"]),
            (LOCAL, ["distributed_type", "accelerate config"]),
            ("compute_environment: AMAZON_SAGEMAKER\n", ["AMAZON_SAGEMAKER", "only LOCAL_MACHINE"]),
            ("", ["not a mapping of keys", "accelerate config"]),
            ("- 1\n", ["not a mapping of keys", "accelerate config"]),
            ("a: [", ["line 1", "accelerate config"]),
            (b"\xe9", ["utf-8", "accelerate config"]),
        ],
        ids=lambda value: str(value)[-40:] if isinstance(value, str | bytes) else "",
    )
    def test_refused(self, refuse_recipe, tmp_path, text, words):
        (tmp_path / "launch.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        modes = [["--check", "--config_file", "launch.yaml"]]
        refuse_recipe({"train.mixed_precision": "no"}, *words, modes=modes)

    @pytest.mark.parametrize(
        ("changes", "launch", "words"),
        [
            (
                {"train.mixed_precision": "fp16"},
                "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n",
                ["fsdp_offload_params is true", "is fp16"],
            ),
            (
                {"train.mixed_precision": "auto"},
                "distributed_type: FSDP\nmixed_precision: fp16\n"
                "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n",
                ["fsdp_offload_params is true", "is fp16"],
            ),
            (
                {},
                "distributed_type: FSDP\n"
                "fsdp_config: {fsdp_reshard_after_forward: NO_SHARD, fsdp_offload_params: true}\n",
                ["fsdp_offload_params is true", "NO_SHARD", "nothing would be offloaded"],
            ),
            (
                {},
                "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
                "parallelism_config: {parallelism_config_tp_size: two}\n",
                ["parallelism_config_tp_size is 'two'", "not a whole number"],
            ),
            (
                {"train.mixed_precision": "no"},
                "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: mine.json}\n",
                ["the DeepSpeed JSON enables bf16", "precision is no"],
            ),
            (
                {},
                "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: inducto}\n",
                ["dynamo_backend is 'inducto'", "'inductor'"],
            ),
            (
                {},
                "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_use_dynamic: perhaps}\n",
                ["dynamo_use_dynamic is 'perhaps'", "true or false"],
            ),
        ],
        ids=str,
    )
    def test_what_a_launch_would_refuse_is_refused_by_the_check(self, refuse_recipe, tmp_path, changes, launch, words):
        (tmp_path / "launch.yaml").write_text(self.LOCAL + launch)
        (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
        refuse_recipe(changes, *words, modes=[["--check", "--config_file", "launch.yaml"]])

    @pytest.mark.parametrize("name", ["nosuch.yaml", "folder", "a" * 300])
    def test_missing(self, refuse_recipe, tmp_path, name):
        (tmp_path / "folder").mkdir()
        modes = [["--check", "--config_file", name]]
        refuse_recipe({}, name, "no such accelerate config file", "distiller configs", modes=modes)

    def test_global_batch_over_the_files_processes(self, refuse_recipe, tmp_path):
        (tmp_path / "launch.yaml").write_text(self.LOCAL + "distributed_type: MULTI_GPU\n")
        modes = [["--check", "--config_file", "launch.yaml"]]
        words = ["samples_per_update 24", "8 x 2 processes = 16", "change one"]
        refuse_recipe({"train.samples_per_update": 24}, *words, modes=modes)

    def test_without_check(self, refuse_recipe):
        modes = [["--config_file", "launch.yaml"], ["--dry-run", "--config_file", "launch.yaml"]]
        refuse_recipe({}, "--config_file belongs to accelerate launch", "--check", modes=modes)


class TestRunFolder:
    @pytest.fixture
    def run_dir(self, tmp_path, pipelines):
        """As after a finished run, with the teacher's own transformer as its student."""
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "recipe.yaml").write_text(dump(parse(toys.recipe(tmp_path, pipelines[1]))))
        shutil.copytree(pipelines[1] / "transformer", folder / "student")
        return folder

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("recipe.yaml", "seed: [", ["run/recipe.yaml", "not valid YAML"]),
            ("recipe.yaml", "", ["run/recipe.yaml", "a mapping of keys"]),
            ("student/config.json", None, ["run", "neither student/ nor a checkpoint", "finish its training"]),
            ("student/config.json", "{", ["run", "student/ is damaged", "config.json"]),
            ("student/diffusion_pytorch_model.safetensors", None, ["run", "student/ is damaged", "safetensors"]),
            ("student/diffusion_pytorch_model.safetensors", "abc", ["run", "student/ is damaged", "safetensors"]),
            ("prompts.txt", None, ["data.path", "prompts.txt does not exist"]),
        ],
    )
    def test_incomplete(self, refuse, run_dir, name, text, words):
        file = run_dir.parent / name if name == "prompts.txt" else run_dir / name
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        refuse(["evaluate", "run"], *words)
        refuse(["sample", "run", "--prompts", "a red cat"], *words)

    def test_a_damaged_summary(self, refuse, run_dir):
        (run_dir / "summary.json").write_text("{")
        refuse(["evaluate", "run"], "run/summary.json", "not readable JSON", "remove it")

    def test_a_student_of_another_shape(self, refuse, run_dir):
        change_json(run_dir / "student" / "config.json", ffn_dim=8)
        refuse(["evaluate", "run"], "run", "student/ is damaged")

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("evaluation.num_samples=0", ["evaluation.num_samples", "given 0", "greater than 0"]),
            ("evaluation.num_sample=5", ["'evaluation.num_sample'", "did you mean 'evaluation.num_samples'"]),
            ("num_samples", ["'num_samples'", "key.sub=value"]),
        ],
    )
    def test_overrides(self, refuse, run_dir, override, words):
        refuse(["evaluate", "run", override], *words)
        refuse(["sample", "run", override, "--prompts", "a red cat"], *words)
        refuse(["sample", "run", "--prompts", "a red cat", "--seed", "1", override], *words)

    def test_a_judge_of_another_size(self, refuse, run_dir):
        refuse(["evaluate", "run", "evaluation.judge=digits"], "evaluation.judge=digits", "64 x 64", "task.height 32")

    def test_an_override_among_the_prompts(self, refuse, run_dir):
        given = "teacher.placement=streamed"
        refuse(["sample", "run", "--prompts", "a red cat", given], given, "no prompt", "before --prompts")

    def test_the_judge_needs_scikit_learn(self, refuse, run_dir, monkeypatch):
        def fail() -> None:
            raise ImportError("No module named 'sklearn'")

        monkeypatch.setattr("distiller.demo.digits.real_digits", fail)
        size = ["task.height=64", "task.width=64"]
        refuse(["evaluate", "run", *size, "evaluation.judge=digits"], "scikit-learn", "distiller[demo]")

    @pytest.mark.parametrize("output", ["nosuch/x.png", "x.txt", "x", "run"])
    def test_output(self, refuse, run_dir, output):
        arguments = ["sample", "run", "--prompts", "a red cat", "--output", output]
        refuse(arguments, f"--output {output}", "a folder that exists", ".png")


def test_messages_stay_on_one_line_whatever_the_names_hold(refuse, tmp_path):
    name = "a\nb\u2028c\x85d.yaml"
    assert os.fspath(tmp_path) not in refuse(["train", name], "a b c d.yaml: no such recipe file")
