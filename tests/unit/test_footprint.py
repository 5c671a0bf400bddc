"""What is refused before any weight is read, what `auto` chooses, and that the arithmetic is that of the placements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from distiller.errors import UserError
from distiller.teacher_config import Teacher as Options
from distiller.teachers import PLACEMENTS, opening
from distiller.teachers.base import Setup
from distiller.teachers.footprint import Room, Sizes, check_fits, choose, footprints, measure
from distiller.teachers.opening import open_teacher
from distiller.teachers.rules import QUANTIZED_PLACEMENTS, RULES, check_placement
from tests.toy_network import ToyNetwork, save_toy, setup

GIB = 2**30
# Wan 14B in bfloat16: 40 blocks.
WAN = Sizes(total=27 * GIB, largest_module=27 * GIB, largest_block=int(0.65 * GIB), rest=1 * GIB, num_blocks=40)


def on_gpus(num_gpus: int, free_gib: float, host_gib: float = 100, **options) -> tuple[dict, Room, Setup]:
    made = setup(**options)
    made = replace(made, ranks=replace(made.ranks, world_size=num_gpus, local_world_size=num_gpus))
    room = Room(int(free_gib * GIB), int(host_gib * GIB), num_gpus, num_gpus)
    return footprints(WAN, made, room), room, made


def test_every_placement_has_a_rule_and_a_footprint():
    assert set(RULES) == set(PLACEMENTS)
    needs, _, _ = on_gpus(2, 80)
    # A custom map says itself where things go; the map's own check looks at the room.
    assert set(needs) == set(PLACEMENTS) - {"custom", "cached"}


@pytest.mark.parametrize(
    ("name", "free_gib", "host_gib", "fitting"),
    [
        ("replicated", 24, 100, ["cpu", "streamed", "disk", "balanced", "sequential", "sharded"]),
        ("rank0", 10, 100, ["cpu", "streamed", "disk"]),
        ("streamed", 2, 100, ["cpu"]),
        ("cpu", 24, 20, ["disk", "balanced", "sequential", "sharded"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(name, free_gib, host_gib, fitting):
    needs, room, made = on_gpus(2, free_gib, host_gib, placement=name)
    with pytest.raises(UserError, match=rf"teacher\.placement {name} takes .* GiB .*these fit: {', '.join(fitting)}$"):
        check_fits(made.options, needs, room)


@pytest.mark.parametrize(
    ("num_gpus", "free_gib", "chosen"),
    [(1, 80, "replicated"), (2, 80, "replicated"), (2, 30, "balanced"), (1, 30, "cpu")],
)
def test_auto_spreads_from_two_gpus_on_and_goes_to_the_cpu_with_one(num_gpus, free_gib, chosen):
    needs, room, _ = on_gpus(num_gpus, free_gib)
    name, reason = choose(needs, room, student_bytes=2 * GIB)
    assert name == chosen
    assert "29.00 of" in reason


def test_auto_runs_and_says_what_it_chose(tmp_path, capsys):
    teacher = open_teacher(ToyNetwork(save_toy(tmp_path)), setup(placement="auto"))
    teacher.close()
    assert capsys.readouterr().out.startswith("teacher.placement auto: replicated (teacher and student take 0.00 of ")


def test_auto_takes_what_fits_when_its_first_choices_do_not():
    needs, room, _ = on_gpus(1, 30, host_gib=8)
    assert choose(needs, room, student_bytes=2 * GIB)[0] == "disk"


def test_one_large_gpu_is_enough_for_rank0():
    needs, room, made = on_gpus(2, 10, placement="rank0", rank=1)
    check_fits(made.options, needs, replace(room, gpu_of_ranks=(10 * GIB, 60 * GIB)))
    with pytest.raises(UserError, match="rank0 takes"):
        check_fits(made.options, needs, replace(room, gpu_of_ranks=(60 * GIB, 10 * GIB)))


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
    sizes = measure(network, torch.float32)
    teacher = open_teacher(network, setup())
    # The buffers that a module makes itself are not in its files.
    assert sizes.total <= teacher.memory().host_bytes <= sizes.total + 2 * 64
    assert sizes.num_blocks == 14
    teacher.close()


def test_nothing_is_read_when_it_does_not_fit(tmp_path, monkeypatch):
    network = ToyNetwork(tmp_path / "no such folder")
    room = opening.room_of(setup())
    monkeypatch.setattr(opening, "room_of", lambda _: replace(room, host=1000))
    for name in ("replicated", "cpu", "streamed", "balanced", "rank0", "swap", "sharded"):
        with pytest.raises(UserError, match=rf"teacher\.placement {name} takes"):
            open_teacher(network, setup(placement=name))


@pytest.mark.parametrize("name", [name for name in RULES if name not in (*QUANTIZED_PLACEMENTS, "custom", "cached")])
def test_int8_is_refused_where_it_would_be_wrong(name):
    with pytest.raises(
        UserError, match=rf"quantization is int8 and teacher\.placement {name}: .* replicated or balanced"
    ):
        check_placement(Options(path="-", placement=name, quantization="int8"), 2, False)


def test_worlds_that_do_not_suit_a_placement_are_refused():
    with pytest.raises(UserError, match=r"teacher\.rank is 2 and the run has 2 rank"):
        check_placement(Options(path="-", placement="rank0", rank=2), 2, False)
    nvme = Options(path="-", placement="sharded", offload="nvme", nvme_path="/tmp")
    with pytest.raises(UserError, match="only DeepSpeed does"):
        check_placement(nvme, 2, False)
    check_placement(nvme, 2, True)
