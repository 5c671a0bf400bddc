"""The examples of docs/MODEL_LOADING_STRATEGIES.md, "How to choose", are what the planner computes."""

from __future__ import annotations

import re

import pytest

from distiller.build import build_task
from distiller.config.loading import load
from distiller.launch.checks import Launch
from distiller.planner.machines import plan_machine
from distiller.planner.plan import Plan, make_plan
from distiller.storage.saved_model import weights_may_be_missing
from scripts.benchmarks import shapes
from tests.placement_table import PAGE

pytestmark = pytest.mark.slow
_, _, EXAMPLES = PAGE.read_text(encoding="utf-8").partition("\n### Examples\n")
ROWS = [
    [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
    for line in EXAMPLES.partition("\n### ")[0].splitlines()
    if re.match(r"\| `\d+x", line)
]


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory) -> str:
    return str(shapes.write_recipe("wan-14b", tmp_path_factory.mktemp("examples")))


def planned(recipe_path: str, machine: str, host_memory: str, samples: str) -> Plan:
    recipe = load(recipe_path, ["train.batch_size=1", f"train.samples_per_update={samples}"])
    described = plan_machine(machine, None, None, None, host_memory, 1)
    with weights_may_be_missing():
        return make_plan(recipe, build_task(recipe), Launch(None, described.num_gpus), described)


def test_there_are_examples():
    assert len(ROWS) == 6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}, {row[2]}")
def test_an_example_is_what_the_planner_computes(row, recipe_path):
    machine, host_memory, samples, fastest, bound_by, choice, other = row
    plan = planned(recipe_path, machine, host_memory, samples)
    found = {placement.name: placement for placement in plan.placements}
    first = plan.placements[0]
    assert (first.name, first.bound_by, plan.choice) == (fastest.split(", ")[0], bound_by, choice)
    for text in (fastest, other):
        name, time = text.split(", ")
        assert found[name].fits == (time != "does not fit"), name
        if found[name].fits:
            assert found[name].step_ms == pytest.approx(float(time.replace(",", "")), rel=0.01), name
