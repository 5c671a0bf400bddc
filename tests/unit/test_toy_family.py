"""A new family of pipelines is one file and one line in FAMILIES: it trains, draws and is evaluated."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKL, PixArtTransformer2DModel

from distiller import commands
from distiller.config.loading import parse
from distiller.diffusion.families import FAMILIES
from tests import toys

CONFIG = {
    "sample_size": 4,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": toys.TEXT_DIM,
    "use_additional_conditions": False,
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (4, 4, 4, 4),
    "norm_num_groups": 2,
    "latent_channels": 4,
}


@pytest.fixture
def pipeline(pipelines, tmp_path, monkeypatch):
    """Text encoder, tokenizer and scheduler of the toy Wan pipeline beside a transformer of another class."""
    folder = tmp_path / "pipeline"
    shutil.copytree(pipelines[1], folder)
    for part in ("transformer", "vae"):
        shutil.rmtree(folder / part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        PixArtTransformer2DModel(**CONFIG).save_pretrained(folder / "transformer")
        AutoencoderKL(**VAE).save_pretrained(folder / "vae")
    file = folder / "model_index.json"
    index = json.loads(file.read_text()) | {"_class_name": "ToyPipeline", "transformer_2": [None, None]}
    file.write_text(json.dumps(index))
    monkeypatch.setitem(FAMILIES, "ToyPipeline", "tests.toy_family:ToyFamily")
    return folder


def test_a_family_of_one_file_trains_draws_and_is_evaluated(pipeline, tmp_path):
    features = {"weight": 0.1, "student_blocks": [0], "teacher_blocks": [2]}
    recipe = parse(
        toys.recipe(
            tmp_path,
            pipeline,
            task={"height": 32, "width": 32, "num_frames": 1, "losses": {"features": features}},
            student={"config": None, "num_layers": 2},
            train={"max_steps": 2, "batch_size": 4, "log_every": 1},
            evaluation={"num_samples": 2, "batch_size": 2},
        )
    )
    commands.train(recipe, False)
    run = tmp_path / "run"
    first, last = toys.read_metrics(run)
    assert first["loss/prediction"] > 0
    assert last["loss/features"] > 0
    assert (run / "samples.png").is_file()
    student = PixArtTransformer2DModel.from_pretrained(run / "student")
    assert len(student.transformer_blocks) == 2
    commands.evaluate(run, [])
    report = json.loads((run / "summary.json").read_text())["evaluation"]
    assert report["velocity_relative"] > 0
    assert report["final_latent_mse"] > 0
