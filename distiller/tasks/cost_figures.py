"""What `evaluate` reports of every task under the same names: what the student costs beside its teacher."""

from __future__ import annotations

from typing import Any

SIZE_FIGURES = ("student_parameters", "teacher_parameters", "size_ratio")
"""Keys of the numbers of `size_figures`."""


def size_figures(student_parameters: int, teacher_parameters: int, main_figure: str) -> dict[str, Any]:
    """Sizes of both models, and the name of the figure that says most about the student's quality.

    `size_ratio` is how many times as many parameters the teacher has. The report holds `speed_ratio` too, how many
    times as much the student computes in a second, and the figure itself under the name `main_figure`.
    """
    return {
        "student_parameters": student_parameters,
        "teacher_parameters": teacher_parameters,
        "size_ratio": teacher_parameters / student_parameters,
        "main_figure": main_figure,
    }


def describe_cost(report: dict[str, Any]) -> str:
    """One line: the main figure, at which size and speed."""
    name, quality = report["main_figure"], report[report["main_figure"]]
    reached = f"{name} {'without a value' if quality is None else f'{quality:.4g}'}"
    size, speed = report["size_ratio"], report["speed_ratio"]
    return f"{reached} with 1/{size:.3g} of the teacher's parameters, at {speed:.3g} times its speed"
