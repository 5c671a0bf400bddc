"""Compiled blocks: whole graphs in every family, the same numbers, and one version for all places of the weights."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, MambaConfig

from distiller import commands
from distiller.config.loading import parse
from distiller.config.teacher import Teacher as TeacherOptions
from distiller.errors import UserError
from distiller.launch import block_compilation
from distiller.launch.block_compilation import (
    MIN_UPDATES,
    compile_blocks,
    compile_mode,
    loops_over_positions,
    why_no_compiler,
)
from distiller.teachers.factory import resolve_placement
from distiller.teachers.rules import check_placement
from distiller.teachers.streaming.interleaved_forward import InterleavedForward
from tests import toy_causal_lm, toys
from tests.model_families import recipe_of
from tests.placement_contract import CASES, answers, open_case, placement_of
from tests.reference_toys import forget_accelerator
from tests.toy_network import ToyNetwork, save_toy, setup

# The compiler's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]


@pytest.fixture
def whole_graphs(monkeypatch) -> list[Any]:
    """torch.compile without a code generator, so that it is fast; raises where a function is not one graph."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile

    @wraps(compiler)
    def compile_whole(function: Any, *, mode: str, **options: Any) -> Any:
        return compiler(function, backend=backend, fullgraph=True, **options)

    monkeypatch.setattr(torch, "compile", compile_whole)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


CHECKPOINTED = ("wan", "llama", "vit")
RUNS = [(family, family in CHECKPOINTED) for family in ("wan", "sd3", "llama", "gemma2", "resnet", "vit")]
SLOW_RUNS = [
    ("sd", False),
    ("sd", True),
    ("llama", False),
    ("wan", False),
    ("vit", False),
    ("gpt2", False),
    ("qwen2", False),
]


@pytest.mark.parametrize(
    ("family", "checkpointing"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS)]
)
def test_runs_are_the_same_with_compiled_blocks(tmp_path, whole_graphs, family, checkpointing):
    lines, students = {}, {}
    for mode in ("none", "default"):
        sections: dict[str, Any] = {"train": {"compile": mode, "gradient_checkpointing": checkpointing}}
        recipe = recipe_of(family, tmp_path, output_dir=str(tmp_path / mode), teacher={"compile": mode}, **sections)
        commands.train(parse(recipe), False)
        forget_accelerator()
        assert bool(whole_graphs) == (mode == "default")
        lines[mode] = toys.read_metrics(tmp_path / mode)
        students[mode] = load_file(next((tmp_path / mode / "student").glob("*.safetensors")))
    for plain, compiled in zip(lines["none"], lines["default"], strict=True):
        for key in ("loss", "grad_norm"):
            assert compiled[key] == pytest.approx(plain[key], rel=1e-5), (key, plain["step"])
    torch.testing.assert_close(students["default"], students["none"], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_placements_with_compiled_blocks_answer_as_the_compiled_replicated_bit_for_bit(tmp_path, monkeypatch):
    """With the code generator. Weights that move through buffers are no reason to compile again."""
    weights, expected, expected_graphs = save_toy(tmp_path), None, 0
    plain = answers(open_case("replicated", ToyNetwork(weights, 2)), 0, 2)
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    for case in (case for case in CASES if placement_of(case) not in ("cpu", "cached") and "offloaded" not in case):
        torch._dynamo.reset()
        before = counted["unique_graphs"]
        teacher = open_case(case, ToyNetwork(weights, 2), compile="default")
        answered = answers(teacher, 0, 2)
        teacher.close()
        num_graphs = counted["unique_graphs"] - before
        if expected is None:
            expected, expected_graphs = answered, num_graphs
            assert num_graphs
            for ours, theirs in zip(answered, plain, strict=True):
                assert np.abs(ours - theirs).max() <= 2e-6 * max(1.0, np.abs(theirs).max())
            continue
        assert num_graphs <= expected_graphs, case
        loose = 2e-6 if placement_of(case) == "rank0" else 0.0
        for ours, theirs in zip(answered, expected, strict=True):
            assert np.abs(ours - theirs).max() <= loose * max(1.0, np.abs(theirs).max()), case


class Block(nn.Module):
    """Multiplies by its weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize(("sizes_vary", "num_graphs"), [(False, 3), (True, 1)])
def test_code_depends_on_sizes_and_not_on_those_before_them(whole_graphs, sizes_vary, num_graphs):
    block = Block(2.0)
    compile_blocks([block], "default", sizes_vary=sizes_vary)
    for size in (4, 6, 4, 8, 6):
        assert block(torch.ones(size)).sum().item() == 2 * size
    assert len(whole_graphs) == num_graphs


def test_blocks_share_one_graph_and_copies_have_weights_of_their_own(whole_graphs):
    blocks = [Block(2.0), Block(3.0)]
    compile_blocks(blocks, "default")
    x = torch.ones(4)
    assert [block(x)[0].item() for block in blocks] == [2.0, 3.0]
    copied = copy.deepcopy(blocks[0])
    copied.weight.data.fill_(5.0)
    blocks[1].weight = nn.Parameter(torch.tensor(7.0))
    assert [block(x)[0].item() for block in (copied, *blocks)] == [5.0, 2.0, 7.0]
    assert len(whole_graphs) == 1


@pytest.mark.parametrize(
    ("mode", "moves_weights", "expected"),
    [
        ("default", True, "default"),
        ("max-autotune", True, "max-autotune-no-cudagraphs"),
        ("max-autotune", False, "max-autotune"),
        ("none", False, None),
    ],
)
def test_graphs_that_need_weights_in_one_place_are_left_out_where_they_move(monkeypatch, mode, moves_weights, expected):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda function, mode, **options: (modes.append(mode), function)[1])
    compile_blocks([Block(1.0)], mode, moves_weights=moves_weights)
    assert modes == ([] if expected is None else [expected])


def test_auto_compiles_on_a_gpu_in_a_long_run(monkeypatch):
    monkeypatch.setattr(block_compilation, "why_no_compiler", lambda device: "")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert compile_mode("auto", gpu, MIN_UPDATES) == "default"
    assert compile_mode("auto", gpu, MIN_UPDATES - 1) == "none"
    assert compile_mode("auto", cpu, MIN_UPDATES) == "none"
    assert [compile_mode(asked, cpu, 1) for asked in ("none", "default")] == ["none", "default"]
    monkeypatch.setattr(block_compilation, "why_no_compiler", lambda device: "there is no compiler")
    assert [compile_mode(asked, gpu, MIN_UPDATES) for asked in ("none", "auto")] == ["none", "none"]
    with pytest.raises(UserError, match=r"teacher\.compile is default and there is no compiler; leave it out, or set"):
        compile_mode("default", gpu, 1, "teacher.compile")


def test_what_a_gpu_s_code_needs_is_named(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    assert why_no_compiler(gpu) == "triton is not installed"
    assert why_no_compiler(torch.device("cpu")) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))
    assert why_no_compiler(gpu).startswith("Tesla P100 is older")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C compiler" in why_no_compiler(gpu)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert why_no_compiler(gpu) == ""


def test_models_that_work_through_positions_are_left_alone_by_auto():
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=9))
        llama = AutoModelForCausalLM.from_config(toy_causal_lm.llama_config(num_hidden_layers=1))
    assert loops_over_positions(mamba.backbone.layers[0])
    assert not loops_over_positions(llama.model.layers[0])
    # Letters that stand for state space models in other names.
    GptOssMLP = type("GptOssMLP", (nn.Module,), {})
    assert not loops_over_positions(nn.Sequential(GptOssMLP()))


class Kinds(nn.Module):
    """One graph for each number of repeats."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            x = x + 1
        return x


def test_many_kinds_of_blocks_are_compiled_in_every_thread(whole_graphs):
    """A streamed teacher's micro-batches run in threads, in which torch's own settings do not hold."""
    blocks = [Kinds(repeats) for repeats in range(1, 14)]
    compile_blocks(blocks, "default")
    found = InterleavedForward(torch.device("cpu")).run(
        [lambda: [block(torch.zeros(3))[0].item() for block in blocks]] * 2
    )
    assert found == [list(range(1, 14))] * 2
    assert len(whole_graphs) == len(blocks)


@pytest.mark.parametrize(
    ("keys", "under_deepspeed", "words"),
    [
        ({"placement": "cpu"}, False, "teacher.placement cpu: it computes on the CPU"),
        ({"placement": "cached", "cache": "folder"}, False, "teacher.placement cached: no teacher runs"),
        ({"placement": "sharded"}, True, "teacher.placement sharded: ZeRO-3 gathers parameters inside the blocks"),
    ],
)
def test_what_cannot_be_compiled_is_refused_when_asked_for_and_left_alone_otherwise(keys, under_deepspeed, words):
    asked = TeacherOptions(path="-", compile="default", **keys)
    with pytest.raises(UserError, match=f"teacher.compile is default and {words}.*; leave it out, or set it to none"):
        check_placement(asked, 2, under_deepspeed)
    check_placement(TeacherOptions(path="-", **keys), 2, under_deepspeed)


@pytest.mark.parametrize(("placement", "mode"), [("streamed", "default"), ("cpu", "none")])
def test_auto_compiles_what_the_placement_can(tmp_path, placement, mode):
    asked = replace(setup(placement=placement), compile_mode="default")
    resolved = resolve_placement(ToyNetwork(save_toy(tmp_path)), asked)
    assert resolved.compile_mode == mode
    said = f"teacher.compile auto: default ({MIN_UPDATES} updates or more)"
    assert (said in resolved.notices) == (mode == "default")


def test_a_resumed_run_that_compiles_otherwise_says_so(tmp_path, whole_graphs, capsys):
    del whole_graphs
    options: dict[str, Any] = {"output_dir": str(tmp_path / "run")}
    commands.train(parse(recipe_of("vit", tmp_path, **options)), False)
    forget_accelerator()
    longer = {"train": {"max_steps": 4, "compile": "default"}, "teacher": {"compile": "none"}}
    commands.train(parse(recipe_of("vit", tmp_path, **options, **longer)), True)
    forget_accelerator()
    said = [line for line in capsys.readouterr().out.splitlines() if "roundings" in line]
    assert said == [
        "note: --resume: train.compile was none up to this checkpoint and is default now, so that roundings change "
        "here; train.compile=none goes on bit for bit"
    ]
