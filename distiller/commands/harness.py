"""Hands an exported language model over to lm-evaluation-harness (`distiller evaluate RUN --lm-eval TASK[,TASK]`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch

from distiller.errors import UserError, nearest

BATCH_SIZE = 8
"""Requests a forward pass."""


@final
@dataclass(frozen=True)
class Harness:
    """Tasks of the harness that are known to exist.

    Attributes:
        tasks: their names, or those of groups of tasks.
        manager: the harness's `TaskManager`, which finds them.
    """

    tasks: tuple[str, ...]
    manager: Any

    @staticmethod
    def open(kind: str, given: str, include: Path | None) -> Harness:
        """Finds tasks, whose names stand between commas, among the harness's own and those of the folder `include`.

        Reads no data set and no model. `kind`: the recipe's `task.kind`. Raises UserError where that is no language
        model, and where the harness is not installed or has no such task.
        """
        if kind != "causal_lm":
            raise UserError(f"--lm-eval {given}: is for language models alone, and this run's task.kind is {kind}")
        if include is not None and not include.is_dir():
            raise UserError(f"--lm-eval-include {include}: is not a folder")
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError("--lm-eval needs lm-evaluation-harness; run: pip install lm-eval")
        manager = import_module("lm_eval.tasks").TaskManager(include_path=None if include is None else str(include))
        tasks = tuple(name for name in (part.strip() for part in given.split(",")) if name)
        if not tasks:
            raise UserError("--lm-eval names no task; give TASK[,TASK], for example arc_easy,hellaswag")
        for name in tasks:
            if not manager.match_tasks([name]):
                meant = nearest(name, manager.all_tasks)
                hint = "" if meant is None else f"; did you mean '{meant}'?"
                raise UserError(f"--lm-eval {name}: lm-evaluation-harness has no such task{hint}")
        return Harness(tasks, manager)

    def run(self, model: Path, device: torch.device, trusts_code: bool) -> dict[str, dict[str, float | None]]:
        """Evaluates the model of a transformers folder in float32; see `tidied` for the result.

        May download the tasks' data sets. `trusts_code`: whether Python files of the folder may be run.
        """
        model_options = {"pretrained": str(model), "dtype": "float32", "trust_remote_code": trusts_code}
        measured = import_module("lm_eval").simple_evaluate(
            model="hf",
            model_args=model_options,
            tasks=list(self.tasks),
            task_manager=self.manager,
            batch_size=BATCH_SIZE,
            device=str(device),
            log_samples=False,
        )
        return tidied(measured["results"])


def tidied(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The harness's results: task -> figure -> value; None where it writes N/A.

    Its keys are `METRIC,FILTER`; where the filter is `none` they are the metric alone, such as `acc` and `acc_stderr`.
    """
    return {task: _figures(values) for task, values in results.items()}


def _figures(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Of one task, without what the harness writes beside the figures: their keys have no comma."""
    named = {key.removesuffix(",none"): value for key, value in values.items() if "," in key}
    return {key: float(value) if isinstance(value, int | float) else None for key, value in named.items()}
