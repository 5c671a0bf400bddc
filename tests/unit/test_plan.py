"""`distiller plan`: arithmetic of placements and engines, machines, choices, and what it prints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml

from distiller.cli import main
from distiller.config.loading import load
from distiller.config.placements import PLACEMENTS
from distiller.config.placements.base import Links, Sizes, TeacherWork, World
from distiller.launch.checks import Launch
from distiller.launch.deepspeed import Offload
from distiller.launch.fsdp import parse_fsdp
from distiller.launch.student_layout import StudentLayout
from distiller.planner.account import WORKSPACE, make_account
from distiller.planner.gpus import GIB, GPUS
from distiller.planner.machines import CONTEXT_BYTES, Machine, parse_bytes, plan_machine
from distiller.planner.plan import make_plan, plan_run
from distiller.planner.remedies import changes
from distiller.planner.traced_update import TracedUpdate
from distiller.teachers.footprint import FILLED_SHARE
from distiller.training.student_memory import StudentState, student_state
from tests import toys
from tests.model_families import recipe_of as recipe_of_family

GB = 10**9


def needs(name: str, sizes: Sizes, world: World):
    spec = PLACEMENTS[name]
    assert spec.memory is not None
    return spec.memory(sizes, spec.options(), world)


def test_the_arithmetic_of_the_older_documents():
    """A student of 10 GB and a teacher of 120 GB on 4 GPUs, in GB of GPU memory in all, and of host memory."""
    sizes, world, student = Sizes(120, 120, 0, 0, 60), World(4, 4, 4), 10
    in_all = {
        name: (4 * (student + needs(name, sizes, world).gpu), needs(name, sizes, world).host)
        for name in ("replicated", "balanced", "cpu", "sharded")
    }
    # Beside `cpu` the GPUs hold the student alone. A shard is a quarter: 40 on each GPU.
    assert in_all == {"replicated": (520, 0), "balanced": (160, 0), "cpu": (40, 120), "sharded": (160, 0)}


MEASURED = {  # docs/performance.md, "Two H200": ms of an update at 6,240 tokens
    **{"replicated": 426, "streamed": 441, "sharded": 477, "balanced": 713, "rank0": 825},
}


def test_predicted_times_of_placements_are_near_those_that_were_measured():
    sizes = Sizes(int(28.6 * GB), int(28.6 * GB), int(0.7 * GB), int(0.5 * GB), 40, 2)
    links, world = Links(54 * GB, 400 * GB, 3 * GB, 100), World(2, 2, 2)
    predicted = {}
    for name in MEASURED:
        spec = PLACEMENTS[name]
        assert spec.time is not None
        # The forward pass itself took 405 ms; the rest of an update 21.
        predicted[name] = 21 + spec.time(TeacherWork(1, 405), sizes, spec.options(), world, links).ms
    for name, measured in MEASURED.items():
        assert predicted[name] == pytest.approx(measured, rel=0.15), name
    # At 1,560 tokens the copies bound `streamed`: half of the blocks by each GPU.
    streamed = PLACEMENTS["streamed"]
    assert streamed.time is not None
    time = streamed.time(TeacherWork(1, 92), sizes, streamed.options(), world, links)
    assert (round(time.ms), time.bound_by) == (260, "host memory to GPU")


@pytest.mark.parametrize(
    ("name", "passes", "world", "expected"),
    [
        ("balanced", 1, World(2, 2, 2), 1.5),
        ("balanced", 4, World(2, 2, 2), 4.5),
        ("balanced", 4, World(1, 1, 2), 4.0),
        ("rank0", 2, World(3, 3, 3), 6.0),
        ("cpu", 1, World(2, 2, 2), 200.0),
    ],
)
def test_times_in_multiples_of_a_pass(name, passes, world, expected):
    spec = PLACEMENTS[name]
    assert spec.time is not None
    links = Links(1e12, 1e12, 1e12, 100)
    assert spec.time(TeacherWork(passes, 1.0), Sizes(1, 1, 1, 1, 1), spec.options(), world, links).ms == expected


@pytest.mark.parametrize("prefetch_steps", [0, 1])
def test_no_placement_is_faster_than_a_whole_teacher_on_every_gpu(task, prefetch_steps):
    """Asked ahead, what a GPU computes for teacher and student adds up, wherever its part of the teacher lies."""
    folder, built = task
    options = [f"teacher.prefetch_steps={prefetch_steps}", "train.batch_size=4", "train.samples_per_update=16"]
    recipe = load(str(folder / "recipe.yaml"), options)
    run = plan_run(recipe, built, Launch(None, 2), Machine(GPUS["H200"], 2, 100 * GIB, 100 * GIB))
    times = {name: run.step_time(PLACEMENTS[name]).ms for name in ("replicated", "streamed", "balanced", "rank0")}
    assert min(times.values()) == times["replicated"]


def test_what_a_run_asks_ahead_hides_behind_the_student():
    links, world, sizes = Links(1.0, 1.0, 1.0, 100), World(2, 2, 2), Sizes(100, 100, 1, 0, 100)
    streamed, balanced = PLACEMENTS["streamed"], PLACEMENTS["balanced"]
    assert streamed.time is not None
    assert balanced.time is not None
    time = streamed.time(TeacherWork(1, 10.0), sizes, streamed.options(), world, links)
    # 100 bytes, half by each GPU, at one a second: it computes for 10 ms of them.
    assert (time.ms, time.computing_ms) == (50_000, 10)
    time = balanced.time(TeacherWork(1, 10.0), sizes, balanced.options(), world, links)
    # Two ranks' passes through two halves: each GPU computes as much as one pass, and waits half of one.
    assert (time.ms, time.computing_ms) == (15, 10)


def layout(engine: str, num_processes: int = 4, accumulation: int = 1, **others) -> StudentLayout:
    return StudentLayout(engine, num_processes, accumulation, others.pop("precision", "bf16"), **{
        "offload": Offload(), "fsdp": None, **others,
    })  # fmt: skip


FSDP = parse_fsdp({"VERSION": "2"})


@pytest.mark.parametrize(
    ("given", "weights", "gradients", "optimizer", "buffers", "host"),
    [
        # Bytes a parameter; four ranks. The host holds a checkpoint's copy of weights and moments.
        (layout("single", 1), 4, 4, 8, 0, 12),
        (layout("ddp"), 4, 4, 8, 4, 3),
        (layout("deepspeed-zero1"), 2, 2, 3, 4, 3),
        (layout("deepspeed-zero2"), 2, 0.5, 3, 0, 3),
        (layout("deepspeed-zero3"), 0.5, 0.5, 3, 4, 3),
        (layout("deepspeed-zero3", precision="no"), 1, 1, 3, 8, 3),
        (layout("deepspeed-zero2-offload", offload=Offload("cpu")), 2, 0, 0, 0, 7),
        (layout("deepspeed-zero3-offload", offload=Offload("cpu", "cpu")), 0, 0, 0, 2, 8),
        (layout("fsdp2", fsdp=FSDP), 1, 1, 2, 0, 3),
        (layout("fsdp2", accumulation=2, fsdp=FSDP), 1, 5, 2, 0, 3),
        (layout("fsdp2", fsdp=replace(FSDP, offloads=True)), 0, 0, 0, 0, 7),
        (layout("fsdp2", fsdp=replace(FSDP, num_replicas=2)), 2, 2, 4, 0, 3),
    ],
)
def test_the_student_s_state_under_every_engine(given, weights, gradients, optimizer, buffers, host):
    recipe = load("digits-wan")
    state, count = student_state(1000, recipe, given), 1000
    assert state == StudentState(*(int(width * count) for width in (weights, gradients, optimizer, buffers, host)))
    averaged = recipe.model_copy(update={"train": recipe.train.model_copy(update={"ema_decay": 0.99})})
    more = student_state(1000, averaged, given)
    share = 4 * count // given.num_processes
    is_offloaded = given.offload.optimizer != "none" or (given.fsdp is not None and given.fsdp.offloads)
    assert more.optimizer - state.optimizer == (0 if is_offloaded else share)
    assert more.host - state.host == share * (2 if is_offloaded else 1)


def test_buckets_of_zero_have_a_largest_size():
    recipe, many = load("digits-wan"), 4 * GB
    assert student_state(many, recipe, layout("deepspeed-zero1")).buffers == pytest.approx(2 * 2 * 500_000_000)
    assert student_state(many, recipe, layout("deepspeed-zero3")).buffers == pytest.approx(2 * 1_500_000_000)


@pytest.mark.parametrize(
    ("given", "prefetch_steps", "expected"),
    [
        # Teacher 30, its answer 5; student 100 with gradients and 80 without; gradients 40. Both hold the answer.
        (layout("single", 1), 0, 100),
        (layout("deepspeed-zero2"), 0, 80),
        # The second micro-batch meets the gradients, and another answer is held.
        (layout("single", 1, 2), 0, 80 + 40 + 5),
        # Two more answers, and the teacher computes beside the student.
        (layout("single", 1), 2, 95 + 25 + 3 * 5),
    ],
)
def test_what_an_update_takes(given, prefetch_steps, expected):
    traced = TracedUpdate(30, 5, 100, 80, {}, {})  # type: ignore[arg-type]
    state = StudentState(weights=1000, gradients=40, optimizer=2000, buffers=300, host=0)
    account = make_account(state, given, traced, head=7, prefetch_steps=prefetch_steps)
    assert account.update == expected
    assert account.peak(500) == 1000 + 2000 + 300 + 7 + 500 + expected + WORKSPACE
    # Weights that leave the GPU lie where the student's activations come later, if those are more than the answer's.
    alone = 0 if prefetch_steps else max(expected - 5 * given.accumulation_steps - 25, 0)
    assert account.peak(500, leaves_gpu=True) == account.peak(500) - alone
    assert account.peak(alone, leaves_gpu=True) == account.beside_teacher


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * GIB), ("24G", 24 * GIB), ("24GB", 24 * GB), ("1.5TiB", 1536 * GIB), ("512 MiB", GIB // 2)],
)
def test_sizes_with_units(text, expected):
    assert parse_bytes(text, "--gpu-memory") == expected


def test_machines_that_are_described():
    described = plan_machine("4x3090-24G", None, None, None, "128GiB", 2)
    assert described == Machine(GPUS["3090"], 4, int(23.6 * GIB) - CONTEXT_BYTES, 128 * GIB, 2)
    assert described.describe() == "2 machines, each with 4 x 3090, 23.0 GiB free on each, 128 GiB of host memory"
    assert plan_machine(None, 8, None, "h100", "1TiB", 1).gpu is GPUS["H100"]
    assert plan_machine("8xA100-40G", None, None, None, "1TiB", 1).gpu is GPUS["A100-40"]
    # A kind for a memory alone: the smallest that has it.
    assert plan_machine(None, 2, "48GiB", None, "1TiB", 1).gpu is GPUS["L40S"]
    assert plan_machine(None, None, None, None, "64GiB", 1) == Machine(None, 0, 0, 64 * GIB)


def recipe_of(folder, *overrides: str):
    return load(str(toys.write_recipe(folder) / "recipe.yaml"), list(overrides))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    from distiller.build import build_task

    folder = tmp_path_factory.mktemp("plan")
    return folder, build_task(recipe_of(folder))


def planned(task, machine: Machine, processes: int, *overrides: str):
    folder, built = task
    return make_plan(load(str(folder / "recipe.yaml"), list(overrides)), built, Launch(None, processes), machine)


def test_a_plan_takes_the_fastest_that_fits_and_names_what_would_fit(task):
    # The toy in units of its own: what it takes without the teacher, and the teacher's size.
    room = planned(task, Machine(GPUS["3090"], 2, 100 * GIB, 100 * GIB), 2)
    rows = {row.name: row for row in room.placements}
    assert room.choice == "replicated"
    assert {name for name, row in rows.items() if not row.fits} == {"dedicated", "cached", "custom"}
    assert rows["dedicated"].why == "teacher.devices asks for 1 GPU(s) beside those of the 2 rank(s), and there are 2"
    assert rows["rank0"].gpu_bytes[0] > rows["rank0"].gpu_bytes[1]
    assert rows["cpu"].gpu_bytes[0] < rows["streamed"].gpu_bytes[0] <= rows["replicated"].gpu_bytes[0]
    assert rows["streamed"].host_bytes > rows["replicated"].host_bytes
    # With a byte less than `replicated` takes, another one is taken.
    tight = Machine(GPUS["3090"], 2, int(rows["replicated"].gpu_bytes[0] / FILLED_SHARE) - 8, 100 * GIB)
    found = planned(task, tight, 2)
    chosen = {row.name: row for row in found.placements}
    assert not chosen["replicated"].fits
    assert " GiB, more than 93% of a GPU's: " in chosen["replicated"].why
    assert found.choice not in (None, "replicated")
    assert found.placements[0].fits
    assert [row.fits for row in found.placements] == sorted((row.fits for row in found.placements), reverse=True)
    # Nothing fits where even the student does not.
    nothing = planned(task, replace(tight, gpu_memory=1000), 2)
    assert nothing.choice is None
    assert all(not row.fits for row in nothing.placements)


def test_a_remedy_is_the_first_change_that_is_enough(task):
    rows = {row.name: row for row in planned(task, Machine(GPUS["3090"], 1, GIB, GIB), 1).placements}
    peak = rows["replicated"].gpu_bytes[0]
    recomputed = planned(task, Machine(GPUS["3090"], 1, GIB, GIB), 1, "train.gradient_checkpointing=true").placements
    smaller = next(row.gpu_bytes[0] for row in recomputed if row.name == "replicated")
    assert smaller < peak
    between = Machine(GPUS["3090"], 1, int((peak + smaller) / 2 / FILLED_SHARE), GIB)
    row = next(row for row in planned(task, between, 1).placements if row.name == "replicated")
    assert (row.fits, row.remedy) == (False, "train.gradient_checkpointing=true")


def test_the_changes_that_are_tried_begin_with_what_costs_least(task, tmp_path, monkeypatch):
    folder, built = task
    # From any folder: launch files name DeepSpeed's JSON relative to the checkout's.
    monkeypatch.chdir(tmp_path)
    machine = Machine(GPUS["3090"], 2, GIB, GIB)

    def tried(processes: int, *overrides: str) -> list[str]:
        recipe = load(str(folder / "recipe.yaml"), list(overrides))
        return [text for _, text in changes(plan_run(recipe, built, Launch(None, processes), machine))]

    recomputing, quantised = "train.gradient_checkpointing=true", "teacher.quantization=int8"
    smaller = "train.batch_size=4 train.samples_per_update=8"
    assert tried(1) == [recomputing, quantised, smaller]
    assert tried(1, "teacher.dtype=float32", f"{recomputing}") == ["teacher.dtype=bfloat16", quantised, smaller]
    sharded = [f"the launch file {name}.yaml" for name in ("zero2", "fsdp2", "zero3_offload")]
    one_each = ["train.batch_size=1", "train.samples_per_update=4"]
    assert tried(2, *one_each) == [*sharded[:2], recomputing, quantised, sharded[2]]
    # Each is planned as it would run: four samples on two ranks, and half of a micro-batch twice as often.
    recipe = load(str(folder / "recipe.yaml"))
    by_text = {text: run for run, text in changes(plan_run(recipe, built, Launch(None, 1), machine))}
    assert (by_text[smaller].recipe.train.batch_size, by_text[smaller].layout.accumulation_steps) == (4, 2)
    two = {
        text: run
        for run, text in changes(plan_run(load(str(folder / "recipe.yaml"), one_each), built, Launch(None, 2), machine))
    }
    assert [two[text].layout.engine for text in sharded] == ["deepspeed-zero2", "fsdp2", "deepspeed-zero3-offload"]
    assert all(two[text].layout.accumulation_steps == 2 for text in sharded)


def test_a_cache_costs_one_answer_for_each_draw(task):
    found = planned(task, Machine(GPUS["H100"], 1, 79 * GIB, 100 * GIB), 1, "cache.draws=2", "train.max_steps=30")
    alone = next(row for row in found.placements if row.name == "replicated")
    assert alone.stage_ms is not None
    assert found.cached_hours is not None
    assert alone.step_ms is not None
    _, built = task
    pass_ms = alone.stage_ms / built.stage_passes()[0]
    # 30 updates of 8 samples are more than two epochs. An update without the teacher's pass of 8 samples is left.
    teacher_ms = 2 * built.num_samples * pass_ms + alone.stage_ms
    student_ms = 30 * (alone.step_ms - 8 * pass_ms)
    assert found.cached_hours == pytest.approx((teacher_ms + student_ms) / 3.6e6, rel=1e-6)


def test_a_plan_of_a_machine_without_gpus_counts_host_memory(task):
    found = planned(task, Machine(None, 0, 0, 100 * GIB), 1)
    assert found.choice == "replicated"
    row = found.placements[0]
    assert (row.gpu_bytes, row.step_ms, found.hours(row)) == ((0,), None, None)
    assert row.host_bytes > 0
    assert planned(task, Machine(None, 0, 0, 1000), 1).choice is None


def test_hours_are_those_of_stages_and_updates(task):
    found = planned(task, Machine(GPUS["H100"], 1, 79 * GIB, 100 * GIB), 1)
    row = found.placements[0]
    assert row.step_ms is not None
    assert row.stage_ms is not None
    assert found.hours(row) == pytest.approx((found.steps * row.step_ms + row.stage_ms) / 3.6e6)
    # What a slow placement asks before the loop takes its time too.
    slow = next(row for row in found.placements if row.name == "cpu")
    assert slow.stage_ms == pytest.approx(100 * row.stage_ms)


def test_it_prints_a_table_and_json(capsys):
    arguments = ["plan", "digits-wan", "--machine", "2x3090-24G", "--host-memory", "64GiB"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 x 3090, 23.0 GiB free on each, 64 GiB of host memory; 2 processes under ddp, bf16")
    assert lines[1].split()[:2] == ["placement", "fits"]
    assert lines[-2].startswith("auto chooses replicated (")
    assert lines[-1].startswith(
        "the older trainer's rule (two GPUs or more: balanced, else cpu) would choose balanced ("
    )
    assert main([*arguments, "--json", "--config_file", "accelerate_configs/zero2.yaml"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["choice"], found["engine"], found["num_processes"]) == ("replicated", "deepspeed-zero2", 2)
    names = {"name", "fits", "why", "gpu_gib_per_rank", "host_gib", "disk_gib", "predicted_step_ms", "bound_by"}
    assert all(names <= row.keys() for row in found["placements"])
    assert len(found["placements"][0]["gpu_gib_per_rank"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--machine", "four"], "--machine is 'four'; write number, kind and memory of its GPUs, such as 4x3090-24G"),
        (["--machine", "4x3090-24G", "--gpus", "2"], "leave --gpus, --gpu, --gpu-memory out"),
        (["--gpu", "GTX"], "--gpu is 'GTX', whose rates are not known; known are H200, "),
        (["--gpu-memory", "24"], "--gpu-memory is '24'; write a number with a unit, such as 24GiB"),
        (["--gpus", "2"], "this machine has no GPU; say which kind the plan is for: --gpu H200, "),
        (["--gpus", "0", "--gpu", "T4"], "--gpus is 0 and --machines 1; each is at least 1"),
        (["--machines", "0"], "--gpus is 1 and --machines 0; each is at least 1"),
        (["--machine", "2xH100-0G"], "--gpu-memory is 0GiB; CUDA alone takes 0.6 GiB of it"),
        (["--processes", "0"], "--processes is 0; it is at least 1"),
        (["--gpu", "T4", "train.mixed_precision=bf16"], "train.mixed_precision is bf16, which T4 has not"),
        (["--gpu", "A100", "teacher.quantization=fp8"], "teacher.quantization is fp8, which A100 has not"),
        (["--plot", "/proc/plan.png"], "--plot /proc/plan.png: "),
        (["--config_file", "nowhere.yaml"], "nowhere.yaml: no such accelerate config file"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(options, said, capsys):
    if torch.cuda.is_available():
        pytest.skip("says what a machine without a GPU says")
    assert main(["plan", "digits-wan", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("distiller:")]) == 1
    assert said in lines[-1]


@pytest.mark.parametrize("family", ["llama", "resnet"])
def test_weights_need_not_be_there(family, tmp_path, capsys):
    recipe = recipe_of_family(family, tmp_path)
    for file in (tmp_path / "teacher").rglob("*.safetensors"):
        file.unlink()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "1", "--gpu", "H100", "--host-memory", "9GiB"]) == 0
    assert "auto chooses replicated" in capsys.readouterr().out
    # Training says what is missing.
    assert main(["train", str(tmp_path / "recipe.yaml"), "--check"]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_a_run_that_asks_no_teacher_has_no_place_for_one(capsys):
    assert main(["plan", "digits-wan", "task.targets=stored", "--gpus", "1", "--gpu", "T4"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == "the run asks no teacher while it trains: its place does not matter"
    )


@pytest.mark.parametrize("options", [["--machine", "2x3090-24G"], []])
def test_it_draws_a_picture(tmp_path, options, capsys):
    file = tmp_path / "plan.svg"
    assert main(["plan", "digits-wan", "--host-memory", "64GiB", *options, "--plot", str(file)]) == 0
    drawn = file.read_text()
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000
    assert main(["plan", "digits-wan", "--plot", "plan.txt"]) == 2
    assert "--plot plan.txt: the name must end with .png, .svg, .pdf" in capsys.readouterr().err
    assert main(["plan", "digits-wan", "--plot", "nowhere/plan.png"]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_a_mistake_in_the_recipe_is_the_recipe_s(capsys):
    assert main(["plan", "digits-wan", "optim.lrr=1"]) == 2
    assert "optim.lrr" in capsys.readouterr().err
