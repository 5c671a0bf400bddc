"""What rank 0 predicts before a run on a GPU, and what is said where a model cannot be followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distiller import teacher_preparation
from distiller.build import build_task
from distiller.config.loading import load
from distiller.config.placements import PLACEMENTS
from distiller.launch.deepspeed import Offload
from distiller.launch.student_layout import StudentLayout
from distiller.planner.account import WORKSPACE
from distiller.planner.forecast import Forecast, forecast
from distiller.planner.gpus import GIB, GPUS, known_gpu
from distiller.planner.machines import Machine
from distiller.planner.planned_run import PlannedRun
from tests import toys
from tests.toy_network import setup

LAYOUT = StudentLayout("single", 1, 1, "bf16", Offload(), None)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A function that gives this machine a GPU of a name, as far as a forecast asks."""

    # Rates that were measured on the machine of the tests are of another GPU.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def name_it(name: str, size: int = 140 * GIB) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=size))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    return name_it


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Any, Any]:
    folder = toys.write_recipe(tmp_path_factory.mktemp("forecast"))
    recipe = load(str(folder / "recipe.yaml"))
    return recipe, build_task(recipe)


def predicted(run: tuple[Any, Any], compiled: tuple[bool, bool] = (False, False)) -> Forecast:
    return forecast(*run, LAYOUT, torch.bfloat16, 1000, compiled, 1)


def test_it_is_the_plan_s_account_and_times(run, gpu):
    gpu("NVIDIA H200")
    found = predicted(run)
    planned = PlannedRun(*run, Machine(GPUS["H200"], 1, 0, 0), LAYOUT, torch.bfloat16, 1000, (False, False))
    # The run counts gradients with the student's state.
    assert found.update_bytes == planned.account.update + WORKSPACE - planned.state.gradients
    assert found.step_ms["streamed"] == planned.step_time(PLACEMENTS["streamed"]).ms
    assert found.step_ms.keys() == {spec.name for spec in PLACEMENTS.values() if spec.speed}


def test_it_goes_by_what_is_compiled_whatever_the_number_of_updates(run, gpu):
    gpu("NVIDIA H200")
    plain, compiled = predicted(run), predicted(run, (True, True))
    assert compiled.update_bytes < plain.update_bytes
    assert compiled.step_ms["replicated"] != plain.step_ms["replicated"]


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79 * GIB, "H100"),
        ("NVIDIA A100-SXM4-80GB", 79 * GIB, "A100"),
        ("NVIDIA A100-SXM4-40GB", 39 * GIB, "A100-40"),
        ("NVIDIA L40S", 44 * GIB, "L40S"),
        ("NVIDIA L4", 22 * GIB, "L4"),
        ("NVIDIA GeForce RTX 4090", 23 * GIB, "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * GIB, None),
        ("NVIDIA Something New", 100 * GIB, None),
    ],
)
def test_gpus_are_known_by_name_and_size(name, size, kind):
    found = known_gpu(name, size)
    assert (None if found is None else found.name) == kind


def test_times_of_an_unknown_gpu_are_not_predicted(run, gpu):
    gpu("NVIDIA Something New")
    found = predicted(run)
    assert found.step_ms == {}
    assert found.update_bytes > 0


def test_a_model_that_cannot_be_followed_is_said_to_be_none(run, monkeypatch):
    recipe, task = run

    def fails(*_: Any) -> Forecast:
        raise RuntimeError("it asks for a value\nand more")

    printed: list[str] = []
    accelerator = SimpleNamespace(device=torch.device("cuda"), print=printed.append)
    session: Any = SimpleNamespace(
        recipe=recipe,
        task=task,
        accelerator=accelerator,
        ranks=setup().ranks,
        student_compile_mode="none",
        teacher_compile_mode="none",
        last_step=6,
        teacher_dtype=torch.float32,
    )
    monkeypatch.setattr(teacher_preparation, "forecast", fails)
    assert teacher_preparation._forecast(session, LAYOUT) is None
    assert printed == [
        "note: what an update takes of the GPU cannot be predicted for these models (RuntimeError: it asks for a "
        "value); a share of the memory is kept for it"
    ]
    expected = Forecast(5)
    monkeypatch.setattr(teacher_preparation, "forecast", lambda *_: expected)
    assert teacher_preparation._forecast(session, LAYOUT) == expected
    accelerator.device = torch.device("cpu")
    assert teacher_preparation._forecast(session, LAYOUT) is None
