"""The figures of `evaluate` against the pipelines: what teacher and student draw, and predict on the teacher's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distiller.commands.gates import figures_of
from distiller.tasks import open_task
from tests import reference_diffusion, reference_pipelines
from tests.reference_rows import FIVE_STEPS
from tests.reference_toys import make_folder, pipeline_in, recipe_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
CPU = torch.device("cpu")
# The last batch is smaller than the others.
FIVE_DRAWINGS = {"evaluation.num_samples": 5, "evaluation.batch_size": 3}
QUANTITIES = {"wan": "velocity", "sd3": "velocity", "sd": "noise"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("evaluation"))


@pytest.mark.parametrize(
    ("pipeline", "keys"),
    [
        ("wan", {}),
        ("wan", {"sampling.guidance_scale": 3.0, "task.guidance.negative_prompt": "blue dog"}),
        # The student has learnt guided predictions, and is drawn without guidance.
        ("wan", {"sampling.guidance_scale": 3.0, "task.guidance.scale": 3.0}),
        ("wan2", FIVE_STEPS | {"sampling.guidance_scale": 3.0}),
        ("sd3", {"sampling.guidance_scale": 3.0}),
        ("sd-euler", {"sampling.guidance_scale": 3.0}),
    ],
)
def test_figures_are_those_of_the_pipelines(folder, tmp_path, pipeline, keys):
    recipe = recipe_of(folder, pipeline, tmp_path, FIVE_DRAWINGS | keys)
    options = recipe.model_dump(mode="json")
    teacher = reference_pipelines.load(str(pipeline_in(folder, pipeline)))
    kind = reference_pipelines.kind_of(teacher)
    student, _ = reference_diffusion.build_student(teacher, options)
    student.eval().save_pretrained(tmp_path / "student")
    task = open_task(recipe)
    report = task.evaluate(tmp_path, torch.float32, CPU)
    assert set(figures_of(report)) == set(task.figures())

    prompts = reference_diffusion.read_data(teacher, options)[0][:5]
    negative = options["task"]["guidance"]["negative_prompt"]
    texts = reference_pipelines.encode(teacher, [*prompts, negative], options["task"]["max_sequence_length"])
    theirs = reference_pipelines.roll_out(teacher, options, prompts, texts, "evaluation")
    is_guided = options["sampling"]["guidance_scale"] > 1 and options["task"]["guidance"]["scale"] is None
    scale = options["sampling"]["guidance_scale"] if is_guided else 1.0
    as_student: dict[str, Any] = {**options, "sampling": options["sampling"] | {"guidance_scale": scale}}
    ours = reference_pipelines.roll_out(with_student(teacher, student), as_student, prompts, texts, "evaluation")
    assert report["final_latent_mse"] == pytest.approx(mean_square(ours["latents"] - theirs["latents"]), rel=1e-5)

    parameters = [
        sum(parameter.numel() for parameter in model.parameters()) for model in (student, *experts_of(teacher))
    ]
    assert report["student_parameters"] == parameters[0]
    assert report["teacher_parameters"] == sum(parameters[1:])
    assert report["size_ratio"] == sum(parameters[1:]) / parameters[0]
    speeds = report["student_samples_per_s"], report["teacher_samples_per_s"]
    assert speeds == pytest.approx([3e3 / report[f"{name}_forward_ms"] for name in ("student", "teacher")])
    assert report["speed_ratio"] == pytest.approx(speeds[0] / speeds[1])

    condition = reference_pipelines.stack([texts[prompt] for prompt in prompts])
    empty = reference_pipelines.stack([texts[negative]] * 5)
    errors, bands = [], {}
    for step, timestep in enumerate(theirs["timesteps"]):
        inputs = theirs["inputs"][:, step], torch.full((5,), timestep)
        with torch.no_grad():
            prediction = reference_pipelines.predict(kind, student, *inputs, condition)
            if scale > 1:
                blank = reference_pipelines.predict(kind, student, *inputs, empty)
                prediction = blank + scale * (prediction - blank)
        errors.append(mean_square(prediction - theirs["outputs"][:, step]))
        bands.setdefault(min(int(4 * timestep / 1000), 3), []).append(errors[-1])
    name = QUANTITIES[kind]
    assert report[f"{name}_mse_last_step"] == pytest.approx(errors[-1], rel=1e-5)
    energy = mean_square(theirs["outputs"]) * len(errors)
    assert report[f"{name}_relative"] == pytest.approx(sum(errors) / energy, rel=1e-5)
    expected = [sum(values) / len(values) for _, values in sorted(bands.items())]
    assert list(report[f"{name}_mse"].values()) == pytest.approx(expected, rel=1e-5)
    conditions = [texts[prompt] for prompt in prompts]
    levels = errors_by_level(teacher, student, options, theirs["latents"], conditions, texts[negative], scale)
    assert list(report["by_noise_level"]) == ["0.0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1.0"]
    for figures, expected in zip(report["by_noise_level"].values(), levels, strict=True):
        assert figures == pytest.approx(expected, rel=1e-4)


def errors_by_level(
    teacher: Any, student: Any, options: Any, latents: torch.Tensor, conditions: list[Any], empty: Any, scale: float
) -> list[dict[str, float]]:
    """Sample by sample, of each fifth of the noise levels; `scale` is the student's guidance."""
    kind, boundary = reference_pipelines.kind_of(teacher), teacher.config.get("boundary_ratio")
    experts, found = experts_of(teacher), []
    for band in range(5):
        error = energy = cosine = 0.0
        for i, (x0, condition) in enumerate(zip(latents, conditions, strict=True)):
            draws = options["seed"], 0, i, f"evaluation level {band}"
            sigma = (band + reference_diffusion.uniform(*draws)) / 5
            noise = torch.randn(x0.shape, generator=reference_pipelines.generator(*draws))
            noisy, timestep, _ = reference_diffusion.noised(teacher, x0, noise, sigma)
            inputs = noisy[None], torch.tensor([float(timestep)])

            def ask(model: Any, by: float, inputs: Any = inputs, condition: Any = condition) -> torch.Tensor:
                with torch.no_grad():
                    blank = reference_pipelines.predict(kind, model, *inputs, reference_pipelines.stack([empty]))
                    full = reference_pipelines.predict(kind, model, *inputs, reference_pipelines.stack([condition]))
                return (blank + by * (full - blank)).double().flatten()

            expert = experts[0 if boundary is None or timestep >= boundary * 1000 else 1]
            theirs, ours = ask(expert, options["sampling"]["guidance_scale"]), ask(student, scale)
            error += float((ours - theirs) @ (ours - theirs))
            energy += float(theirs @ theirs)
            cosine += float(ours @ theirs / (ours.norm() * theirs.norm()))
        found.append({"relative_error": error / energy, "cosine": cosine / len(conditions)})
    return found


def test_several_seeds_give_means_and_deviations(folder, tmp_path):
    keys = {"evaluation.num_samples": 3}
    recipe = recipe_of(folder, "sd", tmp_path, keys)
    teacher = reference_pipelines.load(str(pipeline_in(folder, "sd")))
    student, _ = reference_diffusion.build_student(teacher, recipe.model_dump(mode="json"))
    student.save_pretrained(tmp_path / "student")
    single = []
    for seed in (3, 4, 5):
        task = open_task(recipe_of(folder, "sd", tmp_path, keys | {"seed": seed}))
        single.append(figures_of(task.evaluate(tmp_path, torch.float32, CPU)))
    task = open_task(recipe_of(folder, "sd", tmp_path, keys | {"evaluation.seeds": 3}))
    report = task.evaluate(tmp_path, torch.float32, CPU)
    figures = figures_of(report)
    assert set(figures) == set(task.figures())
    assert figures["num_seeds"] == 3
    assert figures["num_samples"] == 3
    assert report["noise_mse_std"].keys() == report["noise_mse"].keys()
    sampled = [name for name in single[0] if "noise" in name or name == "final_latent_mse"]
    assert len(sampled) > 10
    for name in sampled:
        values = np.array([one[name] for one in single])
        section, dot, inner = name.partition(".")
        spread = f"{section}_std.{inner}" if dot and section == "noise_mse" else f"{name}_std"
        assert figures[name] == pytest.approx(values.mean(), rel=1e-6)
        assert figures[spread] == pytest.approx(values.std(ddof=1), rel=1e-4)


def experts_of(pipeline: Any) -> list[Any]:
    """The networks that predict."""
    parts = [pipeline.components.get(name) for name in ("unet", "transformer", "transformer_2")]
    return [part for part in parts if part is not None]


def with_student(teacher: Any, student: Any) -> Any:
    """The teacher's pipeline with the student in its place; of two experts, in the place of both."""
    parts = dict(teacher.components)
    parts["unet" if "unet" in parts else "transformer"] = student
    if "transformer_2" in parts:
        parts["transformer_2"] = None
    if "safety_checker" in parts:
        parts["requires_safety_checker"] = False
    made = type(teacher)(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def mean_square(values: torch.Tensor) -> float:
    return values.double().square().mean().item()
