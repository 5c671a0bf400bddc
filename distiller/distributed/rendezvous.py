"""Several machines: the network interface, and the comparison of settings before there is a process group.

When a rank ends, its launcher ends the ranks of that machine only; the other machines' ranks would wait for it for half
an hour. So ranks report through the launchers' store that they are ready, or why they will not come.
"""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from distiller.distributed.process import rank, world_size
from distiller.errors import AgreedUserError, SilentUserError, UserError

if TYPE_CHECKING:
    # The command line is read before torch is.
    from torch.distributed import Store

KEY = "distiller/ready"
MPI_VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)
"""Variables that Accelerate reads: the number of processes that MPI started, and this one's rank."""
CONNECTION_TIMEOUT = timedelta(minutes=1)
REPORT_TIMEOUT = timedelta(seconds=5)
"""For the launchers' store, which exists before any rank is started."""
READY_TIMEOUT = timedelta(minutes=30)
"""For the slowest machine to read its recipe."""


def num_machines() -> int:
    """How many launchers take part, as torch's agent says."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_first_machine() -> bool:
    """Whether rank 0 runs here."""
    return os.environ.get("GROUP_RANK", "0") == "0"


def refuse_mpi() -> None:
    """UserError where mpirun or srun started several processes without a launcher of torch.

    Accelerate follows MPI's variables on a CPU and ignores them on a GPU: there each process would be a run of its own.
    """
    if "LOCAL_RANK" in os.environ:
        return
    for size, rank_variable in MPI_VARIABLES:
        value = os.environ.get(size, "")
        if value.isdigit() and int(value) > 1:
            text = (
                f"{size} is {value}, so mpirun or srun started {value} processes, and they do not know each other; "
                f"start one `accelerate launch` a machine, or unset {size} for a single process"
            )
            raise UserError(text) if os.environ.get(rank_variable, "0") == "0" else SilentUserError(text)


def choose_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME, unless it is set, to the interface that leads to the first machine; before any group.

    By default gloo takes the address of the machine's host name, which many systems resolve to the loopback.
    """
    if num_machines() == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: the system only looks up the route.
            probe.connect(address)
            own_address = probe.getsockname()[0]
    except OSError:
        # Gloo's own error names the address.
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own_address for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


_is_exchanged = False
"""Whether no rank waits in `exchange_settings` any more."""


def report_failure(text: str) -> None:
    """Tells the ranks of other machines, if they wait in `exchange_settings`, why this one fails. Waits 5 s at most."""
    if _is_exchanged or not _shares_a_store():
        return
    # The store is gone where the first machine's launcher is: then no rank waits.
    with suppress(RuntimeError):
        _publish(_store(REPORT_TIMEOUT), {"failure": text})


def exchange_settings(settings: Mapping[str, Any]) -> None:
    """Waits until every rank is ready for the process group, and compares settings. Only between several machines.

    Communicates, through the launchers' store.

    Args:
        settings: what must be the same on every rank, for JSON, by the names that messages use.

    Raises:
        AgreedUserError: a rank reports a failure instead, or has other settings than rank 0; on every rank.
    """
    if not _shares_a_store():
        return
    store = _store()
    _publish(store, {"settings": dict(settings)})
    store.set_timeout(READY_TIMEOUT)
    settings_of_main: dict[str, Any] = {}
    for other in range(world_size()):
        message = json.loads(store.get(f"{KEY}/{other}"))
        origin = f"rank {other} on {message['host']}"
        if "failure" in message:
            raise AgreedUserError(f"{origin}: {message['failure']}")
        settings_of_main = settings_of_main or message["settings"]
        if message["settings"] != settings_of_main:
            raise AgreedUserError(f"{origin}: {_difference(message['settings'], settings_of_main)}")
    global _is_exchanged
    _is_exchanged = True


def _publish(store: Store, content: dict[str, Any]) -> None:
    store.set(f"{KEY}/{rank()}", json.dumps({"host": socket.gethostname(), **content}))


def _difference(settings: Mapping[str, Any], main: Mapping[str, Any]) -> str:
    """Names the first setting that differs from rank 0's."""
    name = next(name for name in sorted(settings.keys() | main.keys()) if settings.get(name) != main.get(name))
    return (
        f"{name} is {settings.get(name)!r} and on rank 0 {main.get(name)!r}; start every machine with the same recipe, "
        "launch file and packages"
    )


def _shares_a_store() -> bool:
    """Whether the launchers serve a store to their ranks: torch's elastic agents do, with several machines."""
    return num_machines() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout: timedelta = CONNECTION_TIMEOUT) -> Store:
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", TCPStore(address, port, is_master=False, timeout=timeout))
