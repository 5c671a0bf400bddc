"""Every placement of the teacher beside every engine of the student: twenty updates each, and how far losses differ.

    python scripts/benchmarks/pairs.py --launch ddp --launch zero2 --launch zero3_offload --launch fsdp2

The packaged digits pipeline in float32, from noise. Each launch file is started once; its student makes one update,
which is saved, and continues from there with one placement after the other. Losses are compared with those of the
first launch file's `replicated`. A pair that cannot work is refused in one line, which the table shows.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 20
SETTINGS = (
    *("train.log_every=1", "train.mixed_precision=no", "teacher.dtype=float32", "rollout.enabled=false"),
    *("optim.schedule=constant", "optim.warmup_steps=0", "optim.lr=1e-3", "data.max_samples=256"),
    "tracking.trackers=[]",
)
PLACEMENTS = {
    "replicated": {},
    "cpu": {"placement": "cpu"},
    "streamed": {"placement": "streamed"},
    "streamed, shared transfers": {"placement": "streamed", "shard_transfers": True},
    "disk": {"placement": "disk"},
    "balanced": {"placement": "balanced"},
    "sequential": {"placement": "sequential"},
    "rank0": {"placement": "rank0"},
    "sharded": {"placement": "sharded"},
    "sharded, offload cpu": {"placement": "sharded", "offload": "cpu"},
    "swap": {"placement": "swap"},
    "replicated, int8": {"quantization": "int8"},
    "balanced, int8": {"placement": "balanced", "quantization": "int8"},
}


def run_placements(folder: Path, batch_size: int) -> None:
    """Under a launcher: all placements beside this launch file's engine; rank 0 writes result.json."""
    from torch.utils.data import DataLoader

    from distiller.build import build
    from distiller.config.loading import load
    from distiller.data.order import RankSampler
    from distiller.distributed.devices import quiet_libraries
    from distiller.errors import UserError
    from distiller.tasks.micro_batch import LiveCollation
    from distiller.teachers.base import Setup
    from distiller.teachers.factory import open_teacher
    from distiller.training.loop import train
    from distiller.training.run import Run

    quiet_libraries()
    overrides = [f"output_dir={folder}", f"train.max_steps={STEPS}", f"train.batch_size={batch_size}", *SETTINGS]
    recipe = load("digits-wan", overrides)
    run = build(recipe)
    assert isinstance(run, Run)
    assert run.teacher is not None
    dtype, rank = next(iter(run.student.parameters())).dtype, run.ranks.rank

    def loader(done: int, last_step: int) -> DataLoader[Any]:
        sampler = RankSampler(run.plan, rank, done, last_step)
        return DataLoader(run.loader.dataset, batch_sampler=sampler, collate_fn=LiveCollation(run.task))

    train(replace(run, last_step=1, loader=loader(0, 1)))
    run.teacher.close()
    rows: dict[str, Any] = {}
    under_deepspeed = run.engine.startswith("deepspeed")
    lines = folder / "metrics.jsonl"
    for name, changes in PLACEMENTS.items():
        options = recipe.teacher.model_copy(update=changes)
        if run.ranks.is_main:
            print(f"{run.engine}: {name}", file=sys.stderr, flush=True)
        try:
            teacher = open_teacher(run.task.network, Setup(dtype, options, run.ranks, under_deepspeed))
        except UserError as error:
            rows[name] = str(error)
            continue
        run.checkpoints.load(1)
        none = recipe.checkpoint.model_copy(update={"at_end": False, "every_steps": None, "every_minutes": None})
        lasting = recipe.model_copy(update={"checkpoint": none})
        before = len(lines.read_text().splitlines()) if run.ranks.is_main else 0
        train(replace(run, recipe=lasting, teacher=teacher, first_step=2, loader=loader(1, STEPS)))
        teacher.close()
        if run.ranks.is_main:
            rows[name] = [json.loads(line)["loss"] for line in lines.read_text().splitlines()[before:]]
    if run.ranks.is_main:
        (folder / "result.json").write_text(json.dumps({"engine": run.engine, "rows": rows}))
    run.tracker.close()


def start(launch: str, num_processes: int, batch_size: int, folder: Path) -> dict[str, Any]:
    """One launch file with all placements."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command += ["--main_process_port", str(probe.getsockname()[1])]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{launch}.yaml"), __file__]
    command += ["--inside", str(folder), "--batch-size", str(batch_size)]
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=400)
        return json.loads((folder / "result.json").read_text())
    except (subprocess.SubprocessError, OSError) as error:
        traceback.print_exc()
        return {"engine": launch, "rows": {}, "error": str(error)}


def cell(mine: Any, reference: list[float]) -> str:
    """The largest difference of a loss from the reference's, or why there is none."""
    if mine is None:
        return "did not run"
    if isinstance(mine, str):
        return "refused"
    return f"{max(abs(a - b) for a, b in zip(mine, reference, strict=True)):.1e}"


def main() -> None:
    """Starts every launch file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="append", help="launch files by name; default ddp")
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=1, help="launches beside each other: nothing is timed here")
    parser.add_argument("--output", type=Path, help="write the losses as JSON")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_placements(options.inside, options.batch_size)
        return
    launches = options.launch or ["ddp"]

    def one(launch: str) -> dict[str, Any]:
        return start(launch, options.num_processes, options.batch_size, Path(temporary) / launch)

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.at_once) as pool:
        results = dict(zip(launches, pool.map(one, launches), strict=True))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    reference = next(iter(results.values()))["rows"].get("replicated")
    if not isinstance(reference, list):
        sys.exit("the first launch file gave no losses to compare with")
    print(f"\nlargest difference of {len(reference)} losses (first {reference[0]:.4f}, last {reference[-1]:.4f})")
    print("| teacher | " + " | ".join(result["engine"] for result in results.values()) + " |")
    print("| --- " * (len(results) + 1) + "|")
    refusals: dict[str, None] = {}
    for name in PLACEMENTS:
        cells = [result["rows"].get(name) for result in results.values()]
        refusals |= dict.fromkeys(value for value in cells if isinstance(value, str))
        print(f"| {name} | " + " | ".join(cell(value, reference) for value in cells) + " |")
    for reason in refusals:
        print(f"refused: {reason}")


if __name__ == "__main__":
    main()
