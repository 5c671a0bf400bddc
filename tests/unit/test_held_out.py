"""The loss on held-out samples while training, the best checkpoint, and samples side by side."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import AutoModel
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from distiller.build import build_task
from distiller.checkpoint.best import Best, read_best
from distiller.cli import main
from distiller.config.loading import load
from distiller.distributed.ranks import Ranks
from distiller.tasks.interfaces import HoldsOut
from tests import toys
from tests.model_families import recipe_of

MEASURED = ["evaluation.every_steps=1", "evaluation.sample_every_steps=1", "checkpoint.keep_best=true"]
FAMILIES = {
    "wan": ["data.held_out=0.2", "train.max_steps=4"],
    "llama": ["data.held_out=0.2", "train.max_steps=4"],
    "resnet": ["data.held_out=0.4", "train.max_steps=4", "student.batch_norm=batch"],
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Path]:
    """Family -> the file of its recipe; the stages of all of its runs lie beside it."""
    files = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        content = recipe_of(family, folder) | {"cache_dir": str(folder / "cache")}
        files[family] = folder / "recipe.yaml"
        files[family].write_text(yaml.safe_dump(content))
    return files


@pytest.fixture(scope="module")
def runs(recipes, tmp_path_factory):
    """(family, whether it measures) -> the folder of a run."""
    known: dict[tuple[str, bool], Path] = {}

    def get(family: str, measures: bool) -> Path:
        if (family, measures) not in known:
            folder = known[family, measures] = tmp_path_factory.mktemp("runs") / "run"
            overrides = [f"output_dir={folder}", *FAMILIES[family], *(MEASURED if measures else [])]
            assert main(["train", str(recipes[family]), *overrides]) == 0
        return known[family, measures]

    return get


def held_out_losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["eval/loss"] for line in toys.read_metrics(run_dir) if "eval/loss" in line}


def student_files(run_dir: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((run_dir / "student").glob("*.safetensors"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_measuring_changes_nothing_of_training(runs, family):
    with_it, without = runs(family, True), runs(family, False)
    for name in ("loss", "grad_norm", "lr"):
        assert [line[name] for line in toys.read_metrics(with_it)] == [
            line[name] for line in toys.read_metrics(without)
        ]
    assert student_files(with_it) == student_files(without)
    assert student_files(with_it)
    assert list(held_out_losses(with_it)) == [1, 2, 3, 4]
    assert not held_out_losses(without)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_shown_at_each_step_but_the_last_which_has_the_runs_own(runs, family):
    folder = runs(family, True)
    (final,) = folder.glob("samples.*")
    shown = sorted(folder.glob("evaluations/*/*"))
    assert [file.parent.name for file in shown] == ["step-1", "step-2", "step-3"]
    assert {file.name for file in shown} == {final.name}
    assert not list(runs(family, False).glob("evaluations"))


def test_diffusion_is_measured_on_prompts_and_noise_that_training_does_not_have(recipes, runs):
    """The reference: diffusers' models on all held-out samples in one batch, and the plain mean of squared errors."""
    folder = runs("wan", True)
    recipe = load(str(folder / "recipe.yaml"), ["evaluation.loss_samples=7", "task.losses.features.weight=0"])
    task: Any = build_task(recipe)
    prompts = Path(recipe.data.path).read_text().splitlines()
    assert task.num_held_out == round(0.2 * len(prompts))
    assert task.num_samples + task.num_held_out == len(prompts)
    ranks = Ranks.join(torch.device("cpu"))
    task.prepare_stages(ranks, torch.float32)
    task.load_data(ranks, None)
    samples = [task.held_out_sample(*divmod(index, task.num_held_out)) for index in range(256)]
    assert {sample.sample_id for sample in samples} == set(range(task.num_samples, len(prompts)))
    assert len({sample.timestep for sample in samples}) == 256
    batch = task.collate(samples)
    teacher = AutoModel.from_pretrained(f"{recipe.teacher.path}/transformer")
    student = AutoModel.from_pretrained(str(folder / "student"))
    text = batch.positive["text"]
    # As the pipeline pads it.
    padded = torch.nn.functional.pad(text, (0, 0, 0, 512 - text.shape[1]))
    inputs = {"hidden_states": batch.noisy, "timestep": batch.timesteps, "encoder_hidden_states": padded}
    with torch.no_grad():
        error = (student(**inputs).sample - teacher(**inputs).sample).square().mean().item()
    assert toys.read_metrics(folder)[-1]["eval/loss/prediction"] == pytest.approx(error, rel=1e-5)


def test_a_language_model_is_measured_as_evaluate_does(recipes, runs, capsys):
    folder = runs("llama", True)
    assert main(["evaluate", str(folder)]) == 0
    figures = json.loads((folder / "summary.json").read_text())["evaluation"]
    # The page has them from now on.
    assert f"{figures['kl_divergence']:.4g}" in (folder / "report.html").read_text()
    last = toys.read_metrics(folder)[-1]
    assert last["eval/loss/divergence"] == pytest.approx(figures["kl_divergence"], rel=1e-5)


def test_a_classifier_is_measured_on_the_pictures_of_evaluate(recipes, runs):
    """The reference: transformers' models on the held-out pictures, and cross-entropy by hand."""
    folder = runs("resnet", True)
    task: Any = build_task(load(str(folder / "recipe.yaml")))
    assert isinstance(task, HoldsOut)
    batch = task.collate([task.held_out_sample(0, index) for index in range(task.num_held_out)])
    models = [
        AutoModelForImageClassification.from_pretrained(path).eval()
        for path in (folder / "student", load(str(folder / "recipe.yaml")).teacher.path)
    ]
    with torch.no_grad():
        ours, theirs = (model(batch.pixels).logits.double() for model in models)
    cross_entropy = -ours.log_softmax(1)[torch.arange(len(batch.labels)), batch.labels]
    target, log_probabilities = (theirs / 4).softmax(1), (ours / 4).log_softmax(1)
    divergence = (target * (target.log() - log_probabilities)).sum(1)
    last = toys.read_metrics(folder)[-1]
    assert last["eval/loss/distillation"] == pytest.approx(16 * divergence.mean().item(), rel=1e-5)
    assert last["eval/loss/labels"] == pytest.approx(cross_entropy.mean().item(), rel=1e-5)


def test_the_summary_tells_the_last_loss_and_the_best_step(runs):
    folder = runs("wan", True)
    losses = held_out_losses(folder)
    summary = json.loads((folder / "summary.json").read_text())
    best = min(losses, key=losses.__getitem__)
    assert summary["held_out_loss"] == losses[4]
    assert summary["best"] == {"step": best, "loss": losses[best]}
    assert read_best(folder / "checkpoints") == Best(best, losses[best])


def test_the_best_checkpoint_outlives_newer_ones_and_a_resumed_run_goes_on_from_it(recipes, tmp_path, monkeypatch):
    """A learning rate at which the loss soon grows again."""
    output = tmp_path / "run"
    overrides = [f"output_dir={output}", "data.held_out=0.2", "train.batch_size=2", "checkpoint.keep=1"]
    overrides += ["checkpoint.every_steps=1", "evaluation.every_steps=1", "checkpoint.keep_best=true"]
    numbers = count()
    measured = [3.0, 1.0, 2.0, 0.5, 0.7, 0.2]
    monkeypatch.setattr(
        "distiller.training.held_out.HeldOutEvaluation.measure",
        lambda evaluation, stop: {"eval/loss": measured[next(numbers)]},
    )
    assert main(["train", str(recipes["wan"]), *overrides, "train.max_steps=3"]) == 0
    assert sorted(file.name for file in (output / "checkpoints").glob("step-*")) == ["step-2", "step-3"]
    assert read_best(output / "checkpoints") == Best(2, 1.0)
    assert main(["train", str(recipes["wan"]), "--resume", *overrides, "train.max_steps=5"]) == 0
    assert sorted(file.name for file in (output / "checkpoints").glob("step-*")) == ["step-4", "step-5"]
    assert main(["train", str(recipes["wan"]), "--resume", *overrides, "train.max_steps=6"]) == 0
    assert [file.name for file in (output / "checkpoints").glob("step-*")] == ["step-6"]


def test_the_best_is_saved_where_no_checkpoint_is_due(recipes, tmp_path, monkeypatch):
    output, numbers, measured = tmp_path / "run", count(), [2.0, float("nan"), 1.0, 1.5]
    monkeypatch.setattr(
        "distiller.training.held_out.HeldOutEvaluation.measure",
        lambda evaluation, stop: {"eval/loss": measured[next(numbers)]},
    )
    overrides = [f"output_dir={output}", "data.held_out=0.2", "checkpoint.every_minutes=null"]
    overrides += ["checkpoint.at_end=false", "evaluation.every_steps=1", "checkpoint.keep_best=true"]
    assert main(["train", str(recipes["wan"]), *overrides, "train.max_steps=4", "train.batch_size=2"]) == 0
    assert sorted(file.name for file in (output / "checkpoints").glob("step-*")) == ["step-1", "step-3"]
    assert read_best(output / "checkpoints") == Best(3, 1.0)
    # The exported student is the last one.
    exported = load_file(output / "student" / "diffusion_pytorch_model.safetensors")
    assert main(["export", str(output / "checkpoints" / "step-3"), "--output", str(tmp_path / "best")]) == 0
    best = load_file(tmp_path / "best" / "diffusion_pytorch_model.safetensors")
    assert any(not torch.equal(exported[name], best[name]) for name in best)


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("wan", ["evaluation.every_steps=2"], "data.held_out 0 holds nothing out of the data"),
        ("resnet", ["evaluation.every_steps=2", "data.held_out=0"], "data.held_out 0 holds nothing out of the data"),
        ("wan", ["checkpoint.keep_best=true"], "set evaluation.every_steps"),
        (
            "wan",
            ["evaluation.every_steps=2", "data.held_out=0.2", "teacher.placement=cached", "teacher.cache=here"],
            "asks the teacher about held-out data",
        ),
        ("wan", ["evaluation.every_steps=0"], "evaluation.every_steps"),
    ],
)
def test_what_cannot_be_measured_is_refused(recipes, tmp_path, capsys, family, overrides, said):
    output = tmp_path / "run"
    assert main(["train", str(recipes[family]), f"output_dir={output}", *overrides]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_a_run_of_a_version_without_these_keys_is_resumed_as_it_was(recipes, tmp_path, capsys):
    """Its recipe has none of them; their defaults are what it did, and others are another run."""
    output = tmp_path / "run"
    arguments = ["train", str(recipes["wan"]), f"output_dir={output}", "train.batch_size=2"]
    assert main([*arguments, "train.max_steps=1"]) == 0
    stored = yaml.safe_load((output / "recipe.yaml").read_text())
    for section, names in {
        "data": ("held_out",),
        "evaluation": ("every_steps", "loss_samples", "sample_every_steps"),
        "checkpoint": ("keep_best",),
        "tracking": ("report",),
    }.items():
        for name in names:
            del stored[section][name]
    (output / "recipe.yaml").write_text(yaml.safe_dump(stored))
    assert main([*arguments, "train.max_steps=2", "data.held_out=0.2", "--resume"]) == 2
    assert "data.held_out was None and is 0.2 now" in capsys.readouterr().err
    assert main([*arguments, "train.max_steps=2", "--resume"]) == 0
    assert [line["step"] for line in toys.read_metrics(output)] == [1, 2]
