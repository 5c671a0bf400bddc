"""The training loop. Source order is time order; everything it needs is in `distiller.training.run.Run`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distiller.checkpoint.format import SessionTotals
from distiller.checkpoint.resuming import latest_step
from distiller.checkpoint.schedule import is_due, is_time
from distiller.distributed.shutdown import NO_STOP_SIGNALS, StopSignals, signal_name
from distiller.errors import AgreedError, CheckpointError, RunError, StoppedError
from distiller.tasks.base import LossSum
from distiller.teachers.base import Outputs
from distiller.training.buffer_rollback import BufferRollback
from distiller.training.data_wait import DataWaitNotice
from distiller.training.ddp_buckets import has_buckets, without_side_effects
from distiller.training.held_out import HeldOutEvaluation
from distiller.training.nonfinite_guard import NonFiniteGuard, nan_if_nonfinite
from distiller.training.observers import Observers
from distiller.training.optim import learning_rate, set_learning_rate, step_unless
from distiller.training.out_of_memory import explain
from distiller.training.performance import performance
from distiller.training.run import Outcome, Run
from distiller.training.step_counts import StepCountReducer
from distiller.training.teacher_queue import TeacherQueue
from distiller.training.timing import StepTimer


def train(run: Run, stops: StopSignals = NO_STOP_SIGNALS) -> Outcome:
    """Trains from `first_step` to `last_step`, of which there is at least one.

    Raises StoppedError when a signal asks, and RunError where a GPU's memory is used up.
    """
    with closing(Observers.of(run)) as observers:
        queue = TeacherQueue(run, observers.timer)
        try:
            outcome = _train(run, stops, queue, observers)
        except Exception as error:
            # Not `close`: where another rank is gone, the teacher may wait for it.
            queue.abandon()
            # A rank that answers for all tells the others of its failure, and keeps the reason as the cause.
            reason = error.__cause__ if isinstance(error, AgreedError) else error
            if not isinstance(reason, torch.OutOfMemoryError):
                raise
            kind = AgreedError if isinstance(error, AgreedError) else RunError
            text = explain(str(reason), run, observers.place, queue.num_bytes)
            # The optimizer's moments, which the first update makes, are there in the second one's passes.
            raise kind(text, out_of_memory_at_start=observers.step <= run.first_step + 1) from error
        except StoppedError:
            queue.close()
            raise
        queue.close()
        return outcome


def _train(run: Run, stops: StopSignals, queue: TeacherQueue, observers: Observers) -> Outcome:
    task, accelerator, recipe, metrics = run.task, run.accelerator, run.recipe, {}
    timer, attention = observers.timer, observers.attention
    if accelerator.device.type == "cuda":
        # Without the text encoder and the rollout, which are freed by now.
        torch.cuda.reset_peak_memory_stats(accelerator.device)
    step_counts = StepCountReducer(accelerator)
    guard = NonFiniteGuard(
        accelerator, run.ranks, Path(recipe.output_dir), recipe.optim.max_bad_steps, run.skipped_steps, run.first_step
    )
    buffer_rollback = BufferRollback(run.student)
    data_wait, evaluation = DataWaitNotice(run.loader.num_workers, run.ranks), HeldOutEvaluation(run, queue)
    saved_at, saved_step, is_save_postponed, save_error = time.monotonic(), 0, False, None
    for step in range(run.first_step, run.last_step + 1):
        observers.begin(step)
        batches = queue.load().batches
        # Summed before the first backward: under DeepSpeed the last backward steps.
        local_count = float(sum(task.count(batch) for batch in batches))
        is_due_by_clock = is_time(recipe.checkpoint, time.monotonic() - saved_at)
        count, flags = step_counts.reduce(step, local_count, guard.was_bad, stops.requested > 0, is_due_by_clock)
        guard.observe(flags.num_bad_ranks, flags.step - 1)
        if flags.num_stop_requests:
            _save_and_stop(run, guard, step - 1, stops.requested, _spent(run, timer))

        targets = queue.answers()
        if step == run.first_step:
            _check_finite(run, targets)
            with timer.waiting_for("student"):
                _build_ddp_buckets(run, batches[0], targets[0])

        set_learning_rate(run.optimizer, rate := learning_rate(recipe.optim, step, run.last_step))
        with timer.part("student"):
            pairs = zip(batches, targets, strict=True)
            losses = [_forward_backward(run, batch, target, count) for batch, target in pairs]

        with timer.part("optimizer"):
            limit = recipe.optim.max_grad_norm or math.inf
            gradient_norm = _global_norm(accelerator.clip_grad_norm_(run.student.parameters(), limit))
            is_skipped = _step_if_finite(run, gradient_norm)
            run.optimizer.zero_grad()
            buffer_rollback.keep_or_restore(is_skipped)
            if run.average is not None:
                run.average.update(is_skipped)
        guard.record(
            step, [i for batch in batches for i in task.sample_ids(batch)], [loss.total for loss in losses], is_skipped
        )

        observers.end(step)
        run.tracker.advance()
        is_evaluated, is_sampled = evaluation.is_due(step), evaluation.shows_samples(step)
        is_logged = step % recipe.train.log_every == 0 or step in (run.first_step, run.last_step)
        is_logged = is_logged or is_evaluated or is_sampled
        # On a GPU these flags are one update old: they may have been sent before the last save.
        is_due_by_clock = flags.is_checkpoint_due and flags.step > saved_step
        is_saved = is_due(recipe.checkpoint, step, run.last_step, is_due_by_clock)
        is_saved = is_saved or is_save_postponed
        if is_logged:
            times_ms = timer.read(counts=not attention.is_profiling)
            if step > run.first_step and not attention.is_profiling:
                # Before that the loader's processes start.
                data_wait.check(times_ms)
            metrics = {
                "step": step,
                "epoch": run.plan.epoch_of(step - 1),
                "samples": step * run.plan.samples_per_update,
                **_global_losses(run, losses, count),
                "lr": rate,
                "grad_norm": None if gradient_norm is None else float(gradient_norm),
                "optim/loss_scale": _loss_scale(run),
                "optim/skipped_steps": int(guard.num_skipped),
                **performance(run, times_ms, batches, queue.num_bytes),
            }
            if is_evaluated:
                metrics |= evaluation.measure(lambda: stops.requested > 0)
                observers.recompilations.pass_over()
            run.tracker.log(metrics)
        if is_logged or is_saved:
            guard.flush()
        best = evaluation.better(step, metrics) if is_evaluated and guard.last_was_finite else None
        is_saved = is_saved or best is not None
        # After a bad update the save is postponed to a good one: if several in a row end the run, its newest checkpoint
        # is from before them. After the last update there is none to wait for: the state is that of the last good one.
        is_save_postponed = is_saved and not guard.last_was_finite and step < run.last_step
        if is_saved and not is_save_postponed:
            try:
                is_last, spent = step == run.last_step, _spent(run, timer)
                run.checkpoints.save(step, int(guard.num_skipped), is_last, spent, best)
                evaluation.best = best or evaluation.best
            except CheckpointError as error:
                save_error = error
            saved_at, saved_step = time.monotonic(), step
        if is_sampled:
            run.tracker.log_samples(evaluation.write_samples(step), step)
        if is_logged:
            timer.restart()
        if attention.end():
            timer.discard()
    run.checkpoints.finish()
    return Outcome(metrics, _spent(run, timer), save_error, evaluation.best)


def _save_and_stop(run: Run, guard: NonFiniteGuard, step: int, requested: int, spent: SessionTotals) -> NoReturn:
    """Saves a checkpoint of update `step` and raises StoppedError, on every rank. Communicates."""
    signals = [number for number in run.ranks.gather(requested) if number]
    guard.flush()
    when = f"at step {step}"
    if step < run.first_step:
        when = f"before step {run.first_step}"
    else:
        # A bad update was left out: student and moments are the previous update's, and `num_skipped` counts it.
        if not guard.last_was_finite:
            when += ", which was left out"
        run.checkpoints.finish()
        if run.ranks.broadcast_from_main(lambda: latest_step(Path(run.recipe.output_dir))) != step:
            run.checkpoints.save(step, int(guard.num_skipped), wait=True, spent=spent)
    text = f"stopped by {signal_name(min(signals))} {when}; continue with --resume"
    raise StoppedError(text, min(signals), is_agreed=True)


def _spent(run: Run, timer: StepTimer) -> SessionTotals:
    """Time, steps and failed saves of this session so far."""
    return SessionTotals(time.perf_counter() - run.started, *timer.timed(), run.checkpoints.num_failed, 1)


def _check_finite(run: Run, targets: Sequence[Outputs | None]) -> None:
    """AgreedError on every rank if the teacher's first outputs are not finite on one of them. Communicates."""
    names = sorted({name for outputs in targets for name in outputs or {}})
    for name in names:
        bad = sum((~torch.isfinite(outputs[name])).sum() for outputs in targets if outputs)
        total = run.accelerator.reduce(torch.as_tensor(bad, dtype=torch.float32), "sum")
        if float(total) > 0:  # type: ignore[arg-type]
            raise AgreedError(f"the teacher's {name} is not finite; try teacher.dtype float32, or bfloat16 for float16")


def _build_ddp_buckets(run: Run, batch: Any, target: Outputs | None) -> None:
    """Under DDP, a forward and backward pass without effect that fixes the gradient buckets. Communicates."""
    if has_buckets(run.student):
        with without_side_effects(run.student, run.accelerator.device):
            outputs = run.student(**run.task.student_inputs(batch, target, run.student_dtype))
            (0.0 * run.task.loss(outputs, target, batch).total).backward()


def _forward_backward(run: Run, batch: Any, target: Outputs | None, count: Tensor) -> LossSum:
    accelerator = run.accelerator
    with accelerator.accumulate(run.student):
        # Accelerate itself wraps the forward of DDP and FSDP1 in autocast, but not FSDP2's; no effect under DeepSpeed.
        with accelerator.autocast():
            outputs = run.student(**run.task.student_inputs(batch, target, run.student_dtype))
        loss = run.task.loss(outputs, target, batch)
        # Engines average over ranks and micro-batches; the loss is to be a mean over the count of the whole update.
        scale = nan_if_nonfinite(accelerator.num_processes * run.plan.accumulation_steps, loss.total)
        accelerator.backward(loss.total / count * scale)
    return LossSum(loss.total.detach(), loss.terms)


def _global_norm(norm: Any) -> Any:
    """The gradient norm over all ranks; FSDP2 returns it as a DTensor of partial norms. Communicates under FSDP2."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _step_if_finite(run: Run, gradient_norm: Any) -> Tensor:
    """Steps the optimizer if the gradient is finite. Returns 1 if it was skipped, as a float32 scalar on the device.

    DeepSpeed has stepped, or skipped, inside the last backward.
    """
    accelerator, device = run.accelerator, run.accelerator.device
    if run.engine.startswith("deepspeed"):
        return torch.full((), float(accelerator.optimizer_step_was_skipped), device=device)
    if accelerator.scaler is not None:
        # Fused AdamW is always called and skips by itself, so Accelerate's flag does not show it.
        scale = _loss_scale(run)
        run.optimizer.step()
        return torch.full((), float(_loss_scale(run) < scale), device=device)  # type: ignore[operator]
    is_skipped = (~torch.isfinite(gradient_norm)).float().to(device, non_blocking=True)
    step_unless(run.optimizer, is_skipped)  # type: ignore[arg-type]
    return is_skipped


def _global_losses(run: Run, losses: Sequence[LossSum], count: Tensor) -> dict[str, float]:
    """Global means of the update, from its sums over micro-batches and ranks. Communicates."""
    names = ["loss", *(f"loss/{name}" for name in losses[0].terms)]
    columns = zip(*((loss.total, *loss.terms.values()) for loss in losses), strict=True)
    sums = torch.stack([torch.stack(column).sum() for column in columns])
    total = run.accelerator.reduce(sums, "sum")
    assert isinstance(total, Tensor)
    return dict(zip(names, (total / count).tolist(), strict=True))


def _loss_scale(run: Run) -> float | None:
    if run.accelerator.scaler is not None:
        return float(run.accelerator.scaler.get_scale())
    if run.mixed_precision == "fp16" and run.engine.startswith("deepspeed"):
        return float(run.student.optimizer.loss_scale)  # type: ignore[union-attr,arg-type]
    return None
