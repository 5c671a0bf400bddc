"""Whose turn it is on each GPU, when several processes take forward passes through one copy that is spread over them.

Without an order the driver gives each process slices of time on the first GPU while the second waits, and then the
other way round: two H200 answered at half of their speed. With one, the passes follow each other like a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from distiller.distributed.ranks import Ranks
from distiller.teachers.cuda.stream_counters import StreamCounters


class GpuTicketLock:
    """Gives every pass of every rank a number, and each GPU to one pass after the other in that order.

    Streams wait, not the host. Only time depends on it: a pass that comes back to a GPU which it has left computes
    there out of turn. How often a pass visits each GPU is learnt from the first; before, and when a pass visits fewer
    places, it hands on a GPU at its end. All ranks of the node make equally many passes.
    """

    def __init__(self, devices: Sequence[torch.device], ranks: Ranks) -> None:
        """Communicates."""
        self._devices, self._rank, self._count = list(devices), ranks.local_rank, ranks.local_world_size
        self._signals = StreamCounters(len(self._devices), ranks)
        self._pass_number = -1
        self._module_name = ""
        self._held: set[torch.device] = set()
        self._left: set[torch.device] = set()
        self._visits: Counter[torch.device] = Counter()
        self._learnt: dict[str, Counter[torch.device]] = {}

    def begin(self, module_name: str) -> None:
        """A pass through a module begins."""
        self._pass_number += 1
        self._module_name = module_name
        self._held, self._left, self._visits = set(), set(), Counter()

    def enter(self, device: torch.device) -> None:
        """The pass computes on this device from here on."""
        if device not in self._held and device not in self._left:
            self._signals.wait(self._devices.index(device), self._ticket, torch.cuda.current_stream(device))
            self._held.add(device)

    def leave(self, device: torch.device) -> None:
        """A part of the module on this device has run; after the last one the device is the next pass's."""
        self._visits[device] += 1
        learnt = self._learnt.get(self._module_name)
        if learnt is not None and device in self._held and self._visits[device] == learnt[device]:
            self._hand_on(device)

    def end(self) -> None:
        """The pass is over."""
        self._learnt.setdefault(self._module_name, self._visits)
        for device in self._devices:
            if device not in self._left:
                self.enter(device)
                self._hand_on(device)

    def close(self) -> None:
        """Communicates nothing; every rank has waited for its devices."""
        self._signals.close()

    @property
    def _ticket(self) -> int:
        return self._pass_number * self._count + self._rank

    def _hand_on(self, device: torch.device) -> None:
        self._signals.write(self._devices.index(device), self._ticket + 1, torch.cuda.current_stream(device))
        self._held.discard(device)
        self._left.add(device)
