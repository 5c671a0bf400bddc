"""The student classifier, from a config, a folder or the teacher's layers, and its projections for feature matching."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from distiller.config.classification import ClassificationStudent
from distiller.data import rng
from distiller.errors import UserError
from distiller.storage.packaged_files import local_path
from distiller.tasks.dropout import remove_dropout
from distiller.tasks.feature_capture import capture_outputs
from distiller.tasks.feature_matching import new_projections
from distiller.tasks.layer_selection import evenly_spaced
from distiller.tasks.student_module import TrainedStudent, damaged_student, exported_folder, model_state
from distiller.vision.batch_norm import has_batch_norm, replace_batch_norm
from distiller.vision.files import (
    ClassifierFiles,
    Processor,
    inspect_config,
    labels_of,
    read_config,
)
from distiller.vision.group_norm_export import save_group_norm
from distiller.vision.library import new_model, read_model
from distiller.vision.structure import Structure, first_tensor
from distiller.vision.weight_files import check_weights, stored_files


@dataclass(frozen=True)
class StudentPlan:
    """The student before any weight is read: its config, its structure, and the options of the recipe."""

    options: ClassificationStudent
    config: PretrainedConfig
    structure: Structure
    dropout: tuple[str, ...]
    """Keys of dropout in the config that were above 0 and have been set to 0."""

    def skeleton(self) -> nn.Module:
        """The model on the meta device, with the normalisation layers that it is trained with."""
        with init_empty_weights(include_buffers=True):
            model = new_model(self.config)
        replace_batch_norm(model, self.options.batch_norm)
        return model

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the model has BatchNorm layers that use the statistics of a micro-batch."""
        return self.options.batch_norm == "batch" and has_batch_norm(self.skeleton())

    @property
    def drops_statistics(self) -> bool:
        """Whether trained BatchNorm layers are replaced by GroupNorm, which has no running statistics."""
        is_trained = self.options.from_teacher or self.options.path is not None
        if self.options.batch_norm != "group" or not is_trained:
            return False
        with init_empty_weights(include_buffers=True):
            return has_batch_norm(new_model(self.config))


def plan_student(options: ClassificationStudent, files: ClassifierFiles, processor: Processor) -> StudentPlan:
    """The student's config, checked against the teacher's. Of weights, reads headers only.

    Raises:
        UserError: the config or its folder cannot be used, or the student's classes are not the teacher's.
    """
    if options.from_teacher:
        config, origin = _shallower(options, files), "student"
    elif options.config is not None:
        file, origin = local_path(options.config), f"student.config: {options.config}"
        config = read_config(file, origin)
    else:
        folder, origin = local_path(options.path or ""), f"student.path: {options.path}"
        if not os.path.isdir(folder):
            raise UserError(f"{origin} is not a folder; give a saved model's")
        config = read_config(folder / "config.json", origin)
        check_weights(folder, origin)
    dropout = remove_dropout(config)
    structure = inspect_config(config, processor.shape, origin)
    if structure.num_logits != files.structure.num_logits:
        raise UserError(
            f"{origin}: the student has {structure.num_logits} classes and the teacher {files.structure.num_logits}; "
            "they must be equal"
        )
    labels = labels_of(config, structure.num_logits, origin)
    if labels != files.labels and any(not name.startswith("LABEL_") for name in labels):
        number = next(i for i, pair in enumerate(zip(labels, files.labels, strict=True)) if pair[0] != pair[1])
        raise UserError(
            f"{origin}: class {number} is {labels[number]!r} and the teacher's {files.labels[number]!r}; the order of "
            "id2label must be equal"
        )
    # The student is trained and saved in float32, also where the config was saved with weights of another dtype.
    config.dtype = torch.float32
    config.id2label = dict(enumerate(files.labels))
    config.label2id = {name: number for number, name in enumerate(files.labels)}
    return StudentPlan(options, config, structure, dropout)


def build_model(plan: StudentPlan, files: ClassifierFiles, teacher_files: Sequence[Path], seed: int) -> nn.Module:
    """Builds the student on the CPU in float32, in training mode, the same on every rank and under every engine.

    New weights are drawn with `seed`; torch's random state on the CPU is restored afterwards. Does not communicate.

    Args:
        files: the teacher.
        teacher_files: the teacher's safetensors files, with the names of its module; read only where the student takes
            the teacher's layers.

    Raises:
        UserError: the weights of `student.path` cannot be read, or are not those of its config.
    """
    options = plan.options
    if options.path is not None:
        model = load_model(local_path(options.path), plan.config)
    else:
        with rng.seeded(seed):
            model = new_model(plan.config)
        if options.from_teacher:
            copy_layers(model, plan.structure, files.structure, teacher_files)
    replace_batch_norm(model, options.batch_norm)
    # transformers loads a model in eval mode, and builds a new one in training mode.
    return model.float().train()


def load_model(folder: Path, config: PretrainedConfig) -> nn.Module:
    """A saved classifier in float32 on the CPU, in eval mode.

    Raises:
        UserError: the weights cannot be read, or are not those of the config.
    """
    try:
        model, report = read_model(folder, config, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: is damaged ({' '.join(str(error).split())}); copy it again") from error
    wrong = sorted(
        str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind]
    )
    if wrong:
        raise UserError(f"{folder}: its weights are not those of its config.json ({wrong[0]}); give another folder")
    return model


def copy_layers(
    model: nn.Module, student_structure: Structure, teacher_structure: Structure, files: Sequence[Path]
) -> None:
    """Copies the teacher's tensors into the student: evenly spaced layers of each stage, and all tensors of no layer.

    A tensor that the files lack keeps its value.

    Args:
        student_structure, teacher_structure: structure of the student and of the teacher.
        files: the teacher's safetensors files, with the names of its module.
    """
    source_of = {}
    for prefix, names in _stages(student_structure).items():
        available = _stages(teacher_structure)[prefix]
        kept = evenly_spaced(len(names), len(available))
        source_of |= {name: available[index] for name, index in zip(names, kept, strict=True)}
    opened = [safe_open(file, framework="pt") for file in files]
    file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a mapping)
    with torch.no_grad():
        for name, target in model.state_dict(keep_vars=True).items():
            block = next((block for block in source_of if name.startswith(f"{block}.")), None)
            source = name if block is None else source_of[block] + name.removeprefix(block)
            if source in file_of:
                target.copy_(file_of[source].get_tensor(source))


def save_student(plan: StudentPlan, state: Mapping[str, Tensor], processor: Processor, folder: Path) -> None:
    """Writes the model in the library's own format, with its processor, from the trained module's full state."""
    model = new_model(plan.config)
    changes_norms = plan.options.batch_norm == "group" and has_batch_norm(model)
    replace_batch_norm(model, plan.options.batch_norm)
    model.load_state_dict(model_state(state), strict=True)
    if changes_norms:
        save_group_norm(model, folder)
    else:
        model.save_pretrained(folder)
    processor.save(folder)


def load_student(run_dir: Path, plan: StudentPlan, device: torch.device) -> nn.Module:
    """The exported student of a run, in float32 and eval mode. Raises UserError when the run has none."""
    folder = exported_folder(run_dir)
    if plan.options.batch_norm == "group" and has_batch_norm(new_model(plan.config)):
        with torch.device("meta"):
            model = new_model(plan.config)
        replace_batch_norm(model, "group")
        state: dict[str, Tensor] = {}
        try:
            for file in stored_files(folder):
                with safe_open(file, framework="pt") as stored:
                    state |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
            model.load_state_dict(state, strict=True, assign=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise damaged_student(run_dir, error) from error
    else:
        model = load_model(folder, plan.config)
    return model.eval().to(device)


class DistilledClassifier(TrainedStudent):
    """The student model and, for feature matching, projections into the teacher's widths."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], seed: int
    ) -> None:
        """`blocks`: name and output shape of each matched block, and the output shape of the teacher's block.

        Shapes are for one picture, without the batch.
        """
        super().__init__(model)
        self.feature_blocks = tuple(name for name, _, _ in blocks)
        self.projections = new_projections([(ours, theirs) for _, ours, theirs in blocks], seed)

    def forward(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, classes] of pixels [B, C, H, W], and the projected output of each matched block.

        A projected output has the shape of the teacher's block's output.
        """
        blocks = [(name, self.model.get_submodule(name)) for name in self.feature_blocks]
        with capture_outputs(blocks) as captured:
            logits = self.model(pixel_values=pixels).logits
        # By index: Accelerate's regional compilation wraps an empty list into a module that cannot be iterated.
        features = [self.projections[i](first_tensor(captured[name])) for i, name in enumerate(self.feature_blocks)]
        return logits, features


def check_features(
    student_structure: Structure, teacher_structure: Structure, student: Sequence[int], teacher: Sequence[int]
) -> None:
    """Raises UserError unless all matched blocks exist, and the outputs of each pair have the same positions.

    Args:
        student_structure, teacher_structure: structure of the student and of the teacher.
        student, teacher: indices of the matched blocks, pair by pair.
    """
    for key, numbers, structure in (
        ("student_blocks", student, student_structure),
        ("teacher_blocks", teacher, teacher_structure),
    ):
        for index in numbers:
            if index >= (count := len(structure.block_names)):
                raise UserError(
                    f"task.losses.features.{key} names block {index}; there are {count}"
                    + (f", numbered from 0 to {count - 1}" if count else "; set the weight to 0")
                )
    for i, j in zip(student, teacher, strict=True):
        a, b = student_structure.block_shapes[i], teacher_structure.block_shapes[j]
        if len(a) != len(b) or _positions(a) != _positions(b):
            raise UserError(
                f"task.losses.features: block {i} of the student gives {list(a)} for a picture and block {j} of "
                f"the teacher {list(b)}; match blocks with as many positions, or set the weight to 0"
            )


def _positions(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(H, W) of the shape (C, H, W), (tokens,) of the shape (tokens, dim)."""
    return shape[1:] if len(shape) == 3 else shape[:1]


def _shallower(options: ClassificationStudent, files: ClassifierFiles) -> PretrainedConfig:
    """The teacher's config with fewer layers. Raises UserError where the options do not fit it."""
    values, kind = files.config.to_dict(), type(files.config).__name__
    stages, layers = values.get("depths"), values.get("num_hidden_layers")
    if stages is None and layers is None:
        # CLIP's holds the config of its vision model inside, MobileNet's says nothing of layers.
        raise UserError(f"student: the teacher's {kind} has neither depths nor num_hidden_layers; give student.config")
    if options.depths is not None:
        if stages is None or len(stages) != len(options.depths):
            found = "no stages; give student.num_layers" if stages is None else f"{len(stages)} stages"
            raise UserError(f"student.depths has {len(options.depths)} numbers and the teacher {found}")
        if any(wanted > available for wanted, available in zip(options.depths, stages, strict=True)):
            raise UserError(
                f"student.depths is {list(options.depths)} and the teacher's layers {list(stages)}; lower it"
            )
        cut = {"depths": list(options.depths)}
    else:
        if layers is None or stages is not None:
            raise UserError("student.num_layers: the teacher's layers are in stages; give student.depths")
        if (wanted := options.num_layers or 0) > layers:
            raise UserError(f"student.num_layers is {wanted} and the teacher has only {layers}; lower it")
        cut = {"num_hidden_layers": wanted}
    # Of the teacher's depth; backbones alone use them.
    for key in ("stage_names", "out_features", "out_indices"):
        values.pop(key, None)
    try:
        config = AutoConfig.for_model(**values | cut)
    except Exception as error:
        # Each config class raises errors of its own types for values that contradict each other.
        reason = " ".join(str(error).split())
        raise UserError(f"student: a {kind} cannot be cut so ({reason}); give student.config") from error
    if not cut.items() <= config.to_dict().items():
        # EfficientNet's is computed from other values.
        raise UserError(f"student: the teacher's {kind} does not take other {next(iter(cut))}; give student.config")
    return config


def _stages(structure: Structure) -> dict[str, list[str]]:
    """Names of the layers, by the module list that holds them."""
    stages: dict[str, list[str]] = {}
    for name in structure.block_names:
        stages.setdefault(name.rpartition(".")[0], []).append(name)
    return stages
