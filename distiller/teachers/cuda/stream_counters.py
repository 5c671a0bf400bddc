"""Counters that the GPUs of a node write and wait for, in the order of their streams, without the host.

They are in host memory that every rank and every GPU maps. A wait blocks only a stream: it occupies no multiprocessor
and blocks no process.
"""

# Attributes that the libraries set at run time, which their stubs lack.
# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from typing import final

import torch

from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.teachers.cuda import driver
from distiller.teachers.weights.host_copy import PAGE_BYTES, HostCopy

LINE_BYTES = 64
"""Distance from one counter to the next, so that no two share a cache line."""

_FOR_ALL_DEVICES = 1
_MAPPED = 2


@final
class StreamCounters:
    """Counters of 32 bits, 0 at first, shared by all ranks of the node. Values only grow."""

    def __init__(self, num_counters: int, ranks: Ranks) -> None:
        """Communicates. Raises UserError where the GPUs cannot map host memory."""
        num_bytes = -(-max(num_counters, 1) * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._host = HostCopy.make([num_bytes], ranks)
        self._address = self._host.piece(0).data_ptr()

        def register() -> None:
            error = torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, _FOR_ALL_DEVICES | _MAPPED)
            if int(error) != 0:
                raise UserError(f"a page of host memory cannot be mapped by the GPUs ({error})")

        ranks.all_succeed(register)

    def write(self, index: int, value: int, stream: torch.cuda.Stream) -> None:
        """Sets a counter once the stream's work so far is done."""
        driver.write_value(self._address + index * LINE_BYTES, value, stream)

    def wait(self, index: int, value: int, stream: torch.cuda.Stream) -> None:
        """Makes the stream wait until a counter is at least this value."""
        driver.wait_value(self._address + index * LINE_BYTES, value, stream)

    def close(self) -> None:
        """Frees the memory; no stream may use it any more."""
        torch.cuda.cudart().cudaHostUnregister(self._address)
        self._host.close()
