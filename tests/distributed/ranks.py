"""Runs a function on gloo ranks, one process each, with a time limit that prints all stacks."""

from __future__ import annotations

import faulthandler
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

from distiller.operator_locks import clear_operator_locks, extension_folder


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: int = 120) -> list[Any]:
    """Calls `function(*arguments)` on every rank and returns the results in rank order.

    A rank's exception is raised here with its traceback; ranks that do not end in time print their stacks and are
    killed.
    """
    # A rank that was killed for its time may have been building one of DeepSpeed's operators.
    clear_operator_locks(extension_folder(), patience_s=1)
    context = get_context("spawn")
    results: Queue[Any] = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = (world_size, port, timeout_s, results, function, arguments)
    processes = [context.Process(target=_rank, args=(rank, *call)) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        outcomes = dict(results.get(timeout=timeout_s + 20) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for rank, (_, error) in sorted(outcomes.items()):
        if error is not None:
            raise AssertionError(f"rank {rank}:\n{error}")
    return [outcomes[rank][0] for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    timeout_s: int,
    results: Queue[Any],
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        results.put((rank, (function(*arguments), None)))
    except BaseException:
        results.put((rank, (None, traceback.format_exc())))
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
