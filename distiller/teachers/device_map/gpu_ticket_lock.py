"""A lock on each GPU that grants forward passes of several processes in a fixed order (by ticket number).

All ranks of a node run forward passes on one copy of the teacher that is spread over the GPUs. Without an order the
driver gives each process slices of time on the first GPU while the second is idle, and then the other way round: two
H200 ran at half of their speed. In a fixed order, one pass computes on the second GPU while the next one computes on
the first, as in a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import torch

from distiller.distributed.ranks import Ranks
from distiller.teachers.cuda.stream_counters import StreamCounters


@final
class GpuTicketLock:
    """Numbers every pass of every rank (its ticket), and grants each GPU to the passes in that order.

    Streams wait, not the host. The lock affects speed only: a pass that returns to a GPU which it has released computes
    there without the lock. The first pass through a module counts how many of its parts run on each GPU; it releases
    all GPUs at its end. A later pass releases a GPU after that number of parts, or at its end if it runs fewer. All
    ranks of the node must make the same number of passes.
    """

    def __init__(self, devices: Sequence[torch.device], ranks: Ranks) -> None:
        """Communicates."""
        self._devices, self._rank, self._num_ranks = list(devices), ranks.local_rank, ranks.local_world_size
        self._next_tickets = StreamCounters(len(self._devices), ranks)
        self._pass_index = -1
        self._module_name = ""
        self._held: set[torch.device] = set()
        self._released: set[torch.device] = set()
        self._parts_run: Counter[torch.device] = Counter()
        self._parts_per_pass: dict[str, Counter[torch.device]] = {}

    def begin_pass(self, module_name: str) -> None:
        """Takes the next ticket, for a pass through this module."""
        self._pass_index += 1
        self._module_name = module_name
        self._held, self._released, self._parts_run = set(), set(), Counter()

    def acquire(self, device: torch.device) -> None:
        """Makes the device's current stream wait until all passes with lower tickets have released the device."""
        if device not in self._held and device not in self._released:
            self._next_tickets.wait(self._devices.index(device), self._ticket, torch.cuda.current_stream(device))
            self._held.add(device)

    def finish_part(self, device: torch.device) -> None:
        """A part of the module has been queued on this device; after the pass's last part there, releases it."""
        self._parts_run[device] += 1
        expected = self._parts_per_pass.get(self._module_name)
        if expected is not None and device in self._held and self._parts_run[device] == expected[device]:
            self._release(device)

    def end_pass(self) -> None:
        """Releases all devices that the pass still holds or never used."""
        self._parts_per_pass.setdefault(self._module_name, self._parts_run)
        for device in self._devices:
            if device not in self._released:
                self.acquire(device)
                self._release(device)

    def close(self) -> None:
        """Does not communicate; every rank must have waited for its devices."""
        self._next_tickets.close()

    @property
    def _ticket(self) -> int:
        return self._pass_index * self._num_ranks + self._rank

    def _release(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._next_tickets.write(self._devices.index(device), self._ticket + 1, stream)
        self._held.discard(device)
        self._released.add(device)
