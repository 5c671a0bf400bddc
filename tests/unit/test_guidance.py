"""Who is guided, and how far, with one network and with two experts: as diffusers' pipelines decide it."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel

from distiller import commands
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.data import rng
from distiller.data.latents import LatentStore
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noising import NoisedData
from distiller.diffusion.samples import student_predictor
from distiller.diffusion.sampling import draw, guided_predictor
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.text import embed
from distiller.tasks import open_task
from distiller.teachers.factory import open_teacher
from tests import toys
from tests.toy_network import setup

CPU, SHAPE, PROMPTS = torch.device("cpu"), (4, 1, 4, 4), ["a red cat sits", "a bird"]
TWO_SCALES = [(1.0, 3.0), (4.0, 0.5), (0.5, 4.0), (3.0, 1.0), (4.0, 2.5)]
"""Of the high-noise and the low-noise expert; at the first and the third the pipeline does not guide at all."""


def pipeline_s_latents(pipeline, scales, noise, prompts=PROMPTS, negative="", steps=5):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        [negative] * len(prompts),
        height=32,
        width=32,
        num_frames=1,
        num_inference_steps=steps,
        guidance_scale=scales[0],
        guidance_scale_2=scales[1],
        latents=noise,
        output_type="latent",
    ).frames


def sampling_inputs_of(family):
    encoder = family.load_text_encoder(torch.float32, CPU)
    positive, negative = embed(family, encoder, PROMPTS, 512), embed(family, encoder, [""], 512)
    return SamplingInputs.make(0, "noise", (0, 1), SHAPE, positive, negative, CPU)


@pytest.mark.parametrize("scales", TWO_SCALES)
def test_two_experts_draw_as_the_pipeline_at_any_two_scales(pipelines, scales):
    family = find_pipeline(TeacherOptions(path=str(pipelines[2])))
    network, sampling_inputs = DiffusionNetwork(family, 512), sampling_inputs_of(family)
    predict = guided_predictor(open_teacher(network, setup()), network, (0, 1), sampling_inputs, scales)
    ours = draw(predict, family.noise_process(SHAPE), sampling_inputs, 5).latents
    theirs = pipeline_s_latents(WanPipeline.from_pretrained(pipelines[2]), scales, sampling_inputs.noise)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


@pytest.fixture(scope="module")
def alike(pipelines, tmp_path_factory):
    """Two experts of equal weights: one network can be both."""
    folder = shutil.copytree(pipelines[2], tmp_path_factory.mktemp("alike") / "pipeline")
    return shutil.copytree(folder / "transformer", folder / "transformer_2", dirs_exist_ok=True).parent


@pytest.mark.parametrize("scales", TWO_SCALES)
def test_a_student_of_two_experts_draws_as_the_pipeline_at_any_two_scales(alike, scales):
    family = find_pipeline(TeacherOptions(path=str(alike)))
    network, sampling_inputs = DiffusionNetwork(family, 512), sampling_inputs_of(family)
    student = WanTransformer3DModel.from_pretrained(alike, subfolder="transformer").eval()
    family.architecture.prepare(student, 512)
    predict = student_predictor(network, student, sampling_inputs, scales)
    ours = draw(predict, family.noise_process(SHAPE), sampling_inputs, 5).latents
    theirs = pipeline_s_latents(WanPipeline.from_pretrained(alike), scales, sampling_inputs.noise)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


def sampling(scales):
    return {"num_inference_steps": 5, "guidance_scale": scales[0], "guidance_scale_2": scales[1]}


@pytest.mark.parametrize("scales", TWO_SCALES)
def test_rollout_stored_targets_and_the_count_of_passes(make_recipe, pipelines, scales, capsys):
    recipe = make_recipe(2, sampling=sampling(scales), task={"targets": "stored"}, data={"max_samples": 4})
    task = open_task(recipe)
    asked, teacher = [], open_teacher(task.network, setup())
    predict = teacher.predict

    def counted(requests):
        asked.extend(len(request.wanted) * len(request.sample_ids) for request in requests)
        return predict(requests)

    teacher.predict = counted
    assert task.prepare_stages(toys.ALONE, torch.float32)
    data = task.load_data(toys.ALONE, teacher)
    assert f"= {sum(asked)} forward passes" in capsys.readouterr().out
    store = LatentStore(next((Path(recipe.output_dir) / "stages").glob("rollout-*")))
    pipeline = WanPipeline.from_pretrained(pipelines[2])
    noise = torch.stack([rng.noise(recipe.seed, 0, i, SHAPE, "rollout") for i in range(4)])
    theirs = pipeline_s_latents(pipeline, scales, noise, prompts=toys.PROMPTS[:4])
    # Guidance multiplies rounding errors; which batch a sample is in differs, and with it the last bits on some CPUs.
    torch.testing.assert_close(torch.stack([store.latents(i) for i in range(4)]), theirs, rtol=1e-5, atol=5e-6)
    batch = task.collate([data[0, i] for i in range(4)])
    texts = [pipeline.encode_prompt(text, None, False, max_sequence_length=512)[0] for text in (toys.PROMPTS[:4], [""])]
    for row, expert in enumerate(batch.modules):
        network = (pipeline.transformer, pipeline.transformer_2)[expert]
        point = batch.noisy[row : row + 1], batch.timesteps[row : row + 1]
        with torch.no_grad():
            conditional, unconditional = (
                network(*point, text, return_dict=False)[0] for text in (texts[0][row : row + 1], texts[1])
            )
        scale = scales[expert] if scales[0] > 1 else 1.0
        expected = unconditional + scale * (conditional - unconditional)
        torch.testing.assert_close(batch.stored[row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_a_sample_at_the_boundary_is_the_first_expert_s_and_guided_as_such(make_recipe, pipelines):
    recipe = make_recipe(2, task={"guidance": {"scale": 4.0, "scale_2": 2.0}})
    family = find_pipeline(TeacherOptions(path=str(pipelines[2])))
    process, text = family.noise_process(SHAPE), cast(Any, [{}])

    def sample(boundary, epoch=0):
        return NoisedData(recipe, process, boundary, SHAPE, None, text, [0], 0, 0)[epoch, 0]

    # Both decisions are about the timestep that the network gets, which is float32.
    for epoch in range(8):
        boundary = torch.tensor(sample(None, epoch).timestep, dtype=torch.float32).item()
        assert sample(boundary, epoch).scale == 4.0
    timestep = sample(None).timestep
    assert [sample(boundary).scale for boundary in (timestep, math.nextafter(timestep, 1e3))] == [4.0, 2.0]
    network = DiffusionNetwork(family, 512)
    boundary = network.boundary_timestep
    assert boundary is not None
    assert network.route([boundary, math.nextafter(boundary, 0.0)]) == (0, 1)


def test_evaluation_guides_the_student_as_it_guides_the_teacher(make_recipe, alike):
    """A student that is both experts has no error at their two scales."""
    recipe = make_recipe(
        teacher={"path": str(alike)},
        student={"config": None, "path": str(alike)},
        sampling=sampling((4.0, 0.5)),
        optim={"lr": 1e-12},
        train={"max_steps": 1, "batch_size": 8, "log_every": 1},
        evaluation={"num_samples": 2},
    )
    commands.train(recipe, False)
    folder = Path(recipe.output_dir)
    commands.evaluate(folder, [])
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    assert evaluation["final_latent_mse"] < 1e-9
    assert evaluation["velocity_relative"] < 1e-9


def test_rollouts_that_were_guided_otherwise_have_another_key_and_the_others_theirs(make_recipe):
    def key_of(scales, num_experts=2):
        task = open_task(make_recipe(num_experts, sampling=sampling(scales)))
        return task.cached_inputs(torch.float32)["latents"]

    assert key_of((1.0, 3.0))["scales"] == (1.0, 1.0)
    assert key_of((4.0, 0.5))["scales"] == (4.0, 0.5)
    assert all("scales" not in key_of(scales) for scales in [(4.0, 2.5), (3.0, 1.0), (1.0, 1.0), (5.0, None)])
    assert "scales" not in key_of((0.5, None), num_experts=1)
