"""Plans of the packaged recipes for large teachers, whose weights are not here, against a calculation by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distiller.cli import main
from scripts.benchmarks import shapes

ROOT = Path(__file__).parents[2]
GIB = 2**30
pytestmark = pytest.mark.slow


def rows_of(capsys, *arguments: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The plan, and its rows by their names."""
    assert main(["plan", *arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    return plan, {row["name"]: row for row in plan["placements"]}


def test_wan_14b_on_four_small_gpus(tmp_path, capsys):
    shapes.write_recipe("wan-14b", tmp_path)
    (tmp_path / "prompts.txt").write_text("a boat on a lake at dawn\n" * 64)
    inputs = [f"teacher.path={tmp_path / 'teacher'}", f"data.path={tmp_path / 'prompts.txt'}"]
    plan, rows = rows_of(capsys, "wan-14b-t2i", *inputs, "--machine", "4x3090-24G", "--host-memory", "128GiB")

    # A block: two attentions with four matrices each, a feed-forward network of two, biases and norms.
    block = 8 * 5120**2 + 2 * 5120 * 13824
    teacher_gib = 2 * 40 * block / GIB
    beside = rows["cpu"]["gpu_gib_per_rank"][0]
    # What is outside of the blocks is the time's projection above all: 6 x 5120 x 5120.
    assert rows["replicated"]["gpu_gib_per_rank"][0] - beside == pytest.approx(teacher_gib, rel=0.02)
    assert rows["balanced"]["gpu_gib_per_rank"][0] - beside == pytest.approx(teacher_gib / 4, rel=0.15)
    student = 8 * (8 * 1536**2 + 2 * 1536 * 8960)
    # Weights, gradients and two moments in float32, and DDP's buckets.
    assert beside > 20 * student / GIB
    assert 0.35e9 < student < 0.45e9
    assert not rows["replicated"]["fits"]
    assert plan["choice"] == "streamed"
    assert rows["streamed"]["fits"]
    assert rows["balanced"]["fits"]


def test_llama_70b_on_eight_large_gpus(tmp_path, capsys, monkeypatch):
    seventy = (8192, 28672, 80, 64, 8, False)
    monkeypatch.setitem(shapes.LLAMA, "llama-70b", (seventy, seventy))
    shapes.write_recipe("llama-70b", tmp_path)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(texts.read_text() * 4)
    inputs = [f"teacher.path={tmp_path / 'teacher'}", f"data.path={texts}", f"cache_dir={tmp_path / 'stages'}"]
    machine = ["--machine", "8xH100", "--host-memory", "1TiB"]
    file = ["--config_file", str(ROOT / "accelerate_configs" / "fsdp2.yaml")]
    plan, rows = rows_of(capsys, "llama-70b-to-8b", *inputs, *machine, *file)

    vocabulary = 128_256
    teacher = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + vocabulary * 8192
    beside = rows["cpu"]["gpu_gib_per_rank"][0]
    # Its output layer, as large as its embeddings, is on every GPU in all placements.
    assert rows["replicated"]["gpu_gib_per_rank"][0] - beside == pytest.approx(2 * teacher / GIB, rel=0.01)
    student = 32 * (2 * 4096**2 + 2 * 4096 * 512 + 3 * 4096 * 14336) + 2 * vocabulary * 4096
    assert 7.5e9 < student < 8.5e9
    # An eighth of weights and moments. Gradients are whole until an update's last micro-batch, beside their eighth.
    at_rest = (12 / 8 + 4 + 4 / 8) * student + 2 * vocabulary * 8192
    # The rest is a micro-batch: activations, a block's gathered weights, and the loss.
    assert at_rest / GIB < beside < 1.3 * at_rest / GIB
    assert not rows["replicated"]["fits"]
    assert plan["choice"] == "streamed"
    assert rows["streamed"]["bound_by"] == "teacher: computation"
    # One copy of the teacher and a checkpoint's copy of the student.
    assert rows["streamed"]["host_gib"] == pytest.approx((2 * teacher + 12 * student) / GIB, rel=0.02)
