"""A plan as a picture: memory and time of every placement that can run."""

from __future__ import annotations

from pathlib import Path

from distiller.errors import UserError
from distiller.planner.gpus import GIB
from distiller.planner.plan import Plan, PlannedPlacement

SUFFIXES = (".png", ".svg", ".pdf")
FITS, TOO_LARGE, HOST = "#2f6f9f", "#c0504d", "#b0b0b0"


def check_chart(file: Path) -> None:
    """Raises UserError for a file of another kind, for a folder that is not there, and without matplotlib."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"--plot {file}: the name must end with {', '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise UserError(f"--plot {file}: its folder does not exist; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot needs matplotlib; run: pip install 'distiller[plots]'") from error


def write_chart(found: Plan, file: Path) -> None:
    """Writes bars of memory, and of time where it is known, for the placements that can run; see `check_chart`."""
    from matplotlib.figure import Figure

    rows = [row for row in found.placements if row.gpu_bytes][::-1]
    has_gpus = found.machine.gpu is not None
    figure = Figure(figsize=(10 if has_gpus else 6, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots(1, 2 if has_gpus else 1, sharey=True, squeeze=False)[0]
    names = [row.name for row in rows]
    colours = [FITS if row.fits else TOO_LARGE for row in rows]
    memory = axes[0]
    if has_gpus:
        memory.barh(names, [max(row.gpu_bytes) / GIB for row in rows], color=colours)
        memory.axvline(found.machine.gpu_memory / GIB, color="black", linestyle="--", label="a GPU's free memory")
        memory.set_xlabel("peak on a GPU, GiB")
        memory.legend(loc="upper right", fontsize="small")
        times = axes[1]
        times.barh(names, [row.step_ms or 0.0 for row in rows], color=colours)
        times.set_xscale("log")
        times.set_xlabel("an update, ms (logarithmic)")
        for place, row in enumerate(rows):
            times.annotate(_label(row), (row.step_ms or 1.0, place), (4, 0), textcoords="offset points", va="center")
        times.margins(x=0.25)
    else:
        memory.barh(names, [row.host_bytes / GIB for row in rows], color=HOST)
        memory.set_xlabel("host memory, GiB")
    figure.suptitle(f"{found.machine.describe()}\nblue fits, red does not", fontsize="medium")
    figure.savefig(file, dpi=150)


def _label(row: PlannedPlacement) -> str:
    return "" if row.step_ms is None else f"{row.step_ms:,.0f}"
