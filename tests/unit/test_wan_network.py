"""The teacher's answers equal plain forwards of the same weights, and drawing equals diffusers' own pipeline."""

import shutil

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel

from distiller.config.teacher import Teacher
from distiller.data import rng
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.samples import student_predictor
from distiller.diffusion.sampling import draw, guided_predictor
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.text import embed
from distiller.diffusion.wan.short_text import short_length
from distiller.teachers import Request
from distiller.teachers.factory import open_teacher
from tests import toys
from tests.toy_network import setup

CPU = torch.device("cpu")


def teacher_of(path, dtype=torch.float32):
    family = find_pipeline(Teacher(path=str(path)))
    network = DiffusionNetwork(family, 512)
    return family, network, open_teacher(network, setup(dtype=dtype))


def inputs_for(count: int) -> dict[str, torch.Tensor]:
    noise = torch.stack([rng.noise(0, 0, i, (4, 1, 4, 4)) for i in range(count)])
    text = torch.stack([rng.noise(1, 0, i, (5, 16)) for i in range(count)])
    text[:, 4] = 0
    text[0, 2:] = 0
    timesteps = torch.tensor([100.0, 900.0, 599.9, 600.0, 700.0])[:count]
    return {"latents": noise, "timesteps": timesteps, "text": text, "negative_text": text.flip(0)}


def padded(text: torch.Tensor) -> torch.Tensor:
    return torch.cat([text, text.new_zeros(len(text), 512 - text.shape[1], text.shape[2])], 1)


def test_predictions_equal_a_plain_forward_of_the_padded_text(pipelines):
    _, network, teacher = teacher_of(pipelines[1])
    inputs = inputs_for(5)
    wanted = ("prediction", "unconditional", "features/0", "features/2")
    outputs = teacher.predict([Request(tuple(range(5)), inputs, wanted)])[0]
    plain = WanTransformer3DModel.from_pretrained(pipelines[1], subfolder="transformer")
    with torch.no_grad():
        for name, text in (("prediction", inputs["text"]), ("unconditional", inputs["negative_text"])):
            expected = plain(inputs["latents"], inputs["timesteps"], padded(text), return_dict=False)[0]
            torch.testing.assert_close(outputs[name], expected, rtol=1e-5, atol=1e-5)
    assert outputs["features/0"].shape == (5, 4, 24)
    assert not torch.equal(outputs["features/0"], outputs["features/2"])
    assert not any(output.requires_grad or output.is_inference() for output in outputs.values())
    assert network.num_parameters() == sum(p.numel() for p in plain.parameters())


def test_each_sample_gets_the_expert_of_its_own_timestep(pipelines):
    _, network, teacher = teacher_of(pipelines[2])
    inputs = inputs_for(5)
    modules = network.route(inputs["timesteps"].tolist())
    assert modules == (1, 0, 1, 0, 0)
    mixed = teacher.predict([Request(tuple(range(5)), inputs, ("prediction",), modules)])[0]["prediction"]
    for row, module in enumerate(modules):
        subfolder = network.module_names[module]
        plain = WanTransformer3DModel.from_pretrained(pipelines[2], subfolder=subfolder)
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        with torch.no_grad():
            expected = plain(one["latents"], one["timesteps"], padded(one["text"]), return_dict=False)[0]
        torch.testing.assert_close(mixed[row : row + 1], expected, rtol=1e-5, atol=1e-5)


def test_16_bit_teachers_keep_their_float32_islands(pipelines):
    _, _, teacher = teacher_of(pipelines[1], torch.bfloat16)
    module = teacher._modules["transformer"]
    assert module.blocks[0].attn1.to_q.weight.dtype is torch.bfloat16
    assert module.scale_shift_table.dtype is torch.float32
    outputs = teacher.predict([Request((0, 1), inputs_for(2), ("prediction",))])[0]
    assert outputs["prediction"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("num_experts", "scales"), [(1, (1.0, 1.0)), (1, (4.0, 4.0)), (2, (1.0, 1.0)), (2, (4.0, 2.5))]
)
def test_drawing_equals_the_pipeline(pipelines, num_experts, scales):
    family, network, teacher = teacher_of(pipelines[num_experts])
    prompts = ["a red cat sits", "a bird"]
    encoder = family.load_text_encoder(torch.float32, CPU)
    positive, negative = embed(family, encoder, prompts, 512), embed(family, encoder, [""], 512)
    sampling_inputs = SamplingInputs.make(0, "noise", (0, 1), (4, 1, 4, 4), positive, negative, CPU)
    predict = guided_predictor(teacher, network, (0, 1), sampling_inputs, scales)
    ours = draw(predict, family.noise_process((4, 1, 4, 4)), sampling_inputs, 5, keep_points=True)
    pipeline = WanPipeline.from_pretrained(pipelines[num_experts])
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompts,
        height=32,
        width=32,
        num_frames=1,
        num_inference_steps=5,
        guidance_scale=scales[0],
        guidance_scale_2=scales[1] if num_experts == 2 else None,
        latents=sampling_inputs.noise,
        output_type="latent",
    ).frames
    torch.testing.assert_close(ours.latents, theirs, rtol=1e-4, atol=1e-5)
    assert len(ours.points) == len(ours.predictions) == 5


def test_a_student_that_is_both_experts_draws_as_they_do_at_their_two_scales(pipelines, tmp_path):
    folder = shutil.copytree(pipelines[2], tmp_path / "alike")
    shutil.copytree(folder / "transformer", folder / "transformer_2", dirs_exist_ok=True)
    family, network, teacher = teacher_of(folder)
    student = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").eval()
    family.architecture.prepare(student, 512)
    encoder = family.load_text_encoder(torch.float32, CPU)
    positive, negative = embed(family, encoder, ["a red cat sits"], 512), embed(family, encoder, [""], 512)
    sampling_inputs = SamplingInputs.make(0, "noise", (0,), (4, 1, 4, 4), positive, negative, CPU)
    scales = (4.0, 2.5)
    process = family.noise_process((4, 1, 4, 4))
    ours = draw(student_predictor(network, student, sampling_inputs, scales), process, sampling_inputs, 5)
    theirs = draw(guided_predictor(teacher, network, (0,), sampling_inputs, scales), process, sampling_inputs, 5)
    torch.testing.assert_close(ours.latents, theirs.latents, rtol=1e-4, atol=1e-5)


def test_a_closed_teacher_holds_nothing(pipelines):
    _, _, teacher = teacher_of(pipelines[2])
    memory = teacher.memory()
    assert memory.host_bytes > 2 * 4 * sum(p.numel() for p in toys.transformer().parameters())
    teacher.close()
    assert teacher.memory().host_bytes == 0


def test_prompts_are_encoded_as_the_pipeline_does(pipelines):
    family, _, _ = teacher_of(pipelines[1])
    encoder = family.load_text_encoder(torch.float32, CPU)
    prompts = ["a red cat sits", "", "a  bird\n&amp; a dog runs", "cat " * 600]
    theirs, _ = encoder.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
    for prompt, expected in zip(prompts, theirs, strict=True):
        ours = embed(family, encoder, [prompt], 512)["text"][0]
        length = int((expected != 0).any(-1).sum())
        # Float32 rounding: another batch size is another order of sums, and T5 does not scale its attention logits.
        torch.testing.assert_close(ours[:length], expected[:length], rtol=1e-4, atol=1e-4)
        assert not ours[length:].any()
        assert len(ours) == short_length(length, 512)
