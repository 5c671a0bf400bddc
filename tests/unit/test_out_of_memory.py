"""A GPU whose memory is used up: what the error says of it, and what it advises."""

import re
from dataclasses import replace

import pytest
import torch

from distiller import cli
from distiller.errors import RunError
from distiller.training.loop import train
from distiller.training.memory_advice import PlannedMemory, Shortage, Situation, owners, remedies
from distiller.training.tracking import GIB
from tests.toy_task import LinearTeacher, TokenTask, build_toy_run, toy_recipe

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory 22.00 GiB "
    "is allocated by PyTorch, and 768.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
SITUATION = Situation(
    placement="replicated",
    teacher=10 * GIB,
    head=0,
    prefetch_steps=0,
    prefetched=0,
    planned=PlannedMemory(4 * GIB, {"replicated": 10 * GIB, "sharded": 9 * GIB, "streamed": GIB, "cpu": 0}),
    offloading=("zero2_offload.yaml", 3 * GIB),
    may_expand=True,
    batch_size=4,
    samples_per_update=8,
    accumulation_steps=None,
    recomputes=False,
    can_quantize=True,
)


def test_what_the_allocator_says_is_read():
    shortage = Shortage.of(MESSAGE)
    assert shortage == Shortage(0, 2 * GIB, 24 * GIB, GIB // 2, 22 * GIB, 3 * GIB // 4)
    assert shortage.missing == 1.5 * GIB
    assert not shortage.is_fragmented
    assert Shortage.of(
        "CUDA out of memory. Tried to allocate 600.00 MiB. 0.70 GiB is reserved by PyTorch but unallocated"
    ).is_fragmented
    assert Shortage.of("out of memory") == Shortage(None, None, None, None, None, None)
    assert owners(SITUATION, shortage) == (
        "teacher 10.00 GiB, student's weights and optimizer 4.00 GiB, activations and the rest 8.00 GiB"
    )
    assert owners(SITUATION, Shortage.of("out of memory")) == ""


@pytest.mark.parametrize(
    ("size", "num_bytes"), [("512.00 bytes", 512), ("3.00 KiB", 3072), ("1.50 MiB", 1_572_864), ("2.00 GiB", 2 * GIB)]
)
def test_sizes_are_read_in_every_unit(size, num_bytes):
    assert Shortage.of(f"CUDA out of memory. Tried to allocate {size}.").asked == num_bytes


@pytest.mark.parametrize(
    ("allocated", "student", "rest"), [(22, "4.00", "8.00"), (12, "2.00", "0.00"), (9, "0.00", "0.00")]
)
def test_the_student_holds_no_more_than_the_teacher_leaves(allocated, student, rest):
    assert owners(SITUATION, Shortage(0, None, None, None, allocated * GIB, None)) == (
        f"teacher 10.00 GiB, student's weights and optimizer {student} GiB, activations and the rest {rest} GiB"
    )


def test_nothing_is_held_of_which_nothing_is_known():
    unknown = replace(SITUATION, teacher=0, planned=PlannedMemory())
    assert unknown.activations(Shortage.of("out of memory")) == 0
    assert unknown.planned == PlannedMemory(0, {})


@pytest.mark.parametrize(
    ("asked", "cached", "is_fragmented"), [(5, 5, True), (5, 4, False), (None, 5, False), (5, None, False)]
)
def test_memory_lies_in_pieces_where_the_request_would_fit_into_it(asked, cached, is_fragmented):
    assert Shortage(0, asked, None, None, None, cached).is_fragmented == is_fragmented


def test_settings_that_free_what_is_missing_are_named():
    """1.5 GiB are missing: `sharded`, which would free 1, is left out."""
    shortage = Shortage.of(MESSAGE)
    assert remedies(SITUATION, shortage) == [
        "train.batch_size=2 train.samples_per_update=8 (about 4.00 GiB)",
        "teacher.placement=streamed (9.00 GiB)",
        "teacher.placement=cpu (10.00 GiB)",
        "teacher.quantization=int8 (about 5.00 GiB)",
        "train.gradient_checkpointing=true (most of the student's activations)",
        "the launch file zero2_offload.yaml (about 3.00 GiB)",
    ]
    split = replace(SITUATION, batch_size=9, accumulation_steps=2)
    assert remedies(split, shortage)[0] == "train.batch_size=3 train.gradient_accumulation_steps=6 (about 5.33 GiB)"
    # What every rank holds anyway is nobody's to free, and counts among what is held.
    with_head = replace(SITUATION, teacher=9 * GIB, head=GIB)
    assert "teacher.placement=streamed (8.00 GiB)" in remedies(with_head, shortage)
    assert owners(with_head, shortage) == owners(SITUATION, shortage)
    in_pieces = replace(shortage, cached=3 * GIB)
    assert remedies(SITUATION, in_pieces)[0].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert not remedies(replace(SITUATION, may_expand=False), in_pieces)[0].startswith("PYTORCH")
    ahead = remedies(replace(SITUATION, prefetch_steps=1, prefetched=GIB // 2), shortage)
    assert ahead[0] == "teacher.prefetch_steps=0 (0.50 GiB, and the teacher's activations)"
    nothing_left = replace(
        SITUATION, placement="cpu", teacher=0, batch_size=1, recomputes=True, can_quantize=False, offloading=None
    )
    assert remedies(nothing_left, shortage) == []


@pytest.mark.parametrize(
    ("asked", "free", "missing"), [(5, 2, 3), (5, None, 5), (5, 5, 1), (2, 5, 1), (None, 2, 1), (None, None, 1)]
)
def test_what_is_missing_is_the_request_without_what_is_free(asked, free, missing):
    assert Shortage(0, asked, None, free, None, None).missing == missing


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (1 * GIB, "sharded streamed cpu int8 zero2_offload.yaml"),
        (1 * GIB + 1, "streamed cpu int8 zero2_offload.yaml"),
        (3 * GIB, "streamed cpu int8 zero2_offload.yaml"),
        (3 * GIB + 1, "streamed cpu int8"),
        (5 * GIB, "streamed cpu int8"),
        (5 * GIB + 1, "streamed cpu"),
        (9 * GIB, "streamed cpu"),
        (9 * GIB + 1, "cpu"),
        (10 * GIB, "cpu"),
        (10 * GIB + 1, ""),
    ],
)
def test_a_setting_that_frees_just_what_is_missing_is_named(missing, named):
    """The placements free 1, 9 and 10 GiB, int8 frees 5, and the launch file 3."""
    others_taken = replace(SITUATION, batch_size=1, recomputes=True)
    found = remedies(others_taken, Shortage(0, missing, None, 0, None, None))
    assert [re.findall(r"([\w.]+) \(", text)[0] for text in found] == named.split()


class FullGpuTeacher(LinearTeacher):
    """Needs more memory than there is at its third update."""

    def predict(self, requests):
        if self.num_calls == 2:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().predict(requests)


class FullGpuTask(TokenTask):
    """Its loss needs more memory than there is."""

    def loss(self, student_outputs, teacher_outputs, batch):
        raise torch.OutOfMemoryError(MESSAGE)


def test_the_loop_says_where_memory_was_used_up(tmp_path):
    recipe = toy_recipe(tmp_path, batch_size=2)
    with pytest.raises(RunError) as caught:
        train(build_toy_run(recipe, accumulation_steps=4, teacher=FullGpuTeacher()))
    text = str(caught.value)
    assert text.startswith(
        "out of GPU memory in update 3, teacher: 2048 MiB more were asked for and 512 MiB are free of 24.0 GiB on "
        "GPU 0 (teacher 0.00 GiB, "
    )
    assert "train.batch_size=1 train.samples_per_update=8" in text
    with pytest.raises(RunError, match="in update 1, student: 2048 MiB"):
        train(build_toy_run(recipe, accumulation_steps=4, task=FullGpuTask()))


def test_elsewhere_it_is_one_line_too(capfd):
    def command(stops):
        raise torch.OutOfMemoryError(MESSAGE)

    assert cli.guarded(command) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    # The command that failed is the test's; of the package it is the frame that called it.
    assert re.match(
        r"distiller: out of GPU memory in distiller/cli.py, line [0-9]+: CUDA out of memory. Tried to", said
    )
    assert "fragmentation" not in said
    assert "evaluation.batch_size" in said
