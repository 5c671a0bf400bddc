"""`distiller evaluate RUN --lm-eval TASK`: the exported student in lm-evaluation-harness.

The harness is no dependency, since it asks for older versions of other packages: a package of its name stands for it
here, and the last test runs the real one where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distiller import commands
from distiller.cli import main
from distiller.commands.harness import Harness, tidied
from distiller.config.loading import parse
from tests import classifiers, toy_causal_lm

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
RESULTS = {
    "toy": {"alias": "toy", "sample_len": 6, "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict-match": 1}
}
PACKAGE = f"""
import json
from pathlib import Path

def simple_evaluate(**given):
    model, manager = given["model_args"]["pretrained"], given.pop("task_manager")
    assert (Path(model) / "config.json").is_file() and (Path(model) / "tokenizer_config.json").is_file()
    if "fails" in given["tasks"]:
        raise ConnectionError("no data set")
    file = Path(manager.include_path) / "given.json"
    file.write_text(json.dumps(given))
    return {{"results": {RESULTS!r}}}
"""
TASKS = """
class TaskManager:
    all_tasks = ["toy", "fails"]

    def __init__(self, include_path=None):
        self.include_path = include_path

    def match_tasks(self, names):
        return [name for name in names if name in self.all_tasks]
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    teacher = toy_causal_lm.save_model(folder / "teacher")
    commands.train(parse(toy_causal_lm.recipe(folder, teacher, train={"max_steps": 1})), resume=False)
    return folder / "run"


@pytest.fixture
def toy_harness(tmp_path, monkeypatch) -> None:
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "tasks.py").write_text(TASKS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    yield
    for name in ("lm_eval", "lm_eval.tasks"):
        sys.modules.pop(name, None)


def test_results_are_figures_by_task():
    assert tidied(RESULTS) == {"toy": {"acc": 0.5, "acc_stderr": None, "exact_match,strict-match": 1.0}}


@pytest.mark.usefixtures("toy_harness")
def test_results_stand_in_the_report_and_may_be_bounded(run_dir, tmp_path, capsys):
    arguments = ["evaluate", str(run_dir), "--lm-eval", "toy", "--lm-eval-include", str(tmp_path)]
    assert main([*arguments, "--min", "lm_eval.toy.acc=0.5"]) == 0
    report = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    assert report["lm_eval"] == tidied(RESULTS)
    assert report["kl_divergence"] > 0
    assert "\nlm_eval.toy.acc " in capsys.readouterr().out
    given = json.loads((tmp_path / "given.json").read_text())
    options = {"pretrained": str(run_dir / "student"), "dtype": "float32", "trust_remote_code": False}
    assert (given["model"], given["model_args"], given["tasks"]) == ("hf", options, ["toy"])
    assert main([*arguments, "--min", "lm_eval.toy.acc=0.6", "--max", "lm_eval.toy.f1=1"]) == 3
    said = capsys.readouterr().err
    assert "lm_eval.toy.acc is 0.5, below --min 0.6; lm_eval.toy.f1 has no value, and --max demands 1" in said


@pytest.mark.usefixtures("toy_harness")
def test_a_harness_that_fails_leaves_the_other_figures(run_dir, capsys):
    (run_dir / "summary.json").write_text("{}")
    assert main(["evaluate", str(run_dir), "--lm-eval", "fails"]) == 1
    report = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    assert "lm_eval" not in report
    assert report["num_tokens"] > 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("failed, the figures above have none of it (ConnectionError: no data set)")


@pytest.mark.usefixtures("toy_harness")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lm-eval", "tyo"], "--lm-eval tyo: lm-evaluation-harness has no such task; did you mean 'toy'?"),
        (["--lm-eval", " , "], "--lm-eval names no task; give TASK[,TASK]"),
        (["--lm-eval", "toy", "--lm-eval-include", "nowhere"], "--lm-eval-include nowhere: is not a folder"),
        (["--lm-eval-include", "."], "--lm-eval-include .: names tasks for --lm-eval, which is not given"),
        (["--min", "lm_eval.toy.acc=1"], "--min: lm_eval.toy.acc is no figure of this run;"),
    ],
)
def test_what_is_not_there_is_refused_first(run_dir, capsys, arguments, words):
    assert main(["evaluate", str(run_dir), *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "perplexity" not in printed.out


def test_without_the_harness_its_command_is_said(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert main(["evaluate", str(run_dir), "--lm-eval", "hellaswag"]) == 2
    assert "--lm-eval needs lm-evaluation-harness; run: pip install lm-eval" in capsys.readouterr().err


def test_a_classifier_is_not_for_the_harness(tmp_path, capsys):
    teacher = classifiers.save_classifier(tmp_path / "teacher", classifiers.resnet_config())
    pictures, student = classifiers.save_pictures(tmp_path / "pictures"), classifiers.resnet_config(depths=[1, 1])
    recipe = classifiers.recipe(tmp_path, teacher, pictures, student, train={"max_steps": 1})
    commands.train(parse(recipe), resume=False)
    assert main(["evaluate", str(tmp_path / "run"), "--lm-eval", "toy"]) == 2
    assert "is for language models alone, and this run's task.kind is classification" in capsys.readouterr().err


TASK_FILE = """
task: distiller_toy
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.skipif(not HAS_HARNESS, reason="lm-evaluation-harness is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_real_harness_scores_the_student(run_dir, tmp_path):
    """Multiple choice by the likelihood of each choice after the question, which is plain to compute."""
    words = toy_causal_lm.WORDS
    rows = [
        {"question": f"{words[i]} {words[i + 1]}", "choices": list(words[i : i + 3]), "right": i % 3} for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "toy.yaml").write_text(TASK_FILE.replace("FILE", str(tmp_path / "rows.jsonl")))
    harness = Harness.open("causal_lm", "distiller_toy", tmp_path)
    found = harness.run(run_dir / "student", torch.device("cpu"), trusts_code=False)
    model, tokenizer = (one.from_pretrained(run_dir / "student") for one in (AutoModelForCausalLM, AutoTokenizer))
    hits = 0
    for row in rows:
        question = tokenizer(row["question"])["input_ids"]
        scores = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(f"{row['question']} {choice}")["input_ids"]])
            with torch.no_grad():
                logs = model(ids).logits[0].double().log_softmax(1)
            scores.append(sum(float(logs[i - 1, ids[0, i]]) for i in range(len(question), ids.shape[1])))
        hits += scores.index(max(scores)) == row["right"]
    assert found["distiller_toy"]["acc"] == pytest.approx(hits / 6)
