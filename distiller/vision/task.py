"""Task `classification`: an image classifier distilled into a smaller one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PretrainedConfig

from distiller.config.classification import ClassificationRecipe
from distiller.data.loading import batches_of
from distiller.data.pictures import WRITTEN_SUFFIXES
from distiller.distributed.devices import teacher_dtype
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.storage.stages import Stage
from distiller.tasks.activation_checkpointing import enable_checkpointing
from distiller.tasks.base import LossSum
from distiller.tasks.cost_figures import size_figures
from distiller.tasks.fitting_batch import with_fitting_batch
from distiller.tasks.interfaces import CacheableWhole, Checkable, Evaluable, HoldsOut, Plannable, Samplable, Staged
from distiller.tasks.student_module import TrainedStudent
from distiller.teachers.base import Outputs, Request, Teacher
from distiller.teachers.factory import open_alone
from distiller.vision.converted import converted_files
from distiller.vision.evaluation import ask_teacher, compare, figure_names, open_held_out, processes_for
from distiller.vision.files import Processor, find_classifier, find_folder, read_config
from distiller.vision.network import LOGITS, ClassifierNetwork
from distiller.vision.objective import Compared, Objective
from distiller.vision.prediction_grid import classes_of, prediction_grid, read_prompts
from distiller.vision.samples import PictureBatch, PictureData, PictureSample, collate
from distiller.vision.source import PictureSource
from distiller.vision.student import (
    DistilledClassifier,
    build_model,
    check_features,
    load_student,
    plan_student,
    save_student,
)
from distiller.vision.trained_teacher import TrainedTeacher

MAX_SAMPLES = 10


class ClassificationTask(
    CacheableWhole[PictureBatch, ClassifierNetwork], Checkable, Staged, HoldsOut, Evaluable, Samplable, Plannable
):
    """See `distiller.tasks.base.Task`; the loss is a mean over samples."""

    sample_suffixes = WRITTEN_SUFFIXES

    def __init__(self, recipe: ClassificationRecipe) -> None:
        self._recipe, self._losses = recipe, recipe.task.losses
        teacher = recipe.teacher
        root, _ = find_folder(teacher.path, teacher.revision, teacher.subfolder)
        origin = f"teacher.path: {teacher.path}"
        self._processor = Processor(root, _num_channels(read_config(root / "config.json", origin)), origin)
        self._files = find_classifier(teacher.path, teacher.revision, teacher.subfolder, self._processor)
        trains_teacher = recipe.teacher_training.max_steps is not None
        if not trains_teacher:
            self._files.check_listed()
        if not trains_teacher and self._files.repository is None:
            self._files.fetch()
        self._plan = plan_student(recipe.student, self._files, self._processor)
        self._check_losses()
        if recipe.train.gradient_checkpointing and not self._plan.structure.can_recompute:
            raise UserError(
                "train.gradient_checkpointing: the library does not offer it for this student; set it false"
            )
        self._source = PictureSource(recipe, self._files.labels, self._processor)
        self._trained = TrainedTeacher(recipe, self._files, self._processor, self._source) if trains_teacher else None
        # Not a method of the task: the network may be sent to another process, without the names of all pictures.
        files = partial(converted_files, self._files, stages_dir=recipe.stages_dir)
        self.network = ClassifierNetwork(
            self._files.config,
            self._files.structure,
            self._files.source,
            files if self._trained is None else self._trained_weight_files,
        )
        self.num_samples, self.data_digest = len(self._source.training), self._source.data_digest
        self._objective = Objective(self._losses)

    @property
    def needs_live_teacher(self) -> bool:
        return bool(self._objective.wanted)

    def with_defaults(self, recipe: ClassificationRecipe) -> ClassificationRecipe:
        return recipe

    def notices(self) -> list[str]:
        notices = list(self._source.notices)
        if self._plan.uses_batch_statistics:
            notices.append(
                "student.batch_norm is batch: the student depends on the size of a micro-batch, and the same run split "
                "in another way is another run; frozen and group do not"
            )
        if self._plan.drops_statistics:
            notices.append(
                "student.batch_norm is group: the trained statistics of the student's BatchNorm layers are left out, "
                "so it begins far from what it was, and its exported folder loads with trust_remote_code=True alone; "
                "frozen keeps them"
            )
        if self._plan.dropout:
            keys = ", ".join(self._plan.dropout)
            notices.append(f"the student trains without dropout ({keys}), whose masks no two engines share")
        return notices

    def check_samples(self) -> str:
        return self._source.check_samples(self._processor.num_channels)

    def prepare_stages(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        if self._trained is not None:
            self._trained.train_once(ranks)
        return False

    def missing_stage(self, dtype: torch.dtype) -> Path | None:
        del dtype
        return None if self._trained is None else self._trained.missing_folder

    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        del dtype
        return [] if self._trained is None else [self._trained.stage]

    def load_data(self, ranks: Ranks, teacher: Teacher | None) -> PictureData:
        return self._source.training

    @property
    def num_held_out(self) -> int:
        return len(self._source.held_out)

    def held_out_sample(self, draw: int, index: int) -> PictureSample:
        return self._source.held_out[draw, index]

    def student_skeleton(self) -> DistilledClassifier:
        with torch.device("meta"):
            return self._with_projections(self._plan.skeleton())

    @property
    def block_classes(self) -> tuple[str, ...]:
        return self._plan.structure.block_classes

    def build_student(self) -> DistilledClassifier:
        files = self._weight_files_of_module() if self._recipe.student.from_teacher else []
        return self._with_projections(build_model(self._plan, self._files, files, self._recipe.seed))

    def enable_gradient_checkpointing(self, trained: TrainedStudent) -> None:
        enable_checkpointing(trained.model)

    def collate(self, samples: Sequence[Any]) -> PictureBatch:
        return collate(samples)

    def example(self, batch_size: int) -> PictureBatch:
        return self.collate([PictureSample(0, torch.zeros(self._processor.shape), 0)] * batch_size)

    def stage_passes(self) -> tuple[int, int]:
        return 0, 1

    def to_device(self, batch: PictureBatch, device: torch.device) -> PictureBatch:
        moved = batch.map(lambda tensor: tensor.to(device, non_blocking=True))
        if not self._recipe.task.channels_last:
            return moved
        # Pixels only: labels have no channel dimension.
        return PictureBatch(moved.sample_ids, moved.pixels.to(memory_format=torch.channels_last), moved.labels)

    def request(self, batch: PictureBatch) -> Request:
        return Request(batch.sample_ids, {"pixels": batch.pixels}, self.wanted)

    @property
    def has_draws(self) -> bool:
        return self._recipe.data.augmentation != "none"

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((LOGITS, *self._objective.wanted)))

    def data_settings(self) -> dict[str, Any]:
        return {}

    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        del dtype
        data = self._recipe.data
        changes = {"augmentation": data.augmentation, "crop_scale": data.crop_scale if self.has_draws else None}
        return {
            **changes,
            "config": self._files.describe(),
            "processor": self._processor.describe(),
            "pictures": self._source.contents_digest,
        }

    def sample_ids(self, batch: PictureBatch) -> tuple[int, ...]:
        return batch.sample_ids

    def count(self, batch: PictureBatch) -> int:
        return len(batch.sample_ids)

    def tokens(self, batch: PictureBatch) -> int:
        """Positions that the student's blocks see; where stages differ, the positions of the first block's output."""
        shapes = self._plan.structure.block_shapes
        if not shapes:
            return len(batch.sample_ids)
        positions = shapes[0][1:] if len(shapes[0]) == 3 else shapes[0][:1]
        return len(batch.sample_ids) * torch.Size(positions).numel()

    def student_inputs(
        self, batch: PictureBatch, teacher_outputs: Outputs | None, dtype: torch.dtype
    ) -> Mapping[str, Any]:
        del teacher_outputs
        return {"pixels": batch.pixels.to(dtype)}

    def loss(
        self, student_outputs: tuple[Tensor, list[Tensor]], teacher_outputs: Outputs | None, batch: PictureBatch
    ) -> LossSum:
        logits, features = student_outputs
        return self._objective.loss(Compared(logits, features, batch.labels, teacher_outputs or {}))

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        save_student(self._plan, state, self._processor, folder)

    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        held_out = self._source.held_out
        count = min(MAX_SAMPLES, len(held_out))
        if not count:
            return
        batch = self.to_device(collate([held_out[0, index] for index in range(count)]), accelerator.device)
        predictions = {}
        if teacher is not None:
            # Every rank asks the teacher, since some placements communicate.
            predictions["teacher"] = ask_teacher(teacher, batch.pixels, batch.sample_ids).argmax(-1).tolist()
        if accelerator.is_main_process:
            predictions["student"] = classes_of(load_student(run_dir, self._plan, accelerator.device), batch.pixels)
            pictures = [held_out.picture(index) for index in range(count)]
            grid = prediction_grid(pictures, self._files.labels, batch.labels.tolist(), predictions)
            grid.save(run_dir / "samples.png")

    def figures(self) -> tuple[str, ...]:
        return figure_names(len(self._files.labels))

    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        options, held_out = self._recipe.evaluation, self._source.held_out
        if not len(held_out):
            raise UserError(
                f"data.held_out {self._recipe.data.held_out:g} holds no picture out, so nothing can be evaluated; "
                "train with a larger share of each class held out"
            )
        student = load_student(run_dir, self._plan, device)
        teacher = open_alone(self.network, self._recipe, dtype, device)
        count = min(options.num_samples or len(held_out), len(held_out))
        ranks = Ranks.join(device)
        num_workers = processes_for(held_out, options.batch_size, self._recipe.train.num_workers, ranks)

        def compare_with(batch_size: int) -> dict[str, Any]:
            batches = batches_of(open_held_out(held_out, count, batch_size, num_workers, ranks))
            return compare(teacher, student, batches, self._placing(device))

        report = with_fitting_batch(compare_with, options.batch_size, "evaluation.batch_size")
        teacher.close()
        num_student, num_teacher = sum(p.numel() for p in student.parameters()), self.network.num_parameters()
        return report | {
            **size_figures(num_student, num_teacher, "accuracy_ratio"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "teacher_dtype": str(dtype).removeprefix("torch."),
        }

    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        gate, reached = self._recipe.evaluation.min_accuracy_ratio, report.get("accuracy_ratio")
        if gate is None or (reached is not None and reached >= gate):
            return None
        return (
            f"evaluation.min_accuracy_ratio is {gate:.1%} and the student reaches {reached or 0:.1%} of the teacher's "
            "held-out accuracy"
        )

    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        """Writes these picture files with the classes that teacher and student predict.

        `seed` has no effect, since nothing is drawn.
        """
        del seed
        pictures = read_prompts(prompts, self._processor.num_channels)
        pixels = self._placing(device)(
            torch.stack([torch.from_numpy(self._processor(picture)) for picture in pictures])
        )
        student = load_student(run_dir, self._plan, device)
        teacher = open_alone(self.network, self._recipe, teacher_dtype(self._recipe.teacher.dtype, device), device)
        predictions = {"teacher": ask_teacher(teacher, pixels, range(len(pictures))).argmax(-1).tolist()}
        teacher.close()
        predictions["student"] = classes_of(student, pixels)
        prediction_grid(pictures, self._files.labels, [None] * len(pictures), predictions).save(output)

    def _placing(self, device: torch.device) -> Any:
        """A function that moves pixels [B, C, H, W] to the device, in the recipe's memory format."""
        memory_format = torch.channels_last if self._recipe.task.channels_last else torch.contiguous_format
        return lambda pixels: pixels.to(device).contiguous(memory_format=memory_format)

    def _check_losses(self) -> None:
        features = self._losses.features
        if features.weight:
            student, teacher = self._plan.structure, self._files.structure
            check_features(student, teacher, features.student_blocks, features.teacher_blocks)

    def _with_projections(self, model: nn.Module) -> DistilledClassifier:
        features, student, teacher = self._losses.features, self._plan.structure, self._files.structure
        pairs = zip(features.student_blocks, features.teacher_blocks, strict=True) if features.weight else ()
        blocks = [(student.block_names[i], student.block_shapes[i], teacher.block_shapes[j]) for i, j in pairs]
        return DistilledClassifier(model, blocks, self._recipe.seed)

    def _weight_files_of_module(self) -> list[Path]:
        return self.network.weight_files(self.network.module_names[0])

    def _trained_weight_files(self, names: set[str]) -> list[Path]:
        del names
        assert self._trained is not None
        return self._trained.weight_files()


def _num_channels(config: PretrainedConfig) -> int:
    """Channels of a picture, by the model's config; 3 where it does not say."""
    return int(config.to_dict().get("num_channels", 3))
