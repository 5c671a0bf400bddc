"""What is distilled: one file and one class a task, chosen by `task.kind`."""

from importlib import import_module
from typing import Any

from distiller.config.recipe import Recipe
from distiller.distributed.importing import collections_paused
from distiller.tasks.base import Task

TASKS = {
    "diffusion": ("distiller.diffusion.task", "DiffusionTask"),
    "causal_lm": ("distiller.language.task", "CausalLMTask"),
    "classification": ("distiller.vision.task", "ClassificationTask"),
}
"""`task.kind` -> module and class. Imported when it is asked for: the libraries of the other tasks take seconds."""


def open_task(recipe: Recipe) -> Task[Any, Any]:
    """The recipe's task, checked against the files that it names; reads no weights. Raises UserError."""
    module, name = TASKS[recipe.task.kind]
    with collections_paused():
        loaded = import_module(module)
    return getattr(loaded, name)(recipe)


__all__ = ["TASKS", "Task", "open_task"]
