"""Several machines: through which card they meet, and what they agree on before there is a process group.

Only one launcher's ranks end when a rank of theirs does. On the other machines they would wait half an hour for it.
"""

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
"""What Accelerate looks at: how many processes MPI started, and which this one is."""
CONNECTION, PATIENCE = timedelta(minutes=1), timedelta(minutes=30)
"""For the launchers' store, which is there before any rank is; and for the slowest machine to read its recipe."""


def num_machines() -> int:
    """How many launchers take part, as torch's agent says."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_first_machine() -> bool:
    """Whether rank 0 runs here."""
    return os.environ.get("GROUP_RANK", "0") == "0"


def refuse_mpi() -> None:
    """UserError where mpirun or srun started several processes, which no launcher of torch knows of.

    Accelerate would believe MPI's variables on a CPU, and not on a GPU: there each process would do the whole work.
    """
    if "LOCAL_RANK" in os.environ:
        return
    for size, number in MPI_VARIABLES:
        value = os.environ.get(size, "")
        if value.isdigit() and int(value) > 1:
            text = (
                f"{size} is {value}, so mpirun or srun started {value} processes, and they do not know each other; "
                f"start one `accelerate launch` a machine, or unset {size} for a single process"
            )
            raise UserError(text) if os.environ.get(number, "0") == "0" else SilentUserError(text)


def choose_interface() -> None:
    """Tells gloo which network card leads to the first machine, unless GLOO_SOCKET_IFNAME does; before any group.

    By itself gloo takes the address of the machine's own name, which many systems resolve to the loopback.
    """
    if num_machines() == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: the system only looks up the way.
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError:
        # The launcher knows another way to it, and gloo's own error names the address.
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def report_failure(text: str) -> None:
    """Says to the ranks of other machines that this one will not come. Waits for nobody."""
    if not _shares_a_store():
        return
    # Where the first machine's launcher is gone nobody waits for an answer.
    with suppress(RuntimeError):
        _say(_store(), {"failure": text})


def meet(terms: Mapping[str, Any]) -> None:
    """Waits until every rank is ready for the process group. Communicates, if there are several machines.

    Args:
        terms: what must be the same on all of them, for JSON, by the names that messages give it.

    Raises:
        AgreedUserError: one of them reports a failure instead, or has other terms than rank 0; on every rank.
    """
    if not _shares_a_store():
        return
    store = _store()
    _say(store, {"terms": dict(terms)})
    store.set_timeout(PATIENCE)
    first: dict[str, Any] = {}
    for other in range(world_size()):
        said = json.loads(store.get(f"{KEY}/{other}"))
        origin = f"rank {other} on {said['host']}"
        if "failure" in said:
            raise AgreedUserError(f"{origin}: {said['failure']}")
        first = first or said["terms"]
        if said["terms"] != first:
            raise AgreedUserError(f"{origin}: {_difference(said['terms'], first)}")


def _say(store: Store, content: dict[str, Any]) -> None:
    store.set(f"{KEY}/{rank()}", json.dumps({"host": socket.gethostname(), **content}))


def _difference(terms: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The first of the terms that are not rank 0's."""
    name = next(name for name in sorted(terms.keys() | first.keys()) if terms.get(name) != first.get(name))
    return (
        f"{name} is {terms.get(name)!r} and on rank 0 {first.get(name)!r}; start every machine with the same recipe, "
        "launch file and packages"
    )


def _shares_a_store() -> bool:
    """Whether the launchers hold a store for their ranks: torch's agents do, before they start them."""
    return num_machines() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store() -> Store:
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", TCPStore(address, port, is_master=False, timeout=CONNECTION))
