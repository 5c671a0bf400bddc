"""What logging takes of a run's time, for each tracker: milliseconds a logged update, and its share of the updates.

    python scripts/benchmarks/tracking.py --run outputs/quickstart --step-ms 155 --log-every 10

Logs the lines of a finished run's metrics.jsonl over and over as its updates, to metrics.jsonl alone and with each
tracker that is installed, in turns; nothing is computed in between. The limit is 0.5% of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers

from distiller.config.loading import load
from distiller.distributed.process import prepare_environment
from distiller.run_folder.output_dir import RECIPE_FILE
from distiller.training.tracking import METRICS_FILE, Tracker

NUM_LINES, ROUNDS = 200, 5
LIMIT = 0.005


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, required=True, help="the folder of a run, for its recipe and its metrics")
    parser.add_argument("--step-ms", type=float, default=155.0, help="of an update (default: Wan 1.3B on one H200)")
    parser.add_argument("--log-every", type=int, default=10, help="updates (default %(default)s)")
    return parser.parse_args()


def milliseconds(run: Path, lines: list[dict[str, Any]], trackers: tuple[str, ...]) -> float:
    """Of a logged update: the mean of many, in a folder of its own. Opening and closing the trackers is left out."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # wandb's process may still write when the run is over.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        recipe = load(str(run / RECIPE_FILE), [f"output_dir={folder}"], is_of_run=True)
        tracking = recipe.tracking.model_copy(update={"trackers": trackers, "mode": "offline"})
        recipe = recipe.model_copy(update={"tracking": tracking})
        accelerator = Accelerator(cpu=True, log_with=list(trackers), project_dir=Path(folder) / "tracking")
        with contextlib.redirect_stderr(io.StringIO()):
            tracker = Tracker(recipe, accelerator, 1, NUM_LINES)
            tracker.start_trackers(recipe)
            began = time.perf_counter()
            for step in range(1, NUM_LINES + 1):
                tracker.log(lines[step % len(lines)] | {"step": step})
            took_s = time.perf_counter() - began
            tracker.close()
    return 1e3 * took_s / NUM_LINES


def main() -> None:
    """Measures and prints the table."""
    prepare_environment()
    arguments = read_arguments()
    lines = [json.loads(line) for line in (arguments.run / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    installed = {str(name) for name in get_available_trackers()} & {"wandb", "tensorboard", "trackio"}
    cases: list[tuple[str, ...]] = [(), *((name,) for name in sorted(installed))]
    times: dict[tuple[str, ...], list[float]] = {case: [] for case in cases}
    for number in range(ROUNDS):
        for case in cases if number % 2 == 0 else reversed(cases):
            times[case].append(milliseconds(arguments.run, lines, case))
    window_ms = arguments.log_every * arguments.step_ms
    print(f"{len(lines[0])} numbers; of {arguments.log_every} updates of {arguments.step_ms:g} ms one is logged")
    print(f"{'to':<32}{'ms a logged update':>20}{'share of the time':>20}")
    for case, values in times.items():
        median = statistics.median(values)
        name = "metrics.jsonl" + "".join(f" and {one}" for one in case)
        print(f"{name:<32}{median:>20.2f}{median / window_ms:>20.3%}")
    print(f"{'limit':<32}{LIMIT * window_ms:>20.2f}{LIMIT:>20.3%}")


if __name__ == "__main__":
    main()
