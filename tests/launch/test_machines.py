"""Several machines: two launchers, as two machines would run them, against one process."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests import toys
from tests.launch.launching import CONFIGS, Running
from tests.launch.machines import Network, begun_on_both, network
from tests.launch.test_faults import ENDLESS, step_stopped_at


@pytest.fixture(scope="module")
def where() -> Iterator[Network]:
    with network() as found:
        yield found


def begun(where: Network, toy: Path, run_dir: Path, num_processes: int, name: str, *overrides: str):
    arguments = ["train", str(toy / "recipe.yaml"), f"train.batch_size={8 // num_processes}", *overrides]
    return begun_on_both(where, CONFIGS / f"{name}.yaml", num_processes, run_dir, *arguments)


def check(both: list[Running], run_dir: Path, reference: Path, num_processes: int) -> dict:
    for running in both:
        assert running.wait_until_gone(240) == 0, running.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["world_size"] == num_processes
    toys.assert_same_run(run_dir, reference)
    return summary


def host_copies(running: Running) -> set[str]:
    """The shared copies, by inode, that the ranks of a launcher have mapped."""
    ranks = psutil.Process(running.pid).children()
    maps = [line for rank in ranks for line in Path(f"/proc/{rank.pid}/maps").read_text().splitlines()]
    return {line.split()[4] for line in maps if "memfd:distiller-teacher" in line}


@pytest.mark.slow
def test_two_machines_equal_one_process(where, toy, reference, tmp_path):
    with begun(where, toy, tmp_path / "run", 2, "cpu_2proc", "teacher.placement=streamed") as both:
        assert check(both, tmp_path / "run", reference, 2)["placement"] == "streamed"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_processes", "placement"), [(4, "cpu"), (4, "streamed"), (2, "balanced"), (4, "balanced"), (4, "rank0")]
)
def test_every_place_for_the_teacher_on_two_machines(where, toy, reference, tmp_path, num_processes, placement):
    with begun(where, toy, tmp_path / "run", num_processes, "cpu_2proc", f"teacher.placement={placement}") as both:
        assert check(both, tmp_path / "run", reference, num_processes)["placement"] == placement


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "num_processes", "engine"),
    [("zero2", 2, "deepspeed-zero2"), ("zero2", 4, "deepspeed-zero2"), ("fsdp2", 4, "fsdp2")],
)
def test_sharded_students_on_two_machines(where, toy, reference, tmp_path, name, num_processes, engine):
    with begun(where, toy, tmp_path / "run", num_processes, name) as both:
        assert check(both, tmp_path / "run", reference, num_processes)["engine"] == engine


@pytest.mark.thorough
def test_shards_inside_a_machine_and_replicas_over_machines(where, toy, reference, tmp_path):
    """Two ranks on each; and a run that is resumed is the whole one, bit for bit."""
    content = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())
    content["parallelism_config"] = {f"parallelism_config_dp_{part}_size": 2 for part in ("replicate", "shard")}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(content))
    arguments = ["train", str(toy / "recipe.yaml"), "train.batch_size=2"]
    for run, more in (("whole", []), ("broken", ["train.max_steps=4"]), ("broken", ["--resume"])):
        with begun_on_both(where, tmp_path / "launch.yaml", 4, tmp_path / run, *arguments, *more) as both:
            for running in both:
                assert running.wait_until_gone(240) == 0, running.output
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["engine"], summary["world_size"]) == ("fsdp2", 4)
    toys.assert_same_run(tmp_path / "whole", reference)
    toys.assert_same_run(tmp_path / "broken", tmp_path / "whole", loss_tolerance=0.0, tolerance=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [0, 1])
def test_a_signal_to_one_launcher_stops_both_machines(where, toy, tmp_path, machine):
    """And until then there was one copy of the teacher on each."""
    with begun(where, toy, tmp_path / "run", 4, "cpu_2proc", "teacher.placement=streamed", *ENDLESS) as both:
        both[0].wait_for_step(2)
        copies = [host_copies(running) for running in both]
        assert [len(found) for found in copies] == [1, 1]
        assert copies[0].isdisjoint(copies[1])
        os.kill(both[machine].pid, signal.SIGTERM)
        for running in both:
            running.wait_until_gone(60)
        step_stopped_at(both[0], "SIGTERM")
        assert both[1].lines == []


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [0, 1])
def test_a_file_that_one_machine_lacks(where, toy, tmp_path, machine):
    """It says so with its host's name, and the other one does not wait for it."""
    folders = [toy, toy]
    folders[machine] = tmp_path
    arguments = ["train", str(toy / "recipe.yaml"), "teacher.path=pipeline", "train.batch_size=4"]
    with begun_on_both(where, CONFIGS / "cpu_2proc.yaml", 2, tmp_path / "run", *arguments, folders=folders) as both:
        for running in both:
            assert running.wait_until_gone(120) != 0
    here, missing = f"rank {machine} on {socket.gethostname()}: ", "teacher.path: pipeline"
    expected = (
        [[f"distiller: {here}{missing}"], [f"distiller, {here}{missing}"]]
        if machine
        else [[f"distiller: {missing}"], []]
    )
    for running, starts in zip(both, expected, strict=True):
        assert len(running.lines) == len(starts), running.output
        assert all(line.startswith(start) for line, start in zip(running.lines, starts, strict=True)), running.output
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_that_dies_during_a_rollout_ends_the_other(where, toy, tmp_path, machine):
    """Within a minute, as everywhere; and what was drawn is used by the next run."""
    rollout = ["rollout.samples_per_prompt=100", "rollout.batch_size=1", f"cache_dir={tmp_path / 'cache'}"]
    with begun(where, toy, tmp_path / "run", 2, "cpu_2proc", *rollout) as both:
        shards = [0]

        def has_drawn() -> bool:
            shards[0] = len(list(tmp_path.glob("cache/rollout-*.partial/rollout-*.safetensors")))
            return shards[0] >= 4

        both[0].wait_until(has_drawn, 120)
        both[machine].kill_all()
        assert both[1 - machine].wait_until_gone(60) == 1
        (line,) = both[1 - machine].lines
        assert "the ranks lost each other" in line
        assert line.endswith("continue with --resume")
    assert len(list(tmp_path.glob("cache/rollout-*.partial/rollout-*.safetensors"))) >= shards[0]
