"""A run's folder as training leaves it, with everything that a report shows; no training is needed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from distiller.storage.yaml_files import dump_yaml

STEPS = (1, 10, 20, 30, 40)
NOISE_LEVELS = {
    f"sigma 0.{low}-0.{low + 25}": {"student_mse": 0.02 * low + 0.1, "teacher_mse": 0.01 * low + 0.05}
    for low in (10, 35, 60)
}


def metrics_line(step: int, rate: float = 1e-3) -> dict[str, Any]:
    """A line of metrics.jsonl, of two ranks with GPUs."""
    slow = 5.0 if step == 1 else 1.0
    line = {
        "step": step, "epoch": 0, "samples": 16 * step, "loss": 2.0 / step, "loss/prediction": 1.5 / step,
        "loss/features": 0.5 / step, "lr": rate, "grad_norm": 1.0 + 1 / step, "optim/loss_scale": None,
        "optim/skipped_steps": 2 if step > 20 else 0, "perf/step_ms": 100.0 * slow, "perf/step_ms_min": 95.0 * slow,
        "perf/step_ms_max": 105.0 * slow, "perf/teacher_ms": 40.0, "perf/student_ms": 45.0, "perf/optimizer_ms": 10.0,
        "perf/data_ms": 1.0, "perf/data_ms_min": 0.5, "perf/data_ms_max": 1.5,
        "perf/samples_per_s": 160.0 / slow, "perf/tokens_per_s": 1600.0 / slow + step,
        "perf/mfu": 0.3, "memory/gpu_peak_gib": 70.0, "memory/gpu_peak_gib_min": 61.0, "memory/gpu_peak_gib_max": 70.0,
        "memory/teacher_gpu_gib": 26.7, "memory/teacher_gpu_gib_all_ranks": 53.4, "memory/teacher_host_gib": 0.0,
        "memory/prefetched_gib": 1.5, "memory/host_rss_gib": 6.0, "memory/host_peak_gib": 9.0,
    }  # fmt: skip
    if step % 20 == 0:
        line |= {"eval/loss": 2.5 / step, "eval/loss/prediction": 2.0 / step}
    return line


def write_json(file: Path, content: Any) -> None:
    """Plain JSON."""
    file.write_text(json.dumps(content), encoding="utf-8")


def write_run(folder: Path, rate: float = 1e-3, *, is_finished: bool = True, **sections: Any) -> Path:
    """Writes the files; `sections` of the recipe are merged over the toy's."""
    folder.mkdir(parents=True)
    recipe: dict[str, Any] = {
        "output_dir": str(folder),
        "seed": 0,
        "task": {"kind": "diffusion", "num_frames": 1},
        "teacher": {"path": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "placement": "auto", "quantization": "none"},
        "student": {"num_layers": 10},
        "data": {"kind": "prompts", "path": "/data/prompts.txt"},
        "train": {"max_steps": STEPS[-1], "batch_size": 8},
        "optim": {"lr": rate},
    }
    for name, section in sections.items():
        recipe[name] = recipe.get(name, {}) | section
    (folder / "recipe.yaml").write_text(dump_yaml(recipe), encoding="utf-8")
    steps = STEPS if is_finished else STEPS[:3]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics_line(step, rate)) + "\n" for step in steps))
    session = {
        "started": "2026-11-30T08:00:00+00:00", "first_step": 1, "host": "node-1",
        "gpus": [{"name": "NVIDIA H200", "memory_gib": 139.8}] * 2, "cpu": {"model": "Xeon", "cores": 96},
        "host_memory_gib": 1007.5, "world_size": 2, "engine": "ddp",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "is_dirty": True},
        "command": ["distiller", "train", "my-wan.yaml"],
    }  # fmt: skip
    write_json(folder / "environment.json", [session, session | {"first_step": 11, "host": "node-2"}])
    write_json(folder / "evaluation-step-20.json", evaluation(0.3))
    for step in (20, 40):
        samples = folder / "evaluations" / f"step-{step}"
        samples.mkdir(parents=True)
        Image.new("RGB", (1600, 320), (step, 90, 160)).save(samples / "samples.png")
    if is_finished:
        bad = {"step": 25, "rank": 1, "loss": "nan", "sample_ids": list(range(20))}
        (folder / "bad_batches.jsonl").write_text(json.dumps(bad) + "\n")
        Image.new("RGB", (1600, 320), (40, 90, 160)).save(folder / "samples.png")
        (folder / "samples.txt").write_text("prompt: a red fox\nteacher: in the snow\nstudent: in the rain\n")
        summary = {
            "steps": STEPS[-1], "final_loss": 0.05, "samples_per_s": 158.0, "placement": "streamed", "world_size": 2,
            "engine": "ddp", "mixed_precision": "bf16", "student_params": 1_000_000, "teacher_params": 4_000_000,
            "gpu_peak_gib": 70.0, "expected_gpu_peak_gib": 69.0, "expected_step_ms": 80.0, "failed_saves": 0,
            "evaluation": evaluation(0.1), "wall_s": 3723.0, "sessions": 2,
        }  # fmt: skip
        write_json(folder / "summary.json", summary)
    return folder


def evaluation(error: float) -> dict[str, Any]:
    """A report of `distiller evaluate`."""
    return {
        "num_samples": 100, "velocity_mse": {"sigma 0.00-0.50": error, "sigma 0.50-1.00": 2 * error},
        "velocity_relative": error / 2, "teacher_recognised": 0.99, "student_recognised": 1 - error,
        "by_noise_level": NOISE_LEVELS, "device": "NVIDIA H200",
    }  # fmt: skip
