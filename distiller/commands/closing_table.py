"""The table that a training run ends with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from distiller.training.timing import parts_of_update

_NAME_WIDTH = 11


def closing_table(folder: Path, summary: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Lines of text from summary.json and the last line of metrics.jsonl; what is not known is left out."""
    steps, sessions, rate = summary["steps"], summary["sessions"], summary["samples_per_s"]
    took = f"{steps:,} updates in {tqdm.format_interval(summary['wall_s'])}"
    took += f" ({sessions} sessions)" if sessions > 1 else ""
    rows = [("finished", took + (f"; {rate:,.4g} samples/s in the loop" if rate else ""))]
    if summary["final_loss"] is not None:
        rows.append(("loss", _losses(summary)))
    if metrics.get("perf/step_ms"):
        rows.append(("time", ", ".join(f"{name} {share:.0%}" for name, share in parts_of_update(metrics).items())))
    peak, expected = summary["gpu_peak_gib"], summary["expected_gpu_peak_gib"]
    if peak is not None:
        rows.append(("memory", f"{peak:.2f} GiB of a GPU" + (f", predicted {expected:.2f}" if expected else "")))
    if skipped := metrics.get("optim/skipped_steps"):
        rows.append(("left out", f"{skipped:,} updates, whose loss or gradient was not finite"))
    rows.append(("student", str(folder / "student")))
    rows += [("samples", str(file)) for file in sorted(folder.glob("samples.*"))]
    best = summary["best"]
    if best is not None and best["step"] != steps:
        rows.append(("best", f"distiller export {folder / 'checkpoints'}/step-{best['step']}"))
    rows.append(("next", f"distiller evaluate {folder}"))
    return "\n".join(f"{name:<{_NAME_WIDTH}}{text}" for name, text in rows)


def _losses(summary: Mapping[str, Any]) -> str:
    text, held_out, best = f"{summary['final_loss']:.4g}", summary["held_out_loss"], summary["best"]
    if held_out is not None:
        text += f", on held-out data {held_out:.4g}"
    if best is not None:
        text += f", the lowest {best['loss']:.4g} after update {best['step']}"
    return text
