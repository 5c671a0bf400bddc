"""What is distilled: one file and one class a task, chosen by `task.kind`."""

from collections.abc import Callable
from typing import Any

from distiller.tasks.base import Task
from distiller.tasks.causal_lm import CausalLMTask
from distiller.tasks.diffusion import DiffusionTask

TASKS: dict[str, Callable[[Any], Task[Any, Any]]] = {"diffusion": DiffusionTask, "causal_lm": CausalLMTask}

__all__ = ["TASKS", "Task"]
