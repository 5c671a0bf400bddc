"""What a recipe that was copied and adapted is told: notices about keys that no longer fit, and messages' advice."""

from __future__ import annotations

import json

import pytest
import yaml

from distiller.cli import main
from distiller.config.diffusion import DiffusionRecipe
from distiller.diffusion.judges import find_judge, judge_notices
from distiller.vision.labels import are_unnamed
from tests import toys
from tests.model_families import recipe_of
from tests.toy_task import toy_recipe


def write(folder, family: str, **changes):
    recipe = recipe_of(family, folder, **changes)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


def test_classes_without_names_are_said_to_be_taken_in_the_data_s_order(tmp_path, capsys):
    recipe = write(tmp_path, "resnet")
    classes = sorted(folder.name for folder in (tmp_path / "pictures").iterdir() if folder.is_dir())
    names = [f"LABEL_{number}" for number in range(len(classes))]
    for file in (tmp_path / "teacher" / "config.json", tmp_path / "student.json"):
        content = json.loads(file.read_text())
        content["id2label"] = {str(number): name for number, name in enumerate(names)}
        content["label2id"] = {name: number for number, name in enumerate(names)}
        file.write_text(json.dumps(content))
    assert main(["train", recipe, "--check"]) == 0
    said = capsys.readouterr().out
    assert "taken in the data's order: " + ", ".join(f"{n} = {name}" for n, name in enumerate(classes)) in said


def test_only_the_library_s_numbers_are_no_names():
    assert are_unnamed(["a", "b"], ["LABEL_0", "LABEL_1"])
    assert not are_unnamed(["a", "b"], ["a", "LABEL_1"])
    assert not are_unnamed(["LABEL_1", "LABEL_0"], ["LABEL_0", "LABEL_1"])


def test_a_judge_with_prompts_of_its_own_is_said(tmp_path):
    recipe = toy_recipe(tmp_path)
    assert isinstance(recipe, DiffusionRecipe)
    judged = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"judge": "digits"})})
    (line,) = judge_notices(judged, ["a fox", "a cat"])
    assert "evaluation.judge is digits" in line
    own, _ = find_judge("digits").prompts(judged.evaluation.num_samples, judged.seed)
    assert judge_notices(judged, ["a fox", own[3]]) == []
    assert judge_notices(recipe, ["a fox"]) == []


@pytest.mark.parametrize(("steps", "is_said"), [(6, True), (7, True), (5, False)])
def test_a_warm_up_that_takes_the_whole_run_is_said(tmp_path, capsys, steps, is_said):
    recipe = write(tmp_path, "wan", optim={"warmup_steps": steps}, train={"max_steps": 6})
    assert main(["train", recipe, "--check"]) == 0
    assert (f"optim.warmup_steps {steps} takes all 6 updates" in capsys.readouterr().out) == is_said


def test_a_resumed_run_of_another_length_is_told_what_its_learning_rate_follows(tmp_path, capsys):
    recipe = write(tmp_path, "wan", optim={"schedule": "cosine"})
    output = f"output_dir={tmp_path / 'run'}"
    assert main(["train", recipe, output, "train.max_steps=2"]) == 0
    assert main(["train", recipe, output, "train.max_steps=4", "--resume"]) == 0
    assert (
        "begun with train.max_steps 2: the learning rate follows the new length from now on" in capsys.readouterr().err
    )
    assert main(["train", recipe, output, "train.max_steps=5", "--resume"]) == 0
    assert "begun with train.max_steps 4" in capsys.readouterr().err
    constant = write(tmp_path, "wan", optim={"schedule": "constant"})
    assert main(["train", constant, f"{output}-2", "train.max_steps=2"]) == 0
    assert main(["train", constant, f"{output}-2", "train.max_steps=4", "--resume"]) == 0
    assert "begun with" not in capsys.readouterr().err


def test_text_files_under_another_kind_are_pointed_at(tmp_path, capsys):
    recipe = write(tmp_path, "llama")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a text")
    assert main(["train", recipe, f"data.path={tmp_path / 'texts'}", "--check"]) == 2
    assert "holds no *.jsonl; set data.kind=text" in capsys.readouterr().err


def test_a_teacher_without_tokenizer_is_told_to_save_one(tmp_path, capsys):
    recipe = write(tmp_path, "llama")
    for file in (tmp_path / "teacher").glob("*token*"):
        file.unlink()
    assert main(["train", recipe, "--check"]) == 2
    assert "has no tokenizer; save it into that folder" in capsys.readouterr().err


def test_a_figure_of_both_models_is_taken_for_the_student_s(tmp_path, capsys):
    recipe = write(tmp_path, "llama", train={"max_steps": 1}, data={"held_out": 0.3})
    output = tmp_path / "run"
    assert main(["train", recipe, f"output_dir={output}"]) == 0
    assert main(["evaluate", str(output), "--max", "perplexity=3"]) == 2
    assert "did you mean 'student_perplexity'?" in capsys.readouterr().err
    assert toys.read_metrics(output)


@pytest.mark.parametrize(
    ("student", "is_said"),
    [
        ({"depths": [1, 1], "batch_norm": "group", "config": None}, True),
        ({"depths": [1, 1], "batch_norm": "frozen", "config": None}, False),
        ({"batch_norm": "group"}, False),
    ],
)
def test_trained_statistics_that_are_left_out_are_said(tmp_path, capsys, student, is_said):
    recipe = write(tmp_path, "resnet", student=student)
    assert main(["train", recipe, "--check", "task.losses.features.weight=0"]) == 0
    assert ("student.batch_norm is group: the trained statistics" in capsys.readouterr().out) == is_said


def test_a_check_says_what_the_teacher_draws_before_the_loop(tmp_path, capsys):
    recipe = write(tmp_path, "wan")
    assert main(["train", recipe, "--check"]) == 0
    assert "before the loop" not in capsys.readouterr().out
    assert main(["train", recipe, "--check", "rollout.enabled=true", "sampling.guidance_scale=2.0"]) == 0
    said = capsys.readouterr().out
    number = int(said.partition("ok: ")[2].split()[0])
    assert f"{number * 3 * 2:,} of its forward passes, of a sample each, before the loop" in said
