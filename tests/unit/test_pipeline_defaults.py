"""What a recipe leaves out is what the pipeline does by itself; it is said with its origin, and written out."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

from distiller import commands
from distiller.config.loading import load, parse
from distiller.config.teacher import Teacher
from distiller.data import rng
from distiller.data.latents import LatentStore
from distiller.diffusion.checks import size_notes
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.samples import draw_teacher
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.text import embed
from distiller.errors import UserError
from distiller.tasks import open_task
from distiller.teachers.factory import open_teacher
from tests import toy_pictures, toys
from tests.toy_network import setup

LEFT_OUT = {"task": ("height", "width", "num_frames"), "sampling": ("num_inference_steps", "guidance_scale")}


def bare(data, keep=()):
    """The mapping of a recipe without the keys that the pipeline decides."""
    for section, keys in LEFT_OUT.items():
        for key in set(keys) - set(keep):
            data[section].pop(key, None)
    data["rollout"].pop("batch_size", None)
    return parse(data)


def resolved(recipe):
    task = open_task(recipe)
    recipe = task.with_defaults(recipe)
    return (
        recipe.task.size,
        (recipe.sampling.num_inference_steps, *recipe.sampling.scales),
        (recipe.rollout.batch_size, recipe.evaluation.batch_size),
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Toy networks that say the sizes of real ones: Wan, Stable Diffusion 3.5, 1.5, 1.5 in an early copy."""
    folder = tmp_path_factory.mktemp("large")
    return {
        "wan": toys.make_pipeline(folder / "wan", rope_max_seq_len=1024),
        "wan 2.2": toys.make_pipeline(folder / "wan22", 2, rope_max_seq_len=1024),
        "sd3": toy_pictures.make_sd3(folder / "sd3", sample_size=128, pos_embed_max_size=64),
        "sd": toy_pictures.make_sd(folder / "sd", sample_size=64),
    }


@pytest.mark.parametrize(
    ("kind", "size", "sampling", "batches"),
    [
        ("wan", (81, 480, 832), (50, 5.0, 5.0), (1, 1)),
        ("wan 2.2", (81, 480, 832), (50, 5.0, 5.0), (1, 1)),
        ("sd3", (1, 1024, 1024), (28, 7.0, 7.0), (8, 8)),
        ("sd", (1, 512, 512), (50, 7.5, 7.5), (8, 8)),
    ],
)
def test_defaults_are_the_pipeline_s_and_said_at_check(large, tmp_path, capsys, kind, size, sampling, batches):
    if kind.startswith("wan"):
        data = toys.recipe(tmp_path, large[kind], student={"config": None, "num_layers": 2})
    else:
        data = toy_pictures.recipe(kind, tmp_path, large[kind], student={"config": None, "num_layers": 1})
    recipe = bare(data)
    assert resolved(recipe) == (size, sampling, batches)
    commands.check(recipe, None)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("warning: drawings are guided") for line in lines) == 1
    notes = [line for line in lines if line.startswith("note: ")]
    name = {"sd": "StableDiffusionPipeline", "sd3": "StableDiffusion3Pipeline"}.get(kind, "WanPipeline")
    frames, height, width = size
    said = f"task.num_frames {frames}, task.height {height}, task.width {width}"
    said += f", sampling.num_inference_steps {sampling[0]}, sampling.guidance_scale {sampling[1]:g}"
    assert notes[0] == f"note: as {name} draws by itself: {said}"
    said = f"rollout.batch_size {batches[0]}, evaluation.batch_size {batches[1]}"
    assert notes[1] == f"note: for about 32,768 tokens a forward pass: {said}"


@pytest.mark.parametrize("kind", ["wan", *toy_pictures.KINDS])
def test_a_recipe_that_leaves_all_out_rolls_out_what_the_pipeline_draws_by_itself(pipelines, pictures, tmp_path, kind):
    """Called with prompts, noise and few steps. Wan's toy is told the size as well: its own would take hours."""
    steps = {"num_inference_steps": 3}
    if kind == "wan":
        folder, given = pipelines[1], steps | {"height": 32, "width": 32, "num_frames": 1}
        recipe = bare(toys.recipe(tmp_path, folder, data={"max_samples": 2}), keep=given)
    else:
        # The toy recipe sets the length at which the third encoder embeds.
        folder, given = pictures[kind], steps | ({"max_sequence_length": 5} if kind == "sd3" else {})
        recipe = bare(toy_pictures.recipe(kind, tmp_path, folder, data={"max_samples": 2}), keep=steps)
    task = open_task(recipe)
    task.prepare_stages(toys.ALONE, torch.float32)
    task.load_data(toys.ALONE, open_teacher(task.network, setup()))
    store = LatentStore(next((Path(recipe.output_dir) / "stages").glob("rollout-*")))
    noise = torch.stack([rng.noise(recipe.seed, 0, i, store.shape, "rollout") for i in range(2)])
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noise = noise if kind == "wan" else noise.squeeze(2)
    drawn = pipeline(toys.PROMPTS[:2], latents=noise, output_type="latent", **given)
    drawn = drawn.frames if kind == "wan" else drawn.images.unsqueeze(2)
    torch.testing.assert_close(torch.stack([store.latents(i) for i in range(2)]), drawn, rtol=1e-4, atol=1e-5)


def test_a_run_s_recipe_has_the_numbers(pictures, tmp_path, capsys):
    brief = {"max_steps": 1, "batch_size": 4, "log_every": 1}
    data = toy_pictures.recipe("sd", tmp_path, pictures["sd"], data={"max_samples": 4}, train=brief)
    data["sampling"] = {"num_inference_steps": 2}
    del data["task"]["height"], data["task"]["width"]
    recipe = parse(data)
    commands.train(recipe, False)
    assert "note: as StableDiffusionPipeline draws by itself: task.height 64" in capsys.readouterr().out
    file = tmp_path / "run" / "recipe.yaml"
    held = yaml.safe_load(file.read_text())
    assert (held["task"]["height"], held["task"]["width"]) == (64, 64)
    assert held["sampling"]["guidance_scale"] == 7.5
    assert held["rollout"]["batch_size"] == 8
    assert held["evaluation"]["batch_size"] == 50
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    commands.train(recipe, True)
    assert "is already finished" in capsys.readouterr().out
    commands.check(recipe, None, resume=True)
    # What is written out is no default any more.
    assert open_task(load(str(file))).notices() == open_task(recipe).notices()[1:]


@pytest.mark.parametrize(("given", "missing"), [("height", "width"), ("width", "height")])
def test_one_side_alone_is_refused(make_recipe, given, missing):
    data = make_recipe().model_dump(mode="json")
    data["task"][missing] = None
    with pytest.raises(UserError, match=rf"task\.{given} is 32 and task\.{missing} is left out; give both"):
        parse(data)


def test_latents_say_their_size(make_recipe, tmp_path):
    folder = tmp_path / "latents"
    folder.mkdir()
    save_file({"latents": torch.zeros(9, 4, 2, 4, 6)}, folder / "a.safetensors")
    (folder / "prompts.txt").write_text("a red cat sits\n" * 9)
    data = make_recipe(data={"kind": "latents", "path": str(folder)}).model_dump(mode="json")
    recipe = bare(data, keep=LEFT_OUT["sampling"])
    assert resolved(recipe)[0] == (5, 32, 48)
    data["task"]["height"] = 32
    assert resolved(parse(data))[0] == (5, 32, 48)
    assert (
        open_task(recipe).notices()[0].startswith("as the latents of data.path are: task.num_frames 5, task.height 32")
    )


def test_pictures_have_one_frame_and_the_pipeline_s_size(large, tmp_path):
    from PIL import Image

    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (40, 40)).save(folder / "a.png")
    (folder / "a.txt").write_text("a cat")
    student = {"config": None, "num_layers": 2}
    data = toys.recipe(tmp_path, large["wan"], data={"kind": "images", "path": str(folder)}, student=student)
    assert resolved(bare(data))[0] == (1, 480, 832)


def test_files_of_an_early_stable_diffusion_are_corrected_as_the_pipeline_corrects_them(pictures):
    family = find_pipeline(Teacher(path=str(pictures["sd"])))
    assert family.default_size() == (1, 64, 64)

    def with_config(**changes):
        config = family.teacher_config | changes
        family_of = type(family)
        return family_of(dataclasses.replace(family.files, configs={"unet": config}))

    assert with_config(sample_size=32, _diffusers_version="0.6.0").default_size() == (1, 512, 512)
    assert with_config(sample_size=96, _diffusers_version="0.6.0").default_size() == (1, 768, 768)
    assert with_config(sample_size=32, _diffusers_version="0.9.0").default_size() == (1, 256, 256)
    assert with_config(sample_size=(64, 96)).default_size() == (1, 512, 768)
    with pytest.raises(UserError, match="sample_size None, from which no size of a picture follows"):
        with_config(sample_size=None).default_size()


def test_the_packaged_recipe_leaves_nothing_to_the_pipeline():
    recipe = load("digits-wan", [])
    assert all(getattr(getattr(recipe, section), key) is not None for section in LEFT_OUT for key in LEFT_OUT[section])
    assert open_task(recipe).notices() == []


GUIDED = {"guidance_scale": 4.0, "num_inference_steps": 3}


@pytest.mark.parametrize(
    ("sections", "is_warned"),
    [
        ({"sampling": GUIDED}, True),
        ({"sampling": GUIDED, "task": {"condition_dropout": 0.1}}, False),
        ({"sampling": GUIDED, "task": {"condition_dropout": 0.1, "guidance": {"negative_prompt": "a cat"}}}, True),
        ({"sampling": GUIDED, "task": {"guidance": {"negative_prompt": "a cat"}}}, True),
        ({"sampling": GUIDED, "task": {"guidance": {"scale": 4.0}}}, False),
        ({"sampling": GUIDED, "task": {"targets": "stored"}}, False),
        ({}, False),
    ],
)
def test_guided_drawings_and_a_student_that_never_learns_guidance_are_a_warning(make_recipe, sections, is_warned):
    notices = open_task(make_recipe(**sections)).notices()
    assert [notice.startswith("warning: ") for notice in notices] == [True] * is_warned
    if is_warned:
        assert "sampling.guidance_scale 4" in notices[0]
        assert "task.guidance.scale=4" in notices[0]
        assert "task.condition_dropout=0.1" in notices[0]
        assert ("task.guidance.negative_prompt='' with" in notices[0]) == ("guidance" in sections.get("task", {}))


@pytest.mark.parametrize(
    ("scales", "learnt", "said"),
    [
        ((0.5, 4.0), None, ["sampling.guidance_scale_2 4 has no effect while sampling.guidance_scale is at most 1"]),
        (
            (0.5, 4.0),
            {"scale": 3.0},
            ["sampling.guidance_scale_2 4 has no effect", "is 3 and sampling.guidance_scale 0.5, which draws without"],
        ),
        ((0.5, None), {"scale": 1.0}, []),
        ((3.0, 4.0), {"scale": 3.0, "scale_2": 2.0}, ["scale_2 is 2 and sampling.guidance_scale_2 4: rollout"]),
    ],
)
def test_notes_of_guidance_say_the_recipe_s_own_numbers(make_recipe, scales, learnt, said):
    sampling = {"num_inference_steps": 3, "guidance_scale": scales[0], "guidance_scale_2": scales[1]}
    notices = open_task(make_recipe(2, sampling=sampling, task={"guidance": learnt or {}})).notices()
    assert len(notices) == len(said)
    assert all(words in notice for words, notice in zip(said, notices, strict=True))


def test_a_config_whose_size_says_nothing_is_no_error_where_the_recipe_gives_one(tmp_path):
    folder = toy_pictures.make_sd(tmp_path / "sd", sample_size=[64, 64, 64])
    assert (
        size_notes(parse(toy_pictures.recipe("sd", tmp_path, folder)), find_pipeline(Teacher(path=str(folder)))) == []
    )


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_samples_are_drawn_a_few_at_a_time_and_are_the_same(pictures, tmp_path, kind):
    """With a sampler that draws noise on the way, too: it is each sample's own."""
    folder = pictures[kind]
    if kind == "sd":
        scheduler = toy_pictures.make_scheduler("EulerAncestralDiscreteScheduler")
        folder = toy_pictures.make_sd(tmp_path / "ancestral", scheduler=scheduler)
    drawn, sizes = [], []
    for size in (5, 2):
        data = toy_pictures.recipe(kind, tmp_path, folder, evaluation={"batch_size": size})
        task = open_task(parse(data))
        family, recipe = task.family, task.with_defaults(parse(data))
        teacher = open_teacher(task.network, setup())
        predict = teacher.predict

        def counted(requests, predict=predict):
            sizes.append(len(requests[0].sample_ids))
            return predict(requests)

        teacher.predict = counted
        encoder = family.load_text_encoder(torch.float32, torch.device("cpu"))
        positive, negative = (embed(family, encoder, texts, 5) for texts in (toys.PROMPTS[:5], [""]))
        shape = family.latent_shape(*recipe.task.size)
        sampling_inputs = SamplingInputs.make(0, "sample", range(5), shape, positive, negative, torch.device("cpu"))
        process = family.noise_process(shape)
        drawn.append(draw_teacher(teacher, task.network, process, recipe, sampling_inputs))
    assert sizes == [5] * 3 + [2] * 6 + [1] * 3
    torch.testing.assert_close(*drawn, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("side", "is_warned"), [(64, True), (240, True), (256, False), (512, False)])
def test_drawings_far_smaller_than_what_the_teacher_learnt_from_are_a_warning(large, tmp_path, side, is_warned):
    """As where the digits' recipe is used with Stable Diffusion 1.5, whose pictures have 512 x 512 pixels."""
    student, task = {"config": None, "num_layers": 1}, {"height": side, "width": side}
    recipe = parse(toy_pictures.recipe("sd", tmp_path, large["sd"], student=student, task=task))
    (*notices,) = (line for line in open_task(recipe).notices() if "batch_size" not in line)
    assert len(notices) == is_warned
    assert all(f"warning: task.height {side}" in line and "the 512 x 512 pixels" in line for line in notices)


@pytest.mark.parametrize(
    ("vae", "size"),
    [
        ({"scale_factor_spatial": 16, "scale_factor_temporal": 4}, (81, 480, 832)),
        ({"scale_factor_spatial": 32, "scale_factor_temporal": 3}, (82, 448, 832)),
        ({"scale_factor_spatial": 24, "scale_factor_temporal": 8}, (81, 480, 816)),
    ],
)
def test_wan_s_default_size_is_rounded_to_its_patches_as_the_pipeline_rounds_it(pipelines, vae, size):
    family = find_pipeline(Teacher(path=str(pipelines[1])))
    files = dataclasses.replace(family.files, vae_config=family.files.vae_config | vae)
    assert type(family)(files).default_size() == size
