"""Compares a trained classifier with its teacher on held-out pictures, on which neither of them was trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distiller.data.loader_processes import choose_num_workers, open_loader
from distiller.data.loading import check_loader_sockets
from distiller.distributed.ranks import Ranks
from distiller.tasks.cost_figures import SIZE_FIGURES
from distiller.teachers.base import Request, Teacher
from distiller.vision.calibration import Predictions
from distiller.vision.network import LOGITS
from distiller.vision.samples import PictureBatch, PictureData, collate

MIN_TIMED_S = 0.5
"""Seconds that the timed passes take together, at least."""


def open_held_out(data: PictureData, count: int, batch_size: int, num_workers: int, ranks: Ranks) -> DataLoader[Any]:
    """Loads the first `count` pictures, of which there is at least one, in so many processes."""
    keys = [[(0, i) for i in range(first, min(first + batch_size, count))] for first in range(0, count, batch_size)]
    return open_loader(data, keys, collate, num_workers, 1, ranks)


def processes_for(data: PictureData, batch_size: int, given: int | Literal["auto"], ranks: Ranks) -> int:
    """How many processes load batches of pictures; `given` is the recipe's number. Raises UserError."""
    check_loader_sockets(given)

    def read(first: int) -> PictureBatch:
        return collate([data[0, i % len(data)] for i in range(first, first + batch_size)])

    return choose_num_workers(given, [partial(read, first) for first in (0, batch_size)], ranks)


def compare(
    teacher: Teacher, student: nn.Module, batches: Iterable[PictureBatch], prepare: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Accuracy, calibration and speed of teacher and student, and how often they predict the same class.

    Communicates where the teacher's placement does.

    Args:
        batches: on the CPU, at least one.
        prepare: moves pixels [B, C, H, W] float32 to the networks' device and memory format.

    Returns:
        JSON-ready figures. `agreement` is the share of pictures for which both predict the same class, right or wrong.
        See `Predictions` for the others of each model. Throughputs are pictures per second of forward passes with the
        largest batch.
    """
    models = {"teacher": Predictions(), "student": Predictions()}
    count, agreed, largest = 0, 0, torch.empty(0)
    for batch in batches:
        count += len(batch.sample_ids)
        pixels = prepare(batch.pixels)
        with torch.no_grad():
            logits = {
                "teacher": ask_teacher(teacher, pixels, batch.sample_ids),
                "student": student(pixel_values=pixels).logits,
            }
        classes = {name: model.add(logits[name].cpu(), batch.labels) for name, model in models.items()}
        agreed += int((classes["teacher"] == classes["student"]).sum())
        largest = pixels if len(pixels) > len(largest) else largest
    ids = tuple(range(len(largest)))
    teacher_speed = _pictures_per_s(lambda: ask_teacher(teacher, largest, ids), largest)
    with torch.no_grad():
        student_speed = _pictures_per_s(lambda: student(pixel_values=largest), largest)
    figures = {
        f"{name}_{figure}": value for name in ("student", "teacher") for figure, value in models[name].figures().items()
    }
    return {
        "num_samples": count,
        **figures,
        "accuracy_ratio": figures["student_accuracy"] / figures["teacher_accuracy"]
        if figures["teacher_accuracy"]
        else None,
        "agreement": agreed / count,
        "student_samples_per_s": student_speed,
        "teacher_samples_per_s": teacher_speed,
        "speed_ratio": student_speed / teacher_speed,
        "batch_size": len(largest),
    }


def figure_names(num_classes: int) -> tuple[str, ...]:
    """Keys of the numbers in a report on so many classes."""
    each = [f"{model}_{name}" for model in ("student", "teacher") for name in Predictions.figure_names(num_classes)]
    speeds = ("student_samples_per_s", "teacher_samples_per_s", "speed_ratio", "batch_size")
    return ("num_samples", *each, "accuracy_ratio", "agreement", *speeds, *SIZE_FIGURES)


def ask_teacher(teacher: Teacher, pixels: Tensor, sample_ids: Sequence[int]) -> Tensor:
    """The teacher's logits [B, classes] of pixels [B, C, H, W]; communicates where the teacher's placement does."""
    return teacher.predict([Request(tuple(sample_ids), {"pixels": pixels}, (LOGITS,))])[0][LOGITS]


def _pictures_per_s(call: Callable[[], Any], pixels: Tensor) -> float:
    """Pictures per second, from the median time of 5 passes or more after one to warm up. Waits for the GPU."""
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < MIN_TIMED_S:
        if pixels.is_cuda:
            torch.cuda.synchronize(pixels.device)
        started = time.perf_counter()
        call()
        if pixels.is_cuda:
            torch.cuda.synchronize(pixels.device)
        times.append(time.perf_counter() - started)
    return len(pixels) / float(np.median(times))
