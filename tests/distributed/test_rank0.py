"""`rank0` on two gloo ranks: who holds what, what travels how, and what happens when the ranks' batches differ."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.data import rng
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.network import DiffusionNetwork
from distiller.errors import AgreedError, UserError
from distiller.teachers import Outputs, Request, Teacher
from distiller.teachers.base import Call
from distiller.teachers.factory import open_teacher
from distiller.teachers.weights.layout import ALIGNMENT
from tests import toys
from tests.distributed.ranks import on_ranks
from tests.toy_network import DIM, ToyNetwork, save_toy, setup


class CountingNetwork(ToyNetwork):
    """Knows the batch sizes that it has run, and fails when it is told to."""

    def __init__(self, folder: Path, num_modules: int = 1) -> None:
        super().__init__(folder, num_modules)
        self.batch_sizes: list[int] = []
        self.is_broken = False

    def run(self, module: torch.nn.Module, call: Call) -> Outputs:
        if self.is_broken:
            raise MemoryError("no room for the activations")
        self.batch_sizes.append(len(call.inputs["x"]))
        return super().run(module, call)


def request(size: int, *wanted: str, modules: tuple[int, ...] = ()) -> Request:
    first = 100 * dist.get_rank()
    x = torch.stack([rng.noise(0, 0, first + i, (DIM,)) for i in range(size)])
    return Request(tuple(range(first, first + size)), {"x": x}, wanted or ("output",), modules)


def largest_difference(ours: list[Outputs], theirs: list[Outputs]) -> float:
    assert [set(outputs) for outputs in ours] == [set(outputs) for outputs in theirs]
    pairs = [(mine[name], other[name]) for mine, other in zip(ours, theirs, strict=True) for name in mine]
    assert all(mine.shape == other.shape and mine.dtype == other.dtype for mine, other in pairs)
    return max((mine.float() - other.float()).abs().max().item() for mine, other in pairs)


def weight_bytes() -> int:
    """Of all tensors that stay alive in this process, memory that several share counted once.

    Messages between ranks are bytes, and gloo's threads may hold the last one for as long as no other comes.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not thing.is_meta]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dtype != torch.uint8}
    return sum(kept.values())


def hold(weights: Path, pipeline: Path) -> tuple[int, int, int]:
    """Bytes of the node's teacher as told, bytes that have come to this rank, and what stays once it is closed."""
    before = weight_bytes()
    teacher = open_teacher(ToyNetwork(weights, 2), setup(placement="rank0", rank=1))
    held = teacher.memory().host_bytes, weight_bytes() - before
    teacher.close()
    assert teacher.memory().host_bytes == 0
    return *held, weight_bytes() - before


def batch_uneven(weights: Path, pipeline: Path) -> list[Any]:
    """Batch sizes that the holder runs, and the largest difference from `replicated`, with and without micro-batches.

    First whole batches, then a last one that differs in its size, in the number of requests and in what they want.
    """
    rank, results = dist.get_rank(), []
    reference = open_teacher(ToyNetwork(weights, 2), setup())
    for micro_batch in (None, 3):
        network = CountingNetwork(weights, 2)
        teacher = open_teacher(network, setup(placement="rank0", micro_batch=micro_batch))
        for step in (
            [request(4, modules=(0,) * 4), request(4, modules=(0,) * 4)],
            [request(1, "output", "features/2", modules=(0,)), request(2, modules=(1, 1))]
            if rank == 0
            else [request(3, modules=(1, 0, 1))],
        ):
            difference = largest_difference(teacher.predict(step), reference.predict(step))
            results.append((network.batch_sizes, difference))
            network.batch_sizes = []
    return results


def prompt_by_length(weights: Path, pipeline: Path) -> list[float]:
    """Two Wan experts; texts as long as each rank's longest prompt, and in the end equally long on both."""
    rank = dist.get_rank()
    network = DiffusionNetwork(find_pipeline(TeacherOptions(path=str(pipeline))), 512)
    differences = []
    for dtype in (torch.float32, torch.bfloat16):
        teachers: list[Teacher] = [
            open_teacher(network, setup(dtype, placement=name)) for name in ("replicated", "rank0")
        ]
        for lengths in ((5 + 2 * rank, 4), (6, 6)):
            requests = []
            for number, length in enumerate(lengths):
                ids = tuple(1000 * rank + 10 * number + i for i in range(2 + rank))
                text = torch.stack([rng.noise(1, 0, i, (length, toys.TEXT_DIM)) for i in ids])
                text[:, -2:] = 0
                timesteps = torch.tensor([900.0, 100.0, 700.0])[: len(ids)]
                inputs = {
                    "latents": torch.stack([rng.noise(0, 0, i, (4, 1, 4, 4)) for i in ids]),
                    "timesteps": timesteps,
                    "text": text,
                    "negative_text": text.new_zeros(len(ids), 3, toys.TEXT_DIM),
                }
                modules = network.route(timesteps.tolist())
                requests.append(Request(ids, inputs, ("prediction", "unconditional", "features/1"), modules))
            replicated, rank0 = (teacher.predict(requests) for teacher in teachers)
            differences.append(largest_difference(rank0, replicated))
    return differences


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, str)


def travel(weights: Path, pipeline: Path) -> list[int]:
    """How many messages pass from host to host in each step; all of them plain."""
    teacher = open_teacher(ToyNetwork(weights, 2), setup(placement="rank0"))
    messages: list[Any] = []
    gather_objects = dist.all_gather_object

    def listen(received: list[Any], message: Any, group: dist.ProcessGroup) -> None:
        messages.append(message)
        gather_objects(received, message, group)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("pickled")

    dist.all_gather_object, others = listen, ("broadcast_object_list", "scatter_object_list", "gather_object")
    kept = {name: getattr(dist, name) for name in others}
    try:
        for name in others:
            setattr(dist, name, refuse)
        counts = []
        for size in (3, 4, 2):
            teacher.predict([request(size, "output", "again", modules=(0,) * (size - 1) + (1,))])
            assert all(map(is_plain, messages))
            counts.append(len(messages))
            messages.clear()
    finally:
        dist.all_gather_object = gather_objects
        for name in others:
            setattr(dist, name, kept[name])
    return counts


def fail(weights: Path, pipeline: Path) -> tuple[str, float]:
    """What every rank hears when the holder fails, and whether the teacher answers afterwards."""
    network = CountingNetwork(weights)
    teacher = open_teacher(network, setup(placement="rank0", rank=1))
    network.is_broken = True
    with pytest.raises(AgreedError) as error:
        teacher.predict([request(2)])
    network.is_broken = False
    reference = open_teacher(ToyNetwork(weights), setup())
    return str(error.value), largest_difference(teacher.predict([request(2)]), reference.predict([request(2)]))


def ask_for_too_many(weights: Path, pipeline: Path) -> str:
    with pytest.raises(UserError) as error:
        open_teacher(ToyNetwork(weights), setup(placement="rank0", rank=2))
    return str(error.value)


SCENES: list[Callable[[Path, Path], Any]] = [hold, batch_uneven, prompt_by_length, travel, fail, ask_for_too_many]


def act(weights: Path, pipeline: Path) -> dict[str, Any]:
    from accelerate import PartialState

    PartialState(cpu=True)
    return {scene.__name__: scene(weights, pipeline) for scene in SCENES}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Callable[[Callable], list[Any]]:
    """A scene -> what came of it on each rank; all scenes share one start of the ranks."""
    folder = tmp_path_factory.mktemp("rank0")
    results = on_ranks(2, act, save_toy(folder / "toy"), toys.make_pipeline(folder / "wan", num_experts=2))
    return lambda scene: [of_rank[scene.__name__] for of_rank in results]


def test_the_other_ranks_hold_nothing(seen):
    (told, elsewhere, left_elsewhere), (told_by_holder, held, left) = seen(hold)
    assert told == told_by_holder > 80_000
    # The files' tensors, each at a multiple of 256 bytes, and the buffers that a module makes itself. A message that
    # gloo's threads have not let go of yet is smaller than any of them.
    assert told <= held < told + ALIGNMENT
    assert max(elsewhere, left_elsewhere, left) < ALIGNMENT


def test_uneven_batches_run_together_and_come_back_to_their_owners(seen):
    (whole, last, whole_by_three, last_by_three), others = seen(batch_uneven)
    assert [difference for _, difference in others] == pytest.approx([0] * 4, abs=2e-6)
    assert [r[1] for r in (whole, last, whole_by_three, last_by_three)] == pytest.approx([0] * 4, abs=2e-6)
    assert all(sizes == [] for sizes, _ in others)
    assert whole[0] == [16]
    # With features; the second module's, of both ranks; the first's without features, of rank 1 alone.
    assert sorted(last[0]) == [1, 1, 4]
    assert whole_by_three[0] == [3, 3, 3, 3, 3, 1]
    assert sorted(last_by_three[0]) == [1, 1, 1, 3]


def test_texts_of_another_length_run_by_themselves(seen):
    for differences in seen(prompt_by_length):
        # Outputs are about 1; bfloat16 has steps of 1/128 there.
        assert max(differences[:2]) < 1e-5
        assert max(differences[2:]) < 5e-2


def test_only_names_and_numbers_travel_between_hosts(seen):
    for counts in seen(travel):
        # What is asked; with new kinds of calls also how they went and what came out.
        assert counts == [3, 1, 1]


def test_a_holder_that_fails_at_first_is_heard_by_all(seen):
    for message, difference in seen(fail):
        assert message == "rank 1: MemoryError: no room for the activations"
        assert difference < 2e-6


def test_a_rank_that_there_is_not_is_refused(seen, tmp_path):
    expected = "teacher.rank is 2 and the run has 2 rank(s), counted from 0; give at most 1, or start more processes"
    assert seen(ask_for_too_many) == [expected] * 2
    with pytest.raises(UserError, match=r"teacher.rank is 1 and the run has 1 rank\(s\)"):
        open_teacher(ToyNetwork(tmp_path), setup(placement="rank0", rank=1))
