"""`teacher.placement: sharded`: every rank holds its share of each tensor, on its device or off it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distiller.teachers.base import Agenda, Network, Outputs, Request, Setup, Teacher, TeacherMemory, answer
from distiller.teachers.fully_sharded import FullyShardedModules
from distiller.teachers.shards import Shards, held_bytes
from distiller.teachers.zero3 import Zero3Modules

Kind = tuple[str, tuple[str, ...]]
"""A pass's module and what is wanted of it: passes of one kind run the same blocks."""


class ShardedTeacher(Teacher):
    """FSDP2, or, where the student's engine is DeepSpeed, ZeRO-3 in an engine of its own. `predict` communicates.

    Blocks are gathered as a forward pass comes to them, so all ranks must run passes of the same kinds in the same
    order.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks = network, setup.ranks
        make = Zero3Modules if setup.under_deepspeed else FullyShardedModules
        self._shards: Shards = make(network, setup)
        self._host_bytes = sum(self._ranks.gather_on_node(held_bytes(self._shards.tensors(), "cpu")))

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        # Not with `ranks`: a stand-in made there may skip other blocks than the pass that it stands in for.
        return answer(self._network, requests, self._run)

    def memory(self) -> TeacherMemory:
        return TeacherMemory(held_bytes(self._shards.tensors(), "cuda"), self._host_bytes)

    def close(self) -> None:
        self._shards.close()
        self._host_bytes = 0

    def _run(self, agenda: Agenda) -> list[list[Outputs]]:
        own = [call for _, calls in agenda for call in calls]
        outputs: dict[int, Outputs] = {}
        for (module, wanted), count in self._agree([(call.module, call.wanted) for call in own]):
            places = [place for place, call in enumerate(own) if (call.module, call.wanted) == (module, wanted)]
            for turn in range(count):
                # A rank with fewer of them than another repeats some call of its own as one of this kind.
                call = own[places[turn]] if turn < len(places) else replace(own[0], module=module, wanted=wanted)
                answered = self._network.run(self._shards.modules[module], call)
                if turn < len(places):
                    outputs[places[turn]] = answered
            self._shards.settle(module)
        in_order = (outputs[place] for place in range(len(own)))
        return [[next(in_order) for _ in calls] for _, calls in agenda]

    def _agree(self, own: list[Kind]) -> list[tuple[Kind, int]]:
        """How often every rank runs each kind, in the order of all ranks. Communicates, when there are two modules."""
        names = self._network.module_names
        # With one module the ranks agree already: their requests ask for the same passes.
        of_ranks = [own] if len(names) == 1 else self._ranks.gather(own)
        counts: Counter[Kind] = Counter()
        for kinds in of_ranks:
            counts |= Counter(kinds)
        return sorted(counts.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
