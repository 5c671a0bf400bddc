"""`distiller report`: reads runs, and writes their page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distiller.distributed.process import print_to_stderr
from distiller.errors import UserError
from distiller.report.run_files import RunFiles, read_run
from distiller.run_folder.files import REPORT_FILE
from distiller.storage.durable_writes import write_durably


def report(folders: Sequence[Path], output: Path | None) -> Path:
    """Writes the page of these runs' folders and returns its file.

    Args:
        output: report.html in the run's folder by default; of several runs, in the working folder.

    Raises:
        UserError: a folder holds no run or nothing that was logged, is given twice, or the file cannot be written.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("distiller report: a run is given twice; give each once")
    runs = _distinct([read_run(folder) for folder in folders])
    target = output or (folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    if target.is_dir():
        raise UserError(f"--output {target}: is a folder; give a file in it, such as {target / REPORT_FILE}")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--output {target}: its folder does not exist; make it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise UserError(f"{target.absolute().parent}: cannot be written; give --output with a file in another folder")
    try:
        _write(runs, target)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror or error}); give --output with another file"
        ) from error
    return target


def update_report(folder: Path) -> None:
    """Writes RUN/report.html and says where; a failure is one line on stderr. Never raises."""
    file = folder / REPORT_FILE
    try:
        _write([read_run(folder)], file)
    except Exception as error:
        # A run that is complete must not fail for the sake of its picture.
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        print_to_stderr(
            f"warning: {file} was not written ({' '.join(str(what).split())}); the run is complete without it"
        )
    else:
        # The terminal may be gone.
        with contextlib.suppress(OSError):
            print(f"report: {file}", flush=True)


def _write(runs: Sequence[RunFiles], file: Path) -> None:
    # plotly takes time to import, and is missing where somebody installed without dependencies.
    from distiller.report.page import make_page

    write_durably(file, make_page(runs))


def _distinct(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Runs whose folders have one name are called by as much of their paths as tells them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    raise AssertionError("folders differ")
