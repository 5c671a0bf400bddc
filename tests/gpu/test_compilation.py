"""Compiled teachers and students on GPUs: run by hand, `python -m pytest tests/gpu/test_compilation.py -s`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import toy_causal_lm, toys
from tests.distributed.ranks import on_ranks
from tests.gpu.ranks import NUM_GPUS, run_on_gpus
from tests.launch.launching import CONFIGS
from tests.placement_contract import CASES, answers_of_cases, placement_of
from tests.toy_network import save_toy

COMPILED = [case for case in CASES if placement_of(case) not in ("cpu", "cached")]
LOOSE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Of the largest output: against what is not compiled, and of `rank0`, whose batch has another size."""

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [n for n in (1, 2) if n <= NUM_GPUS])
def test_compiled_placements_answer_as_the_compiled_replicated(tmp_path, world_size, dtype):
    cases = [case for case in COMPILED if case != "sharded, offloaded" or world_size > 1]
    weights: Path = save_toy(tmp_path)
    compiled: list[dict[str, Any]] = on_ranks(
        world_size, partial(answers_of_cases, compile="default"), weights, cases, dtype, True, timeout_s=240
    )
    plain: list[dict[str, Any]] = on_ranks(world_size, answers_of_cases, weights, ["replicated"], dtype, True)
    for rank, results in enumerate(compiled):
        for case in cases:
            for num_modules in (1, 2):
                result, reference = results[f"{case} {num_modules}"], results[f"replicated {num_modules}"]
                assert not isinstance(result, str), f"rank {rank}, {case}:\n{result}"
                loose = LOOSE[dtype] if placement_of(case) == "rank0" else 0.0
                eager = plain[rank][f"replicated {num_modules}"][0]
                for mine, theirs, uncompiled in zip(result[0], reference[0], eager, strict=True):
                    assert np.abs(mine - theirs).max() <= loose * max(1.0, np.abs(theirs).max()), (rank, case)
                    assert np.abs(mine - uncompiled).max() <= LOOSE[dtype] * max(1.0, np.abs(uncompiled).max())


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    losses = {"losses": {"features": {"weight": 0.3, "student_blocks": [0], "teacher_blocks": [1]}}}
    train = {"max_steps": 8, "batch_size": 8, "log_every": 1, "mixed_precision": "no"}
    recipe = toys.recipe(folder, toys.make_pipeline(folder / "pipeline"), train=train, task=losses)
    recipe["cache_dir"], recipe["teacher"]["dtype"] = str(folder / "cache"), "float32"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def run(toy: Path, name: str, output_dir: str, *overrides: str) -> Path:
    return run_on_gpus(CONFIGS / f"{name}.yaml", toy / output_dir, "train", str(toy / "recipe.yaml"), *overrides)


@pytest.fixture(scope="module")
def plain(toy) -> Path:
    return run(toy, "single_gpu", "plain")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["single_gpu", "ddp", "zero2", "fsdp2"])
def test_compiled_runs_in_float32_are_those_of_one_gpu_without_compilation(toy, plain, name):
    size = 8 if name == "single_gpu" else 4
    options = ("train.compile=default", "teacher.compile=default", f"train.batch_size={size}")
    compiled = run(toy, name, f"{name}-compiled", *options)
    ours, theirs = toys.read_metrics(compiled), toys.read_metrics(plain)
    losses = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    vector, reference = toys.student_vector(compiled), toys.student_vector(plain)
    distance = ((vector - reference).norm() / reference.norm()).item()
    print(f"{name}, compiled: loss within {losses:.1e}, student within {distance:.1e}")
    assert losses < 2e-5
    assert distance < 1e-4


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """A language model and rows of different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    teacher = toy_causal_lm.save_model(folder / "teacher")
    train = {"max_steps": 8, "batch_size": 8, "log_every": 1, "mixed_precision": "no"}
    recipe = toy_causal_lm.recipe(folder, teacher, train=train)
    recipe["cache_dir"], recipe["teacher"]["dtype"] = str(folder / "cache"), "float32"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", ["toy", "texts"])
def test_a_compiled_run_resumes_bitwise(request, kind):
    """The unbroken run's teacher has drawn latents in batches of another size before; rows of text differ in length."""
    folder: Path = request.getfixturevalue(kind)
    options = ["train.compile=default", "teacher.compile=default"]
    options += ["rollout.batch_size=5", f"cache_dir={folder / 'own'}"] if kind == "toy" else []
    whole = run(folder, "single_gpu", "whole", *options)
    run(folder, "single_gpu", "broken", *options, "train.max_steps=4")
    broken = run(folder, "single_gpu", "broken", *options, "--resume")
    assert [line["loss"] for line in toys.read_metrics(broken)] == [line["loss"] for line in toys.read_metrics(whole)]
    ours, theirs = (load_file(next((path / "student").glob("*.safetensors"))) for path in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
