"""Runs the training loop on a recipe and compares its results with a plain loop's; lists a recipe's keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from pydantic import BaseModel
from torch import Tensor

from distiller.build import build
from distiller.config.recipe import Recipe
from distiller.distributed.shutdown import NO_STOP_SIGNALS
from distiller.training.loop import train
from distiller.training.run import Run
from tests import toys
from tests.plain_loop import Trained

ROOT = Path(__file__).parent.parent


@dataclass
class Ran:
    """The logged metrics of every update, and the trained weights, under the plain student's names."""

    metrics: list[dict[str, Any]]
    weights: dict[str, Tensor]
    average: dict[str, tuple[int, Tensor]] | None
    """Name -> this rank's part of the moving average: its start in the flat tensor, and its values."""
    is_fused: bool


def run(recipe: Recipe, resume: bool = False, stops: Any = NO_STOP_SIGNALS, stays: bool = False) -> Ran:
    """Builds and trains in this process, without export and samples. `stays`: keeps the Accelerator for another run."""
    built = build(recipe, resume)
    assert isinstance(built, Run)
    try:
        train(built, stops)
        weights = {name: value.detach().clone() for name, value in plain_module(built).state_dict().items()}
        average = None
        if built.average is not None:
            average = {piece.name: (piece.start, piece.values.clone()) for piece in built.average.pieces()}
        is_fused = bool(built.optimizer.param_groups[0]["fused"])
        return Ran(toys.read_metrics(Path(recipe.output_dir)), weights, average, is_fused)
    finally:
        if built.teacher is not None:
            built.teacher.close()
        if not stays:
            built.accelerator.end_training()
            forget_accelerate()


def plain_module(built: Run) -> torch.nn.Module:
    """The student as it was before an engine wrapped it."""
    return built.accelerator.unwrap_model(built.student)


def forget_accelerate() -> None:
    """Resets Accelerate, so that one test can build several Accelerators."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def assert_same(ours: Ran, theirs: Trained, first: Mapping[str, Tensor], tolerance: float = 2e-5) -> None:
    """Compares loss, terms, gradient norm, rate and epoch of every update, and the change of each weight tensor."""
    assert len(ours.metrics) == len(theirs.losses)
    assert [line["lr"] for line in ours.metrics] == pytest.approx(theirs.rates, rel=1e-12)
    assert [line["epoch"] for line in ours.metrics] == theirs.epochs
    assert [line["loss"] for line in ours.metrics] == pytest.approx(theirs.losses, rel=tolerance, abs=tolerance / 10)
    assert [line["grad_norm"] for line in ours.metrics] == pytest.approx(theirs.norms, rel=10 * tolerance)
    for line, terms in zip(ours.metrics, theirs.terms, strict=True):
        found = {name.removeprefix("loss/"): value for name, value in line.items() if name.startswith("loss/")}
        assert found == pytest.approx(terms, rel=tolerance, abs=tolerance / 10)
    assert_moved_alike(ours.weights, theirs.weights, first, 50 * tolerance)
    assert any(not torch.equal(value, first[name]) for name, value in theirs.weights.items())
    assert (ours.average is None) == (theirs.average is None)
    if ours.average is not None and theirs.average is not None:
        for name, (start, values) in ours.average.items():
            end = start + values.numel()
            parts = (values, theirs.average[name].flatten()[start:end], first[name].flatten()[start:end])
            assert_moved_alike(*({name: part} for part in parts), 50 * tolerance)
        assert ours.average


def assert_moved_alike(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], first: Mapping[str, Tensor], tolerance: float
) -> None:
    """For each tensor, the norm of the difference over the norm of its change in training."""
    # A tied weight may have two names in one and one name in the other.
    names = theirs.keys() & ours.keys()
    assert {name for name in theirs.keys() ^ ours.keys() if not name.endswith("lm_head.weight")} == set()
    assert names
    ways = {name: (theirs[name].double() - first[name].double()).norm().item() for name in names}
    for name in names:
        distance = (ours[name].double() - theirs[name].double()).norm().item()
        assert distance <= tolerance * ways[name] + 1e-8, f"{name}: {distance} of {ways[name]}"


def keys_of(section: type[BaseModel], names: Iterable[str] | None = None, prefix: str = "") -> list[str]:
    """The dotted keys of a section of the recipe and of those inside it; `names`: only these of its fields."""
    found = []
    for name, field in section.model_fields.items():
        if names is None or name in names:
            kind = field.annotation
            is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
            found += keys_of(kind, None, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    return found


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested mappings over others."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def assert_named_tests_exist(places: Iterable[str]) -> None:
    """Asserts that tests named as `file::name` exist."""
    for place in places:
        file, _, name = place.partition("::")
        names = re.findall(r"^ *def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert name.rpartition("::")[2] in names, place


def unique_rows(table: Mapping[str, list[dict[str, Any]]]) -> list[Any]:
    """The rows as pytest's parameters, without duplicates, each named by its first key."""
    found: dict[str, Any] = {}
    for key, rows in table.items():
        for number, row in enumerate(rows):
            found.setdefault(repr(row), pytest.param(row, id=f"{key}-{number}"))
    return list(found.values())


def changes_key(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row gives this key a value, by itself or inside of a section."""
    section, _, name = key.partition(".")
    return key in row or name in (row.get(section) or {})
