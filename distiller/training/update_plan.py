"""How many updates a run makes, and how they split the samples, from the recipe and the number of processes."""

from __future__ import annotations

from distiller.config.recipe import Recipe
from distiller.data.order import UpdatePlan
from distiller.errors import UserError


def plan_updates(recipe: Recipe, num_samples: int, accumulation_steps: int, num_processes: int) -> UpdatePlan:
    """How samples are split over updates and ranks; UserError when one update is larger than the data."""
    plan = UpdatePlan(num_samples, recipe.train.batch_size, accumulation_steps, num_processes, recipe.seed)
    if not plan.updates_per_epoch:
        raise UserError(
            f"one update takes {plan.samples_per_update} samples (train.batch_size {plan.batch_size} x accumulation "
            f"{plan.accumulation_steps} x {plan.world_size} processes) and the data has {num_samples}; "
            f"{_smaller_update(plan)}"
        )
    return plan


def last_step_of(recipe: Recipe, plan: UpdatePlan) -> int:
    """The number of the run's last update; the first is 1."""
    return recipe.train.max_steps or (recipe.train.num_epochs or 1) * plan.updates_per_epoch


def length_notices(recipe: Recipe, last_step: int) -> list[str]:
    """One line where the learning rate never reaches `optim.lr`."""
    warmup_steps = recipe.optim.warmup_steps
    if warmup_steps < last_step:
        return []
    return [
        f"optim.warmup_steps {warmup_steps} takes all {last_step} updates of the run, whose learning rate never gets "
        "beyond it; lower it"
    ]


def _smaller_update(plan: UpdatePlan) -> str:
    """What makes an update no larger than the data."""
    if not plan.num_samples:
        return "give some data"
    if fitting := plan.num_samples // (plan.accumulation_steps * plan.world_size):
        return f"lower batch_size to {fitting} or less"
    if fitting := plan.num_samples // plan.world_size:
        return (
            "lower train.gradient_accumulation_steps (or samples_per_update), with batch_size 1 to accumulation "
            f"{fitting} or less"
        )
    return f"start at most {plan.num_samples} {'process' if plan.num_samples == 1 else 'processes'}, or give more data"
