"""Whole runs on the picture families in one process: from prompts, pictures and latents to a student that draws."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from distiller import commands
from distiller.config.loading import parse
from distiller.config.recipe import Recipe
from distiller.errors import UserError
from distiller.tasks import open_task
from tests import toy_pictures, toys


@pytest.fixture
def make_picture_recipe(pictures, tmp_path):
    """As `make_recipe`, for a kind."""

    def make(kind: str, **sections: Any) -> Recipe:
        brief = {"max_steps": 3, "batch_size": 8, "log_every": 1}
        return parse(toy_pictures.recipe(kind, tmp_path, pictures[kind], **({"train": brief} | sections)))

    return make


@pytest.fixture
def train():
    """Trains, any number of times in one test."""
    from accelerate.state import AcceleratorState, GradientState

    def run(recipe: Recipe) -> Path:
        commands.train(recipe, False)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Path(recipe.output_dir)

    return run


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in toys.read_metrics(folder)]


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_from_prompts_to_a_student_that_draws_in_the_library_s_pipeline(make_picture_recipe, train, pictures, kind):
    folder = train(make_picture_recipe(kind))
    assert (folder / "samples.png").is_file()
    assert toys.read_metrics(folder)[0]["perf/tokens_per_s"] > 0
    task = open_task(make_picture_recipe(kind))
    model_class, part = task.family.architecture.model_class, task.family.architecture.part
    student = model_class.from_pretrained(folder / "student")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["student_params"] == sum(parameter.numel() for parameter in student.parameters())
    pipeline = DiffusionPipeline.from_pretrained(pictures[kind], **{part: student})
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a red cat", height=32, width=32, num_inference_steps=2, output_type="np").images[0]
    assert picture.shape == (32, 32, 3)
    quantity = "velocity" if kind == "sd3" else "noise"
    commands.evaluate(folder, ["evaluation.num_samples=4"])
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    assert evaluation[f"{quantity}_mse_last_step"] > 0
    assert 0 < evaluation[f"{quantity}_relative"] < 5
    commands.sample(folder, [], ["a red cat", "a bird"], 0, folder / "two.png")
    assert (folder / "two.png").is_file()


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_a_student_that_is_the_teacher_has_no_loss(make_picture_recipe, train, pictures, kind):
    """The whole path from prompt to loss is exact, or this would not be zero; the evaluation, guided, as well."""
    student = {"config": None, "path": str(pictures[kind])}
    recipe = make_picture_recipe(kind, student=student, optim={"lr": 1e-12}, train={"max_steps": 1, "log_every": 1})
    folder = train(recipe)
    assert losses(folder)[0] < 1e-9
    commands.evaluate(folder, ["evaluation.num_samples=4", "sampling.guidance_scale=3"])
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    assert evaluation["final_latent_mse"] < 1e-8


def test_noise_of_a_stochastic_sampler_is_the_samples_own(make_picture_recipe, train, tmp_path):
    """The pipeline of Stable Diffusion 3 passes no generator to its scheduler, which drew from the global state."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    pipeline = toy_pictures.make_sd3(tmp_path / "sd3", scheduler=scheduler)
    sections = {"teacher": {"path": str(pipeline)}, "student": {"config": None, "path": str(pipeline)}}
    folder = train(make_picture_recipe("sd3", **sections, optim={"lr": 1e-12}, train={"max_steps": 1}))
    commands.evaluate(folder, ["evaluation.num_samples=4"])
    assert json.loads((folder / "summary.json").read_text())["evaluation"]["final_latent_mse"] < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_accumulation_checkpointing_and_loader_workers_change_nothing(make_picture_recipe, train, tmp_path, kind):
    cache = str(tmp_path / "cache")
    plain = train(make_picture_recipe(kind, cache_dir=cache, output_dir=str(tmp_path / "plain")))
    split = {"batch_size": 2, "samples_per_update": 8, "gradient_checkpointing": True, "num_workers": 1, "max_steps": 3}
    parts = train(make_picture_recipe(kind, cache_dir=cache, output_dir=str(tmp_path / "split"), train=split))
    toys.assert_same_run(parts, plain)


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("sd3", {"task": {"num_frames": 5}}, ["task.num_frames is 5", "draws pictures", "set it to 1"]),
    ("sd", {"task": {"num_frames": 5}}, ["task.num_frames is 5", "draws pictures", "set it to 1"]),
    ("sd3", {"task": {"height": 40}}, ["task.height 40 is not a multiple of 16"]),
    ("sd3", {"task": {"width": 256}}, ["task.width 256 makes 16 patches", "pos_embed_max_size is 6"]),
    ("sd", {"task": {"height": 36}}, ["task.height 36 is not a multiple of 8"]),
    ("sd", {"task": {"height": 40}}, ["task.height 40 makes 5 latents", "halves them 1 times"]),
    ("sd3", {"task": {"max_sequence_length": 600}}, ["task.max_sequence_length is 600", "at most 512"]),
    (
        "sd",
        {"task": {"max_sequence_length": 7}},
        ["task.max_sequence_length is 7", "its tokenizer's 8", "leave it out"],
    ),
    ("sd", {"task": {"timesteps": {"weighting": "cosmap"}}}, ["task.timesteps.weighting is cosmap", "predicts noise"]),
    ("sd3", {"task": {"guidance": {"scale": 2.0, "scale_2": 2.0}}}, ["task.guidance.scale_2 is 2", "remove it"]),
    ("sd3", {"student": {"config": None, "ffn_dim": 8}}, ["student.ffn_dim", "SD3Transformer2DModel", "num_layers"]),
    ("sd", {"student": {"config": None, "num_attention_heads": 1}}, ["student.num_attention_heads", "UNet2DCondition"]),
    ("sd", {"student": {"config": None, "num_layers": 3}}, ["student.num_layers is 3", "only 2", "lower it"]),
    (
        "sd",
        {"task": {"losses": {"features": {"weight": 1, "student_blocks": [0], "teacher_blocks": [4]}}}},
        ["task.losses.features needs equal patch sizes and resolutions"],
    ),
    (
        "sd",
        {"task": {"losses": {"features": {"weight": 1, "student_blocks": [5], "teacher_blocks": [1]}}}},
        ["student_blocks names block 5; there are 5"],
    ),
]
"""Kind, sections of the recipe, and words of the line."""


@pytest.mark.parametrize(("kind", "sections", "words"), REFUSED)
def test_what_a_family_cannot_follow_is_refused(make_picture_recipe, kind, sections, words):
    with pytest.raises(UserError) as error:
        open_task(make_picture_recipe(kind, **sections))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("sd3", {"joint_attention_dim": 8}, ["joint_attention_dim (text width) is 8 and the teacher's 16"]),
        ("sd3", {"pooled_projection_dim": 8}, ["pooled_projection_dim", "must be equal"]),
        ("sd3", {"patch_size": 1}, ["patch_size (latents a patch) is 1", "must be equal"]),
        ("sd3", {"caption_projection_dim": 16}, ["caption_projection_dim is 16", "num_attention_heads x"]),
        ("sd", {"cross_attention_dim": 16}, ["cross_attention_dim (text width) is 16", "must be equal"]),
        ("sd", {"in_channels": 9}, ["9 input and 4 output channels", "text-to-image"]),
        ("sd", {"addition_embed_type": "text"}, ["addition_embed_type is 'text'", "timestep and text alone"]),
        ("sd", {"down_block_types": ["AttnDownBlock2D", "DownBlock2D"]}, ["names AttnDownBlock2D", "CrossAttnDown"]),
        ("sd", {"down_block_types": None}, ["down_block_types is None", "a list of names"]),
        ("sd", {"dropout": 0.1}, ["dropout is 0.1", "set it to 0"]),
        ("sd", {"norm_num_groups": 3}, ["diffusers cannot build this model", "correct it"]),
        ("sd", {"_class_name": "UNet2DModel"}, ["describes a UNet2DModel", "UNet2DConditionModel"]),
    ],
)
def test_a_student_that_does_not_fit_is_refused(make_picture_recipe, tmp_path, kind, changes, words):
    recipe = make_picture_recipe(kind)
    toy_pictures.write_student_config(kind, tmp_path / "own-student.json", **changes)
    with pytest.raises(UserError) as error:
        open_task(recipe)
    assert all(word in str(error.value) for word in words), str(error.value)


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("kind", "file", "changes", "words"),
    [
        (
            "sd",
            "model_index.json",
            {"_class_name": "StableDiffusionXLPipeline"},
            ["WanPipeline", "StableDiffusion3Pip"],
        ),
        ("sd", "scheduler/scheduler_config.json", {"_class_name": "LCMScheduler"}, ["LCMScheduler", "DDIMScheduler"]),
        ("sd", "model_index.json", {"_class_name": ["pipeline", "MyPipeline"]}, ["is a ['pipeline'", "WanPipeline"]),
        ("sd", "scheduler/scheduler_config.json", {"timestep_type": "continuous"}, ["is continuous", "discrete ones"]),
        ("sd", "scheduler/scheduler_config.json", {"prediction_type": "sample"}, ["is sample", "v_prediction"]),
        ("sd", "tokenizer/tokenizer_config.json", {"model_max_length": 10**30}, ["model_max_length", "positions"]),
        ("sd3", "scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, ["DDIMScheduler", "FlowMatch"]),
        ("sd3", "model_index.json", {"text_encoder_2": [None, None]}, ["has no text_encoder_2", "complete"]),
    ],
)
def test_a_teacher_that_is_something_else_is_refused(
    make_picture_recipe, pictures, tmp_path, kind, file, changes, words
):
    folder = shutil.copytree(pictures[kind], tmp_path / "copy")
    change_json(folder / file, **changes)
    with pytest.raises(UserError) as error:
        open_task(make_picture_recipe(kind, teacher={"path": str(folder)}))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_student_of_another_parametrisation_is_refused(make_picture_recipe, pictures, tmp_path):
    scheduler = toy_pictures.make_scheduler("DDIMScheduler", prediction_type="v_prediction")
    other = toy_pictures.make_sd(tmp_path / "v", scheduler=scheduler)
    for path in (other, other / "unet"):
        with pytest.raises(UserError, match=r"prediction_type is v_prediction and the teacher's is epsilon"):
            open_task(make_picture_recipe("sd", student={"config": None, "path": str(path)}))
