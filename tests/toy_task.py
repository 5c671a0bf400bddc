"""A task with unequal token counts: the loop's arithmetic without any real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from distiller.cache.layout import Layout
from distiller.cache.reading import CachedCollation, CachedData
from distiller.checkpoint.saving import Checkpoints
from distiller.config.loading import parse
from distiller.config.recipe import Recipe
from distiller.data import rng
from distiller.data.order import RankSampler, UpdatePlan
from distiller.distributed.ranks import Ranks
from distiller.student_state.factory import open_state
from distiller.tasks.base import LossSum
from distiller.tasks.interfaces import CacheableWhole, HoldsOut
from distiller.tasks.micro_batch import LiveCollation
from distiller.tasks.student_module import TrainedStudent
from distiller.teachers.base import Outputs, Request, Teacher, TeacherMemory
from distiller.training.optim import build_optimizer
from distiller.training.run import Run
from distiller.training.tracking import Tracker
from tests import toy_network
from tests.toy_state import IDENTITY

DIM = 4
Batch = list[tuple[int, Tensor]]


class Sequences(Dataset[tuple[int, Tensor]]):
    """Sample i is a sequence of 1 + 3 i mod 7 vectors."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Tensor]:
        _, sample_id = key
        return sample_id, rng.noise(0, 0, sample_id, (1 + 3 * sample_id % 7, DIM))


class LinearTeacher(Teacher):
    """A teacher that applies a fixed linear map and counts its calls."""

    def __init__(self) -> None:
        self.weight, self.num_calls = rng.noise(9, 0, 0, (DIM, DIM)), 0

    def predict(self, requests: Any) -> list[Outputs]:
        self.num_calls += 1
        return [{"output": tokens @ self.weight.to(tokens.device)} for tokens in (r.inputs["tokens"] for r in requests)]

    def memory(self) -> TeacherMemory:
        return TeacherMemory(host_bytes=self.weight.nbytes)

    def close(self) -> None:
        del self.weight


class ToyStudent(TrainedStudent):
    """One layer."""

    def forward(self, input: Tensor) -> Tensor:
        return self.model(input)


class ToyTask(CacheableWhole[Batch, Any], HoldsOut):
    """What the two toy tasks share: 16 samples, five held out after them, a live teacher, nothing to export."""

    num_samples = 16
    num_held_out = 5
    data_digest = "toy"
    needs_live_teacher = True
    _wanted = ("output",)

    def load_data(self, ranks: Ranks, teacher: Teacher | None) -> Sequences:
        return Sequences()

    def held_out_sample(self, draw: int, index: int) -> tuple[int, Tensor]:
        return Sequences()[draw, self.num_samples + index]

    def student_skeleton(self) -> TrainedStudent:
        return self.build_student().to("meta")

    @property
    def block_classes(self) -> tuple[str, ...]:
        return ("Linear",)

    def enable_gradient_checkpointing(self, trained: TrainedStudent) -> None:
        raise AssertionError

    def collate(self, samples: Any) -> Batch:
        return list(samples)

    @property
    def has_draws(self) -> bool:
        return False

    @property
    def wanted(self) -> tuple[str, ...]:
        return self._wanted

    def data_settings(self) -> dict[str, Any]:
        return {}

    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        return {}

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        return [(sample_id, tokens.to(device)) for sample_id, tokens in batch]

    def sample_ids(self, batch: Batch) -> tuple[int, ...]:
        return tuple(sample_id for sample_id, _ in batch)

    def tokens(self, batch: Batch) -> int:
        return self.count(batch)

    def export(self, state: Any, folder: Path) -> None:
        raise AssertionError


class TokenTask(ToyTask):
    """Mean squared error per token, averaged over all tokens of the update."""

    def build_student(self) -> ToyStudent:
        return _linear(DIM)

    def request(self, batch: Batch) -> Request:
        return Request(tuple(i for i, _ in batch), {"tokens": _tokens(batch)}, ("output",))

    def count(self, batch: Batch) -> int:
        return len(_tokens(batch))

    def student_inputs(self, batch: Batch, teacher_outputs: Outputs | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"input": _tokens(batch)}

    def loss(self, student_outputs: Tensor, teacher_outputs: Outputs | None, batch: Batch) -> LossSum:
        assert teacher_outputs is not None
        total = (student_outputs - teacher_outputs["output"]).square().mean(1).sum()
        return LossSum(total, {"token": total.detach()})


class RowTask(ToyTask):
    """A linear student of a `ToyNetwork`: one row a sample, and with two modules each sample by its own."""

    _wanted = ("output", "features/2")

    def __init__(self, num_modules: int) -> None:
        self._num_modules = num_modules

    def build_student(self) -> ToyStudent:
        return _linear(toy_network.DIM)

    def request(self, batch: Batch) -> Request:
        ids = tuple(sample_id for sample_id, _ in batch)
        # Not i mod 2: a micro-batch, and a rank, may need one module, the other, or both.
        modules = tuple(sample_id // 3 % 2 for sample_id in ids) if self._num_modules > 1 else ()
        return Request(ids, {"x": _rows(batch)}, self.wanted, modules)

    def count(self, batch: Batch) -> int:
        return len(batch)

    def student_inputs(self, batch: Batch, teacher_outputs: Outputs | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"input": _rows(batch)}

    def loss(self, student_outputs: Tensor, teacher_outputs: Outputs | None, batch: Batch) -> LossSum:
        assert teacher_outputs is not None
        target = teacher_outputs["output"].float() + teacher_outputs["features/2"].float()
        total = (student_outputs - target).square().mean(1).sum()
        return LossSum(total, {"row": total.detach()})


def toy_recipe(folder: Path, **train: Any) -> Recipe:
    """A recipe whose teacher and student sections are not read; `train` may hold two keys of the optimizer as well."""
    sections = {"teacher": {"path": "-"}, "student": {"config": "-"}, "data": {"path": "-"}}
    optim = {"lr": 0.05, "max_grad_norm": 0.5, "weight_decay": 0.01, "schedule": "linear"}
    optim |= {name: train.pop(name) for name in ("fused", "max_bad_steps") if name in train}
    train = {"max_steps": 8, "log_every": 1} | train
    return parse({"output_dir": str(folder), "optim": optim, "train": train, **sections})


def build_toy_run(
    recipe: Recipe,
    accumulation_steps: int = 1,
    task: ToyTask | None = None,
    teacher: Teacher | None = None,
    cpu: bool = True,
    cache: tuple[Path, Layout] | None = None,
) -> Run:
    """A run over TokenTask, or another task with its teacher, in whatever world there is; with a cache, from that."""
    Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)
    plugin = GradientAccumulationPlugin(
        num_steps=accumulation_steps, adjust_scheduler=False, sync_with_dataloader=False
    )
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_plugin=plugin)
    task, batch_size = task or TokenTask(), recipe.train.batch_size
    plan = UpdatePlan(16, batch_size, accumulation_steps, accelerator.num_processes, recipe.seed)
    trained = task.build_student()
    student, optimizer = accelerator.prepare(trained, build_optimizer(trained, recipe.optim))
    last_step = recipe.train.max_steps or 1
    engine = "single" if accelerator.num_processes == 1 else "ddp"
    ranks, state = Ranks.join(accelerator.device), open_state(engine, accelerator, student, optimizer)
    return Run(
        recipe=recipe,
        accelerator=accelerator,
        engine=engine,
        mixed_precision="no",
        plan=plan,
        task=task,
        teacher=teacher or LinearTeacher(),
        placement=recipe.teacher.placement,
        student=student,
        student_dtype=torch.float32,
        student_parameters=trained.num_model_parameters(),
        optimizer=optimizer,
        average=None,
        loader=DataLoader(
            Sequences() if cache is None else CachedData(Sequences(), *cache, draws=1),
            batch_sampler=RankSampler(plan, accelerator.process_index, 0, last_step),
            collate_fn=LiveCollation(task) if cache is None else CachedCollation(task),
        ),
        checkpoints=Checkpoints(
            Path(recipe.output_dir),
            ranks,
            1,
            replace(IDENTITY, engine=engine, world_size=ranks.world_size),
            state,
            None,
        ),
        tracker=Tracker(recipe, accelerator, 1, last_step),
        first_step=1,
        last_step=last_step,
        ranks=ranks,
        skipped_steps=0,
        stages_s=0.0,
    )


def _tokens(batch: Batch) -> Tensor:
    return torch.cat([tokens for _, tokens in batch])


def _rows(batch: Batch) -> Tensor:
    return torch.stack(
        [rng.noise(7, 0, sample_id, (toy_network.DIM,)).to(tokens.device) for sample_id, tokens in batch]
    )


def _linear(dim: int) -> ToyStudent:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ToyStudent(nn.Linear(dim, dim))
