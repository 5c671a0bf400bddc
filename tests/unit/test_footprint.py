"""What is refused before any weight is read, what `auto` chooses, and that the arithmetic is that of the placements."""

from __future__ import annotations

import errno
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import MemoryBudget, Sizes
from distiller.config.placements.streamed import StreamedOptions
from distiller.config.teacher import Teacher as Options
from distiller.errors import RunError, UserError
from distiller.storage.weight_files import WeightFiles
from distiller.teachers import Request, factory
from distiller.teachers.device_map.maps import Packing
from distiller.teachers.factory import open_teacher
from distiller.teachers.fitting import by_speed, check_fits, choose, fitting
from distiller.teachers.footprint import AUTO_SHARE, footprints, kept_for_updates, measure, memory_budget
from distiller.teachers.rules import check_placement
from tests.placement_contract import requests_of
from tests.toy_network import DIM, ToyNetwork, save_toy, setup

GIB = 2**30
# Wan 14B in bfloat16: 40 blocks.
WAN = Sizes(total=27 * GIB, largest_module=27 * GIB, largest_block=int(0.65 * GIB), rest=1 * GIB, num_blocks=40)


class Node:
    """GPUs with so much free for the teacher and the student, and a student."""

    def __init__(self, num_gpus: int, free_gib: float, host_gib: float = 100, student_gib: float = 2, **options):
        made = setup(**options)
        self.setup = replace(made, ranks=replace(made.ranks, world_size=num_gpus, local_world_size=num_gpus))
        self.num_gpus, self.free_gib, self.host_gib, self.student_gib = num_gpus, free_gib, host_gib, student_gib
        self.needs = footprints(WAN, self.setup, self.budget(1))

    def budget(self, share: float) -> MemoryBudget:
        kept = kept_for_updates(self.setup, int(self.free_gib * GIB), share)
        free = int(max((self.free_gib - self.student_gib) * GIB - kept, 0))
        return MemoryBudget(free, int(self.host_gib * GIB), self.num_gpus, self.num_gpus, (free,) * self.num_gpus)

    def pack(self, placement: str, kept_share: float) -> Packing:
        """As a real map: blocks are not split."""
        free = self.budget(1 - kept_share).gpu
        assert free is not None
        blocks = [40 // self.num_gpus] * self.num_gpus
        needed = {gpu: WAN.largest_block * count + WAN.rest * (gpu == 0) for gpu, count in enumerate(blocks)}
        return Packing([], needed, 0, dict.fromkeys(range(self.num_gpus), free))

    def fits(self, with_activations: bool) -> list[str]:
        share = AUTO_SHARE if with_activations else 1
        options, times = self.setup.options, self.setup.step_ms
        return list(fitting(self.needs, self.budget(share), options, self.pack, 1 - share, times))

    def choose(self) -> tuple[str, str]:
        setup = replace(self.setup, reserved_bytes=int(self.student_gib * GIB))
        return choose(self.needs["replicated"], self.budget(AUTO_SHARE), self.fits, setup)

    def check(self, name: str) -> None:
        options = self.setup.options.model_copy(update={"placement": name})
        check_fits(options, self.needs, self.budget(1), lambda: self.fits(True))


def test_every_placement_has_a_footprint_and_a_rank_by_speed():
    # A custom map says itself where things go; the map's own check looks at the memory.
    assert set(Node(2, 80).needs) == set(PLACEMENTS) - {"custom", "cached"}
    two, one, without = Node(2, 80).budget(1), Node(1, 80).budget(1), replace(Node(2, 80).budget(1), gpu=None)
    assert by_speed(two) == [
        *("replicated", "streamed", "sharded", "balanced", "rank0", "sequential", "swap", "disk", "cpu")
    ]
    assert by_speed(one) == [
        *("replicated", "balanced", "sequential", "streamed", "sharded", "rank0", "swap", "disk", "cpu")
    ]
    assert by_speed(without) == [
        *("replicated", "balanced", "cpu", "sequential", "sharded", "rank0", "streamed", "swap", "disk")
    ]
    candidates = {spec.name for spec in PLACEMENTS.values() if spec.is_auto_candidate}
    assert candidates == {"replicated", "streamed", "balanced", "cpu", "disk"}


@pytest.mark.parametrize(
    ("name", "free_gib", "host_gib", "fitting"),
    [
        ("replicated", 24, 100, ["streamed", "sharded", "balanced", "sequential", "disk", "cpu"]),
        ("replicated", 19, 100, ["streamed", "disk", "cpu"]),
        ("rank0", 10, 100, ["streamed", "disk", "cpu"]),
        ("streamed", 4, 100, ["cpu"]),
        ("cpu", 24, 20, ["sharded", "balanced", "sequential", "disk"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(name, free_gib, host_gib, fitting):
    node = Node(2, free_gib, host_gib)
    if free_gib == 24:
        node.student_gib = 1
    said = rf"teacher\.placement {name} takes .* GiB .*these fit, fastest first: {', '.join(fitting)}$"
    with pytest.raises(UserError, match=said):
        node.check(name)


def test_weights_that_leave_the_gpu_lie_where_the_student_s_activations_come():
    node = Node(1, 40)
    for alone, beside in ((0, 28), (20, 8), (30, 0)):
        setup = replace(node.setup, update_bytes=40 * GIB, student_excess_bytes=alone * GIB)
        sizes = Sizes(28 * GIB, 28 * GIB, GIB, 0, 28)
        budget = MemoryBudget(40 * GIB, 100 * GIB, 1, 1)
        needs = footprints(sizes, setup, budget, beside_update=True)
        assert needs["swap"].gpu == beside * GIB
        assert needs["replicated"].gpu == 28 * GIB
        # Where no memory is kept for updates, it needs room for all of its weights.
        assert footprints(sizes, setup, budget)["swap"].gpu == 28 * GIB


def test_what_an_update_takes_is_kept_free_in_place_of_a_share_of_the_memory():
    """28 GiB of weights on a GPU with 40 free: a fifth would leave too little, and an update takes 3 GiB."""
    node = Node(1, 40)
    assert node.choose()[0] == "replicated"
    tight = Node(1, 34)
    assert tight.choose()[0] == "streamed"
    known = replace(tight.setup, update_bytes=1 * GIB)
    for setup_of_run, kept in (
        (tight.setup, {AUTO_SHARE: 20, 0.9: 10, 1.0: 0}),
        # A choice keeps 7 GiB as a margin, and the update's. A question whether it can work keeps the less of both.
        (known, {AUTO_SHARE: 8, 0.9: 8, 1.0: 0}),
        (replace(known, update_bytes=5 * GIB), {AUTO_SHARE: 12, 0.9: 10, 1.0: 0}),
    ):
        for share, expected in kept.items():
            assert kept_for_updates(setup_of_run, 100 * GIB, share) == pytest.approx(expected * GIB, abs=8)
    tight.setup = known
    name, reason = tight.choose()
    assert name == "replicated"
    assert reason.startswith("a whole teacher, the student and an update take 30.00 GiB of the 31.62 that are 93% of ")


def test_predicted_times_decide_and_what_was_measured_where_they_are_equal():
    two = Node(2, 80).budget(1)
    # To whole milliseconds: `streamed` and `sharded` are as fast as `replicated`, by which the order stays.
    times = {
        "replicated": 90.2,
        "streamed": 90.4,
        "sharded": 89.9,
        "balanced": 150,
        "disk": 700,
        "cpu": 9000,
        "swap": 600,
    }
    assert by_speed(two, times) == [
        *("replicated", "streamed", "sharded", "balanced", "swap", "disk", "cpu", "rank0", "sequential")
    ]
    node = Node(2, 24)
    node.setup = replace(
        node.setup, step_ms={"streamed": 417.0, "balanced": 300.0, "disk": 2000.0, "replicated": 200.0}
    )
    name, reason = node.choose()
    assert name == "balanced"
    assert reason.endswith(
        "; an update is predicted to take, by placement: balanced 300 ms, streamed 417 ms, disk 2,000 ms"
    )


def test_a_refusal_of_everything_says_so():
    with pytest.raises(UserError, match=r"no placement fits, so choose a smaller teacher\.dtype or a smaller student"):
        Node(1, 1, host_gib=1, student_gib=4).check("streamed")


@pytest.mark.parametrize(
    ("num_gpus", "free_gib", "host_gib", "chosen"),
    [
        (1, 80, 100, "replicated"),
        (2, 80, 100, "replicated"),
        # A card of 24 GiB beside a teacher of 27: blocks pass through it, at a small part of the CPU's time.
        (1, 24, 100, "streamed"),
        (2, 24, 100, "streamed"),
        # Host memory is too small for a copy of the teacher.
        (2, 30, 8, "balanced"),
        (1, 30, 8, "disk"),
        # The student leaves no room for the buffers of `streamed`.
        (1, 3, 100, "cpu"),
    ],
)
def test_auto_takes_the_fastest_that_fits(num_gpus, free_gib, host_gib, chosen):
    name, reason = Node(num_gpus, free_gib, host_gib).choose()
    assert name == chosen
    assert reason.startswith("a whole teacher and the student take 29.00 GiB of the ")


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_auto_never_chooses_what_is_then_refused(num_gpus):
    for free_gib in range(1, 100, 3):
        for host_gib in (4, 20, 60):
            for student_gib in (0.1, 3, 12):
                node = Node(num_gpus, free_gib, host_gib, student_gib)
                name, _ = node.choose()
                if node.fits(False):
                    assert PLACEMENTS[name].is_auto_candidate
                    if name in ("balanced", "sequential"):
                        assert node.pack(name, 0).fits
                    else:
                        node.check(name)


def test_a_single_process_spreads_the_teacher_before_it_streams():
    """Measured on two H200 with 24 GiB free, Wan 14B at 1,600 tokens: 371 ms spread, 615 ms streamed."""
    node = Node(2, 24, student_gib=1)
    alone = replace(node.budget(AUTO_SHARE), num_ranks=1)
    assert list(fitting(node.needs, alone, node.setup.options, node.pack, 0.2))[:3] == [
        "balanced",
        "sequential",
        "streamed",
    ]


def test_no_device_map_is_made_where_something_faster_fits():
    """A map looks at every GPU of the node, and a context there takes memory from the rank that trains on it."""
    for node, chosen in ((Node(2, 80), "replicated"), (Node(2, 24), "streamed")):

        def never(placement: str, kept_share: float) -> Packing:
            raise AssertionError(placement)

        def fits(with_activations: bool, node: Node = node):
            return fitting(node.needs, node.budget(AUTO_SHARE), node.setup.options, never, 0.2)

        assert choose(node.needs["replicated"], node.budget(AUTO_SHARE), fits, node.setup)[0] == chosen


def test_auto_takes_what_leaves_nothing_for_activations_before_it_gives_up():
    """The teacher alone takes 90% of the only GPU, and the host has no memory for a copy."""
    node = Node(1, 30, host_gib=0.5, student_gib=0)
    assert node.fits(True) == []
    assert node.choose()[0] == "replicated"
    node.check("replicated")


def test_auto_runs_and_says_what_it_chose(tmp_path, capsys):
    teacher = open_teacher(ToyNetwork(save_toy(tmp_path)), setup(placement="auto"))
    teacher.close()
    assert capsys.readouterr().out.startswith(
        "teacher.placement auto: replicated (a whole teacher and the student take 0.00 GiB "
    )


def test_one_large_gpu_is_enough_for_rank0():
    node = Node(2, 10, placement="rank0", rank=1)
    others = lambda: []  # noqa: E731
    check_fits(node.setup.options, node.needs, replace(node.budget(1), gpu_of_ranks=(10 * GIB, 60 * GIB)), others)
    with pytest.raises(UserError, match="rank0 takes"):
        check_fits(node.setup.options, node.needs, replace(node.budget(1), gpu_of_ranks=(60 * GIB, 10 * GIB)), others)
    needs, budget = {"rank0": node.needs["rank0"]}, replace(node.budget(1), gpu_of_ranks=(10 * GIB, 60 * GIB))
    assert list(fitting(needs, budget, node.setup.options, None, 0)) == ["rank0"]


def test_a_quantised_checkpoint_is_refused(tmp_path):
    """int8 weights without their scales are numbers too, and were read as such once."""
    network = ToyNetwork(save_toy(tmp_path))
    state = load_file(tmp_path / "first.safetensors")
    save_file(state | {"embed.SCB": torch.ones(16)}, tmp_path / "first.safetensors")
    with pytest.raises(UserError, match=r"hold embed\.SCB, which the model of its config"):
        open_teacher(network, setup())
    save_file(state | {"embed.weight": torch.ones(16, 16, dtype=torch.int8)}, tmp_path / "first.safetensors")
    with pytest.raises(UserError, match=r"embed\.weight is stored as int8, so it is quantised"):
        open_teacher(network, setup())


def test_the_sizes_are_those_of_the_weights(tmp_path):
    network = ToyNetwork(save_toy(tmp_path), 2)
    sizes = measure(network, setup())
    teacher = open_teacher(network, setup())
    # The buffers that a module makes itself are not in its files.
    assert sizes.total <= teacher.memory().host_bytes <= sizes.total + 2 * 64
    assert sizes.num_blocks == 14
    teacher.close()


def test_nothing_is_read_when_it_does_not_fit(tmp_path, monkeypatch):
    network = ToyNetwork(tmp_path / "no such folder")
    budget = factory.memory_budget(setup())
    monkeypatch.setattr(factory, "memory_budget", lambda *_: replace(budget, host=1000))
    for name in ("replicated", "cpu", "streamed", "balanced", "rank0", "swap", "sharded"):
        with pytest.raises(UserError, match=rf"teacher\.placement {name} takes"):
            open_teacher(network, setup(placement=name))


@pytest.mark.parametrize(
    "name", [spec.name for spec in PLACEMENTS.values() if spec.why_not_quantized and spec.memory is not None]
)
def test_quantised_layers_are_refused_where_they_would_be_wrong(name):
    asked = rf"quantization is fp8 and teacher\.placement {name}: .*; choose placement replicated, .* or swap, or"
    with pytest.raises(UserError, match=asked):
        check_placement(Options(path="-", placement=name, quantization="fp8"), 2, False)


def test_worlds_that_do_not_suit_a_placement_are_refused():
    with pytest.raises(UserError, match=r"teacher\.rank is 2 and the run has 2 rank"):
        check_placement(Options(path="-", placement="rank0", rank=2), 2, False)
    nvme = Options(path="-", placement="sharded", offload="nvme", nvme_path="/tmp")
    with pytest.raises(UserError, match="only DeepSpeed does"):
        check_placement(nvme, 2, False)
    check_placement(nvme, 2, True)


def test_the_float32_copies_of_a_16_bit_teacher_on_the_cpu_are_counted(tmp_path):
    network, made = ToyNetwork(save_toy(tmp_path)), setup(torch.bfloat16, placement="cpu")
    teacher = open_teacher(network, made)
    generator = torch.Generator().manual_seed(0)
    teacher.predict([Request((0,), {"x": torch.randn(1, DIM, generator=generator)}, ("output",), ())])
    counted = footprints(measure(network, made), made, memory_budget(made))["cpu"].host
    # The toy's float32 islands are copied without growing.
    assert teacher.memory().host_bytes <= counted + 4096
    assert counted > measure(network, made).total


def test_int8_sizes_are_those_of_the_converted_layers(tmp_path):
    """Of convolutions, embeddings and float32 islands nothing becomes smaller."""
    network, made = ToyNetwork(save_toy(tmp_path)), setup(torch.bfloat16, quantization="int8")
    sizes, plain = measure(network, made), measure(network, setup(torch.bfloat16))
    assert plain.total / 2 < sizes.total < plain.total
    assert sizes.total <= open_teacher(network, made).memory().host_bytes <= sizes.total + 64


def test_resident_blocks_take_no_more_than_all_blocks():
    """Blocks of very different sizes, as a UNet's: each is counted as the largest, up to the whole teacher."""
    uneven = Sizes(total=100, largest_module=100, largest_block=60, rest=10, num_blocks=9)
    for count, on_device, in_host_copy in ((0, 190, 90), (1, 250, 30), (9, 100, 0)):
        options = StreamedOptions(ring_blocks=3, resident_blocks=count)
        assert (options.device_bytes(uneven), options.passing_bytes(uneven)) == (on_device, in_host_copy)


@pytest.mark.parametrize("placement", ["replicated", "cpu", "streamed", "disk", "balanced", "swap"])
def test_a_file_that_cannot_be_read_any_more_is_one_line(tmp_path, monkeypatch, placement):
    network = ToyNetwork(save_toy(tmp_path))
    monkeypatch.setattr(WeightFiles, "read", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(RunError, match=r"^the teacher's weights cannot be read any more \(.*Input/output error\)"):
        open_teacher(network, setup(placement=placement)).predict(requests_of(0, 1, 1))
