"""Imports go one way, and nothing refers to what lies above it."""

import ast
from pathlib import Path

import distiller
from scripts import mutation

PACKAGE = Path(distiller.__file__).parent
# Lower layers first; a module may import from its own layer and from lower ones.
LAYERS = [
    ["__init__", "errors"],
    ["distributed"],
    ["storage"],
    ["config"],
    ["data"],
    ["launch"],
    ["student_state"],
    ["checkpoint"],
    ["run_folder"],
    ["teachers"],
    ["tasks"],
    ["training"],
    ["planner"],
    ["diffusion", "language", "vision"],
    ["demo"],
    ["cache"],
    ["export"],
    ["session"],
    ["student_preparation", "teacher_preparation", "run_overview"],
    ["build"],
    ["report"],
    ["commands"],
    ["arguments"],
    ["cli"],
    ["__main__", "older"],
]
"""A package imports from the rows above its own, and from itself."""
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distiller"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("distiller.")}
    return {name for name in found if name in LAYER_OF}


def test_imports_go_one_way():
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        owner = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for imported in imports_of(file) - {owner}:
            if LAYER_OF[imported] >= LAYER_OF[owner]:
                wrong.append(f"{file.relative_to(PACKAGE)} imports {imported}")
    assert not wrong


def test_every_package_has_a_layer():
    owners = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in PACKAGE.rglob("*.py")}
    assert owners == set(LAYER_OF)


def test_the_loop_knows_interfaces_and_no_concrete_task_or_placement():
    text = (PACKAGE / "training" / "loop.py").read_text(encoding="utf-8")
    names = [a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) for a in n.names]
    assert not [name for name in names if "Diffusion" in name or "Replicated" in name or "Wan" in name]


def test_mutation_testing_finds_its_files_and_tests():
    for files, tests in mutation.GROUPS.values():
        assert all(any(PACKAGE.parent.glob(pattern)) for pattern in files), files
        assert all(any(Path(__file__).parent.glob(f"test_{name}.py")) for name in tests), tests
