"""What several machines settle before there is a process group."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress

import psutil
import pytest
from torch.distributed import TCPStore

from distiller.cli import guarded, main
from distiller.distributed import rendezvous
from distiller.distributed.rendezvous import choose_interface, exchange_settings, report_failure
from distiller.distributed.shutdown import StopSignals
from distiller.errors import AgreedUserError, RunError, UserError


@pytest.fixture
def two_machines(monkeypatch) -> TCPStore:
    """This process is rank 0 of two on as many machines; the launchers' store."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    for name, value in {
        "GROUP_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    # So that what is chosen here is undone at the end.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous, "_is_exchanged", False)
    return store


def test_the_card_is_the_one_that_leads_to_the_first_machine(two_machines):
    choose_interface()
    addresses = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [known.address for known in addresses]


def test_a_card_that_was_chosen_stays(two_machines, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "given")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "given"


def test_one_machine_needs_none(two_machines, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    choose_interface()
    exchange_settings({})
    report_failure("nobody listens")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert two_machines.num_keys() <= 1


def test_ranks_hear_of_one_that_will_not_come(two_machines, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    report_failure("teacher.path: gone")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(AgreedUserError) as error:
        exchange_settings({})
    assert str(error.value) == f"rank 1 on {socket.gethostname()}: teacher.path: gone"
    assert isinstance(error.value, UserError)


def test_ranks_that_are_ready_go_on(two_machines, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    message = {"host": "elsewhere", "settings": {"optim.lr": 0.1}}
    two_machines.set("attempt-0/distiller/ready/0", json.dumps(message))
    exchange_settings({"optim.lr": 0.1})


@pytest.mark.parametrize("own", [0, 1])
def test_every_rank_hears_that_one_has_another_recipe(two_machines, monkeypatch, own):
    monkeypatch.setenv("RANK", str(own))
    settings = [{"optim.lr": 0.1, "torch": "2.13"}, {"optim.lr": 0.2, "torch": "2.13"}]
    message = {"host": "elsewhere", "settings": settings[1 - own]}
    two_machines.set(f"attempt-0/distiller/ready/{1 - own}", json.dumps(message))
    with pytest.raises(AgreedUserError) as error:
        exchange_settings(settings[own])
    host = "elsewhere" if own == 0 else socket.gethostname()
    assert str(error.value).startswith(f"rank 1 on {host}: optim.lr is 0.2 and on rank 0 0.1; start every machine")


@pytest.mark.parametrize("names", [("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")])
def test_processes_that_mpi_started_are_refused_in_one_line(monkeypatch, capsys, names):
    """Before any of them does the work of all. Accelerate, on a CPU, would ask for MASTER_ADDR in a traceback."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(names[0], "2")
    monkeypatch.setenv(names[1], "0")
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err.startswith(f"distiller: {names[0]} is 2, so mpirun or srun started 2 processes")
    monkeypatch.setenv(names[1], "1")
    assert main(["recipes"]) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(names[0], "1")
    assert main(["recipes"]) == 0
    monkeypatch.setenv(names[0], "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["recipes"]) == 0


@pytest.mark.parametrize(
    ("error", "said"), [(RunError("no data"), "no data"), (PermissionError(13, "denied"), "[Errno 13] denied")]
)
def test_other_machines_hear_of_any_failure(two_machines, monkeypatch, error, said):
    """They would wait for half an hour."""

    def command(stops: StopSignals) -> None:
        raise error

    monkeypatch.setenv("RANK", "1")
    with suppress(PermissionError):
        guarded(command)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(AgreedUserError, match=re.escape(said)):
        exchange_settings({})
