"""Predicted against measured memory and time of short runs: placements x engines x batches x precisions x tasks.

    python scripts/benchmarks/planner_accuracy.py --results planner.jsonl --minutes 9
    python scripts/benchmarks/planner_accuracy.py --results planner.jsonl --minutes 0       # the table alone

Each combination is a run of 16 updates through its launch file, with random weights, in a process of its own. It is
appended to the results file as soon as it ends, and a second call continues after what is there. `--gpu-memory` of a
combination makes the GPU smaller: this process holds the rest while the run lasts. While one run computes, the process
of the next imports its libraries; it does not touch the GPU before its turn, and stands still while time is measured.

"Predicted" is what the planner says today, from descriptions alone and the rates that were measured there at the start.
Memory is the peak of allocated bytes; time that of the last 8 updates. A row of `auto` shows what it chose, and its
time beside that of the fastest placement that was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from shapes import write_recipe, write_weights
from step_time import hold_all_but

from distiller.build import build_task
from distiller.config.loading import load
from distiller.config.placements import AUTO, PLACEMENTS
from distiller.launch.checks import Launch
from distiller.launch.fsdp import fsdp_of_file
from distiller.launch.request import read_launch_file
from distiller.planner.gpus import GIB, GPUS
from distiller.planner.machines import Machine
from distiller.planner.plan import plan_run
from distiller.planner.planned_run import PlannedRun
from distiller.planner.rates import measure_rates
from distiller.storage.saved_model import weights_may_be_missing

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150
LOGGED = 3
"""Lines of metrics of a run: after updates 1, 8 and 16."""
PARTS = ("teacher", "student", "optimizer")


@dataclass(frozen=True)
class Combination:
    """One run. `launch`: a file of accelerate_configs; `free_gib`: of the GPU, all of it where None."""

    model: str
    launch: str
    overrides: tuple[str, ...]
    free_gib: int | None
    placement: str

    @property
    def title(self) -> str:
        """One line."""
        size = "" if self.free_gib is None else f", {self.free_gib} GiB"
        return f"{self.model}, {self.launch}{size}, {' '.join(self.overrides) or 'defaults'}: {self.placement}"


CHECKPOINTED, COMPILED = "train.gradient_checkpointing=true", ("train.compile=default", "teacher.compile=default")
GROUPS: tuple[tuple[str, str, tuple[str, ...], int | None, tuple[str, ...]], ...] = (
    ("wan-14b", "single_gpu", ("train.batch_size=1",), None, ("auto", "replicated", "streamed")),
    ("wan-14b", "single_gpu", ("train.batch_size=1", "teacher.prefetch_steps=1"), None, ("replicated", "streamed")),
    ("wan-14b", "single_gpu", ("train.batch_size=1", *COMPILED), None, ("replicated",)),
    ("wan-14b", "single_gpu", (), None, ("replicated", "streamed")),
    ("wan-14b", "single_gpu", ("train.batch_size=1",), 24, ("auto", "streamed", "disk")),
    ("wan-14b", "single_gpu", ("train.batch_size=1",), 48, ("auto", "streamed")),
    ("wan-14b", "single_gpu", (), 80, ("auto",)),
    ("llama-8b", "single_gpu", (), None, ("auto", "replicated", "streamed", "swap")),
    ("llama-8b", "single_gpu", (CHECKPOINTED,), None, ("replicated",)),
    ("llama-8b", "single_gpu", ("train.batch_size=1",), None, ("replicated", "streamed")),
    ("llama-8b", "single_gpu", COMPILED, None, ("replicated", "streamed")),
    ("llama-8b", "single_gpu", (*COMPILED, "teacher.quantization=fp8"), None, ("replicated", "streamed")),
    ("llama-8b", "single_gpu", ("train.batch_size=2",), 48, ("auto", "replicated", "streamed")),
    ("llama-8b", "single_gpu", ("train.batch_size=1", CHECKPOINTED), 24, ("auto", "streamed")),
    ("wan-1.3b", "single_gpu", (), None, ("auto", "replicated", "streamed", "swap", "disk", "balanced")),
    ("wan-1.3b", "single_gpu", (CHECKPOINTED,), None, ("replicated", "streamed")),
    ("wan-1.3b", "single_gpu", ("train.batch_size=1",), None, ("auto", "replicated", "streamed")),
    ("wan-1.3b", "single_gpu", ("train.batch_size=8",), None, ("replicated",)),
    ("wan-1.3b", "single_gpu", COMPILED, None, ("replicated", "streamed")),
    ("wan-1.3b", "single_gpu", (*COMPILED, CHECKPOINTED), None, ("replicated",)),
    ("wan-1.3b", "single_gpu", ("train.mixed_precision=no", "train.batch_size=2"), None, ("replicated",)),
    ("wan-1.3b", "single_gpu", ("train.mixed_precision=fp16", "teacher.dtype=float16"), None, ("replicated",)),
    ("wan-1.3b", "single_gpu", ("train.gradient_accumulation_steps=2",), None, ("replicated", "streamed")),
    ("wan-1.3b", "single_gpu", ("teacher.prefetch_steps=1",), None, ("replicated", "streamed")),
    ("wan-1.3b", "single_gpu", (*COMPILED, "teacher.quantization=fp8"), None, ("replicated",)),
    ("wan-1.3b", "single_gpu", (), 24, ("auto", "replicated", "streamed")),
    ("wan-1.3b", "single_gpu", ("train.batch_size=8", CHECKPOINTED), 24, ("auto", "replicated", "streamed")),
    ("wan-1.3b", "fsdp2", (), None, ("replicated", "sharded")),
    ("wan-1.3b", "fsdp2", (CHECKPOINTED,), None, ("replicated",)),
    ("wan-1.3b", "fsdp1", (), None, ("replicated",)),
    ("wan-1.3b", "fsdp2_offload", (), None, ("replicated",)),
    ("wan-1.3b", "zero2", (), None, ("replicated", "streamed")),
    ("wan-1.3b", "zero3", (), None, ("replicated", "sharded")),
    ("wan-1.3b", "zero3_offload", (), None, ("replicated",)),
    ("llama-1b", "single_gpu", (), None, ("auto", "replicated", "streamed", "balanced")),
    ("llama-1b", "single_gpu", (CHECKPOINTED,), None, ("replicated",)),
    ("llama-1b", "single_gpu", ("train.batch_size=1",), None, ("replicated", "streamed")),
    ("llama-1b", "single_gpu", COMPILED, None, ("replicated",)),
    ("llama-1b", "fsdp2", (), None, ("replicated",)),
    ("llama-1b", "zero2", (), None, ("replicated",)),
    ("resnet-50", "single_gpu", (), None, ("auto", "replicated", "streamed")),
    ("resnet-50", "single_gpu", ("train.mixed_precision=no",), None, ("replicated",)),
    ("resnet-50", "single_gpu", COMPILED, None, ("replicated",)),
)
"""Model, launch file, overrides, GiB that are free, placements. One process each."""


def combinations() -> Iterator[Combination]:
    """All of them, those of one model after the other."""
    for model, launch, overrides, free_gib, placements in GROUPS:
        for placement in placements:
            yield Combination(model, launch, overrides, free_gib, placement)


class Process:
    """A run that imports its libraries at once, and starts when it is told to."""

    def __init__(self, combination: Combination, folder: Path, number: int) -> None:
        self.combination = combination
        self._order, self._output_dir = folder / f"order-{number}.json", folder / f"run-{number}"
        self._log_path = folder / f"log-{number}.txt"
        self._recipe, self._began, self._seconds = folder / combination.model / "recipe.yaml", 0.0, 0.0
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        command += ["--main_process_port", "0"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{combination.launch}.yaml")]
        command += [__file__, "--inside", str(self._order)]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def run(self, others: Sequence[Process]) -> None:
        """Starts the run, and returns when its last update has been measured, or when it failed.

        `others`: what stands still from the first update on.
        """
        self._began = time.perf_counter()
        overrides = [*self.combination.overrides, f"teacher.placement={self.combination.placement}"]
        written = self._order.with_suffix(".tmp")
        written.write_text(json.dumps([str(self._recipe), f"output_dir={self._output_dir}", *overrides]))
        written.rename(self._order)
        while self._process.poll() is None and (logged := self._num_logged()) < LOGGED:
            if logged:
                for other in others:
                    other.send(signal.SIGSTOP)
            if time.perf_counter() > self._began + TIMEOUT_S:
                self.stop()
            time.sleep(0.1)
        for other in others:
            other.send(signal.SIGCONT)
        self._seconds = time.perf_counter() - self._began

    def row(self) -> dict[str, Any]:
        """Waits for the end; the combination with what was measured, or with why nothing was."""
        row = asdict(self.combination) | {"seconds": round(self._seconds, 1)}
        if self._process.wait(TIMEOUT_S) != 0:
            return row | {"error": self._log_path.read_text()[-3000:]}
        summary = json.loads((self._output_dir / "summary.json").read_text())
        last = json.loads((self._output_dir / "metrics.jsonl").read_text().splitlines()[-1])
        shutil.rmtree(self._output_dir)
        return row | {
            "chosen": summary["placement"],
            "gib": last["memory/gpu_peak_gib_max"],
            "said_gib": summary["expected_gpu_peak_gib"],
            "said_ms": summary["expected_step_ms"],
            **{f"{name}_ms": last[f"perf/{name}_ms"] for name in ("step", *PARTS)},
        }

    def stop(self) -> None:
        """Ends it, whatever it does."""
        self.send(signal.SIGTERM)
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal to the launcher and its process, if they run."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._process.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                process.send_signal(number)

    def _num_logged(self) -> int:
        metrics = self._output_dir / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0


def inside(order: Path) -> int:
    """Under the launcher: imports, waits for its arguments, and trains."""
    import diffusers.pipelines.wan
    import transformers.models.auto

    from distiller import cli

    del diffusers, transformers
    while not order.exists():
        if os.getppid() == 1:
            return 1
        time.sleep(0.02)
    return cli.main(["train", *json.loads(order.read_text())])


def measure_all(asked: Sequence[Combination], results: Path, minutes: float) -> None:
    """Measures one after the other until time is up; each row is written when it is there.

    The end of a run, its export, passes while the next one builds its models, unless memory is limited.
    """
    ends = time.perf_counter() + 60 * minutes
    # Page-locked and memory-mapped files are fastest where nothing is written to a disk.
    parent = "/dev/shm" if torch.cuda.is_available() and Path("/dev/shm").exists() else None
    with tempfile.TemporaryDirectory(dir=parent) as temporary, results.open("a") as file:
        folder, model, hardware = Path(temporary), "", _hardware()
        waiting: Process | None = None
        ending: Process | None = None

        def finish() -> None:
            nonlocal ending
            if ending is None:
                return
            row = ending.row()
            file.write(json.dumps(row | hardware) + "\n")
            file.flush()
            shown = f"failed: {row['error'][-300:]}" if "error" in row else f"{row['gib']} GiB, {row['step_ms']:.1f} ms"
            print(f"[{row['seconds']:5.1f} s] {ending.combination.title}: {shown}", flush=True)
            ending = None

        for number, combination in enumerate(asked):
            if time.perf_counter() > ends:
                break
            process = waiting or Process(combination, folder, number)
            if combination.model != model or combination.free_gib is not None:
                finish()
            if combination.model != model:
                shutil.rmtree(folder / (model or "-"), ignore_errors=True)
                model = combination.model
                write_recipe(model, folder / model)
                write_weights(model, folder / model)
                torch.cuda.empty_cache()
            waiting = Process(asked[number + 1], folder, number + 1) if number + 1 < len(asked) else None
            held = None if combination.free_gib is None else hold_all_but(combination.free_gib)
            process.run([other for other in (waiting, ending) if other is not None])
            finish()
            ending = process
            if held is not None:
                finish()
                del held
        finish()
        if waiting is not None:
            waiting.stop()


def _hardware() -> dict[str, Any]:
    """Names, and the rates of the GPU and its host."""
    if not torch.cuda.is_available():
        return {"hardware": "CPU", "torch": torch.__version__}
    rates = asdict(measure_rates(torch.device("cuda", 0)))
    torch.cuda.empty_cache()
    return {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "rates": rates}


@lru_cache(maxsize=1)
def _descriptions() -> Path:
    return Path(tempfile.mkdtemp(prefix="planner-accuracy-"))


@lru_cache(maxsize=1)
def _planned(model: str, launch: str, overrides: tuple[str, ...]) -> PlannedRun:
    """The run of all placements on a typical machine; an update is followed once for them."""
    path = _descriptions() / model / "recipe.yaml"
    if not path.exists():
        write_recipe(model, path.parent)
    precision = () if any("mixed_precision" in override for override in overrides) else ("train.mixed_precision=bf16",)
    recipe = load(str(path), [*overrides, *precision])
    with weights_may_be_missing():
        task = build_task(recipe)
    file = ROOT / "accelerate_configs" / f"{launch}.yaml"
    asked = Launch(read_launch_file(file, 1), 1, fsdp_of_file(file, 1))
    return plan_run(recipe, task, asked, Machine(GPUS["H200"], 1, 139 * GIB, 500 * GIB))


def predict(row: dict[str, Any]) -> tuple[float, float]:
    """GiB of the GPU's peak and milliseconds of an update, for a measured row's run on one H200."""
    run, placement = _planned(row["model"], row["launch"], tuple(row["overrides"])), row["chosen"]
    if "rates" in row:
        gpu = dataclasses.replace(GPUS["H200"], **row["rates"])
        run = dataclasses.replace(run, machine=dataclasses.replace(run.machine, gpu=gpu))
    spec = PLACEMENTS[placement]
    assert spec.memory is not None
    teacher = spec.memory(run.sizes, spec.options.of(run.options(placement)), run.world).gpu
    return run.account.peak(teacher, leaves_gpu=spec.leaves_gpu) / GIB, run.step_time(spec).ms


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The table, and what it comes to."""
    print("| run | chosen | GiB | predicted | | ms | predicted | | teacher, student, optimizer ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    memory, times = [], []
    for row in rows:
        title = Combination(**{key: row[key] for key in Combination.__dataclass_fields__}).title
        if "error" in row:
            print(f"| {title} | failed: {row['error'][-120:]} |")
            continue
        gib, step_ms = predict(row)
        memory.append(gib / row["gib"] - 1)
        times.append(step_ms / row["step_ms"] - 1)
        parts = ", ".join("-" if row[f"{name}_ms"] is None else f"{row[f'{name}_ms']:.1f}" for name in PARTS)
        print(
            f"| {title} | {row['chosen']} | {row['gib']:.2f} | {gib:.2f} | {memory[-1]:+.1%} | "
            f"{row['step_ms']:.1f} | {step_ms:.1f} | {times[-1]:+.0%} | {parts} |"
        )
    if memory:
        print(
            f"\nmemory of {len(memory)} runs: median {median(map(abs, memory)):.1%}, "
            f"from {min(memory):+.1%} to {max(memory):+.1%}"
        )
        print(f"time: median {median(map(abs, times)):.0%}, from {min(times):+.0%} to {max(times):+.0%}")
    _report_choices(rows)


def _report_choices(rows: Sequence[dict[str, Any]]) -> None:
    """What `auto` chose, beside the fastest that was measured in the same memory."""
    measured = [row for row in rows if "error" not in row]
    for row in rows:
        if row["placement"] != AUTO:
            continue
        if "error" in row:
            print(f"auto failed: {row['error'][-200:]}")
            continue
        same = ("model", "launch", "overrides", "free_gib")
        beside = [other for other in measured if all(other[key] == row[key] for key in same)]
        fastest = min(beside, key=lambda other: other["step_ms"])
        print(
            f"auto, {row['model']}, {row['free_gib'] or 'all'} GiB, {' '.join(row['overrides'])}: {row['chosen']} "
            f"{row['step_ms']:.1f} ms; fastest of {len(beside)}: {fastest['chosen']} {fastest['step_ms']:.1f} "
            f"({row['step_ms'] / fastest['step_ms']:.2f})"
        )


def main() -> int:
    """Measures what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("planner.jsonl"), help="read, and continued")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no further run after so long")
    parser.add_argument("--model", action="append", help="only combinations of these; may be repeated")
    parser.add_argument("--only", action="append", help="only combinations whose line has this; may be repeated")
    parser.add_argument("--without-table", action="store_true", help="measure alone: predictions take a while")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.inside)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {_key(row) for row in rows if "error" not in row}
    asked = [one for one in combinations() if not options.model or one.model in options.model]
    if options.only:
        asked = [one for one in asked if any(part in one.title for part in options.only)]
    asked = [one for one in asked if _key(asdict(one)) not in done]
    if options.minutes:
        measure_all(asked, options.results, options.minutes)
        if options.without_table:
            return 0
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    report(rows)
    return 0


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(str(tuple(value) if isinstance(value, list) else value) for value in (row[name] for name in _FIELDS))


_FIELDS = tuple(Combination.__dataclass_fields__)

if __name__ == "__main__":
    sys.exit(main())
