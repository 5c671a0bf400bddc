"""Writes the table of placements in docs/MODEL_LOADING_STRATEGIES.md: `python -m tests.placement_table`."""

from __future__ import annotations

from pathlib import Path

from distiller.teachers.rules import table

PAGE = Path(__file__).parents[1] / "docs" / "MODEL_LOADING_STRATEGIES.md"
BEGIN, END = "<!-- placements: begin -->\n", "<!-- placements: end -->\n"


def page() -> str:
    """The whole page, with the table as the program's rules have it now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has no lines {BEGIN.strip()} and {END.strip()}, in this order"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
