"""Runs a function on gloo ranks, one process each, with a time limit that prints all stacks."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch

from distiller.launch.operator_locks import clear_operator_locks, extension_folder
from tests.distributed.rank_host import PATIENCE_S, Call, Outcome, RankHost

NUM_HOSTS = 2
"""Neighbouring ranks come from different hosts: they differ in what Python draws at its start, such as hash seeds."""
_hosts: list[RankHost] = []


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: int = 120) -> list[Any]:
    """Calls `function(*arguments)` on every rank and returns the results in rank order.

    A rank's exception is raised here with its traceback; ranks that do not end in time print their stacks and are
    killed. Every call has ranks of its own.
    """
    # A rank that was killed for its time may have been building one of DeepSpeed's operators.
    clear_operator_locks(extension_folder(), patience_s=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    call = Call(pickle.dumps((function, arguments)), environment, os.getcwd(), timeout_s)
    # A fork of a process that has counted its GPUs, as the imports do, cannot use them.
    forks = not torch.cuda.is_available()
    while len(_hosts) < min(world_size, NUM_HOSTS):
        _hosts.append(RankHost(forks))
    hosts = _hosts[:world_size]
    outcomes: dict[int, Outcome] = {}
    try:
        for number, host in enumerate(hosts):
            host.send(call, list(range(number, world_size, NUM_HOSTS)))
        for host in hosts:
            outcomes |= host.receive(timeout_s + 3 * PATIENCE_S)
    except BaseException:
        # What they were doing is not over; the next call has new ones.
        while _hosts:
            _hosts.pop().close()
        raise
    for rank, (_, error) in sorted(outcomes.items()):
        if error is not None:
            raise AssertionError(f"rank {rank}:\n{error}")
    return [outcomes[rank][0] for rank in range(world_size)]
