"""Finds the teacher's place beside the student, before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distiller.launch.checks import check_nvme_room
from distiller.launch.deepspeed import deepspeed_config
from distiller.launch.student_layout import StudentLayout
from distiller.planner.forecast import Forecast, forecast
from distiller.session import Session, teacher_setup
from distiller.tasks.base import Task
from distiller.tasks.interfaces import Plannable, ReplicatesHead
from distiller.teachers.base import Setup
from distiller.teachers.factory import resolve_placement
from distiller.training.student_memory import student_state


def place_teacher(session: Session[Any], excluded: tuple[str, ...] = ()) -> tuple[Setup, int]:
    """The teacher's place beside the student, and the bytes of its layers that every rank holds. Communicates.

    The placement is resolved unless no teacher is asked in the loop. Raises UserError for a disk too small for the
    student, and for a teacher that fits nowhere. `excluded`: placements that `auto` does not choose.
    """
    recipe, world, ranks = session.recipe, session.world, session.ranks
    task: Task[Any, Any] = session.task
    num_parameters = task.student_skeleton().num_trained_parameters()
    if world.offload.is_on("nvme"):
        zero = deepspeed_config(world.accelerator)["zero_optimization"]
        local_share = ranks.local_world_size / ranks.world_size
        ranks.all_succeed(lambda: check_nvme_room(zero, num_parameters, local_share))
    head_bytes = task.replicated_head_bytes(session.teacher_dtype) if isinstance(task, ReplicatesHead) else 0
    layout = StudentLayout(
        world.engine,
        ranks.world_size,
        world.accumulation_steps,
        world.mixed_precision,
        world.offload,
        world.fsdp,
    )
    state = student_state(num_parameters, recipe, layout)
    setup = replace(teacher_setup(session, state.gpu + head_bytes, state.host), excluded=excluded)
    if (expected := _forecast(session, layout)) is not None:
        setup = replace(
            setup,
            update_bytes=expected.update_bytes,
            student_excess_bytes=expected.student_excess_bytes,
            step_ms=expected.step_ms,
        )
    if task.needs_live_teacher and recipe.teacher.placement != "cached":
        setup = resolve_placement(task.network, setup)
    return setup, head_bytes


def _forecast(session: Session[Any], layout: StudentLayout) -> Forecast | None:
    """What an update will take on this machine's GPUs; None without GPUs, and where a model cannot be followed.

    Rank 0 follows an update, the others wait. Communicates.
    """
    recipe, device = session.recipe, session.accelerator.device
    task: Task[Any, Any] = session.task
    is_plannable = isinstance(task, Plannable)
    is_asked = task.needs_live_teacher and recipe.teacher.placement != "cached"
    if device.type != "cuda" or not is_asked or not is_plannable:
        return None
    num_machines = session.ranks.world_size // session.ranks.local_world_size

    def follow() -> Forecast | str:
        try:
            compiled = session.student_compile_mode != "none", session.teacher_compile_mode != "none"
            steps, dtype = session.last_step, session.teacher_dtype
            return forecast(recipe, task, layout, dtype, steps, compiled, num_machines)
        except Exception as error:
            # Code of a model may read the values of tensors that have none here; torch has many types for that.
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"

    found = session.ranks.broadcast_from_main(follow)
    if isinstance(found, str):
        session.accelerator.print(
            f"note: what an update takes of the GPU cannot be predicted for these models ({found}); a share of the "
            "memory is kept for it"
        )
        return None
    return found
