"""The training loop. Source order is time order; everything it needs is in `Run`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distiller.checkpoint import Checkpoints
from distiller.config import Recipe
from distiller.data.order import UpdatePlan
from distiller.errors import RunError
from distiller.optim import learning_rate, set_learning_rate
from distiller.tasks.base import LossSum, Task
from distiller.teachers.base import Outputs, Teacher
from distiller.timing import StepTimer
from distiller.tracking import GIB, Tracker, peak_flops
from distiller.weights import MovingAverage


@dataclass
class Run:
    """What the loop needs, built by `distiller.build`. `student` and `optimizer` are prepared; the teacher never is."""

    recipe: Recipe
    accelerator: Accelerator
    engine: str
    mixed_precision: str
    plan: UpdatePlan
    task: Task[Any, Any]
    teacher: Teacher | None
    student: nn.Module
    student_dtype: torch.dtype
    student_parameters: int
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    loader: DataLoader[Any]
    checkpoints: Checkpoints
    tracker: Tracker
    first_step: int
    last_step: int
    stages_s: float


def train(run: Run) -> dict[str, Any]:
    """Trains from `first_step` to `last_step` and returns the last logged metrics."""
    task, accelerator, recipe = run.task, run.accelerator, run.recipe
    loader, timer, metrics = iter(run.loader), StepTimer(accelerator.device), {}
    skipped_steps = 0
    for step in range(run.first_step, run.last_step + 1):
        with timer.part("data"):
            batches = [next(loader) for _ in range(run.plan.accumulation_steps)]
        batches = [task.to_device(batch, accelerator.device) for batch in batches]
        count = _global_count(run, batches)

        with timer.part("teacher"):
            targets = _ask_teacher(run, batches)
        if step == run.first_step:
            _check_finite(targets)

        set_learning_rate(run.optimizer, rate := learning_rate(recipe.optim, step, run.last_step))
        with timer.part("student"):
            losses = [
                _forward_backward(run, batch, target, count) for batch, target in zip(batches, targets, strict=True)
            ]

        with timer.part("optimizer"):
            gradient_norm = accelerator.clip_grad_norm_(
                run.student.parameters(), recipe.optim.max_grad_norm or math.inf
            )
            run.optimizer.step()
            run.optimizer.zero_grad()
            if run.average is not None:
                run.average.update(run.student)
        skipped_steps += int(bool(accelerator.optimizer_step_was_skipped))

        timer.end_step()
        run.tracker.advance()
        if step % recipe.train.log_every == 0 or step in (run.first_step, run.last_step):
            metrics = {
                "step": step,
                "epoch": run.plan.epoch_of(step - 1),
                "samples": step * run.plan.samples_per_update,
                **_global_losses(run, losses, count),
                "lr": rate,
                "grad_norm": None if gradient_norm is None else float(gradient_norm),
                "optim/loss_scale": _loss_scale(run),
                "optim/skipped_steps": skipped_steps,
                **_performance(run, timer.read(), batches),
            }
            run.tracker.log(metrics)
            if not math.isfinite(metrics["loss"]):
                raise RunError(
                    f"the loss is {metrics['loss']} at step {step}; lower optim.lr or set optim.max_grad_norm"
                )
        if _is_checkpoint_step(run, step):
            run.checkpoints.save(step, run.student, run.optimizer, run.average)
    return metrics


def _global_count(run: Run, batches: Sequence[Any]) -> Tensor:
    """The update's count over micro-batches and ranks, known before the first backward: under DeepSpeed that steps."""
    count = torch.tensor(float(sum(run.task.count(batch) for batch in batches)), device=run.accelerator.device)
    return run.accelerator.reduce(count, "sum")  # type: ignore[return-value]


def _ask_teacher(run: Run, batches: Sequence[Any]) -> list[Outputs] | list[None]:
    if run.teacher is None:
        return [None] * len(batches)
    return run.teacher.predict([run.task.request(batch) for batch in batches])


def _check_finite(targets: Sequence[Outputs | None]) -> None:
    for outputs in targets:
        for name, value in (outputs or {}).items():
            if not bool(torch.isfinite(value).all()):
                raise RunError(
                    f"the teacher's {name} is not finite; try teacher.dtype=float32 (or bfloat16, not float16)"
                )


def _forward_backward(run: Run, batch: Any, target: Outputs | None, count: Tensor) -> LossSum:
    accelerator = run.accelerator
    with accelerator.accumulate(run.student):
        outputs = run.student(**run.task.student_inputs(batch, run.student_dtype))
        loss = run.task.loss(outputs, target, batch)
        # Engines average over ranks and over micro-batches; the loss is a mean over the whole update's count.
        scale = accelerator.num_processes * run.plan.accumulation_steps
        accelerator.backward(loss.total / count * scale)
    return LossSum(loss.total.detach(), loss.terms)


def _global_losses(run: Run, losses: Sequence[LossSum], count: Tensor) -> dict[str, float]:
    """Global means of the update, from its sums over micro-batches and ranks. Communicates."""
    names = ["loss", *(f"loss/{name}" for name in losses[0].terms)]
    columns = zip(*((loss.total, *loss.terms.values()) for loss in losses), strict=True)
    sums = torch.stack([torch.stack(column).sum() for column in columns])
    total = run.accelerator.reduce(sums, "sum")
    assert isinstance(total, Tensor)
    return dict(zip(names, (total / count).tolist(), strict=True))


def _performance(run: Run, times_ms: dict[str, float], batches: Sequence[Any]) -> dict[str, float | None]:
    """Time, throughput and memory; the slowest and fastest rank where they may differ. Communicates."""
    device, on_gpu = run.accelerator.device, run.accelerator.device.type == "cuda"
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB if on_gpu else 0.0
    mine = torch.tensor([times_ms["step"], peak_gib], device=device)
    step_ms, gpu_gib = run.accelerator.gather(mine.unsqueeze(0)).cpu().T.tolist()
    step_s = max(step_ms) / 1e3
    tokens = sum(run.task.tokens(batch) for batch in batches) * run.accelerator.num_processes
    memory = None if run.teacher is None else run.teacher.memory()
    under_deepspeed = run.engine.startswith("deepspeed")
    return {
        "perf/step_ms": sum(step_ms) / len(step_ms),
        "perf/step_ms_min": min(step_ms),
        "perf/step_ms_max": max(step_ms),
        "perf/teacher_ms": None if run.teacher is None else times_ms["teacher"],
        "perf/student_ms": times_ms["student"],
        "perf/optimizer_ms": None if under_deepspeed else times_ms["optimizer"],
        "perf/data_ms": times_ms["data"],
        "perf/samples_per_s": run.plan.samples_per_update / step_s,
        "perf/tokens_per_s": tokens / step_s,
        "perf/mfu": _utilisation(run, tokens / step_s / run.accelerator.num_processes),
        "memory/gpu_peak_gib": max(gpu_gib) if on_gpu else None,
        "memory/gpu_peak_gib_min": min(gpu_gib) if on_gpu else None,
        "memory/gpu_peak_gib_max": max(gpu_gib) if on_gpu else None,
        "memory/teacher_gpu_gib": None if memory is None else memory.gpu_bytes / GIB,
        "memory/teacher_host_gib": None if memory is None else memory.host_bytes / GIB,
        "memory/host_rss_gib": psutil.Process().memory_info().rss / GIB,
    }


def _utilisation(run: Run, tokens_per_s: float) -> float | None:
    """The student's model FLOPs (6 a parameter and token, Kaplan et al. 2020) over the GPU's peak, without teacher."""
    peak = peak_flops(run.accelerator.device, run.mixed_precision)
    return None if peak is None else 6 * run.student_parameters * tokens_per_s / peak


def _loss_scale(run: Run) -> float | None:
    if run.accelerator.scaler is not None:
        return float(run.accelerator.scaler.get_scale())
    if run.mixed_precision == "fp16" and run.engine.startswith("deepspeed"):
        return float(run.student.optimizer.loss_scale)  # type: ignore[union-attr,arg-type]
    return None


def _is_checkpoint_step(run: Run, step: int) -> bool:
    checkpoint = run.recipe.checkpoint
    if step == run.last_step:
        return checkpoint.at_end
    return checkpoint.every_steps is not None and step % checkpoint.every_steps == 0
