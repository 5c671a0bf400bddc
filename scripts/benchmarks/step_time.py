"""Where a step's time and memory go, for a Wan teacher of real layout with random weights, under several launch files.

    python scripts/benchmarks/step_time.py --model wan-1.3b --launch single_gpu --launch ddp
    python scripts/benchmarks/step_time.py --model wan-14b --gpu-memory 24 --placement auto --placement streamed

The pipeline is made once on disk: random weights, with the packaged digits' text encoder, tokenizer and VAE, so text is
64 wide and latents have 4 channels. Prints one table; beside each row stands the limit: the teacher's forward and the
student's forward and backward at the GPU's dense bf16 peak (2 and 6 FLOP a parameter and token), which ignores
attention and everything that is not a matrix product. Host memory is the largest resident set that any rank had; the
loss is the last step's, which is equal under every engine but for rounding. "ahead" is `teacher.prefetch_steps`: with
it the step is between the longer of teacher and student, as the row without it has them, and their sum. `--gpu-memory`
makes the GPUs smaller: this process holds all but so much of each while the rows run.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import WanTransformer3DModel
from shapes import WAN, copy_pipeline, wan_config

from distiller.training.tracking import peak_flops

ROOT = Path(__file__).parents[2]


def make_pipeline(folder: Path, model: str) -> int:
    """Writes the pipeline with bfloat16 random weights made on the device; returns the number of parameters."""
    copy_pipeline(folder, with_weights=True)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformer = WanTransformer3DModel.from_config(wan_config(model))
    transformer.to(torch.bfloat16).save_pretrained(folder / "transformer")
    return sum(parameter.numel() for parameter in transformer.parameters())


def hold_all_but(free_gib: float) -> list[torch.Tensor]:
    """Takes memory of every GPU until so much of it is free for other processes; keep what is returned."""
    held = []
    for gpu in range(torch.cuda.device_count()):
        with torch.cuda.device(gpu):
            torch.cuda.empty_cache()
            held.append(torch.empty(1, device="cuda"))  # the context takes memory too
            free, _ = torch.cuda.mem_get_info()
            held.append(torch.empty(max(int(free - free_gib * 2**30), 0), dtype=torch.uint8, device="cuda"))
            print(f"GPU {gpu}: {torch.cuda.mem_get_info()[0] / 2**30:.2f} GiB free for the runs", flush=True)
    return held


def measure(folder: Path, name: str, side: int, batch_size: int, step: int, options: list[str]) -> dict[str, Any]:
    """Runs a few steps through a launch file and returns the metrics of a logged step and the summary."""
    output_dir = folder / f"run-{name}-{len(list(folder.glob('run-*')))}"
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), "-m", "distiller", "train"]
    command += [str(folder / "recipe.yaml"), f"output_dir={output_dir}", f"train.batch_size={batch_size}"]
    subprocess.run([*command, f"task.height={side}", f"task.width={side}", *options], cwd=ROOT, check=True)
    summary = json.loads((output_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step) | summary


def main() -> None:
    """Makes the pipeline, measures every launch file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WAN, default="wan-1.3b")
    parser.add_argument("--launch", action="append", help="launch files by name; default single_gpu")
    parser.add_argument("--side", type=int, default=640, help="pixels; 640 is 1,600 tokens")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--student-layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further row after so long")
    parser.add_argument("--checkpointing", choices=["both", "true", "false"], default="both", help="of activations")
    parser.add_argument("--placement", action="append", help="teacher.placement; several make a row each")
    parser.add_argument("--prefetch-steps", type=int, action="append", help="teacher.prefetch_steps; as --placement")
    parser.add_argument("--gpu-memory", type=float, help="GiB of each GPU that the runs may use; the rest is held")
    parser.add_argument("--student-heads", type=int, help="default: as many as the teacher has")
    parser.add_argument("--option", action="append", default=[], help="recipe override for every row")
    options = parser.parse_args()
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_pipeline(folder / "pipeline", options.model)
        heads = {} if options.student_heads is None else {"num_attention_heads": options.student_heads}
        recipe = {
            "output_dir": "-",
            "teacher": {"path": str(folder / "pipeline")},
            "student": {"num_layers": options.student_layers, **heads},
            "data": {"path": "asset:digits-prompts.txt", "max_samples": 256},
            # Random weights draw nothing: noise costs the loop the same as a rollout's latents would.
            "rollout": {"enabled": False},
            "train": {"max_steps": options.steps, "log_every": options.steps // 2, "num_workers": 2},
            "task": {"num_frames": 1},
            "sampling": {"num_inference_steps": 2, "guidance_scale": 1.0},
            "checkpoint": {"at_end": False, "every_minutes": None},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        held = None if options.gpu_memory is None else hold_all_but(options.gpu_memory)
        checkpointings = ("false", "true") if options.checkpointing == "both" else (options.checkpointing,)
        launches, placements = options.launch or ["single_gpu"], options.placement or ["replicated"]
        asked = itertools.product(launches, placements, checkpointings, options.prefetch_steps or [0])
        rows = []
        for name, placement, checkpointing, ahead in asked:
            if time.perf_counter() - began > 60 * options.minutes:
                break
            extra = [f"teacher.placement={placement}", f"train.gradient_checkpointing={checkpointing}"]
            # The last updates ask for nothing any more, and do not belong to what is measured.
            extra += [f"teacher.prefetch_steps={ahead}", f"train.max_steps={options.steps + ahead}"]
            given = [*extra, *options.option]
            try:
                metrics = measure(folder, name, options.side, options.batch_size, options.steps, given)
            except subprocess.CalledProcessError:
                print(f"{name}, {placement}: failed, see above", file=sys.stderr)
                continue
            chosen = metrics["placement"] if placement != "auto" else f"auto: {metrics['placement']}"
            rows.append((name, chosen, checkpointing, ahead, metrics))
        del held
    tokens = options.batch_size * (options.side // 16) ** 2
    peak = peak_flops(device, "bf16")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"\n{options.model}: {parameters / 1e9:.2f} B parameters, {tokens} tokens a rank and step")
    print(f"{where}, torch {torch.__version__}; milliseconds a step")
    columns = [
        "launch file   ",
        "teacher         ",
        "checkpointing",
        "ahead",
        "   step",
        "teacher",
        "student",
        "optimiz",
        "   data",
        "GPU peak GiB",
        "predicted ms, GiB",
        "host peak GiB",
        "last loss",
    ]
    print(" | ".join([*columns, "limit: teacher, student"]))
    for name, placement, checkpointing, ahead, metrics in rows:
        times = [metrics[f"perf/{part}_ms"] for part in ("step", "teacher", "student", "optimizer", "data")]
        shown = " | ".join("   - " if value is None else f"{value:7.1f}" for value in times)
        limits = (
            [1e3 * flop * tokens / peak for flop in (2 * parameters, 6 * metrics["student_params"])] if peak else []
        )
        memory = metrics["memory/gpu_peak_gib_max"]
        peak_gib = "-" if memory is None else f"{memory:.2f}"
        expected = metrics["expected_step_ms"], metrics["expected_gpu_peak_gib"]
        predicted = ", ".join("-" if value is None else f"{value:.2f}" for value in expected)
        print(
            f"{name:14} | {placement:16} | {checkpointing:13} | {ahead:5} | {shown} | {peak_gib:>12} | "
            f"{predicted:>17} | {metrics['memory/host_peak_gib']:13.1f} | {metrics['loss']:.6f} | "
            + ", ".join(f"{limit:.1f}" for limit in limits)
        )


if __name__ == "__main__":
    main()
