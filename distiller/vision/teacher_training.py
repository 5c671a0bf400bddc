"""The stage that trains a teacher on the labels, where a recipe's teacher is a config without weights."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import math
import shutil
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from distiller.config.classification import TeacherTraining
from distiller.config.recipe import Optim
from distiller.data import rng
from distiller.data.order import RankSampler, UpdatePlan
from distiller.errors import RunError
from distiller.storage.stages import Stage
from distiller.training.optim import build_optimizer, learning_rate, set_learning_rate
from distiller.vision.files import ClassifierFiles, Processor
from distiller.vision.library import new_model
from distiller.vision.samples import PictureData, collate


def train_teacher(
    stage: Stage,
    files: ClassifierFiles,
    processor: Processor,
    options: TeacherTraining,
    data: PictureData,
    device: torch.device,
) -> str:
    """Trains a new model of the teacher's config in float32, and saves it with its processor as the stage's result.

    Runs in one process and does not communicate. The result depends on options, data and config alone; its last bits
    also depend on the machine.

    Returns:
        One line with the updates, the seconds that they took and the last loss.

    Raises:
        RunError: the last loss is not finite.
    """
    assert options.max_steps is not None
    started = time.perf_counter()
    with rng.seeded(options.seed):
        model = new_model(files.config)
    model.to(device).train()
    optim = Optim(
        lr=options.lr, weight_decay=options.weight_decay, schedule="cosine", warmup_steps=options.warmup_steps
    )
    optimizer = build_optimizer(model, optim)
    plan = UpdatePlan(len(data), min(options.batch_size, len(data)), 1, 1, options.seed)
    loader = DataLoader(data, batch_sampler=RankSampler(plan, 0, 0, options.max_steps), collate_fn=collate)
    criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    loss = torch.zeros(())
    # The teacher's dropout, if it has any, must not change the random state of the run.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        for step, batch in enumerate(loader, start=1):
            set_learning_rate(optimizer, learning_rate(optim, step, options.max_steps))
            loss = criterion(model(pixel_values=batch.pixels.to(device)).logits, batch.labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if not math.isfinite(loss.item()):
        raise RunError(f"the teacher's training ended with loss {loss.item()}; lower teacher_training.lr")
    shutil.rmtree(stage.partial, ignore_errors=True)
    # With the module's own names, by which placements read tensors.
    model.cpu().save_pretrained(stage.partial, save_original_format=False)
    processor.save(stage.partial)
    stage.finish()
    seconds = time.perf_counter() - started
    return f"teacher trained for {options.max_steps} updates in {seconds:.0f} s, last loss {loss.item():.4f}"
