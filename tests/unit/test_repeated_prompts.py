"""Prompts that stand in the data more than once: every sample is drawn, trained, shown and judged with its own text."""

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel

from distiller.data import rng
from distiller.data.latents import LatentStore
from distiller.diffusion.batch import DiffusionBatch
from distiller.tasks import open_task
from distiller.teachers.factory import open_teacher
from tests import toys
from tests.toy_network import setup

A, B, C = "a red cat runs", "a blue dog sits", "a bird"
REPEATED = {
    "twice": ([A, A, B, C], 1),
    "only one text": ([A, A, A, A], 1),
    "samples of each": ([A, B, A], 2),
    "the negative prompt's": (["a", A, "a", B], 1),
}
"""The data's prompts, and samples of each."""


@pytest.fixture(params=REPEATED)
def repeated(request, make_recipe, tmp_path):
    """A task over repeated prompts whose stages are done, its data, and each sample's prompt."""
    prompts, per_prompt = REPEATED[request.param]
    path = toys.write_prompts(tmp_path / "repeated.txt", prompts)

    def make(targets: str):
        recipe = make_recipe(
            data={"path": str(path)},
            task={"targets": targets, "guidance": {"negative_prompt": "a"}},
            rollout={"samples_per_prompt": per_prompt, "batch_size": 3},
            sampling={"guidance_scale": 3.0},
        )
        task = open_task(recipe)
        assert task.prepare_stages(toys.ALONE, torch.float32)
        data = task.load_data(toys.ALONE, open_teacher(task.network, setup()))
        return recipe, task, data, [prompt for prompt in prompts for _ in range(per_prompt)]

    return make


def test_the_rollout_draws_each_sample_from_its_own_prompt(repeated, pipelines):
    recipe, _, _, prompts = repeated("live")
    store = LatentStore(next((Path(recipe.output_dir) / "stages").glob("rollout-*")))
    pipeline = WanPipeline.from_pretrained(pipelines[1])
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.stack([rng.noise(recipe.seed, 0, i, (4, 1, 4, 4), "rollout") for i in range(len(prompts))])
    size = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 3, "guidance_scale": 3.0}
    drawn = pipeline(prompts, ["a"] * len(prompts), **size, latents=noise, output_type="latent").frames
    torch.testing.assert_close(
        torch.stack([store.latents(i) for i in range(len(prompts))]), drawn, rtol=1e-4, atol=1e-5
    )
    assert [store.prompts[store.prompt_index(i)] for i in range(len(prompts))] == prompts


def test_stored_targets_are_the_answers_to_the_sample_s_own_text(repeated, pipelines):
    _, task, data, prompts = repeated("stored")
    batch = task.collate([data[0, i] for i in range(len(prompts))])
    assert isinstance(batch, DiffusionBatch)
    assert batch.stored is not None
    teacher = WanTransformer3DModel.from_pretrained(pipelines[1], subfolder="transformer")
    texts = embedded(pipelines[1], [*prompts, "a"])
    with torch.no_grad():
        conditional, unconditional = (
            teacher(batch.noisy, batch.timesteps, text, return_dict=False)[0]
            for text in (texts[:-1], texts[-1:].expand(len(prompts), -1, -1))
        )
    guided = unconditional + 3.0 * (conditional - unconditional)
    torch.testing.assert_close(batch.stored, guided, rtol=1e-4, atol=1e-5)


def test_training_and_drawing_read_the_sample_s_own_text(repeated, pipelines):
    _, task, data, prompts = repeated("live")
    texts = embedded(pipelines[1], prompts)
    trained = task.collate([data[0, i] for i in range(len(prompts))]).positive["text"]
    shown = task._source.sampling_inputs(
        [task._source.prompt_of(i) for i in range(len(prompts))], (0,), toys.ALONE.device
    )
    for text in (trained, shown.positive["text"]):
        torch.testing.assert_close(text, texts[:, : text.shape[1]], rtol=1e-5, atol=1e-6)


def embedded(folder, prompts):
    """The pipeline's own embeddings [N, 512, D]."""
    pipeline = WanPipeline.from_pretrained(folder, transformer=None, vae=None)
    return pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)[0].detach()


def test_only_rollouts_that_were_drawn_with_other_texts_have_a_new_key(make_recipe, tmp_path):
    """Folders of unique prompts were right, and took the teacher's time: their key is what it was."""

    def key_of(prompts):
        path = toys.write_prompts(tmp_path / "prompts-of-key.txt", prompts)
        task = open_task(make_recipe(data={"path": str(path)}))
        return task.cached_inputs(torch.float32)["latents"]

    assert "text_rows" not in key_of([A, B, C])
    assert "text_rows" not in key_of([A, B, A[:5], C])
    # The last prompt stands twice: its number is that of no text.
    assert len({key_of(prompts)["text_rows"] for prompts in ([A, B, B], [A, A, B])}) == 2
