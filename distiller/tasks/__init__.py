"""What is distilled: one file and one class a task, chosen by `task.kind`."""

from distiller.tasks.base import Task
from distiller.tasks.diffusion import DiffusionTask

TASKS: dict[str, type[DiffusionTask]] = {"diffusion": DiffusionTask}

__all__ = ["TASKS", "Task"]
