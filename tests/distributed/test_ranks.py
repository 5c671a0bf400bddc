"""Two and three gloo ranks: exact global means, shared stages, agreed errors."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distiller.distributed.liveness import LivenessBarrier
from distiller.distributed.rank_failure import is_lost_rank_error
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedUserError, UserError
from distiller.storage.stages import Stage
from tests import toys
from tests.distributed.ranks import on_ranks


def train_toy(folder: Path, batch_size: int, accumulation_steps: int) -> np.ndarray:
    from distiller.training.loop import train
    from tests.toy_task import build_toy_run, toy_recipe

    run = build_toy_run(toy_recipe(folder, batch_size=batch_size), accumulation_steps)
    train(run)
    return torch.cat([p.detach().flatten() for p in run.student.parameters()]).numpy()


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation_steps"), [(2, 4, 1), (2, 2, 2), (4, 1, 2)])
def test_the_loss_is_a_global_mean_over_unequal_counts(tmp_path, world_size, batch_size, accumulation_steps):
    alone = train_toy(tmp_path / "alone", 8, 1)
    weights = on_ranks(world_size, train_toy, tmp_path / "ranks", batch_size, accumulation_steps)
    assert all(np.array_equal(other, weights[0]) for other in weights)
    assert np.linalg.norm(weights[0] - alone) / np.linalg.norm(alone) < 1e-6
    ours, theirs = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ranks", "alone")
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def roll_out(recipe: dict) -> bool:
    from distiller.build import build_task
    from distiller.config.loading import parse
    from distiller.launch.accelerator import open_world
    from distiller.teachers.factory import open_teacher
    from tests.toy_network import setup

    parsed = parse(recipe)
    task, world = build_task(parsed), open_world(parsed, lambda fsdp: fsdp.class_names)
    ranks = Ranks.join(world.accelerator.device)
    needed = task.prepare_stages(ranks, torch.float32)
    teacher = open_teacher(task.network, setup())
    data = task.load_data(ranks, teacher)
    assert len(data) == 27
    return needed


def test_a_rollout_is_bitwise_the_same_for_any_number_of_ranks(tmp_path):
    """Three shards over two ranks: one rank repeats another's work, since placements may communicate in `predict`."""
    pipeline = toys.make_pipeline(tmp_path / "pipeline")
    folders = []
    for world_size in (1, 2):
        rollout, cache = {"batch_size": 10}, tmp_path / f"cache-{world_size}"
        recipe = toys.recipe(tmp_path, pipeline, rollout=rollout, cache_dir=str(cache))
        assert on_ranks(world_size, roll_out, recipe) == [True] * world_size
        assert on_ranks(world_size, roll_out, recipe) == [False] * world_size
        folders.append(next(cache.glob("rollout-*")))
    assert folders[0].name == folders[1].name
    files = sorted(path.name for path in folders[0].iterdir())
    assert files == sorted(path.name for path in folders[1].iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) == 3
    for name in files:
        if name.endswith(".safetensors"):
            one, two = load_file(folders[0] / name), load_file(folders[1] / name)
            assert all(torch.equal(one[key], two[key]) for key in one)


def joined() -> Ranks:
    from accelerate import Accelerator

    return Ranks.join(Accelerator(cpu=True).device)


def disagree() -> str:
    ranks = joined()

    def only_rank_0_sees_it() -> None:
        assert ranks.is_main
        raise UserError("the folder is taken")

    with pytest.raises(AgreedUserError) as error:
        ranks.broadcast_from_main(only_rank_0_sees_it)
    return str(error.value)


def test_what_rank_0_refuses_every_rank_refuses():
    assert on_ranks(2, disagree) == ["the folder is taken"] * 2


def wait_for_a_rank_that_dies(number: int, folder: Path) -> None:
    ranks, stage = joined(), Stage("made", {"by": "rank 0"}, folder)
    ranks.barrier()
    if ranks.rank == number:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        stage.make_on_main(ranks, lambda: (stage.partial.mkdir(), stage.finish()))
    assert is_lost_rank_error(error.value)


@pytest.mark.parametrize("number", [0, 1])
def test_nobody_waits_for_a_rank_that_is_dead(tmp_path, number):
    """However long the wait may be for one that lives."""
    with pytest.raises(AssertionError, match=f"^rank {number}:\\nno result within 30 s, exit code -9"):
        on_ranks(2, wait_for_a_rank_that_dies, number, tmp_path, timeout_s=30)


def make_in_two_runs(folder: Path) -> list[tuple[str, bool]]:
    """A thread for each run, with a group of its own; what each found, in order."""
    from accelerate import Accelerator

    device, stage, found = (
        Accelerator(cpu=True).device,
        Stage("drawn", {"of": "both"}, folder),
        list[tuple[str, bool]](),
    )

    def work(run: str, ranks: Ranks) -> None:
        with stage.make_on_all_ranks(ranks) as is_missing:
            found.append((run, is_missing))
            if is_missing:
                (stage.partial / f"part-{ranks.rank}").touch()
                time.sleep(0.3)
                assert found == [(run, True)]
                ranks.interruptible_barrier()
                if ranks.is_main:
                    stage.finish()
                ranks.barrier()

    threads = [threading.Thread(target=work, args=(run, Ranks.join(device))) for run in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_runs_of_two_ranks_make_a_stage_one_after_the_other(tmp_path):
    """Whichever run is first makes it; the other finds it made, on both of its ranks."""
    ours, theirs = on_ranks(2, make_in_two_runs, tmp_path)
    assert ours == theirs
    assert [is_missing for _, is_missing in ours] == [True, False]
    assert sorted(file.name for file in tmp_path.glob("drawn-*/part-*")) == ["part-0", "part-1"]


def work_beside_a_rank_that_dies() -> None:
    ranks = joined()
    others, pieces = LivenessBarrier(ranks), []

    def work() -> None:
        for piece in range(1000):
            others.arrive()
            pieces.append(piece)
            if ranks.rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)

    with pytest.raises(RuntimeError) as error:
        work()
    assert is_lost_rank_error(error.value)
    assert 10 < len(pieces) < 500


def test_who_works_alone_sees_that_another_has_died():
    """Between two pieces of the work, without waiting for those that live."""
    with pytest.raises(AssertionError, match=r"^rank 1:\nno result within 30 s, exit code -9"):
        on_ranks(2, work_beside_a_rank_that_dies, timeout_s=30)


def be_asked_to_stop_while_waiting() -> bool:
    ranks, heard = joined(), list[float]()
    ranks.barrier()
    if ranks.rank == 1:
        signal.signal(signal.SIGUSR2, lambda *_: heard.append(time.monotonic()))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    if ranks.is_main:
        time.sleep(3)
    ranks.interruptible_barrier()
    return ranks.rank == 0 or time.monotonic() - heard[0] > 1.5


def test_a_signal_is_heard_while_rank_0_is_at_work():
    assert on_ranks(2, be_asked_to_stop_while_waiting) == [True, True]
