"""The phases that training and `distiller cache` share: join the processes, place the teacher, run the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch.utils.data import Dataset

from distiller.config.recipe import Recipe
from distiller.data.order import UpdatePlan
from distiller.distributed.devices import teacher_dtype
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedUserError
from distiller.launch.accelerator import World, open_world
from distiller.launch.block_compilation import MIN_UPDATES, compile_mode, why_no_compiler
from distiller.launch.compile import student_compile_mode
from distiller.launch.fsdp import FsdpLaunch, wrapped_classes
from distiller.run_folder.output_dir import check_shared_stages
from distiller.storage.durable_writes import missing_durability
from distiller.tasks.base import Task
from distiller.tasks.interfaces import Staged, format_notice, missing_stage
from distiller.teachers.base import Setup, Teacher
from distiller.teachers.factory import load_teacher
from distiller.teachers.quantization.error import QuantizationError, measure_error
from distiller.training.update_plan import last_step_of, plan_updates

TaskT = TypeVar("TaskT", bound=Task[Any, Any])


@final
@dataclass(frozen=True)
class Session(Generic[TaskT]):
    """A recipe and its task in the processes that were launched. Made before any weight is read.

    Attributes:
        student_compile_mode, teacher_compile_mode: of torch.compile, for blocks that can be compiled; or `none`.
    """

    recipe: Recipe
    task: TaskT
    world: World
    ranks: Ranks
    plan: UpdatePlan
    last_step: int
    teacher_dtype: torch.dtype
    student_compile_mode: str = "none"
    teacher_compile_mode: str = "none"

    @property
    def accelerator(self) -> Accelerator:
        """Accelerate's."""
        return self.world.accelerator

    @property
    def num_epochs(self) -> int:
        """How many passes over the data the run begins."""
        return self.plan.epoch_of(self.last_step - 1) + 1


def fsdp_units(fsdp: FsdpLaunch, task: Task[Any, Any]) -> tuple[str, ...]:
    """The classes of the student's modules that FSDP gathers as one unit each. Raises UserError."""
    return wrapped_classes(fsdp, task.student_skeleton(), task.block_classes)


def join_world(recipe: Recipe, task: TaskT, planned_updates: int | None = None) -> Session[TaskT]:
    """Creates the Accelerator and joins the other ranks. Communicates; raises UserError.

    `planned_updates`: of the run for which a dry run stands.
    """
    world = open_world(recipe, lambda fsdp: fsdp_units(fsdp, task))
    device = world.accelerator.device
    plan = plan_updates(recipe, task.num_samples, world.accumulation_steps, world.accelerator.num_processes)
    dtype = teacher_dtype(recipe.teacher.dtype, device)
    last_step = last_step_of(recipe, plan)
    num_updates = planned_updates or last_step
    plugin = world.accelerator.state.dynamo_plugin
    if plugin is not None and plugin.backend is not DynamoBackend.NO:
        student_mode = "none"  # Accelerate compiles it, as the launch file or the environment says.
    else:
        student_mode = student_compile_mode(recipe, world.engine, device, num_updates)
    teacher_mode = compile_mode(recipe.teacher.compile, device, num_updates, "teacher.compile")
    is_automatic = "auto" in (recipe.train.compile, recipe.teacher.compile)
    if is_automatic and num_updates >= MIN_UPDATES and (why_not := why_no_compiler(device)):
        world.accelerator.print(f"note: no blocks are compiled: {why_not}")
    ranks = Ranks.join(device)
    return Session(recipe, task, world, ranks, plan, last_step, dtype, student_mode, teacher_mode)


def teacher_setup(session: Session[Any], reserved_bytes: int = 0, reserved_host_bytes: int = 0) -> Setup:
    """What a placement is built with, `auto` not resolved yet; the bytes are those of `Setup`."""
    under_deepspeed = session.world.engine.startswith("deepspeed")
    options, ranks = session.recipe.teacher, session.ranks
    dtype, mode = session.teacher_dtype, session.teacher_compile_mode
    folders = session.recipe.stages_dir
    return Setup(
        dtype,
        options,
        ranks,
        under_deepspeed,
        reserved_bytes,
        reserved_host_bytes,
        compile_mode=mode,
        stages_dir=folders,
    )


def check_same_data(task: Task[Any, Any], ranks: Ranks) -> None:
    """Every rank reads the same data, or UserError on all of them. Communicates."""
    seen = ranks.gather((task.num_samples, task.data_digest))
    other = [rank for rank, found in enumerate(seen) if found != seen[0]]
    if other:
        raise AgreedUserError(
            f"data: rank {other[0]} reads {seen[other[0]][0]} samples and rank 0 {seen[0][0]}, or others than it; give "
            "every machine the same files"
        )


def check_stages_shared(session: Session[Any]) -> None:
    """Ranks that will wait for a stage see the folder where it is made, or UserError on all. Communicates."""
    task, dtype = session.task, session.teacher_dtype
    is_missing = session.ranks.all_succeed(lambda: missing_stage(task, dtype) is not None)
    check_shared_stages(session.recipe, is_missing, session.ranks)


def print_missing_durability(session: Session[Any], folder: Path) -> None:
    """Says where the folder's file system may lose files in a crash. Communicates."""
    if (missing := session.ranks.broadcast_from_main(lambda: missing_durability(folder))) is not None:
        session.accelerator.print(f"note: {missing}")


def print_notices(session: Session[Any], notices: Sequence[str]) -> None:
    """On rank 0, a line for each."""
    for notice in notices:
        session.accelerator.print(format_notice(notice))


def prepare_stages(session: Session[Any]) -> bool:
    """Runs the stages that need no teacher, and says whether one is left that does. Communicates."""
    task = session.task
    return isinstance(task, Staged) and task.prepare_stages(session.ranks, session.teacher_dtype)


def load_teacher_and_data(session: Session[Any], setup: Setup | None) -> tuple[Teacher | None, Dataset[Any]]:
    """Loads the teacher into its resolved place (None: there is none), and the data. Communicates."""
    task, ranks = session.task, session.ranks
    teacher = None if setup is None else load_teacher(task.network, setup)
    # Ranks load at different speeds, and the collectives from here on have short time-outs: they meet first.
    ranks.barrier()
    return teacher, task.load_data(ranks, teacher)


def measure_quantization(
    session: Session[Any], setup: Setup, teacher: Teacher, data: Dataset[Any]
) -> QuantizationError | None:
    """The error of a quantised teacher on the run's own first samples; None where it is not quantised. Communicates.

    Raises UserError if it is above `teacher.max_quantization_error`.
    """
    if setup.options.quantization == "none":
        return None
    task = session.task
    requests = (task.request(task.collate([data[0, sample_id]])) for sample_id in range(task.num_samples))
    return measure_error(task.network, setup, teacher, requests)
