"""The program on a machine whose memory does not suffice for the first placements that `auto` chooses.

    scarce_memory.py RANK PLACEMENT[,PLACEMENT] train RECIPE ...

Rank RANK raises torch's error where such a placement answers for the second time.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from distiller import __main__ as program
from distiller.commands import training_run
from distiller.distributed.process import rank
from distiller.training.memory_advice import PlannedMemory

FAILING_RANK, FAILING = int(sys.argv[1]), sys.argv[2].split(",")
real_build = training_run.build


def build(*arguments: Any, **options: Any) -> Any:
    """With a GPU's figures for the placements."""
    run = real_build(*arguments, **options)
    if rank() == FAILING_RANK and run.placement in FAILING:
        predict, asked = run.teacher.predict, []

        def fail(requests: Any) -> Any:
            asked.append(requests)
            if len(asked) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return predict(requests)

        run.teacher.predict = fail
    return replace(
        run, planned_memory=PlannedMemory(0, {"replicated": 3, "balanced": 2, "cpu": 1, "streamed": 1, "disk": 1})
    )


training_run.build = build
del sys.argv[1:3]
sys.exit(program.run())
