"""The student, made from a config, a saved model or the teacher's blocks, and the projections trained with it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from distiller.config.diffusion import DiffusionStudent
from distiller.data import rng
from distiller.diffusion.architecture import Architecture, Origin
from distiller.diffusion.family import Family
from distiller.diffusion.pipeline import check_weights, model_files
from distiller.errors import UserError
from distiller.storage.json_files import read_json_object
from distiller.storage.packaged_files import local_path, search_note
from distiller.storage.weight_files import read_header
from distiller.tasks.feature_capture import capture_outputs
from distiller.tasks.feature_matching import new_projections
from distiller.tasks.student_module import TrainedStudent

CUT_KEYS = ("num_layers", "num_attention_heads", "ffn_dim")
"""Keys of the recipe's section `student` that cut a student out of the teacher."""


def student_config(student: DiffusionStudent, family: Family) -> dict[str, Any]:
    """The student's `config.json`, checked against the teacher's. Reads no weights.

    Raises:
        UserError: the file is missing or describes another class, its channels, patches or text width do not fit the
            teacher's, or diffusers cannot build the model.
    """
    architecture, teacher = family.architecture, family.teacher_config
    config = _cut_config(student, architecture, teacher) if student.from_teacher else _read_config(student, family)
    for key, name in architecture.keys_equal_to_teacher.items():
        student_value, teacher_value = config[key], teacher[key]
        if student_value != teacher_value:
            raise UserError(
                f"the student's {key} ({name}) is {student_value} and the teacher's {teacher_value}; they must be equal"
            )
    architecture.check_student(config, teacher)
    family.check_student(student, config)
    try:
        with torch.device("meta"):
            model = architecture.model_class.from_config(config)
    except Exception as error:
        kind = type(error).__name__
        raise UserError(f"diffusers cannot build a student of this config ({kind}: {error}); correct it") from error
    if student.path is not None:
        _check_stored(model, _model_folder(student, architecture), f"student.path: {student.path}")
    return config


def build_student(student: DiffusionStudent, config: Mapping[str, Any], family: Family, seed: int) -> Any:
    """Builds the student on the CPU in float32, the same on every rank and under every engine.

    Initial weights are drawn from `seed`; the global random state does not change. Does not communicate. Raises
    UserError for a missing folder.
    """
    model_class = family.architecture.model_class
    if student.path is not None:
        folder = _model_folder(student, family.architecture)
        return model_class.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    with rng.seeded(seed):
        model = model_class.from_config(dict(config))
    if student.from_teacher:
        copy_from_teacher(model, family)
    return model


def copy_from_teacher(model: Any, family: Family) -> None:
    """Copies evenly spaced blocks and leading channels of the teacher into the student, one tensor at a time.

    A narrower student gets the leading slice of every axis: the first heads and the first feed-forward channels. Of two
    experts the first is copied, since the second has learnt only small timesteps.
    """
    part, architecture = family.network_parts[0], family.architecture
    config, tensors = dict(model.config), _SavedTensors(family.files.fetch(part) / part)
    with torch.no_grad():
        for name, target in (*model.named_parameters(), *model.named_buffers()):
            origin = architecture.origin(name, target, config, family.teacher_config)
            if origin is not None and origin.name in tensors:
                target.copy_(_leading_slice(tensors[origin.name].float(), target, origin))


class DistilledStudent(TrainedStudent):
    """The student model and, for feature matching, projections into the teacher's width."""

    def __init__(
        self,
        architecture: Architecture,
        model: Any,
        blocks: Sequence[str],
        widths: Sequence[tuple[int, int]],
        seed: int,
    ) -> None:
        """Makes the projections, whose weights are drawn from the run's `seed`.

        Args:
            blocks: names of the student's submodules whose outputs are matched.
            widths: (student's, teacher's) width of each of these outputs.
        """
        super().__init__(model)
        self._architecture, self._blocks = architecture, tuple(blocks)
        self.projections = new_projections([((student,), (teacher,)) for student, teacher in widths], seed)

    def forward(self, latents: Tensor, timesteps: Tensor, **conditions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Predicts from latents [B, C, F, H, W], timesteps [B] and the prompts' conditions [B, ...].

        Returns:
            the prediction [B, C, F, H, W], and the projected output of each matched block,
            [B, tokens, teacher's width].
        """
        blocks = [(name, self.model.get_submodule(name)) for name in self._blocks]
        with capture_outputs(blocks) as captured:
            prediction = self._architecture.forward(self.model, latents, timesteps, conditions)
        # By index: Accelerate's regional compilation wraps an empty list into a module that cannot be iterated.
        features = [
            self.projections[i](self._architecture.feature(captured[name])) for i, name in enumerate(self._blocks)
        ]
        return prediction, features


def _cut_config(student: DiffusionStudent, architecture: Architecture, teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The teacher's config with the sizes that the recipe gives. Raises UserError for sizes that cannot be cut."""
    config = {**teacher}
    for key in CUT_KEYS:
        wanted = getattr(student, key)
        if wanted is None:
            continue
        if key not in architecture.cut_keys:
            known = ", ".join(f"student.{name}" for name in architecture.cut_keys)
            raise UserError(f"student.{key}: a {architecture.name} is not cut by it but by {known}; remove it")
        size = teacher[architecture.cut_keys[key]]
        if not isinstance(size, int):
            raise UserError(
                f"student.{key}: the teacher's {architecture.cut_keys[key]} is {size}, not one number; give "
                "student.config"
            )
        if wanted > size:
            raise UserError(f"student.{key} is {wanted} and the teacher has only {size}; lower it")
        config[architecture.cut_keys[key]] = wanted
    architecture.finish_cut(config, teacher)
    return config


def _read_config(student: DiffusionStudent, family: Family) -> dict[str, Any]:
    """The config of `student.config` or `student.path`, with defaults filled in. Raises UserError."""
    architecture = family.architecture
    if student.config is not None:
        file, key = local_path(student.config), "student.config"
    else:
        file, key = _model_folder(student, architecture) / "config.json", "student.path"
    missing = f"{key}: {file} does not exist{search_note(file)}; give a config.json of {architecture.name}"
    config = read_json_object(file, f"{key}: {file}", missing)
    defaults = architecture.defaults()
    architecture.check_config(defaults | config, f"{key}: {file}")
    unknown = {name for name in config if name not in defaults and not name.startswith("_")}
    if unknown:
        raise UserError(f"{key}: {file} has keys that {architecture.name} does not know: {', '.join(sorted(unknown))}")
    if student.path is not None:
        check_weights(file.parent, f"student.path: {student.path}")
    return defaults | config


def _check_stored(model: Any, folder: Path, origin: str) -> None:
    """Raises UserError where the files lack a tensor of the (meta) model, or hold another one or another shape.

    diffusers would drop the one without a word, and leave the other on the meta device. Reads headers only.
    """
    stored = {name: tensor for file in model_files(folder) for name, tensor in read_header(file).items()}
    expected, ignored = model.state_dict(), type(model)._keys_to_ignore_on_load_unexpected or ()
    for name in sorted(expected.keys() | stored.keys()):
        if name not in expected and any(re.search(pattern, name) for pattern in ignored):
            continue
        if name not in expected or name not in stored:
            found = "lack" if name in expected else "hold"
            raise UserError(f"{origin}: its weights {found} {name}, unlike the model of its config.json; copy it again")
        if stored[name].shape != tuple(expected[name].shape):
            raise UserError(
                f"{origin}: {name} has shape {list(stored[name].shape)} in the weights and "
                f"{list(expected[name].shape)} by its config.json; the two do not belong together"
            )


def _model_folder(student: DiffusionStudent, architecture: Architecture) -> Path:
    """The folder of the model at `student.path`, which may be inside a pipeline's. Raises UserError."""
    folder = local_path(student.path or "")
    if not os.path.isdir(folder):
        raise UserError(f"student.path: {student.path} is not a folder; give a saved model's or a pipeline's")
    return folder / architecture.part if (folder / architecture.part).is_dir() else folder


class _SavedTensors:
    """The tensors of a saved model, read one at a time from its safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(file, framework="pt") for file in model_files(folder)]
        self._owner = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def __getitem__(self, name: str) -> Tensor:
        return self._owner[name].get_tensor(name)


def _leading_slice(source: Tensor, target: Tensor, origin: Origin) -> Tensor:
    """The leading slice of `source` along every axis, in the shape of `target`; of stacked vectors, that of each."""
    if origin.num_stacked > 1:
        parts = source.unflatten(0, (origin.num_stacked, -1))
        source = parts[:, : target.shape[0] // origin.num_stacked].flatten(0, 1)
    return source[tuple(slice(0, size) for size in target.shape)]
