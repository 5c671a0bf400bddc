"""The digits' student with its teacher, and the same student from the labels alone, over several seeds.

    python scripts/benchmarks/digits_resnet.py --samples 1438,100

The teacher is trained once and kept (`--folder`), and so is every run, under a name that says what it was given; every
run has the recipe's steps, on so many training pictures.
Prints held-out accuracy, mean and spread (standard deviation) over the seeds, whatever comes out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from distiller.storage.stages import digest_of

ALPHAS = {"teacher and labels": None, "labels alone": 0.0}


def main() -> None:
    """Trains and evaluates every student, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    # With commas: an option of several words would take the overrides after it for more of them.
    parser.add_argument(
        "--samples", type=numbers, default=[1438], metavar="N,N", help="training pictures; 1438 = all of them"
    )
    parser.add_argument("--folder", type=Path, help="kept for the next time; default: a new one")
    parser.add_argument("overrides", nargs="*", help="keys of the recipe, such as train.max_steps=200")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="digits-resnet-"))
    print(f"runs are in {folder}")
    print("| training pictures | learnt from | accuracy | spread | of the teacher's | agreement |")
    print("| --- | --- | --- | --- | --- | --- |")
    reports: list[dict[str, Any]] = []
    for samples in arguments.samples:
        for name, alpha in ALPHAS.items():
            reports = []
            for seed in range(arguments.seeds):
                # Without the recipe's quality gate: every result is printed.
                own = [
                    "evaluation.min_accuracy_ratio=null",
                    f"seed={seed}",
                    f"data.max_samples={samples}",
                    f"cache_dir={folder / 'cache'}",
                ]
                if alpha is not None:
                    own.append(f"task.losses.distillation.alpha={alpha}")
                # Other settings are another run.
                run_dir = folder / f"{name.replace(' ', '-')}-{samples}-{seed}-{digest_of(arguments.overrides)[:8]}"
                reports.append(report_of(run_dir, [*own, *arguments.overrides]))
            print(row(samples, name, reports), flush=True)
    print(
        f"teacher's held-out accuracy {reports[0]['teacher_accuracy']:.2%}, {reports[0]['num_samples']} pictures; ",
        end="",
    )
    print(f"the student is 1/{reports[0]['size_ratio']:.1f} of its size")


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(part) for part in text.split(",")]


def report_of(run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """The evaluation of one run, which is trained if it is not there."""
    if not (run_dir / "summary.json").is_file():
        distiller("train", "digits-resnet", f"output_dir={run_dir}", *overrides)
    distiller("evaluate", str(run_dir))
    return json.loads((run_dir / "summary.json").read_text())["evaluation"]


def distiller(*arguments: str) -> None:
    """Runs a command; its output is shown when it fails."""
    result = subprocess.run([sys.executable, "-m", "distiller", *arguments], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"distiller {' '.join(arguments)}:\n{result.stdout}{result.stderr}")


def row(samples: int, name: str, reports: list[dict[str, Any]]) -> str:
    """One line of the table."""
    accuracies = [report["student_accuracy"] for report in reports]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    ratio = statistics.mean(report["accuracy_ratio"] for report in reports)
    agreement = statistics.mean(report["agreement"] for report in reports)
    cells = (samples, name, f"{statistics.mean(accuracies):.2%}", f"{spread:.2%}", f"{ratio:.2%}", f"{agreement:.2%}")
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
