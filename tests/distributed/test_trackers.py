"""Trackers that take long to open, on rank 0 alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from accelerate import PartialState

from distiller.commands.training_run import start_trackers
from distiller.training.loop import train
from distiller.training.tracking import Tracker
from tests import toys
from tests.distributed.ranks import on_ranks
from tests.toy_task import build_toy_run, toy_recipe

SLOW_S = 1.0


def slowly(folder: Path) -> None:
    PartialState(cpu=True)
    run = build_toy_run(toy_recipe(folder, batch_size=4))
    start = Tracker.start_trackers

    def slow(tracker: Tracker, *arguments: Any) -> None:
        time.sleep(SLOW_S if run.ranks.is_main else 0.0)
        start(tracker, *arguments)

    Tracker.start_trackers = slow  # type: ignore[method-assign]
    try:
        start_trackers(run)
        train(run)
    finally:
        Tracker.start_trackers = start  # type: ignore[method-assign]


def test_no_rank_s_first_update_holds_their_start(tmp_path):
    on_ranks(2, slowly, tmp_path)
    assert toys.read_metrics(tmp_path)[0]["perf/step_ms_max"] < 0.8e3 * SLOW_S
