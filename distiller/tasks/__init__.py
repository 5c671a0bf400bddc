"""What is distilled: one file and one class a task, chosen by `task.kind`."""

from typing import Any

from distiller.config.recipe import Recipe
from distiller.distributed.importing import import_object
from distiller.tasks.base import Task

TASKS = {
    "diffusion": "distiller.diffusion.task:DiffusionTask",
    "causal_lm": "distiller.language.task:CausalLMTask",
    "classification": "distiller.vision.task:ClassificationTask",
}
"""`task.kind` -> module and class. Imported when it is asked for: the libraries of the other tasks take seconds."""


def open_task(recipe: Recipe) -> Task[Any, Any]:
    """The recipe's task, checked against the files that it names; reads no weights. Raises UserError."""
    return import_object(TASKS[recipe.task.kind])(recipe)


__all__ = ["TASKS", "Task", "open_task"]
