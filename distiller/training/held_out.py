"""The loss on held-out samples while training, and samples side by side."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distiller.checkpoint.best import Best, read_best
from distiller.errors import AgreedError
from distiller.tasks.base import LossSum
from distiller.tasks.interfaces import HoldsOut, Samplable
from distiller.tasks.micro_batch import LiveCollation, MicroBatch
from distiller.training.run import Run
from distiller.training.teacher_queue import TeacherQueue

EVALUATIONS_FOLDER = "evaluations"


@final
class HeldOutEvaluation:
    """Measures the student that is being trained, as `evaluation.every_steps` and `sample_every_steps` say.

    It is in eval mode and without gradients meanwhile, and nothing of its state or of training's random draws changes.
    The moving average is not measured; samples are the exported student's, and so the average's where there is one.

    Attributes:
        best: of the checkpoints that are there; None before the first.
    """

    def __init__(self, run: Run, queue: TeacherQueue) -> None:
        """Measures nothing. Communicates."""
        self._run, self._queue, self._settings = run, queue, run.recipe.evaluation
        self._collation = LiveCollation(run.task)
        best = run.ranks.broadcast_from_main(lambda: read_best(Path(run.recipe.output_dir) / "checkpoints"))
        # One after the checkpoint that is resumed is of a course that the run has left.
        self.best = best if best is not None and best.step < run.first_step else None

    def is_due(self, step: int) -> bool:
        """Whether the loss is measured after update `step`: every so many, and after the last one."""
        every = self._settings.every_steps
        return every is not None and (step % every == 0 or step == self._run.last_step)

    def shows_samples(self, step: int) -> bool:
        """Whether samples are drawn after update `step`; after the last one they always are, by others."""
        every = self._settings.sample_every_steps
        return every is not None and step % every == 0 and step < self._run.last_step

    def measure(self, is_stop_requested: Callable[[], bool]) -> dict[str, float]:
        """The mean loss and its terms, by metric; {} where a signal asked a rank to stop.

        Every rank calls it. Communicates as an update does, without gradients.
        """
        run = self._run
        micro_batches = self._own_keys()
        sums, count = torch.zeros(0, dtype=torch.float64), 0.0
        names: list[str] = []
        self._queue.wait()
        with _evaluating(run.student):
            # As many at a time as an update has, for which there is memory.
            for start in range(0, len(micro_batches), run.plan.accumulation_steps):
                if any(run.ranks.gather(is_stop_requested())):
                    return {}
                group = micro_batches[start : start + run.plan.accumulation_steps]
                loaded = [self._load(keys) for keys, _ in group]
                for micro_batch, target, (_, counts) in zip(loaded, self._ask(loaded), group, strict=True):
                    loss = self._loss(micro_batch.batch, target)
                    if not counts:
                        continue
                    names = ["eval/loss", *(f"eval/loss/{name}" for name in loss.terms)]
                    values = torch.stack([loss.total, *loss.terms.values()]).double().cpu()
                    sums = values if not len(sums) else sums + values
                    count += run.task.count(micro_batch.batch)
        gathered = run.ranks.gather((names, sums.tolist(), count))
        names = next(names for names, _, _ in gathered if names)
        total = sum(count for _, _, count in gathered)
        # In the order of the ranks, so that all have the same sum.
        rows = [values for _, values, _ in gathered if values]
        return {name: sum(column) / total for name, column in zip(names, zip(*rows, strict=True), strict=True)}

    def better(self, step: int, metrics: dict[str, Any]) -> Best | None:
        """This step as the best one so far, of which a checkpoint is to be kept; None where it is not."""
        loss = metrics.get("eval/loss")
        if not self._run.recipe.checkpoint.keep_best or loss is None:
            return None
        # Also where it is not finite: no comparison with NaN is true.
        if not (loss < float("inf") if self.best is None else loss < self.best.loss):
            return None
        return Best(step, loss)

    def write_samples(self, step: int) -> Path:
        """Writes `samples.*` into `evaluations/step-N`, which it returns. Every rank calls it. Communicates.

        Raises AgreedError, on every rank, if rank 0 cannot write the student that is shown.
        """
        run = self._run
        assert isinstance(run.task, Samplable), "check_run refuses others"
        folder = Path(run.recipe.output_dir) / EVALUATIONS_FOLDER / f"step-{step}"
        self._queue.wait()
        # The copy of a checkpoint that is being written is in the same memory.
        run.checkpoints.finish()
        weights = run.checkpoints.gathered_result()

        def export() -> None:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                run.task.export(weights, folder / "student")
            except (OSError, SafetensorError) as error:
                # safetensors reports a full disk as a SafetensorError, which is no OSError.
                raise AgreedError(f"{folder}: cannot be written ({error}); make room and pass --resume") from error

        run.ranks.broadcast_from_main(export)
        run.task.write_samples(folder, run.sampling_teacher, run.accelerator)
        if run.ranks.is_main:
            shutil.rmtree(folder / "student", ignore_errors=True)
            with suppress(OSError):
                # A task without data to show writes nothing.
                folder.rmdir()
        # Rank 0 draws the student's alone, and others would wait in a collective of the device, whose time is limited.
        run.ranks.barrier()
        return folder

    def _own_keys(self) -> list[tuple[list[tuple[int, int]], bool]]:
        """This rank's micro-batches as keys of samples, and whether each counts.

        Every rank has as many, since the models may communicate; what is missing is filled up by the first micro-batch
        of all, which then does not count.
        """
        run, task = self._run, self._run.task
        assert isinstance(task, HoldsOut), "check_run refuses others"
        num_held_out, wanted = task.num_held_out, self._settings.loss_samples
        count = wanted if task.has_draws else min(wanted, num_held_out)
        keys = [divmod(index, num_held_out) for index in range(count)]
        size, num_ranks = run.plan.batch_size, run.ranks.world_size
        batches = [keys[start : start + size] for start in range(0, count, size)]
        rounds = -(-len(batches) // num_ranks)
        own = batches[run.ranks.rank :: num_ranks]
        return [(keys, True) for keys in own] + [(batches[0], False)] * (rounds - len(own))

    def _load(self, keys: list[tuple[int, int]]) -> MicroBatch:
        run, task = self._run, self._run.task
        assert isinstance(task, HoldsOut)
        samples = [task.held_out_sample(draw, index) for draw, index in keys]
        return self._collation(samples).to(task, run.accelerator.device)

    def _ask(self, loaded: list[MicroBatch]) -> list[Any]:
        teacher = self._run.teacher
        if teacher is None:
            return [None] * len(loaded)
        return list(teacher.predict([micro_batch.request(self._run.task) for micro_batch in loaded]))

    def _loss(self, batch: Any, target: Any) -> LossSum:
        run = self._run
        with torch.no_grad(), run.accelerator.autocast():
            outputs = run.student(**run.task.student_inputs(batch, target, run.student_dtype))
        with torch.no_grad():
            return run.task.loss(outputs, target, batch)


@contextmanager
def _evaluating(student: nn.Module) -> Iterator[None]:
    """Puts a prepared student into eval mode; afterwards every module is in the mode in which it was."""
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in student.modules()]
    student.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module in student.modules():
            # The outermost part stays gathered after a forward pass, for a backward pass that does not come.
            if isinstance(module, FSDPModule):
                module.reshard()
