"""`teacher.placement: dedicated`: processes of the teacher's own, how they answer, fail and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from distiller import commands
from distiller.config.loading import parse
from distiller.config.placements.dedicated import DedicatedOptions
from distiller.config.teacher import Teacher as Options
from distiller.errors import RunError, UserError
from distiller.teachers import Request
from distiller.teachers.dedicated import choose_gpus
from distiller.teachers.factory import open_teacher
from tests import classifiers, toy_causal_lm, toys
from tests.distributed.ranks import on_ranks
from tests.placement_contract import IN_PROCESSES, answers, answers_of_cases, open_case, requests_of
from tests.toy_network import DIM, ToyNetwork, save_toy, setup

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


class FailingNetwork(ToyNetwork):
    """Fails in the teacher's process at samples of a number, or ends it."""

    def run(self, module, call):
        if (call.inputs["x"] == 13).all():
            raise ValueError("thirteen is not a number for it")
        if (call.inputs["x"] == 14).all():
            os._exit(3)
        return super().run(module, call)


class UnloadableNetwork(ToyNetwork):
    def weight_files(self, name):
        raise UserError(f"{self.origin}: no such file")


class EndingNetwork(ToyNetwork):
    def weight_files(self, name):
        os._exit(5)


def request_of(value: float, num_samples: int = 2) -> Request:
    return Request(tuple(range(num_samples)), {"x": torch.full((num_samples, DIM), value)}, ("output",))


def servers() -> list[psutil.Process]:
    """The processes of teachers that this process has started."""
    return [
        child
        for child in psutil.Process().children()
        if any("processes.server" in word for word in child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(scope="module")
def teacher(weights):
    """Of two processes, which some tests ask."""
    opened = open_teacher(FailingNetwork(weights, 1), setup(placement="dedicated", devices=2))
    yield opened
    opened.close()


def test_answers_are_those_of_replicated_on_two_ranks(weights):
    cases = [case for case in IN_PROCESSES if case != "dedicated"]
    arguments = (weights, cases, "bfloat16", False, (2,))
    plain = open_case("replicated", ToyNetwork(weights, 2), torch.bfloat16)
    for rank, of_rank in enumerate(on_ranks(2, answers_of_cases, *arguments, timeout_s=250)):
        expected = answers(plain, rank, 2, autocast=False)
        for case in cases:
            result = of_rank[f"{case} 2"]
            assert not isinstance(result, str), f"rank {rank}, {case}:\n{result}"
            assert all(np.array_equal(*pair) for pair in zip(result[0], expected, strict=True)), case


def test_updates_are_answered_at_the_same_time(teacher, weights):
    """By as many processes: each question of the first two is answered while the other one is under way."""
    plain = open_teacher(ToyNetwork(weights, 1), setup())
    assert teacher.num_parallel_updates == 2
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = teacher.predict([request_of(number, 3)])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        [expected] = plain.predict([request_of(number, 3)])
        assert torch.equal(found[number][0]["output"], expected["output"])


def test_requests_of_any_size_follow_each_other(teacher, weights):
    """Buffers grow, and answers are not overwritten by the next ones."""
    plain = open_teacher(ToyNetwork(weights, 1), setup())
    sizes = (1, 700, 3, 2000, 1)
    answered = [teacher.predict([request_of(1.5, size), request_of(2.5, size)]) for size in sizes]
    for size, outputs in zip(sizes, answered, strict=True):
        for mine, value in zip(outputs, (1.5, 2.5), strict=True):
            [expected] = plain.predict([request_of(value, size)])
            assert torch.equal(mine["output"], expected["output"])


def test_all_outputs_and_modules_travel(teacher, weights):
    plain = open_teacher(ToyNetwork(weights, 1), setup())
    requests = requests_of(0, 1, 1)
    for mine, expected in zip(teacher.predict(requests), plain.predict(requests), strict=True):
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[name], expected[name]) for name in mine)


def test_a_failed_question_leaves_no_answer_behind(teacher, weights):
    """One of two processes fails; what the other one said to that question is not the answer to the next one."""
    plain = open_teacher(ToyNetwork(weights, 1), setup())
    message = r"^the teacher's process \d on cpu: ValueError: thirteen is not a number"
    with pytest.raises(RunError, match=message):
        teacher.predict([request_of(13), request_of(1)])
    requests = [request_of(2), request_of(3)]
    for mine, expected in zip(teacher.predict(requests), plain.predict(requests), strict=True):
        assert torch.equal(mine["output"], expected["output"])


def language_recipe(folder: Path) -> dict[str, Any]:
    return toy_causal_lm.recipe(folder, toy_causal_lm.save_model(folder / "teacher"))


def classifier_recipe(folder: Path) -> dict[str, Any]:
    config = classifiers.resnet_config()
    teacher = classifiers.save_classifier(folder / "teacher", config)
    return classifiers.recipe(folder, teacher, classifiers.save_pictures(folder / "pictures", 4), config)


@pytest.mark.parametrize("make_recipe", [language_recipe, pytest.param(classifier_recipe, marks=pytest.mark.thorough)])
def test_networks_of_other_tasks_reach_the_process(tmp_path, make_recipe):
    """They are sent there: with configs, tokenizers, and what finds their files."""
    losses, given, before = [], make_recipe(tmp_path), servers()
    for placement in ("replicated", "dedicated"):
        given["output_dir"] = str(tmp_path / placement)
        given["teacher"]["placement"] = placement
        given["train"] |= {"max_steps": 3, "log_every": 1, "batch_size": 2}
        commands.train(parse(given), resume=False)
        losses.append([line["loss"] for line in toys.read_metrics(tmp_path / placement)])
    assert losses[0] == losses[1]
    assert servers() == before


def test_memory_is_that_of_all_processes(teacher, weights):
    plain = open_teacher(ToyNetwork(weights, 1), setup())
    assert teacher.memory().host_bytes == 2 * plain.memory().host_bytes
    assert teacher.memory().gpu_bytes == 0


def test_a_process_that_ends_ends_the_run(weights):
    teacher = open_teacher(FailingNetwork(weights, 1), setup(placement="dedicated"))
    try:
        started, message = time.monotonic(), "^the teacher's process 0 on cpu has ended; .* continue with --resume$"
        with pytest.raises(RunError, match=message):
            teacher.predict([request_of(14)])
        with pytest.raises(RunError, match=message):
            teacher.predict([request_of(1)])
        assert time.monotonic() - started < 30
    finally:
        teacher.close()


@pytest.mark.parametrize(
    ("network", "devices", "kind", "message"),
    [
        (UnloadableNetwork, 2, UserError, "the teacher's process on cpu: .*: no such file"),
        (EndingNetwork, 1, RunError, "the teacher's process on cpu ended with exit code 5 while it loaded"),
    ],
)
def test_a_process_that_cannot_load_is_refused_and_none_is_left(weights, network, devices, kind, message):
    before = servers()
    with pytest.raises(kind, match=message):
        open_teacher(network(weights, 1), setup(placement="dedicated", devices=devices))
    assert servers() == before


def test_a_killed_rank_leaves_no_process(weights):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from distiller.teachers.factory import open_teacher\n"
        "from tests.toy_network import ToyNetwork, setup\n"
        f"teacher = open_teacher(ToyNetwork(Path({str(weights)!r}), 1), setup(placement='dedicated', devices=2))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **given) as process:
        assert process.stdout is not None
        while "ready" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        children = psutil.Process(process.pid).children()
        assert len([child for child in children if "processes.server" in " ".join(child.cmdline())]) == 2
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


def test_processes_ignore_what_asks_the_run_to_stop(teacher):
    """The rank handles it, and needs them for the update under way."""
    for process in servers():
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert len(teacher.predict([request_of(1), request_of(2)])) == 2


@pytest.mark.parametrize(
    ("devices", "num_gpus", "used", "expected"),
    [
        (1, 2, ["cuda:0"], ["cuda:1"]),
        (2, 8, ["cuda:0", "cuda:1"], ["cuda:6", "cuda:7"]),
        ([3, 0], 4, ["cuda:0"], ["cuda:3", "cuda:0"]),
    ],
)
def test_gpus_that_no_rank_trains_on_are_chosen(devices, num_gpus, used, expected):
    assert choose_gpus(DedicatedOptions(devices=devices), num_gpus, used) == expected


def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(UserError, match=r"teacher.devices is 1 and this machine has 2 GPU\(s\), of which its 2 proc"):
        choose_gpus(DedicatedOptions(), 2, ["cuda:0", "cuda:1"])
    with pytest.raises(UserError, match=r"teacher.devices names GPU 4, and this machine has 2, counted from 0"):
        choose_gpus(DedicatedOptions(devices=(1, 4)), 2, ["cuda:0"])


@pytest.mark.parametrize("devices", [[], [1, 1]])
def test_a_list_of_gpus_has_each_once(devices):
    with pytest.raises(ValueError, match="give at least one GPU, and each once"):
        Options(path="-", placement="dedicated", devices=devices)
