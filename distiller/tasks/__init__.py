"""What is distilled: one file and one class a task, chosen by `task.kind`."""

from collections.abc import Callable
from typing import Any

from distiller.tasks.base import Task
from distiller.tasks.classification import ClassificationTask
from distiller.tasks.diffusion import DiffusionTask

TASKS: dict[str, Callable[[Any], Task[Any, Any]]] = {
    "diffusion": DiffusionTask,
    "classification": ClassificationTask,
}

__all__ = ["TASKS", "Task"]
