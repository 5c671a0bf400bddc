"""Builds the student with its optimizer, average and checkpoints, as the engine and the step of a run ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from distiller.checkpoint.format import Identity
from distiller.checkpoint.saving import Checkpoints
from distiller.checkpoint.schedule import is_periodic
from distiller.launch.block_compilation import MIN_UPDATES
from distiller.run_folder.inputs import record_inputs
from distiller.session import Session
from distiller.student_state.factory import open_state
from distiller.student_state.moving_average import MovingAverage
from distiller.training.optim import build_optimizer
from distiller.training.student_compilation import compile_student


@final
@dataclass(frozen=True)
class Student:
    """What is trained, prepared by Accelerate, at the step where the run continues."""

    module: nn.Module
    num_parameters: int
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    checkpoints: Checkpoints
    skipped_steps: int


def prepare_student(session: Session[Any], identity: Identity, steps_done: int) -> Student:
    """Builds the student and its optimizer, has the engine shard them, and loads a checkpoint. Communicates."""
    recipe, task, ranks, world = session.recipe, session.task, session.ranks, session.world
    run_dir = Path(recipe.output_dir)
    trained = task.build_student()
    num_parameters = trained.num_model_parameters()
    # Not before: a hub's weights are there by now.
    ranks.broadcast_from_main(lambda: record_inputs(recipe, run_dir))
    if recipe.train.gradient_checkpointing or (world.fsdp is not None and world.fsdp.recomputes):
        task.enable_gradient_checkpointing(trained)
    ranks.barrier()
    module, optimizer = world.accelerator.prepare(trained, build_optimizer(trained, recipe.optim))
    is_automatic = recipe.train.compile == "auto"
    is_compiled = compile_student(
        module,
        task.block_classes,
        session.student_compile_mode,
        is_automatic=is_automatic,
        sizes_vary=task.network.sizes_vary,
        moves_weights=world.engine == "fsdp2" or session.plan.accumulation_steps > 1,
    )
    if is_compiled and is_automatic:
        world.accelerator.print(f"train.compile auto: {session.student_compile_mode} ({MIN_UPDATES} updates or more)")
    state = open_state(world.engine, world.accelerator, module, optimizer)
    decay = recipe.train.ema_decay
    average = None if decay is None else MovingAverage(state, decay)
    checkpoints = Checkpoints(run_dir, ranks, recipe.checkpoint.keep, identity, state, average)
    ranks.broadcast_from_main(checkpoints.remove_stale)
    skipped_steps = checkpoints.load(steps_done) if steps_done else 0
    if is_periodic(recipe.checkpoint):
        checkpoints.reserve()
    return Student(module, num_parameters, optimizer, average, checkpoints, skipped_steps)
