"""Runs the older command line: translates flags and student config, then trains the resulting recipe."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distiller.cli import guarded
from distiller.config.loading import parse
from distiller.distributed.process import is_main_process, prepare_environment, rank
from distiller.distributed.shutdown import StopSignals
from distiller.errors import RunError, UserError
from distiller.older.flags import Flags, read_flags
from distiller.older.launch import Launch, check_launcher
from distiller.older.recipe import translate
from distiller.older.student import is_older, translate_student
from distiller.storage.packaged_files import local_path
from distiller.storage.yaml_files import dump_yaml

if TYPE_CHECKING:
    from distiller.diffusion.family import Family

STUDENT_FILE = "student_config.json"
"""Name of the translated student config in output_dir; `student.config` of the recipe is its path."""


def main(command: Sequence[str] | None = None) -> int:
    """Runs `command` (script and flags; default `sys.argv`). Returns the exit code: 0 done, 1 failed, 2 wrong use."""
    prepare_environment()
    return guarded(lambda stops: _train(sys.argv if command is None else command, stops))


def _train(command: Sequence[str], stops: StopSignals) -> None:
    flags = read_flags(command[1:])
    launch = Launch.here()
    notices = check_launcher(flags, launch, command)
    data, recipe_notices = translate(flags, launch)
    notices += recipe_notices
    data["output_dir"] = str(_free_folder(Path(os.path.expanduser(flags.output_dir)), flags.resume, notices))
    student = _student(flags, data, notices)
    recipe = parse(data, "the recipe of these flags")
    _check_sample_dir(flags)
    if is_main_process():
        _show(notices, student, data)

    file = Path(recipe.output_dir) / STUDENT_FILE
    if student is not None:
        _write_student(file, student, flags.resume)
    from distiller import commands
    from distiller.run_folder.output_dir import RECIPE_FILE

    stops.listen()
    try:
        commands.train(recipe, flags.resume, stops)
    except UserError:
        # The run was refused before it claimed the folder: remove the file that was written above.
        if student is not None and not os.path.isfile(file.with_name(RECIPE_FILE)):
            _remove(file)
        raise
    if flags.sample_dir is not None and is_main_process():
        _copy_samples(Path(recipe.output_dir), Path(flags.sample_dir))


def _free_folder(wanted: Path, resume: bool, notices: list[str]) -> Path:
    """`wanted`, or if it holds a run, which the older trainer would have overwritten, the first free `wanted-2`, ...

    All ranks find the same folder: rank 0 claims one only after all ranks have joined the process group.
    """
    from distiller.run_folder.output_dir import RECIPE_FILE

    if resume or not wanted.name:
        return wanted
    folder, index = wanted, 1
    while os.path.isfile(folder / RECIPE_FILE):
        index += 1
        folder = wanted.with_name(f"{wanted.name}-{index}")
    if folder != wanted:
        notices.append(f"{wanted} holds a run, which is kept (--resume continues it); this one goes to {folder}")
    return folder


def _student(flags: Flags, data: dict[str, Any], notices: list[str]) -> dict[str, Any] | None:
    """The translated student config if it is an older one, else None.

    If it is, sets its path and sizes in the recipe `data`. Adds to `notices`. Raises UserError.
    """
    from distiller.config.teacher import Teacher
    from distiller.diffusion.families import find_pipeline

    origin = f"--student_config {flags.student_config}"
    given = _read_json(local_path(flags.student_config), origin)
    translated = None
    if is_older(given):
        family = find_pipeline(Teacher(path=flags.teacher_path))
        _check_kind(family, flags)
        teacher = {key: family.teacher_config[key] for key in family.architecture.defaults()}
        latent_pixels = int(family.files.vae_config.get("scale_factor_spatial", 8))
        translated = translate_student(given, teacher, latent_pixels, origin)
        notices += translated.notices
        data["student"]["config"] = str(Path(data["output_dir"]) / STUDENT_FILE)
        if translated.max_sequence_length is not None:
            data["task"]["max_sequence_length"] = translated.max_sequence_length
        if translated.image_size is not None:
            data["task"] = {"height": translated.image_size, "width": translated.image_size} | data["task"]
            _check_size(data["task"]["height"], family)
    if "height" not in data["task"]:
        notices.append(f"{origin} names no image_size: the teacher's own; --image_size PIXELS sets another")
    return None if translated is None else translated.config


def _check_kind(family: Family, flags: Flags) -> None:
    if family.architecture.name != "WanTransformer3DModel":
        raise UserError(
            f"--student_config {flags.student_config} is an older config, which describes a Wan transformer, and "
            f"--teacher_path {flags.teacher_path} has a {family.architecture.name}; give that class's config.json"
        )


def _check_size(pixels: int, family: Family) -> None:
    try:
        family.latent_shape(1, pixels, pixels)
    except UserError as error:
        raise UserError(f"image_size is {pixels}: {error}") from error


def _read_json(file: Path, origin: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError(f"{origin} does not exist; give an older config or a WanTransformer3DModel's") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{origin} is not readable JSON ({error}); correct it") from error


def _check_sample_dir(flags: Flags) -> None:
    if flags.sample_dir is not None and os.path.exists(flags.sample_dir) and not os.path.isdir(flags.sample_dir):
        raise UserError(f"--sample_dir {flags.sample_dir} is a file; give a folder")


def _show(notices: Sequence[str], student: dict[str, Any] | None, data: dict[str, Any]) -> None:
    for notice in notices:
        print(f"note: {notice}")
    if student is not None:
        print(f"the student's config.json, kept in {data['student']['config']}:\n{json.dumps(student, indent=2)}")
    kept = Path(data["output_dir"]) / "recipe.yaml"
    print(f"the recipe of these flags, kept with every default in {kept}:\n{dump_yaml(data)}", flush=True)


def _write_student(file: Path, config: dict[str, Any], resume: bool) -> None:
    """Writes the file atomically; every rank writes the same, so that each node has it. Raises UserError."""
    text = json.dumps(config, indent=2) + "\n"
    try:
        if resume and file.is_file() and file.read_text(encoding="utf-8") != text:
            raise UserError(
                f"--resume: the student config is another one than {file}, which this run was started with; give the "
                "same, or another --output_dir"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{rank()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise UserError(f"--output_dir: {file.parent} cannot be written ({error.strerror}); give another") from error


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    try:
        file.parent.rmdir()
    except OSError:
        # The folder does not exist, or holds other files.
        return


def _copy_samples(output_dir: Path, sample_dir: Path) -> None:
    drawn, copy = output_dir / "samples.png", sample_dir / "samples.png"
    if copy.resolve() == drawn.resolve():
        return
    try:
        sample_dir.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(drawn, copy)
    except OSError as error:
        raise RunError(f"--sample_dir: {sample_dir} cannot be written ({error.strerror}); {drawn} is there") from error
