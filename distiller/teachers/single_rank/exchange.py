"""Calls of all ranks, run where one of them can: inputs go to the holder, outputs come back.

Tensors travel from device to device by the default process group, one for each kind of call and each input or output,
however many calls there are. What they are travels from host to host, as names and numbers.
"""

# Types here are wider than what is passed on; to be narrowed in the code.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.distributed.ranks import Ranks
from distiller.teachers.base import Call, Outputs


class Rows(NamedTuple):
    """A tensor [B, ...] but for its B: its name, its dtype's name, and one sample's shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: Tensor) -> Rows:
        """What describes a tensor [B, ...]."""
        return Rows(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """A tensor [num_rows, ...] that is not filled."""
        return torch.empty(num_rows, *self.shape, dtype=getattr(torch, self.dtype), device=device)


class Kind(NamedTuple):
    """What calls have in common that can run as one batch."""

    module: str
    wanted: tuple[str, ...]
    inputs: tuple[Rows, ...]

    @staticmethod
    def of(call: Call) -> Kind:
        """The kind of a call."""
        inputs = tuple(Rows.of(name, call.inputs[name]) for name in sorted(call.inputs))
        return Kind(call.module, tuple(call.wanted), inputs)


Counts = dict[Kind, list[int]]
"""Rows of each kind on each rank, in the order in which kinds run and travel; the same on every rank."""


class Exchange:
    """Answers every rank's calls on one rank, the holder. Every rank has one and uses it equally often."""

    def __init__(self, ranks: Ranks, holder: int, run: Callable[[Call], Outputs]) -> None:
        """`run` answers a batch of calls of one kind; called on the holder alone."""
        self._ranks, self._holder, self._run = ranks, holder, run
        # The same on all ranks, since all of them see all kinds: a known kind's outputs are not described again.
        self._outputs_of: dict[Kind, tuple[Rows, ...]] = {}

    def answer(self, calls: Sequence[Call]) -> list[Outputs]:
        """Outputs of this rank's calls, in order, on its device. Communicates.

        Raises AgreedError on every rank when the holder fails at a kind of call that it has not run before.
        """
        own: dict[Kind, list[int]] = {}
        for place, call in enumerate(calls):
            own.setdefault(Kind.of(call), []).append(place)
        batches = {kind: _batch(kind, [calls[place] for place in places]) for kind, places in own.items()}
        counts = self._count_rows(batches)
        answered = self._hold(batches, counts) if self._ranks.rank == self._holder else self._ask(batches, counts)
        results: list[Outputs] = [{} for _ in calls]
        for kind, places in own.items():
            rows = [_num_rows(calls[place].inputs) for place in places]
            for name, output in answered[kind].items():
                for place, part in zip(places, output.split(rows), strict=True):
                    results[place][name] = part
        return results

    def _count_rows(self, batches: dict[Kind, dict[str, Tensor]]) -> Counts:
        told = self._ranks.gather([(kind, _num_rows(inputs)) for kind, inputs in batches.items()])
        counts: Counts = {}
        for rank, of_rank in enumerate(told):
            for kind, num_rows in of_rank:
                counts.setdefault(kind, [0] * self._ranks.world_size)[rank] = num_rows
        return counts

    def _hold(self, batches: dict[Kind, dict[str, Tensor]], counts: Counts) -> dict[Kind, Outputs]:
        """The holder's part: receives, runs and sends; returns the outputs of its own rows."""
        whole = {
            kind: {rows.name: rows.empty(sum(of_ranks), self._ranks.device) for rows in kind.inputs}
            for kind, of_ranks in counts.items()
        }
        arriving: list[tuple[int, Tensor]] = []
        for kind, of_ranks in counts.items():
            for name, tensor in whole[kind].items():
                parts = tensor.split(of_ranks)
                arriving += self._of_others(parts)
                if kind in batches:
                    parts[self._holder].copy_(batches[kind][name])
        _transfer(dist.irecv, arriving)
        outputs = self._agree_on_outputs(
            counts, lambda: {kind: self._run(Call(kind.module, whole.pop(kind), kind.wanted)) for kind in counts}
        )
        leaving: list[tuple[int, Tensor]] = []
        own: dict[Kind, Outputs] = {kind: {} for kind in batches}
        for kind, of_ranks in counts.items():
            for rows in self._outputs_of[kind]:
                output = outputs[kind][rows.name].contiguous()
                parts = output.split(of_ranks)
                leaving += self._of_others(parts)
                if kind in batches:
                    # A copy, so that the other ranks' rows do not stay as long as the student needs these.
                    part = parts[self._holder]
                    own[kind][rows.name] = part if len(part) == len(output) else part.clone()
        _transfer(dist.isend, leaving)
        return own

    def _ask(self, batches: dict[Kind, dict[str, Tensor]], counts: Counts) -> dict[Kind, Outputs]:
        """Every other rank's part: sends its inputs and receives its outputs."""
        kinds = [kind for kind in counts if kind in batches]
        _transfer(dist.isend, [(self._holder, batches[kind][rows.name]) for kind in kinds for rows in kind.inputs])
        self._agree_on_outputs(counts, dict)
        received: dict[Kind, Outputs] = {}
        for kind in kinds:
            num_rows = counts[kind][self._ranks.rank]
            received[kind] = {r.name: r.empty(num_rows, self._ranks.device) for r in self._outputs_of[kind]}
        _transfer(dist.irecv, [(self._holder, tensor) for outputs in received.values() for tensor in outputs.values()])
        return received

    def _agree_on_outputs(self, counts: Counts, run_all: Callable[[], dict[Kind, Outputs]]) -> dict[Kind, Outputs]:
        """Runs everything; where a kind is new, all ranks hear what its outputs are, or that the holder failed.

        First batches are those that run out of memory; later ones cost no word from host to host.
        """
        new = [kind for kind in counts if kind not in self._outputs_of]
        if not new:
            return run_all()
        outputs = self._ranks.all_succeed(run_all)
        is_holder = self._ranks.rank == self._holder
        described = [tuple(Rows.of(*item) for item in outputs[kind].items()) for kind in new] if is_holder else []
        self._outputs_of.update(zip(new, self._ranks.gather(described)[self._holder], strict=True))
        return outputs

    def _of_others(self, parts: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        return [(rank, part) for rank, part in enumerate(parts) if rank != self._holder]


def _batch(kind: Kind, calls: Sequence[Call]) -> dict[str, Tensor]:
    """The inputs of calls of one kind, one after the other; contiguous."""
    # The concatenation of channels-last tensors is channels-last, which does not travel as bytes in a row.
    return {rows.name: torch.cat([call.inputs[rows.name] for call in calls]).contiguous() for rows in kind.inputs}


def _num_rows(tensors: Outputs) -> int:
    return len(next(iter(tensors.values())))


def _transfer(operation: Callable, tensors: Sequence[tuple[int, Tensor]]) -> None:
    """Sends contiguous tensors to other ranks, or receives them; the two of a pair list them in the same order.

    Communicates. On a GPU the current stream waits and the host does not.
    """
    # As bytes, since not every backend knows every dtype. Both sides leave empty tensors out, which NCCL cannot send.
    operations = [
        dist.P2POp(operation, tensor.view(-1).view(torch.uint8), rank) for rank, tensor in tensors if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
