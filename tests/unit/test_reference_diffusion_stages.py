"""What the stages leave, and whom the loop asks, against the pipelines themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.teachers import Request
from distiller.teachers.factory import open_teacher
from tests import reference_diffusion, reference_pipelines
from tests.reference_rows import DRAWN_GUIDED, FIVE_STEPS, IMAGES, STORED
from tests.reference_toys import make_folder, pipeline_in, recipe_of, run_product
from tests.toy_network import setup

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
BRIEF = {"train.max_steps": 1, "rollout.samples_per_prompt": 2, "rollout.batch_size": 7}
TWO_SCALES = {"sampling.guidance_scale": 4.0, "sampling.guidance_scale_2": 2.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stages"))


def read_stage(stages: Path, name: str, tensor: str = "latents") -> torch.Tensor:
    """A stage's tensor of all samples, in the order of its files."""
    (stage,) = stages.glob(f"{name}-*/")
    return torch.cat([load_file(file)[tensor] for file in sorted(stage.glob("*.safetensors"))])


@pytest.mark.parametrize(
    ("pipeline", "keys"),
    [
        ("wan", {}),
        ("wan", DRAWN_GUIDED | {"task.guidance.negative_prompt": "blue dog"}),
        ("wan", {"task.num_frames": 5, "task.width": 48}),
        ("wan2", FIVE_STEPS | TWO_SCALES),
        ("sd3-dynamic", DRAWN_GUIDED),
        ("sd-ancestral", DRAWN_GUIDED),
    ],
)
def test_a_rollout_is_what_the_pipeline_draws(folder, tmp_path, pipeline, keys):
    """Sample by sample, in the order of the prompts, and every step's input and prediction with it."""
    recipe = recipe_of(folder, pipeline, tmp_path / "run", BRIEF | STORED | keys)
    recipe = recipe.model_copy(update={"cache_dir": str(tmp_path / "stages")})
    run_product(recipe)
    options = recipe.model_dump(mode="json")
    library = reference_pipelines.load(options["teacher"]["path"])
    prompts, _ = reference_diffusion.read_data(library, options)
    texts = [*dict.fromkeys(prompts), options["task"]["guidance"]["negative_prompt"]]
    embedded = reference_pipelines.encode(library, texts, options["task"]["max_sequence_length"])
    drawn = reference_pipelines.roll_out(library, options, prompts, embedded)
    for ours, theirs in (("latents", "latents"), ("points", "inputs"), ("predictions", "outputs")):
        found = read_stage(tmp_path / "stages", "rollout", ours)
        assert ((found - drawn[theirs]).norm() / drawn[theirs].norm()).item() < 3e-6
    (stage,) = (tmp_path / "stages").glob("rollout-*/")
    assert load_file(min(stage.glob("*.safetensors")))["timesteps"].tolist() == drawn["timesteps"]


@pytest.mark.parametrize("pipeline", ["wan", "sd3"])
def test_pictures_are_what_the_pipeline_s_vae_makes_of_them(folder, tmp_path, pipeline):
    recipe = recipe_of(folder, pipeline, tmp_path / "run", BRIEF | IMAGES)
    recipe = recipe.model_copy(update={"cache_dir": str(tmp_path / "stages")})
    run_product(recipe)
    options = recipe.model_dump(mode="json")
    _, latents = reference_diffusion.read_data(reference_pipelines.load(options["teacher"]["path"]), options)
    found = read_stage(tmp_path / "stages", "images")
    assert ((found - latents).norm() / latents.norm()).item() < 1e-6


def test_a_teacher_does_not_run_under_the_caller_s_autocast(folder):
    network = DiffusionNetwork(find_pipeline(Teacher(path=str(pipeline_in(folder, "sd3")))), 5)
    teacher = open_teacher(network, setup())
    numbers = torch.Generator().manual_seed(0)
    inputs = {
        "latents": torch.randn(2, 4, 1, 4, 4, generator=numbers),
        "timesteps": torch.tensor([100.0, 900.0]),
        "text": torch.randn(2, 13, 16, generator=numbers),
        "pooled": torch.randn(2, 12, generator=numbers),
    }
    request = Request((0, 1), inputs, ("prediction", "features/1"))
    plain = teacher.predict([request])[0]
    with torch.autocast("cpu", torch.bfloat16):
        ours = teacher.predict([request])[0]
    for name, expected in plain.items():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], expected)
