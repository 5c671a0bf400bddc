"""An update that is followed without data: every family can be, and its products are those of a computed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from distiller.build import build_task
from distiller.config.loading import parse
from distiller.planner.traced_update import TracedUpdate, trace_update
from distiller.tasks.interfaces import Plannable
from tests import toy_causal_lm
from tests.model_families import CLASSIFIERS, LANGUAGE, recipe_of

BF16 = torch.bfloat16
TYPICAL = ("wan", "llama", "resnet")
FAMILIES = [
    pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow)
    for name in ("wan", "sd", "sd3", *LANGUAGE, *CLASSIFIERS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("families")


def task_of(family: str, folder: Path, **sections: Any) -> Any:
    place = folder / family
    place.mkdir(exist_ok=True)
    return build_task(parse(recipe_of(family, place, **sections)))


def traced(
    task: Any, size: int = 4, *, dtypes: tuple[Any, ...] = (BF16, torch.float32, BF16), **how: bool
) -> TracedUpdate:
    return trace_update(task, size, *dtypes, **({"recomputes": False} | how))


def flops(kernels: Any) -> int:
    return sum(kernel.flops * count for kernel, count in kernels.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_followed(family, folder):
    task = task_of(family, folder)
    assert isinstance(task, Plannable)
    one, two = traced(task, 4), traced(task, 8)
    assert 0 < one.answer < one.teacher_peak
    assert one.student_peak >= one.student_activations > one.answer
    # Twice the samples: twice the work, and about twice the activations.
    assert flops(two.teacher_kernels) == 2 * flops(one.teacher_kernels)
    assert two.answer == 2 * one.answer
    assert 1.2 * one.student_activations < two.student_activations <= 2.1 * one.student_activations
    # Weights in 16 bits need no copies of them, and keep no more.
    short = traced(task, 4, dtypes=(BF16, BF16, None))
    assert short.student_activations <= one.student_activations
    assert flops(short.student_kernels) == flops(one.student_kernels)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["wan", "sd3", "llama", "vit"])
def test_recomputed_activations_take_less_memory_and_more_work(family, folder):
    task = task_of(family, folder)
    kept, recomputed = traced(task, 16), traced(task, 16, recomputes=True)
    assert recomputed.student_activations < kept.student_activations
    assert flops(kept.student_kernels) < flops(recomputed.student_kernels) < 1.5 * flops(kept.student_kernels)
    assert flops(recomputed.teacher_kernels) == flops(kept.teacher_kernels)


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("wan", marks=pytest.mark.slow), pytest.param("vit", marks=pytest.mark.slow)]
)
def test_compiled_blocks_take_no_more_memory(family, folder):
    task = task_of(family, folder)
    assert traced(task, 16, compiles=True).student_activations < traced(task, 16).student_activations


@pytest.mark.parametrize("family", ["wan", "sd", "sd3", "resnet", "vit"])
def test_the_teacher_s_products_are_those_that_torch_counts_of_a_real_pass(family, folder):
    task = task_of(family, folder)
    network, request = task.network, task.request(task.example(4))
    modules: dict[str, nn.Module] = {}
    for name in network.module_names:
        modules[name] = network.skeleton(name, torch.float32)
        for tensors in (module._parameters for module in modules[name].modules()):
            tensors.update(
                {key: nn.Parameter(torch.rand(value.shape)) for key, value in tensors.items() if value is not None}
            )
        modules[name].to_empty(device="cpu") if any(b.is_meta for b in modules[name].buffers()) else None
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for call in network.calls(request):
            network.run(modules[call.module], call)
    followed = trace_update(task, 4, torch.float32, torch.float32, None, recomputes=False)
    assert flops(followed.teacher_kernels) == counter.get_total_flops()


def test_a_run_without_a_teacher_has_no_passes_of_it(folder):
    teacher = toy_causal_lm.save_model(folder / "teacher")
    recipe = toy_causal_lm.recipe(folder, teacher, task={"losses": {"alpha": 0.0}})
    followed = traced(build_task(parse(recipe)))
    assert (followed.answer, followed.teacher_peak, flops(followed.teacher_kernels)) == (0, 0, 0)
    assert followed.student_peak > 0
