"""One copy of a teacher over two GPUs, used by two ranks: run by hand, `python -m pytest tests/gpu -s`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.data import rng
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.distributed.devices import set_tf32
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers import Outputs, Request, Setup, Teacher
from distiller.teachers.factory import open_teacher
from tests import toys
from tests.distributed.ranks import on_ranks

NUM_BLOCKS = 8
MIB = 2**20
SLACK_BYTES = 48 * MIB
"""What a GPU's free memory may differ by beside weights: allocations are rounded, kernels are loaded."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "balanced": {"placement": "balanced"},
    "sequential": {"placement": "sequential"},
    "custom": {
        "placement": "custom",
        "device_map": {"": 1, "condition_embedder": 0, "proj_out": 0}
        | {f"blocks.{n}": (0, "cpu", 1, "disk")[n % 4] for n in range(NUM_BLOCKS)}
        | {"blocks.4.ffn": 1, "blocks.6.attn2.to_q": "cpu"},
    },
    "custom, pageable": {"placement": "custom", "device_map": {"": "cpu"}, "pin_memory": False},
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """Two experts of 0.14 billion parameters each: 0.27 GiB in bfloat16."""
    sizes = {"num_layers": NUM_BLOCKS, "num_heads": 16, "attention_head_dim": 64, "ffn_dim": 4096}
    return toys.make_pipeline(tmp_path_factory.mktemp("gpu") / "pipeline", num_experts=2, **sizes)


@pytest.fixture(scope="module")
def ran(pipeline) -> list[dict[str, Any]]:
    return on_ranks(2, find_out, pipeline, timeout_s=280)


def find_out(pipeline: Path) -> dict[str, Any]:
    """Everything that two ranks with a GPU each find."""
    from accelerate import PartialState

    device = PartialState().device
    set_tf32(False)
    ranks = Ranks.join(device)
    network = DiffusionNetwork(find_pipeline(TeacherOptions(path=str(pipeline))), 512)
    for gpu in range(torch.cuda.device_count()):
        torch.ones(64, 64, device=torch.device("cuda", gpu)).mm(torch.ones(64, 64, device=torch.device("cuda", gpu)))
    results: dict[str, Any] = {"memory": measure(network, ranks), "shared": see_changes(network, ranks)}
    for dtype in (torch.float32, torch.bfloat16):
        expected = predict(open_teacher(network, setup(ranks, dtype)), network, ranks)
        results |= {
            f"{name} {dtype}": distance(
                predict(open_teacher(network, setup(ranks, dtype, **options)), network, ranks), expected
            )
            for name, options in PLACEMENTS.items()
        }
    int8 = predict(open_teacher(network, setup(ranks, torch.bfloat16, quantization="int8")), network, ranks)
    results["int8"] = distance(int8, expected)
    options = {"quantization": "int8", "placement": "balanced"}
    results["int8, balanced"] = distance(
        predict(open_teacher(network, setup(ranks, torch.bfloat16, **options)), network, ranks), int8
    )
    too_large = replace(setup(ranks, torch.bfloat16, placement="balanced"), reserved_bytes=2**45)
    with pytest.raises(UserError) as error:
        open_teacher(network, too_large)
    results["refusal"] = str(error.value)
    return results


def setup(ranks: Ranks, dtype: torch.dtype, **options: Any) -> Setup:
    return Setup(dtype, TeacherOptions(path="-", **options), ranks)


def predict(teacher: Teacher, network: DiffusionNetwork, ranks: Ranks) -> list[Outputs]:
    """Answers to two steps of requests that need both experts, and closes the teacher."""
    answers = []
    for step in range(2):
        ids = tuple(1000 * ranks.rank + 10 * step + i for i in range(2 + ranks.rank))
        text = torch.stack([rng.noise(1, 0, i, (7, toys.TEXT_DIM)) for i in ids])
        text[:, -2:] = 0
        timesteps = torch.tensor([900.0, 100.0, 700.0])[: len(ids)]
        inputs = {
            "latents": torch.stack([rng.noise(0, 0, i, (4, 1, 16, 16)) for i in ids]),
            "timesteps": timesteps,
            "text": text,
            "negative_text": torch.zeros(len(ids), 3, toys.TEXT_DIM),
        }
        inputs = {name: value.to(ranks.device) for name, value in inputs.items()}
        wanted = ("prediction", "unconditional", "features/1", f"features/{NUM_BLOCKS - 1}")
        answers += teacher.predict([Request(ids, inputs, wanted, network.route(timesteps.tolist()))])
    assert all(value.device == ranks.device for outputs in answers for value in outputs.values())
    teacher.close()
    return [{name: value.float().cpu() for name, value in outputs.items()} for outputs in answers]


def distance(ours: list[Outputs], theirs: list[Outputs]) -> float:
    """The largest distance of two outputs, relative to the second."""
    return max(
        ((a[name] - b[name]).norm() / b[name].norm()).item() for a, b in zip(ours, theirs, strict=True) for name in b
    )


def measure(network: DiffusionNetwork, ranks: Ranks) -> dict[str, Any]:
    """Bytes: of the weights, by which all GPUs' used memory grew and shrank again, and what this rank allocated."""
    gpus = range(torch.cuda.device_count())

    def used() -> int:
        ranks.node_barrier()
        return sum(total - free for free, total in map(torch.cuda.mem_get_info, gpus))

    def allocated() -> int:
        return sum(map(torch.cuda.memory_allocated, gpus))

    torch.cuda.empty_cache()
    used_before, allocated_before = used(), allocated()
    teacher = open_teacher(network, setup(ranks, torch.bfloat16, placement="balanced"))
    torch.cuda.empty_cache()  # what loading needed for a moment
    figures = {"grew": used() - used_before, "allocated": allocated() - allocated_before}
    figures["reported"] = sum(ranks.gather_on_node(teacher.memory().gpu_bytes))
    teacher.close()
    # `close` itself gives memory back to the GPU: nothing is emptied here.
    figures["kept"] = used() - used_before
    skeletons = [network.skeleton(name, torch.bfloat16) for name in network.module_names]
    figures["weights"] = sum(p.nbytes for module in skeletons for p in module.parameters())
    return figures


def see_changes(network: DiffusionNetwork, ranks: Ranks) -> float:
    """A weight as the second rank sees it after the first has changed it."""
    modules = {}
    run = network.run
    network.run = lambda module, call: (modules.update({call.module: module}), run(module, call))[1]  # type: ignore
    teacher = open_teacher(network, setup(ranks, torch.bfloat16, placement="balanced"))
    device, ids = ranks.device, (0,)
    inputs = {"latents": torch.zeros(1, 4, 1, 4, 4), "timesteps": torch.full((1,), 900.0)}
    inputs |= {"text": torch.zeros(1, 3, toys.TEXT_DIM)}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    teacher.predict([Request(ids, inputs, ("prediction",), (0,))])
    del network.run
    bias = modules["transformer"].proj_out.bias
    ranks.node_barrier()
    if ranks.rank == 0:
        bias.fill_(7.0)
        torch.cuda.synchronize(bias.device)
    ranks.node_barrier()
    seen = bias.float().mean().item()
    del bias
    modules.clear()
    teacher.close()
    return seen


def test_both_gpus_together_hold_one_copy(ran):
    for figures in (of_rank["memory"] for of_rank in ran):
        print({name: round(value / MIB, 1) for name, value in figures.items()}, "MiB")
        slack = 2 * SLACK_BYTES
        assert abs(figures["grew"] - figures["weights"]) < slack < figures["weights"]
        assert abs(figures["reported"] - figures["weights"]) < slack
        assert figures["kept"] < slack
    owner, other = (of_rank["memory"]["allocated"] for of_rank in ran)
    assert abs(owner - ran[0]["memory"]["weights"]) < SLACK_BYTES
    assert other < MIB


def test_a_rank_sees_what_another_writes(ran):
    assert [of_rank["shared"] for of_rank in ran] == [7.0, 7.0]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_answers_equal_those_of_replicated(ran, name, dtype):
    """The same kernels on the same numbers, wherever they lie."""
    for of_rank in ran:
        print(name, dtype, of_rank[f"{name} {dtype}"])
        assert of_rank[f"{name} {dtype}"] <= 1e-6


def test_int8_is_close_to_bfloat16_and_spread_as_whole(ran):
    for of_rank in ran:
        print("int8", of_rank["int8"])
        assert 0 < of_rank["int8"] < 0.05
        assert of_rank["int8, balanced"] <= 1e-6


def test_a_student_that_takes_everything_is_said(ran):
    for of_rank in ran:
        assert of_rank["refusal"].startswith("teacher.placement=balanced needs")
        assert of_rank["refusal"].endswith("these fit, fastest first: cpu")
