"""A placement made of this file and one registration line is checked, listed, documented and under the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
from pydantic import Field, create_model
from torch import nn

from distiller.cli import main
from distiller.config import loading, teacher
from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import (
    Footprint,
    PlacementOptions,
    PlacementSpec,
    Sizes,
    SpeedRank,
    SupportRow,
    World,
)
from distiller.config.sections import Positive
from distiller.errors import UserError
from distiller.run_folder.output_dir import may_change_on_resume
from distiller.teachers import Network, Outputs, Request, Setup, Teacher, TeacherMemory, factory
from distiller.teachers.base import ModuleCalls, answer
from distiller.teachers.factory import open_teacher
from distiller.teachers.rules import check_placement, table
from distiller.teachers.weights.loading import load_on_all_ranks, plan_modules
from tests import placement_contract, recipe_keys, toy_network
from tests.distributed.ranks import on_ranks


class ToyOptions(PlacementOptions):
    """One key of its own."""

    toy_copies: Positive = Field(default=1, description="of the weights on each rank, which take turns")


def _memory(sizes: Sizes, options: ToyOptions, world: World) -> Footprint:
    total = options.toy_copies * sizes.total
    return Footprint(total, 0) if world.num_gpus else Footprint(0, total * world.num_local_ranks)


def _check_world(options: ToyOptions, num_processes: int, under_deepspeed: bool) -> None:
    del options, num_processes
    if under_deepspeed:
        raise UserError("teacher.placement=toy does not run beside DeepSpeed; choose another placement")


SPEC = PlacementSpec(
    name="toy",
    teacher_class="tests.unit.test_toy_placement:ToyTeacher",
    options=ToyOptions,
    row=SupportRow("whole, `toy_copies` times", "none", "nothing", beside_zero="no"),
    memory=_memory,
    speed=SpeedRank(on_gpus=15, one_process=15, on_cpus=5),
    why_not_quantized="it has not been tried",
    check_world=_check_world,
)


@final
class ToyTeacher(Teacher):
    """Every rank holds all modules some times over; each forward pass uses the next copy."""

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._num_bytes = network, 0
        self._copies = [self._load(setup) for _ in range(ToyOptions.of(setup.options).toy_copies)]
        self._next = cycle(self._copies)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._run)

    def memory(self) -> TeacherMemory:
        return TeacherMemory(host_bytes=self._num_bytes)

    def close(self) -> None:
        self._copies.clear()

    def _load(self, setup: Setup) -> dict[str, nn.Module]:
        modules = {}
        for plan in plan_modules(self._network, setup, is_reader=setup.ranks.is_main):
            self._num_bytes += load_on_all_ranks(plan, plan.units, setup.ranks)
            plan.close_files()
            modules[plan.name] = plan.module
        return modules

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        return [[self._network.run(next(self._next)[name], call) for call in calls] for name, calls in agenda]


@contextmanager
def registered() -> Iterator[None]:
    """A program in whose registry the placement is."""
    with pytest.MonkeyPatch.context() as patch:
        # The registration line.
        patch.setitem(PLACEMENTS, SPEC.name, SPEC)
        # What an import of the recipe's classes makes of the registry.
        section = teacher.make_section()
        for kind, recipe in loading.RECIPES.items():
            fields: dict[str, Any] = {"teacher": (section, recipe.model_fields["teacher"])}
            patch.setitem(loading.RECIPES, kind, create_model(recipe.__name__, __base__=recipe, **fields))
        patch.setattr(toy_network, "TeacherOptions", section)
        patch.setitem(placement_contract.CASES, SPEC.name, {"toy_copies": 2})
        yield


@pytest.fixture
def toy() -> Iterator[None]:
    with registered():
        yield


def answers_of_toy(folder: Path) -> dict[str, Any]:
    with registered():
        return placement_contract.answers_of_cases(folder, ["toy"], "float32")


def train_toy(folder: Path, output: Path, batch_size: int) -> dict[str, Any]:
    with registered():
        return placement_contract.train_cases(folder, output, ["replicated", "toy"], batch_size, [1, 2])


def test_it_answers_and_trains_as_the_contract_says(tmp_path):
    weights = toy_network.save_toy(tmp_path / "toy")
    for rank, results in enumerate(on_ranks(2, answers_of_toy, weights, timeout_s=200)):
        for num_modules in (1, 2):
            result = results[f"toy {num_modules}"]
            assert not isinstance(result, str), result
            network = toy_network.ToyNetwork(weights, num_modules)
            expected = placement_contract.answers(
                placement_contract.open_case("replicated", network), rank, num_modules, autocast=False
            )
            for ours, theirs in zip(result[0], expected, strict=True):
                assert np.abs(ours - theirs).max() <= 2e-6 * max(1.0, np.abs(theirs).max())
    trained = on_ranks(2, train_toy, weights, tmp_path / "runs", 4, timeout_s=200)[0]
    for accumulation in (1, 2):
        losses, student, held_out = trained[f"toy {accumulation}"]
        assert np.abs(np.array(losses) - np.array(trained["replicated 1"][0])).max() <= 2e-6
        reference = trained["replicated 1"][1]
        assert np.linalg.norm(student - reference) <= 1e-5 * np.linalg.norm(reference)
        assert held_out == pytest.approx(trained["replicated 1"][2], abs=2e-6)


def test_users_see_it_where_placements_are_listed(toy, capsys, monkeypatch):
    assert "| `toy` | whole, `toy_copies` times | none | yes | no | no | nothing |" in table()
    page = recipe_keys.page()
    assert "`swap`, `cached`, `toy` | `auto` |" in page
    assert "| `toy_copies` | whole number > 0 | `1` | toy: of the weights on each rank, which take turns |" in page
    assert main(["train", "digits-wan", "teacher.placement=tou", "--check"]) == 2
    assert "'cached' or 'toy'" in capsys.readouterr().err
    assert "teacher.toy_copies" in may_change_on_resume()


def test_its_keys_and_its_world_are_checked(toy):
    assert loading.load("digits-wan", ["teacher.placement=toy", "teacher.toy_copies=2"]).teacher.toy_copies == 2
    with pytest.raises(UserError, match=r"toy_copies is 2, which teacher\.placement replicated does not .* does: toy$"):
        loading.load("digits-wan", ["teacher.toy_copies=2"])
    recipe = loading.load("digits-wan", ["teacher.placement=toy", "teacher.quantization=int8"])
    with pytest.raises(UserError, match=r"int8 and teacher\.placement toy: it has not been tried; choose"):
        check_placement(recipe.teacher, 1, False)
    with pytest.raises(UserError, match="does not run beside DeepSpeed"):
        check_placement(loading.load("digits-wan", ["teacher.placement=toy"]).teacher, 1, True)


def test_its_memory_is_counted_and_it_is_proposed_by_its_speed(toy, tmp_path, monkeypatch):
    network = toy_network.ToyNetwork(toy_network.save_toy(tmp_path))
    sizes, free = factory.measure(network, toy_network.setup()), factory.memory_budget(toy_network.setup())
    monkeypatch.setattr(factory, "memory_budget", lambda *_: replace(free, host=int(1.5 * sizes.total)))
    with pytest.raises(UserError, match=r"teacher\.placement toy takes .*; these fit, fastest first: replicated, "):
        open_teacher(network, toy_network.setup(placement="toy", toy_copies=2))
    with pytest.raises(
        UserError, match=r"teacher\.placement swap takes .*; these fit, fastest first: toy, replicated, "
    ):
        open_teacher(network, toy_network.setup(placement="swap"))


def test_without_the_line_it_is_not_there():
    assert "toy" not in PLACEMENTS
    assert "`toy`" not in table()
    assert "toy_copies" not in teacher.Teacher.model_fields
