"""Writes the tree of modules in docs/architecture.md: `python -m tests.module_tree`, after a module comes or goes.

The line of a module or package is the first sentence of its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- python -m tests.module_tree: begin -->", "<!-- end -->"


def page() -> str:
    """The page with its tree written anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{chr(10).join(_tables())}\n{END}{after}"


def _tables() -> Iterator[str]:
    """One table of modules a package, after one of the packages."""
    package = ROOT / "distiller"
    yield "| module | what it does |\n| --- | --- |"
    yield from (_row(file) for file in sorted(package.glob("*.py")) if file.stem != "__init__")
    for folder in sorted(init.parent for init in package.rglob("__init__.py")):
        if folder == package:
            continue
        yield f"\n#### `{folder.relative_to(ROOT)}/`\n\n{_summary(folder / '__init__.py')}\n"
        files = [file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
        if files:
            yield "| module | what it does |\n| --- | --- |"
            yield from map(_row, files)
    yield ""


def _row(file: Path) -> str:
    return f"| `{file.name}` | {_summary(file)} |"


def _summary(file: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
