"""The trainer against a loop written by hand for the same step: what its generality costs.

    python scripts/benchmarks/hand_written.py --model digits --launch cpu --batch-size 32 --side 64 --steps 200
    python scripts/benchmarks/hand_written.py --model wan-1.3b --compile default

Both train a student of the same layout beside the same teacher on flow matching: noise the latents, ask the teacher,
mean squared error, clip, fused AdamW, in bfloat16 on a GPU and float32 on a CPU. The loop by hand is the plainest that
does this: its latents and texts lie on the device from the start, nothing is logged, saved, checked or counted. Each
side runs in processes of its own, in turn; the figure is the median of the sides' milliseconds a step, and the ratio
that of the medians. The first half of the steps is not timed.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from diffusers import WanTransformer3DModel
from shapes import WAN
from step_time import make_pipeline
from torch import nn

from distiller.storage.packaged_files import ASSETS_DIR

ROOT = Path(__file__).parents[2]
NUM_PROMPTS, TEXT_ROWS = 256, 16
LEARNING_RATE, MAX_GRAD_NORM = 1e-4, 1.0


def write_recipe(folder: Path, options: argparse.Namespace) -> None:
    """The pipeline and a recipe for the trainer."""
    student: dict[str, Any] = {"num_layers": options.student_layers}
    if options.model == "digits":
        teacher, student = "asset:digits-wan", {"config": "asset:digits-student.json"}
    else:
        make_pipeline(folder / "pipeline", options.model)
        teacher = str(folder / "pipeline")
    train = {"max_steps": options.steps, "log_every": options.steps // 2, "num_workers": 0 if options.on_cpu else 2}
    recipe = {
        "output_dir": "-",
        "cache_dir": str(folder / "stages"),
        "teacher": {"path": teacher, "compile": options.compile},
        "student": student,
        "data": {"path": "asset:digits-prompts.txt", "max_samples": NUM_PROMPTS},
        "rollout": {"enabled": False},
        "train": train | {"batch_size": options.batch_size, "compile": options.compile},
        "task": {"num_frames": 1, "height": options.side, "width": options.side},
        "optim": {"lr": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM},
        "sampling": {"num_inference_steps": 2, "guidance_scale": 1.0},
        "checkpoint": {"at_end": False, "every_minutes": None},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def launched(options: argparse.Namespace, *arguments: str) -> None:
    """Runs something under the launch file; raises CalledProcessError with its output shown."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{options.launch}.yaml"), *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
        raise subprocess.CalledProcessError(result.returncode, command)


def trainer_ms(folder: Path, number: int, options: argparse.Namespace) -> float:
    """Milliseconds a step of the trainer, over the second half of a run."""
    output_dir = folder / f"run-{number}"
    launched(options, "-m", "distiller", "train", str(folder / "recipe.yaml"), f"output_dir={output_dir}")
    return json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[-1])["perf/step_ms"]


def by_hand_ms(folder: Path, options: argparse.Namespace) -> float:
    """Milliseconds a step of the loop by hand, over the second half of its steps."""
    report = folder / "by-hand.json"
    launched(options, str(Path(__file__)), "--loop", str(folder), *sys.argv[1:])
    return json.loads(report.read_text())


def loop(folder: Path, options: argparse.Namespace) -> None:
    """The loop by hand; rank 0 writes the time."""
    on_gpu, rank = torch.cuda.is_available(), int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(rank)
    source = ASSETS_DIR / "digits-wan" if options.model == "digits" else folder / "pipeline"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    teacher = WanTransformer3DModel.from_pretrained(source, subfolder="transformer", torch_dtype=dtype).to(device)
    teacher.eval().requires_grad_(False)
    changes: dict[str, Any] = {"num_layers": options.student_layers}
    if options.model == "digits":
        changes = json.loads((ASSETS_DIR / "digits-student.json").read_text())
    student = WanTransformer3DModel.from_config(dict(teacher.config) | changes).to(device).train()
    if options.compile != "none":
        for model in (teacher, student):
            model.compile_repeated_blocks(fullgraph=True)
    model: nn.Module = student
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(student, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, fused=True)
    config, size = teacher.config, options.side // 8
    latents = torch.randn(NUM_PROMPTS, config.in_channels, 1, size, size, device=device)
    texts = torch.randn(NUM_PROMPTS, TEXT_ROWS, config.text_dim, device=device, dtype=dtype)
    started = 0.0
    for step in range(options.steps):
        if step == options.steps // 2:
            if on_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
        index = torch.randint(NUM_PROMPTS, (options.batch_size,), device=device)
        clean, text = latents[index], texts[index]
        noise, sigma = torch.randn_like(clean), torch.rand(options.batch_size, device=device)
        share = sigma.view(-1, 1, 1, 1, 1)
        noisy, timesteps = (1 - share) * clean + share * noise, 1000 * sigma
        with torch.no_grad():
            target = teacher(noisy.to(dtype), timesteps, text, return_dict=False)[0]
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            prediction = model(noisy, timesteps, text, return_dict=False)[0]
        (prediction.float() - target.float()).square().mean().backward()
        nn.utils.clip_grad_norm_(student.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    if rank == 0:
        elapsed_ms = (time.perf_counter() - started) * 1e3 / (options.steps - options.steps // 2)
        (folder / "by-hand.json").write_text(json.dumps(elapsed_ms))
    if world_size > 1:
        dist.destroy_process_group()


def main() -> None:
    """Measures both sides in turn and prints the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["digits", *WAN], default="wan-1.3b")
    parser.add_argument("--launch", default="single_gpu", help="a launch file by name: cpu, single_gpu, ddp")
    parser.add_argument("--compile", choices=["none", "default"], default="none", help="blocks of both models")
    parser.add_argument("--side", type=int, default=640, help="pixels; 640 is 1,600 tokens")
    parser.add_argument("--batch-size", type=int, default=4, help="of each process")
    parser.add_argument("--student-layers", type=int, default=10, help="not for digits, whose student is packaged")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.on_cpu = not torch.cuda.is_available()
    if options.loop is not None:
        loop(options.loop, options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_recipe(folder, options)
        trainer, by_hand = [], []
        for number in range(options.repeats):
            # The order alternates, so that a machine that becomes slower or faster meets both sides.
            for side in ("trainer", "by hand") if number % 2 == 0 else ("by hand", "trainer"):
                if side == "trainer":
                    trainer.append(trainer_ms(folder, number, options))
                else:
                    by_hand.append(by_hand_ms(folder, options))
            print(f"run {number + 1}: trainer {trainer[-1]:.2f} ms a step, by hand {by_hand[-1]:.2f}", flush=True)
    where = "CPU" if options.on_cpu else torch.cuda.get_device_name()
    print(f"\n{options.model}, {where}, torch {torch.__version__}, {options.launch}, compile {options.compile}")
    ratio = median(trainer) / median(by_hand)
    print(f"medians: trainer {median(trainer):.2f} ms a step, by hand {median(by_hand):.2f}; {ratio:.3f} times")


if __name__ == "__main__":
    main()
