"""An evaluation whose batch is too large for the memory is repeated with half of it, and gives the same figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distiller import commands
from distiller.config.loading import parse
from distiller.errors import RunError
from distiller.tasks.fitting_batch import with_fitting_batch
from distiller.teachers.replicated import ReplicatedTeacher
from tests import classifiers, toy_causal_lm, toys


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


def test_the_batch_is_halved_until_it_fits(capsys):
    tried = []

    def compute(size: int) -> str:
        tried.append(size)
        if size > 3:
            raise out_of_memory()
        return f"done with {size}"

    assert with_fitting_batch(compute, 13, "evaluation.batch_size") == "done with 3"
    assert tried == [13, 6, 3]
    assert capsys.readouterr().err.splitlines() == [
        "note: memory is used up; again with evaluation.batch_size=6",
        "note: memory is used up; again with evaluation.batch_size=3",
    ]


def test_nothing_is_repeated_for_other_reasons(capsys):
    def never_fits(size: int) -> None:
        raise out_of_memory()

    with pytest.raises(
        RunError, match=r"used up with evaluation\.batch_size=1, below which .* Tried to allocate 2\.00"
    ):
        with_fitting_batch(never_fits, 2, "evaluation.batch_size")
    capsys.readouterr()
    with pytest.raises(RunError, match=r"used up with evaluation\.batch_tokens=60,"):
        with_fitting_batch(never_fits, 200, "evaluation.batch_tokens", smallest=60)
    assert [line.rpartition("=")[2] for line in capsys.readouterr().err.splitlines()] == ["100", "60"]
    tried = []

    def broken(size: int) -> None:
        tried.append(size)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        with_fitting_batch(broken, 2, "evaluation.batch_size")
    assert tried == [2]


def of_diffusion(folder: Path) -> dict[str, Any]:
    evaluation = {"num_samples": 5, "batch_size": 4}
    return toys.recipe(folder, toys.make_pipeline(folder / "teacher"), evaluation=evaluation)


def of_classification(folder: Path) -> dict[str, Any]:
    teacher = classifiers.save_classifier(folder / "teacher", classifiers.vit_config())
    student = classifiers.vit_config(num_hidden_layers=2)
    pictures = classifiers.save_pictures(folder / "pictures")
    return classifiers.recipe(folder, teacher, pictures, student, evaluation={"batch_size": 5})


def of_language(folder: Path) -> dict[str, Any]:
    teacher = toy_causal_lm.save_model(folder / "teacher")
    sections = {"data": {"held_out": 0.3}, "evaluation": {"batch_tokens": 200}}
    return toy_causal_lm.recipe(folder, teacher, **sections)


@pytest.mark.parametrize(
    ("make", "figures", "said"),
    [
        (of_diffusion, ("final_latent_mse", "velocity_relative"), "evaluation.batch_size=2"),
        (of_classification, ("student_accuracy", "teacher_accuracy", "agreement"), "evaluation.batch_size=2"),
        (of_language, ("student_perplexity", "teacher_perplexity", "kl_divergence"), "evaluation.batch_tokens=100"),
    ],
)
def test_figures_do_not_depend_on_the_batch_that_fitted(tmp_path, monkeypatch, capfd, make, figures, said):
    recipe = parse(make(tmp_path))
    commands.train(recipe, resume=False)
    expected = evaluated(Path(recipe.output_dir))
    predict, sizes = ReplicatedTeacher.predict, []

    def limited(self, requests):
        sizes.append(max(len(request.sample_ids) for request in requests))
        # Less than the first batch, and enough for half of it.
        if sizes[-1] > 0.7 * sizes[0]:
            raise out_of_memory()
        return predict(self, requests)

    monkeypatch.setattr(ReplicatedTeacher, "predict", limited)
    capfd.readouterr()
    found = evaluated(Path(recipe.output_dir))
    assert f"again with {said}" in capfd.readouterr().err
    assert max(sizes[1:]) < sizes[0]
    assert {name: found[name] for name in figures} == pytest.approx(
        {name: expected[name] for name in figures}, rel=1e-5
    )


def evaluated(folder: Path) -> dict[str, Any]:
    commands.evaluate(folder, [])
    return json.loads((folder / "summary.json").read_text())["evaluation"]
