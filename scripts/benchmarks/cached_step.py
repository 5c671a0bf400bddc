"""A step from a cache against the student alone: the same loader, with outputs of zeros in place of what is read.

    LAUNCH="accelerate launch --config_file accelerate_configs/cpu.yaml"
    OPTIONS="digits-wan teacher.cache=outputs/cache cache_dir=outputs/stages cache.draws=1"
    $LAUNCH -m distiller cache $OPTIONS
    $LAUNCH scripts/benchmarks/cached_step.py $OPTIONS

The cache is that of the recipe; its files are in the page cache after the first round, which is not counted. Rounds
follow each other on one student. The limit is 1: nothing to read. Rows of tokens must have one length (data.packing).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from distiller.build import build
from distiller.cache.reading import CachedCollation, CachedData
from distiller.config.loading import load
from distiller.data.loader_processes import open_loader
from distiller.data.order import RankSampler, SampleKey
from distiller.distributed.process import is_main_process, prepare_environment
from distiller.tasks.interfaces import Cacheable
from distiller.teachers.base import Outputs
from distiller.training.loop import train
from distiller.training.run import Run


class Zeros(Dataset[tuple[Any, Outputs]]):
    """The samples of a cached data set, each with the same zeros."""

    def __init__(self, cached: CachedData) -> None:
        self._data = cached.data
        _, outputs = cached[0, 0]
        self._outputs = {name: torch.zeros_like(tensor) for name, tensor in outputs.items()}

    def __getitem__(self, key: SampleKey) -> tuple[Any, Outputs]:
        return self._data[key], self._outputs


def main() -> None:
    """Runs the rounds and prints both sides."""
    prepare_environment()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    options = parser.parse_args()
    folder = "outputs/cached-step"
    if is_main_process():
        shutil.rmtree(folder, ignore_errors=True)
    try:
        quiet = ["tracking.trackers=[]", "checkpoint.at_end=false", "checkpoint.every_minutes=null"]
        quiet += [f"train.log_every={options.steps}"]
        last = f"train.max_steps={(2 * options.rounds + 3) * options.steps}"
        recipe = load(
            options.recipe, ["teacher.placement=cached", *options.overrides, f"output_dir={folder}", last, *quiet]
        )
        run = build(recipe)
        assert isinstance(run, Run)
        cached = run.loader.dataset
        assert isinstance(cached, CachedData)
        data: dict[str, Dataset[Any]] = {"cached": cached, "zeros": Zeros(cached)}
        step_ms: dict[str, list[float]] = {name: [] for name in data}
        data_ms: dict[str, list[float]] = {name: [] for name in data}
        step = 1
        assert isinstance(run.task, Cacheable)
        for number in range(options.rounds + 1):
            # They alternate in going first, so that drift affects both alike.
            for name in sorted(data, reverse=bool(number % 2)):
                end = step + options.steps - 1
                sampler, num_workers = RankSampler(run.plan, run.ranks.rank, step - 1, end), run.loader.num_workers
                micro_batches = run.plan.accumulation_steps
                loader = open_loader(
                    data[name], sampler, CachedCollation(run.task), num_workers, micro_batches, run.ranks
                )
                outcome = train(replace(run, first_step=step, last_step=end, loader=loader))
                step = end + 1
                if number:
                    step_ms[name].append(1e3 * outcome.spent.timed_s / outcome.spent.timed_steps)
                    data_ms[name].append(outcome.metrics["perf/data_ms"])
        run.tracker.close()
        if run.ranks.is_main:
            for name, times in step_ms.items():
                whole, waiting = statistics.median(times), statistics.median(data_ms[name])
                each = ", ".join(f"{time:.1f}" for time in times)
                print(f"{name:<8} {whole:9.2f} ms a step, of which {waiting:.2f} wait for data (rounds: {each})")
            ratios = [cached / zeros for cached, zeros in zip(*step_ms.values(), strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"cached / zeros: {statistics.median(ratios):.4f}, the median of {len(ratios)} rounds ({spread})")
            print("limit: 1")
    finally:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
