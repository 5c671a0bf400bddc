"""Peaks and times that the planner predicts, from descriptions alone, against those measured on one and two H200.

The measured figures are those of docs/performance.md, and the commands that measured them stand there. Weights are not
needed: the models are described by their config files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast

from distiller.build import build_task
from distiller.config.loading import load
from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import World
from distiller.launch.checks import Launch
from distiller.launch.fsdp import fsdp_of_file
from distiller.launch.request import read_launch_file
from distiller.launch.student_layout import layout_of_launch
from distiller.planner.gpus import GIB, GPUS
from distiller.planner.machines import Machine
from distiller.planner.planned_run import PlannedRun
from distiller.storage.packaged_files import ASSETS_DIR
from distiller.storage.saved_model import weights_may_be_missing

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WAN = {
    "wan-1.3b": {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40},
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LLAMA = {"teacher": (4096, 14336, 32, 32, 8), "student": (2048, 8192, 16, 32, 8)}
VOCABULARY = 128_256
WAN_14B = ["train.batch_size=1", "student.num_attention_heads=12"]
COMPILED = ["train.compile=default", "teacher.compile=default"]
MEASURED = [
    # model, launch file, overrides, GiB
    ("wan-1.3b", None, [], 17.75),
    ("wan-1.3b", None, ["train.gradient_checkpointing=true"], 10.82),
    ("wan-1.3b", "ddp", [], 19.54),
    ("wan-1.3b", "fsdp1", [], 15.41),
    ("wan-1.3b", "fsdp2", [], 12.61),
    ("wan-1.3b", "fsdp2_offload", [], 9.92),
    ("wan-1.3b", "zero1", [], 15.16),
    ("wan-1.3b", "zero2", [], 13.65),
    ("wan-1.3b", "zero2_offload", [], 10.97),
    ("wan-1.3b", "zero3", [], 14.81),
    ("wan-1.3b", "zero3_offload_optimizer", [], 11.21),
    ("wan-1.3b", "zero3_offload", [], 10.75),
    ("wan-14b", "ddp", [*WAN_14B, "student.ffn_dim=8960"], 37.1),
    ("wan-14b", "ddp", [*WAN_14B, "student.ffn_dim=8960", "teacher.placement=streamed"], 12.9),
    ("wan-14b", None, [*WAN_14B, *COMPILED], 36.69),
    ("wan-14b", None, [*WAN_14B, *COMPILED, "teacher.prefetch_steps=1"], 36.72),
    ("llama-8b", None, [], 48.9),
    ("llama-8b", None, COMPILED, 42.9),
    ("llama-8b", None, ["teacher.placement=streamed"], 37.2),
]
ALLOWED, LEAST, ALLOWED_TIME = 0.04, 0.985, 0.30


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: _write_wan(folder / name, sizes) for name, sizes in WAN.items()} | {
        "llama-8b": _write_llama(folder / "llama")
    }


def _write_wan(folder: Path, sizes: dict[str, int]) -> Path:
    """A pipeline without weights, and a student of ten of its blocks; 1,600 tokens a sample."""
    shutil.copytree(ASSETS_DIR / "digits-wan", folder / "pipeline", ignore=shutil.ignore_patterns("*.safetensors"))
    config = folder / "pipeline" / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes | {"rope_max_seq_len": 1024}))
    return _write(
        folder,
        task={"kind": "diffusion", "height": 640, "width": 640, "num_frames": 1},
        teacher={"path": str(folder / "pipeline"), "placement": "replicated", "compile": "none"},
        student={"num_layers": 10},
        data={"kind": "prompts", "path": "asset:digits-prompts.txt"},
        train={"batch_size": 4, "max_steps": 40, "mixed_precision": "bf16", "compile": "none"},
    )


def _write_llama(folder: Path) -> Path:
    """Llama 3.1 8B and 3.2 1B without weights; rows of 2,048 tokens."""
    for name, sizes in LLAMA.items():
        config = LlamaConfig(
            vocab_size=VOCABULARY, tie_word_embeddings=name == "student", pad_token_id=0, eos_token_id=1
        )
        config.update(dict(zip(SIZES, sizes, strict=True)))
        config.head_dim = config.hidden_size // config.num_attention_heads
        config.save_pretrained(folder / name)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
    made.save_pretrained(folder / "teacher")
    (folder / "texts.jsonl").write_text((json.dumps({"text": "w5 " * 2047}) + "\n") * 8)
    return _write(
        folder,
        task={"kind": "causal_lm"},
        teacher={"path": str(folder / "teacher"), "placement": "replicated", "compile": "none"},
        student={"config": str(folder / "student" / "config.json")},
        data={
            "kind": "jsonl",
            "path": str(folder / "texts.jsonl"),
            "max_length": 2048,
            "packing": False,
            "held_out": 0,
        },
        train={"batch_size": 4, "max_steps": 40, "mixed_precision": "bf16", "compile": "none"},
    )


def _write(folder: Path, **sections: dict[str, object]) -> Path:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": str(folder / "out"), **sections}))
    return folder / "recipe.yaml"


@pytest.mark.parametrize(("model", "launch", "overrides", "measured"), MEASURED)
def test_predicted_peaks_are_those_that_were_measured(recipes, model, launch, overrides, measured):
    recipe = load(str(recipes[model]), overrides)
    with weights_may_be_missing():
        task = build_task(recipe)
    processes = 1 if launch is None else 2
    asked = Launch()
    if launch is not None:
        file = ROOT / "accelerate_configs" / f"{launch}.yaml"
        asked = Launch(read_launch_file(file, processes), processes, fsdp_of_file(file, processes))
    machine = Machine(GPUS["H200"], processes, 139 * GIB, 500 * GIB)
    run = PlannedRun(recipe, task, machine, layout_of_launch(recipe, asked, "bf16"), torch.bfloat16, 40)
    spec = PLACEMENTS[recipe.teacher.placement]
    assert spec.memory is not None
    world = World(processes, processes, processes)
    teacher = spec.memory(run.sizes, spec.options.of(recipe.teacher), world).gpu
    predicted = run.account.peak(teacher) / GIB
    assert predicted == pytest.approx(measured, rel=ALLOWED)
    assert predicted > measured * LEAST


TIMES = [
    # model, overrides, milliseconds of the teacher and of the student's passes
    ("wan-1.3b", [], 67.1, 81.0),
    ("wan-14b", [*WAN_14B, *COMPILED], 72.6, 47.5),
    ("llama-8b", [], 230, 188),
    ("llama-8b", COMPILED, 189.5, 142),
]


@pytest.mark.parametrize(("model", "overrides", "teacher_ms", "student_ms"), TIMES)
def test_predicted_times_are_near_those_that_were_measured(recipes, model, overrides, teacher_ms, student_ms):
    recipe = load(str(recipes[model]), overrides)
    with weights_may_be_missing():
        task = build_task(recipe)
    machine = Machine(GPUS["H200"], 1, 139 * GIB, 500 * GIB)
    run = PlannedRun(recipe, task, machine, layout_of_launch(recipe, Launch(), "bf16"), torch.bfloat16, 40)
    assert run.teacher_work("replicated").ms == pytest.approx(teacher_ms, rel=ALLOWED_TIME)
    assert run.student_ms == pytest.approx(student_ms, rel=ALLOWED_TIME)
