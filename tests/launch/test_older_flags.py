"""The older documents' command lines, run from inside scripts/ as they were written; only --teacher_path is changed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from distiller.storage.yaml_files import parse_yaml
from tests import toys
from tests.launch.launching import CONFIGS, ROOT, Result, run

TIMEOUT_S = 280
PLAIN = "python train_distillation.py"
ACCELERATE = f"accelerate launch --config_file {CONFIGS / 'cpu_2proc.yaml'} train_distillation.py"
FILES = "--teacher_path T --student_config config/student_config.json --data_path data/static_prompts.txt"
TO_OUTPUTS = f"{FILES} --output_dir ./outputs"
TO_T2I = f"{FILES} --output_dir ./outputs/wan_t2i"


def torchrun(processes: int) -> str:
    return f"torchrun --nproc_per_node={processes} train_distillation.py"


# The line, the processes that it starts here, and keys of the recipe that it makes.
LINES = {
    "single process": (f"{PLAIN} {TO_OUTPUTS} --num_epochs 10 --batch_size 2", 1, {"placement": "replicated"}),
    "single process, CPU": (
        f"{PLAIN} --teacher_on_cpu --teacher_dtype float16 --batch_size 1 {TO_T2I} --num_epochs 1",
        1,
        {"placement": "cpu", "dtype": "float16"},
    ),
    "single process, balanced": (
        f"{PLAIN} --balanced_teacher --teacher_dtype float16 --batch_size 2 {TO_T2I} --num_epochs 1",
        1,
        {"placement": "balanced", "dtype": "float16"},
    ),
    "cpu": (f"{torchrun(4)} {TO_OUTPUTS} --teacher_device_strategy cpu --distributed", 4, {"placement": "cpu"}),
    "balanced": (
        f"{torchrun(4)} {TO_OUTPUTS} --teacher_device_strategy balanced --distributed",
        4,
        {"placement": "balanced"},
    ),
    "gpu0": (
        f"{torchrun(4)} {TO_OUTPUTS} --teacher_device_strategy gpu0 --distributed",
        4,
        {"placement": "rank0", "rank": 0},
    ),
    "auto": (f"{torchrun(4)} {TO_OUTPUTS} --teacher_device_strategy auto --distributed", 4, {"placement": "auto"}),
    "no strategy": (
        f"{torchrun(4)} {TO_T2I} --num_epochs 100 --batch_size 4 --lr 1e-5 --distributed --num_steps 3",
        4,
        {"placement": "auto"},
    ),
    "multi_gpu": (f"{torchrun(2)} {TO_OUTPUTS} --multi_gpu --teacher_on_cpu --distributed", 2, {"placement": "cpu"}),
    "another rank": (
        f"{torchrun(2)} {TO_OUTPUTS} --teacher_rank 1 --distributed",
        2,
        {"placement": "rank0", "rank": 1},
    ),
    "shared": (f"{torchrun(2)} {TO_OUTPUTS} --share_teacher --distributed", 2, {"placement": "cpu"}),
    "little memory": (
        f"{torchrun(2)} {TO_OUTPUTS} --teacher_dtype float16 --gradient_checkpointing --batch_size 1 "
        "--mixed_precision bf16 --teacher_device_strategy cpu",
        2,
        {"placement": "cpu", "dtype": "float16"},
    ),
    "one process under torchrun": (
        f"{torchrun(1)} --teacher_on_cpu --teacher_dtype float16 --batch_size 1 --distributed {TO_OUTPUTS}",
        1,
        {"placement": "cpu"},
    ),
    "samples": (
        f"{torchrun(2)} {TO_T2I} --num_epochs 20 --batch_size 1 --lr 1e-5 --gradient_checkpointing --save_samples "
        '--sample_prompts "A mountain landscape" "A city at night" --sample_interval 1 --teacher_device_strategy gpu0 '
        "--num_steps 20",
        2,
        {"placement": "rank0"},
    ),
    "torch.distributed.launch": (
        f"python -m torch.distributed.launch --nproc_per_node=2 train_distillation.py {TO_T2I} --num_epochs 2 "
        "--batch_size 4 --lr 1e-5 --distributed --teacher_device_strategy cpu",
        2,
        {"placement": "cpu"},
    ),
    "accelerate": (f"{ACCELERATE} {TO_OUTPUTS} --teacher_device_strategy cpu --distributed", 2, {"placement": "cpu"}),
    "accelerate, gpu0": (f"{ACCELERATE} {TO_OUTPUTS} --teacher_device_strategy gpu0", 2, {"placement": "rank0"}),
    "accelerate, balanced": (f"{ACCELERATE} {TO_OUTPUTS} --balance_teacher", 2, {"placement": "balanced"}),
    "accelerate, as it is": (
        f"accelerate launch train_distillation.py {TO_OUTPUTS} --num_epochs 1",
        1,
        {"placement": "replicated"},
    ),
}


@pytest.fixture
def scripts(tmp_path) -> Path:
    """A copy of scripts/, whose outputs are the test's own."""
    return shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("outputs", "__*"))


def start(line: str, teacher: Path, folder: Path) -> Result:
    words = [str(teacher) if word == "T" else word for word in shlex.split(line)]
    # Accelerate's default file is the machine's and not the test's.
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HOME": str(folder / "hub")}
    return run(words, TIMEOUT_S, folder, environment)


TYPICAL = ("another rank", "little memory", "samples", "torch.distributed.launch", "accelerate", "accelerate, as it is")
"""One of each kind of launcher and of what a line asks for; the others differ from these in a flag."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in TYPICAL else pytest.mark.thorough) for n in LINES],
)
def test_older_lines_run_as_they_were_written(name, scripts):
    line, processes, keys = LINES[name]
    result = start(line, ROOT / "distiller" / "assets" / "digits-wan", scripts)
    assert result.code == 0, result.stderr
    folder = scripts / "outputs" / ("wan_t2i" if TO_T2I in line else "")
    teacher = parse_yaml((folder / "recipe.yaml").read_text())["teacher"]
    assert {key: teacher[key] for key in keys} == keys
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["world_size"] == processes
    assert summary["steps"] == json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert (folder / "student" / "config.json").is_file()
    assert (folder / "samples.png").is_file()
    assert ("note: --distributed" in result.stdout) == (("--distributed" in line) != (processes > 1))


@pytest.mark.slow
def test_gpu0_on_two_ranks(scripts, tmp_path):
    """The quick one: a toy teacher, two updates, and what the line leaves can be evaluated from the same folder."""
    teacher = toys.make_pipeline(tmp_path / "teacher")
    line = f"{torchrun(2)} {TO_OUTPUTS} --teacher_device_strategy gpu0 --distributed --num_steps 2"
    result = start(line, teacher, scripts)
    assert result.code == 0, result.stderr
    assert "text_dim 16" in result.stdout
    assert json.loads((scripts / "outputs" / "summary.json").read_text())["world_size"] == 2
    assert len(toys.read_metrics(scripts / "outputs")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_places_and_processes_change_nothing(scripts, tmp_path):
    teacher = toys.make_pipeline(tmp_path / "teacher")
    common = f"{FILES} --num_steps 3 --lr 1e-3"
    result = start(f"{PLAIN} {common} --output_dir one --batch_size 4", teacher, scripts)
    assert result.code == 0, result.stderr
    for processes, flags in ((2, "--teacher_on_cpu"), (4, "--balanced_teacher"), (4, "--teacher_rank 1")):
        line = f"{torchrun(processes)} {common} --output_dir other --batch_size {4 // processes} {flags}"
        result = start(line, teacher, scripts)
        assert result.code == 0, result.stderr
        toys.assert_same_run(scripts / "other", scripts / "one")
        shutil.rmtree(scripts / "other")


@pytest.mark.slow
def test_it_is_resumed_and_evaluated_where_it_ran(scripts, tmp_path):
    teacher = toys.make_pipeline(tmp_path / "teacher")
    assert start(f"{PLAIN} {TO_OUTPUTS} --num_steps 2", teacher, scripts).code == 0
    assert start(f"{PLAIN} {TO_OUTPUTS} --num_steps 3 --resume", teacher, scripts).code == 0
    assert [line["step"] for line in toys.read_metrics(scripts / "outputs")][-1] == 3
    result = start("python -m distiller evaluate outputs evaluation.num_samples=4", teacher, scripts)
    assert result.code == 0, result.stderr


@pytest.mark.slow
def test_without_a_launcher_multi_gpu_says_the_command(scripts):
    result = start(f"{PLAIN} {TO_OUTPUTS} --multi_gpu --teacher_on_cpu", ROOT, scripts)
    assert result.code == 2
    assert result.stderr.count("\n") == 1
    assert "torchrun --nproc_per_node=" in result.stderr
    assert not (scripts / "outputs").exists()


@pytest.mark.slow
def test_a_refusal_on_two_ranks_is_one_line(scripts):
    result = start(f"{torchrun(2)} {TO_OUTPUTS} --teacher_on_cpu --balanced_teacher", ROOT, scripts)
    assert result.code != 0
    ours = [line for line in result.stderr.splitlines() if line.startswith("distiller")]
    assert len(ours) == 1
    assert "the teacher lives in one place" in ours[0]
