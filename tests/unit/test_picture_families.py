"""The picture families against diffusers: predictions, prompts, noise, drawings and students are the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline, StableDiffusionPipeline

from distiller.config.diffusion import DiffusionStudent
from distiller.config.teacher import Teacher
from distiller.data import rng
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.family import Family
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.sampling import draw, guided_predictor
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.student import build_student, student_config
from distiller.diffusion.text import embed
from distiller.diffusion.variance_preserving import SCHEDULERS
from distiller.teachers import Request
from distiller.teachers.factory import open_teacher
from tests import toy_pictures
from tests.toy_network import setup

# What diffusers' schedulers do with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
CPU, SHAPE, LENGTH = torch.device("cpu"), (4, 1, 4, 4), 5
PROMPTS = ["a red cat sits", "a bird", "dog " * 20]


def teacher_of(path: Path, dtype=torch.float32) -> tuple[Family, DiffusionNetwork, Any]:
    family = find_pipeline(Teacher(path=str(path)))
    network = DiffusionNetwork(family, LENGTH)
    return family, network, open_teacher(network, setup(dtype=dtype))


def load_model(path: Path) -> Any:
    family = find_pipeline(Teacher(path=str(path)))
    part = family.architecture.part
    return family.architecture.model_class.from_pretrained(path, subfolder=part).eval()


def inputs_for(kind: str, count: int) -> dict[str, torch.Tensor]:
    rows, width = (13, toy_pictures.T5_WIDTH) if kind == "sd3" else (8, toy_pictures.CLIP_WIDTH)
    found = {
        "latents": torch.stack([rng.noise(0, 0, i, SHAPE) for i in range(count)]),
        "timesteps": torch.tensor([100.0, 900.0, 599.0])[:count],
        "text": torch.stack([rng.noise(1, 0, i, (rows, width)) for i in range(count)]),
    }
    if kind == "sd3":
        found["pooled"] = torch.stack([rng.noise(2, 0, i, (toy_pictures.POOLED_WIDTH,)) for i in range(count)])
    return found


def plain(kind: str, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the library's model says."""
    with torch.no_grad():
        if kind == "sd3":
            latents, timesteps = inputs["latents"][:, :, 0], inputs["timesteps"]
            return model(latents, inputs["text"], inputs["pooled"], timesteps, return_dict=False)[0].unsqueeze(2)
        return model(inputs["latents"][:, :, 0], inputs["timesteps"], inputs["text"], return_dict=False)[0].unsqueeze(2)


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_predictions_equal_a_plain_forward(pictures, kind):
    family, network, teacher = teacher_of(pictures[kind])
    inputs = inputs_for(kind, 3)
    negative = {name: inputs[name].flip(0) for name in ("text", "pooled") if name in inputs}
    request = inputs | {f"negative_{name}": value for name, value in negative.items()}
    names = tuple(f"features/{number}" for number in range(len(network.block_names(network.module_names[0]))))
    outputs = teacher.predict([Request((0, 1, 2), request, ("prediction", "unconditional", *names))])[0]
    model = load_model(pictures[kind])
    torch.testing.assert_close(outputs["prediction"], plain(kind, model, inputs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs["unconditional"], plain(kind, model, inputs | negative), rtol=1e-5, atol=1e-5)
    for number, name in enumerate(names):
        assert outputs[name].shape[1:] == family.architecture.feature_shape(family.teacher_config, number, SHAPE)
    assert not torch.equal(outputs["features/0"], outputs[names[-1]][:, : outputs["features/0"].shape[1]])
    assert network.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_16_bit_teachers_predict_in_16_bits(pictures, kind):
    family, network, teacher = teacher_of(pictures[kind], torch.bfloat16)
    outputs = teacher.predict([Request((0, 1), inputs_for(kind, 2), ("prediction",))])[0]
    model = family.architecture.model_class.from_pretrained(
        pictures[kind], subfolder=family.architecture.part, dtype=torch.bfloat16
    )
    inputs = {name: value if name == "timesteps" else value.bfloat16() for name, value in inputs_for(kind, 2).items()}
    assert torch.equal(outputs["prediction"], plain(kind, model.eval(), inputs))
    assert network.skeleton(network.module_names[0], torch.bfloat16).training is False


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_int8_teachers_answer_nearly_the_same(pictures, kind):
    _, network, teacher = teacher_of(pictures[kind])
    quantised = open_teacher(network, setup(torch.float32, quantization="int8"))
    request = Request((0, 1, 2), inputs_for(kind, 3), ("prediction",))
    ours, theirs = (one.predict([request])[0]["prediction"] for one in (quantised, teacher))
    assert 0 < ((ours - theirs).norm() / theirs.norm()).item() < 0.05


def test_a_unet_s_parts_are_in_the_order_in_which_they_run(pictures):
    """Or a device map would send a forward pass to and fro between two GPUs."""
    _, network, _ = teacher_of(pictures["sd"])
    skeleton = network.skeleton("unet", torch.float32)
    names = [name for name, _ in skeleton.named_modules() if name in network.block_names("unet")]
    assert tuple(names) == network.block_names("unet")
    parts = [name for name, _ in skeleton.named_children()]
    assert parts.index("conv_in") < parts.index("down_blocks") < parts.index("mid_block") < parts.index("conv_norm_out")


@pytest.mark.parametrize("has_third", [True, False])
def test_sd3_prompts_are_encoded_as_the_pipeline_does(tmp_path, has_third):
    family = find_pipeline(Teacher(path=str(toy_pictures.make_sd3(tmp_path / "sd3", has_third))))
    assert len(family.text_parts) == (6 if has_third else 4)
    ours = embed(family, family.load_text_encoder(torch.float32, CPU), PROMPTS, LENGTH)
    absent = {} if has_third else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "sd3", **absent)
    with torch.no_grad():
        text, _, pooled, _ = pipeline.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=LENGTH
        )
    assert torch.equal(ours["text"], text)
    assert torch.equal(ours["pooled"], pooled)
    assert bool(ours["text"][:, toy_pictures.CLIP_LENGTH :].any()) == has_third


def test_sd_prompts_are_encoded_as_the_pipeline_does(pictures):
    family = find_pipeline(Teacher(path=str(pictures["sd"])))
    ours = embed(family, family.load_text_encoder(torch.float32, CPU), PROMPTS, 8)
    with torch.no_grad():
        text, _ = StableDiffusionPipeline.from_pretrained(pictures["sd"]).encode_prompt(PROMPTS, CPU, 1, False)
    assert torch.equal(ours["text"], text)


def drawn_by_both(folder: Path, scale: float, steps: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Latents of our loop and of the library's pipeline, and how often ours asked the teacher."""
    family, network, teacher = teacher_of(folder)
    encoder = family.load_text_encoder(torch.float32, CPU)
    positive, negative = embed(family, encoder, PROMPTS[:2], LENGTH), embed(family, encoder, [""], LENGTH)
    sampling_inputs = SamplingInputs.make(0, "noise", (0, 1), SHAPE, positive, negative, CPU)
    predict = guided_predictor(teacher, network, (0, 1), sampling_inputs, (scale, scale))
    process = family.noise_process(SHAPE)
    ours = draw(predict, process, sampling_inputs, steps, keep_points=True)
    assert len(ours.points) == len(ours.predictions) == len(ours.timesteps) == len(process.timesteps(steps))
    pipeline = family.pipeline_class.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    options = {"max_sequence_length": LENGTH} if family.architecture.part == "transformer" else {}
    theirs = pipeline(
        PROMPTS[:2],
        height=32,
        width=32,
        num_inference_steps=steps,
        guidance_scale=scale,
        latents=sampling_inputs.noise[:, :, 0],
        generator=sampling_inputs.generators(),
        output_type="latent",
        **options,
    ).images
    return ours.latents[:, :, 0], theirs, len(ours.points)


@pytest.mark.parametrize("kind", ["FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler"])
def test_a_16_bit_teacher_draws_in_float32(tmp_path, kind):
    """Schedulers of Euler's kind round each step's latents to the prediction's dtype, which the VAE then refuses."""
    if kind.startswith("Flow"):
        folder = toy_pictures.make_sd3(tmp_path / "pipeline")
    else:
        folder = toy_pictures.make_sd(tmp_path / "pipeline", scheduler=toy_pictures.make_scheduler(kind))
    drawn = {}
    for dtype in (torch.float32, torch.bfloat16):
        family, network, teacher = teacher_of(folder, dtype)
        encoder = family.load_text_encoder(dtype, CPU)
        positive, negative = embed(family, encoder, PROMPTS[:2], LENGTH), embed(family, encoder, [""], LENGTH)
        sampling_inputs = SamplingInputs.make(0, "noise", (0, 1), SHAPE, positive, negative, CPU)
        predict = guided_predictor(teacher, network, (0, 1), sampling_inputs, (1.0, 1.0))
        drawn[dtype] = draw(predict, family.noise_process(SHAPE), sampling_inputs, 20).latents
        assert drawn[dtype].dtype == torch.float32
        family.load_vae(CPU).decode(drawn[dtype])
    ours, expected = drawn[torch.bfloat16], drawn[torch.float32]
    assert 0 < ((ours - expected).norm() / expected.norm()).item() < 5e-3


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("options", [{"shift": 3.0}, {"use_dynamic_shifting": True, "base_image_seq_len": 2}])
def test_drawing_with_sd3_equals_the_pipeline(tmp_path, options, scale):
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    folder = toy_pictures.make_sd3(tmp_path / "sd3", scheduler=scheduler)
    ours, theirs, count = drawn_by_both(folder, scale, 5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert count == 5


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_drawing_with_any_scheduler_equals_the_pipeline(tmp_path, kind, prediction_type):
    """Also those that step in another scale, ask more often than they step, or draw noise on the way."""
    scheduler = toy_pictures.make_scheduler(kind, prediction_type=prediction_type)
    folder = toy_pictures.make_sd(tmp_path / "sd", scheduler=scheduler)
    ours, theirs, count = drawn_by_both(folder, 3.0, 4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert (count > 4) == (kind == "PNDMScheduler")


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_noise_and_truth_are_the_schedulers(tmp_path, prediction_type):
    scheduler = toy_pictures.make_scheduler("DDPMScheduler", prediction_type=prediction_type)
    process = find_pipeline(Teacher(path=str(toy_pictures.make_sd(tmp_path / "sd", scheduler)))).noise_process(SHAPE)
    latents, noise = rng.noise(0, 0, 0, SHAPE), rng.noise(0, 0, 1, SHAPE)
    for share, expected in ((1e-4, 0), (0.5, 500), (0.9999, 999)):
        level = process.level(share)
        timestep = torch.tensor([expected])
        assert level.timestep == expected
        noisy = scheduler.add_noise(latents[None], noise[None], timestep)[0]
        torch.testing.assert_close(level.signal * latents + level.noise * noise, noisy)
        data_target = noise
        if prediction_type == "v_prediction":
            data_target = scheduler.get_velocity(latents[None], noise[None], timestep)[0]
        torch.testing.assert_close(process.data_target(latents, noise, level), data_target)


def test_what_the_sampler_gives_the_network_is_of_training_s_kind(tmp_path):
    """Euler carries latents of variance sigma^2 + 1: stored points are what the network got."""
    scheduler = toy_pictures.make_scheduler("EulerDiscreteScheduler")
    family, _, _ = teacher_of(toy_pictures.make_sd(tmp_path / "sd", scheduler=scheduler))
    noise = torch.stack([rng.noise(0, 0, i, SHAPE) for i in range(64)])
    sampling_inputs = SamplingInputs(noise, {}, {}, (0, "noise", tuple(range(64))))
    trajectory = draw(lambda point, timestep: point, family.noise_process(SHAPE), sampling_inputs, 4, keep_points=True)
    assert trajectory.points[0].std().item() == pytest.approx(1.0, abs=0.05)


def test_dynamic_shifting_is_the_shift_of_training(tmp_path):
    options = {"use_dynamic_shifting": True, "base_image_seq_len": 2}
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    process = find_pipeline(
        Teacher(path=str(toy_pictures.make_sd3(tmp_path / "sd3", scheduler=scheduler)))
    ).noise_process(SHAPE)
    ours = process.load_scheduler()
    process.set_timesteps(ours, 3, CPU)
    shift, sigma = process.auto_shift, 0.5005
    assert shift > 1.5
    assert ours.sigmas[1].item() == pytest.approx(shift * sigma / (1 + (shift - 1) * sigma), rel=1e-3)


@pytest.mark.parametrize("kind", toy_pictures.KINDS)
def test_pictures_go_through_the_vae_as_the_pipeline_sends_them(pictures, kind):
    family = find_pipeline(Teacher(path=str(pictures[kind])))
    vae, pixels = family.load_vae(CPU), rng.noise(0, 0, 0, (2, 3, 1, 32, 32)).clamp(-1, 1)
    latents = vae.encode(pixels)
    assert latents.shape == (2, *SHAPE)
    pipeline = family.pipeline_class.from_pretrained(pictures[kind])
    config = pipeline.vae.config
    with torch.no_grad():
        posterior = pipeline.vae.encode(pixels[:, :, 0]).latent_dist
        expected = (posterior.mode() - (config.shift_factor or 0.0)) * config.scaling_factor
        torch.testing.assert_close(latents[:, :, 0], expected)
        decoded = pipeline.vae.decode(latents[:, :, 0] / config.scaling_factor + (config.shift_factor or 0.0)).sample
    expected = pipeline.image_processor.postprocess(decoded, output_type="np")
    for count in (1, 2):
        drawn = vae.decode(latents[:count])[:, 0] / 255
        assert abs(drawn - expected[:count]).max() <= 0.5 / 255 + 1e-5


def cut(pipeline: Path, **keys: Any) -> Any:
    family, student = find_pipeline(Teacher(path=str(pipeline))), DiffusionStudent(**keys)
    return build_student(student, student_config(student, family), family, 0).eval()


@pytest.mark.parametrize(
    ("kind", "keys"), [("sd3", {"num_layers": 3, "num_attention_heads": 2}), ("sd", {"num_layers": 2})]
)
def test_all_of_the_teacher_is_the_teacher(pictures, kind, keys):
    inputs = inputs_for(kind, 3)
    student, teacher = cut(pictures[kind], **keys), load_model(pictures[kind])
    assert torch.equal(plain(kind, student, inputs), plain(kind, teacher, inputs))


def test_sd3_depth_keeps_evenly_spaced_blocks_and_the_last(pictures):
    for count, kept in ((2, (0, 2)), (1, (2,))):
        student, teacher = cut(pictures["sd3"], num_layers=count), load_model(pictures["sd3"])
        teacher.transformer_blocks = torch.nn.ModuleList([teacher.transformer_blocks[number] for number in kept])
        inputs = inputs_for("sd3", 3)
        assert torch.equal(plain("sd3", student, inputs), plain("sd3", teacher, inputs))
        assert student.config.dual_attention_layers == ((0,) if count == 2 else ())


def test_sd3_width_keeps_leading_heads_and_each_modulation_s_channels(pictures):
    student, teacher = cut(pictures["sd3"], num_attention_heads=1), load_model(pictures["sd3"])
    ours, theirs = student.transformer_blocks, teacher.transformer_blocks
    assert torch.equal(ours[1].attn.to_q.weight, theirs[1].attn.to_q.weight[:8, :8])
    for mine, other, count in (
        (ours[0].norm1, theirs[0].norm1, 9),
        (ours[1].norm1_context, theirs[1].norm1_context, 6),
        (ours[2].norm1_context, theirs[2].norm1_context, 2),
        (student.norm_out, teacher.norm_out, 2),
    ):
        assert torch.equal(mine.linear.bias.view(count, 8), other.linear.bias.view(count, 16)[:, :8])
    fresh = toy_pictures.transformer(num_attention_heads=1, caption_projection_dim=8)
    assert torch.equal(student.pos_embed.pos_embed, fresh.pos_embed.pos_embed)
    assert torch.isfinite(plain("sd3", student, inputs_for("sd3", 2))).all()


def test_a_unet_keeps_first_layers_down_and_first_and_last_up(pictures):
    student, teacher = cut(pictures["sd"], num_layers=1), load_model(pictures["sd"])
    for down in teacher.down_blocks:
        down.resnets = down.resnets[:1]
    for up in teacher.up_blocks:
        up.resnets = torch.nn.ModuleList([up.resnets[0], up.resnets[2]])
    first, last = teacher.down_blocks[0], teacher.up_blocks[1]
    first.attentions = first.attentions[:1]
    last.attentions = torch.nn.ModuleList([last.attentions[0], last.attentions[2]])
    inputs = inputs_for("sd", 3)
    assert torch.equal(plain("sd", student, inputs), plain("sd", teacher, inputs))
