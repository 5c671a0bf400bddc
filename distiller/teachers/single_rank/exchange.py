"""Runs the calls of all ranks on one rank, the holder: inputs are sent to it, and outputs sent back.

The default process group, or the one that `Exchange` is given, sends tensors from device to device: one tensor for each
kind of call and each input or output, however many calls there are. Names, dtypes and shapes are gathered between
hosts, over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from distiller.distributed.ranks import Ranks
from distiller.teachers.base import Call, Outputs


@final
class RowSpec(NamedTuple):
    """Describes a tensor [B, ...] without B: its name, its dtype's name, and the shape of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: Tensor) -> RowSpec:
        """The description of a tensor [B, ...]."""
        return RowSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """An uninitialised tensor [num_rows, ...]."""
        return torch.empty(num_rows, *self.shape, dtype=getattr(torch, self.dtype), device=device)


@final
class CallKind(NamedTuple):
    """What calls that can run as one batch have in common."""

    module: str
    wanted: tuple[str, ...]
    inputs: tuple[RowSpec, ...]

    @staticmethod
    def of(call: Call) -> CallKind:
        """The kind of a call."""
        inputs = tuple(RowSpec.of(name, call.inputs[name]) for name in sorted(call.inputs))
        return CallKind(call.module, tuple(call.wanted), inputs)


Counts = dict[CallKind, list[int]]
"""Kind -> number of rows on each rank, in the order in which kinds are sent and run; the same on every rank."""


OutputsOfKinds = dict[CallKind, Outputs]
"""Kind -> outputs of all its rows."""


@final
class Exchange:
    """Runs every rank's calls on one rank, the holder. All ranks call `answer` equally often."""

    def __init__(
        self, ranks: Ranks, holder: int, run: Callable[[Call], Outputs], group: dist.ProcessGroup | None = None
    ) -> None:
        """`run` computes a batch of calls of one kind; called on the holder alone.

        `group`: of all ranks, through which tensors travel; None for the default one.
        """
        self._ranks, self._holder, self._run, self._group = ranks, holder, run, group
        # The same on all ranks, since every rank sees the kinds of all; each kind's outputs are described only once.
        self._outputs_of: dict[CallKind, tuple[RowSpec, ...]] = {}

    def answer(self, calls: Sequence[Call]) -> list[Outputs]:
        """Outputs of this rank's calls, in order, on its device. Communicates.

        Raises AgreedError on every rank when the holder fails at a kind of call that it has not run before.
        """
        own: dict[CallKind, list[int]] = {}
        for i, call in enumerate(calls):
            own.setdefault(CallKind.of(call), []).append(i)
        batches = {kind: _batch(kind, [calls[i] for i in indices]) for kind, indices in own.items()}
        counts = self._count_rows(batches)
        is_holder = self._ranks.rank == self._holder
        outputs_of = self._run_for_all(batches, counts) if is_holder else self._run_remotely(batches, counts)
        results: list[Outputs] = [{} for _ in calls]
        for kind, indices in own.items():
            num_rows = [_num_rows(calls[i].inputs) for i in indices]
            for name, output in outputs_of[kind].items():
                for i, part in zip(indices, output.split(num_rows), strict=True):
                    results[i][name] = part
        return results

    def _count_rows(self, batches: dict[CallKind, dict[str, Tensor]]) -> Counts:
        """Counts the rows of every rank's batches. Communicates."""
        gathered = self._ranks.gather([(kind, _num_rows(inputs)) for kind, inputs in batches.items()])
        counts: Counts = {}
        for rank, of_rank in enumerate(gathered):
            for kind, num_rows in of_rank:
                counts.setdefault(kind, [0] * self._ranks.world_size)[rank] = num_rows
        return counts

    def _run_for_all(self, batches: dict[CallKind, dict[str, Tensor]], counts: Counts) -> OutputsOfKinds:
        """On the holder: receives, runs and sends; returns the outputs of its own rows."""
        whole = {
            kind: {rows.name: rows.empty(sum(of_ranks), self._ranks.device) for rows in kind.inputs}
            for kind, of_ranks in counts.items()
        }
        to_receive: list[tuple[int, Tensor]] = []
        for kind, of_ranks in counts.items():
            for name, tensor in whole[kind].items():
                parts = tensor.split(of_ranks)
                to_receive += self._without_holder(parts)
                if kind in batches:
                    parts[self._holder].copy_(batches[kind][name])
        self._transfer(dist.irecv, to_receive)
        outputs = self._agree_on_outputs(
            counts, lambda: {kind: self._run(Call(kind.module, whole.pop(kind), kind.wanted)) for kind in counts}
        )
        to_send: list[tuple[int, Tensor]] = []
        own: OutputsOfKinds = {kind: {} for kind in batches}
        for kind, of_ranks in counts.items():
            for rows in self._outputs_of[kind]:
                output = outputs[kind][rows.name].contiguous()
                parts = output.split(of_ranks)
                to_send += self._without_holder(parts)
                if kind in batches:
                    # A copy, so that the other ranks' rows are freed while the student still uses these.
                    part = parts[self._holder]
                    own[kind][rows.name] = part if len(part) == len(output) else part.clone()
        self._transfer(dist.isend, to_send)
        return own

    def _run_remotely(self, batches: dict[CallKind, dict[str, Tensor]], counts: Counts) -> OutputsOfKinds:
        """On every other rank: sends its inputs and receives its outputs."""
        kinds = [kind for kind in counts if kind in batches]
        self._transfer(dist.isend, [(self._holder, batches[kind][rows.name]) for kind in kinds for rows in kind.inputs])
        self._agree_on_outputs(counts, dict)
        received: OutputsOfKinds = {}
        for kind in kinds:
            num_rows = counts[kind][self._ranks.rank]
            received[kind] = {r.name: r.empty(num_rows, self._ranks.device) for r in self._outputs_of[kind]}
        to_receive = [(self._holder, tensor) for outputs in received.values() for tensor in outputs.values()]
        self._transfer(dist.irecv, to_receive)
        return received

    def _agree_on_outputs(self, counts: Counts, run_all: Callable[[], OutputsOfKinds]) -> OutputsOfKinds:
        """Runs all kinds; if one is new, all ranks learn the shapes of its outputs, or that the holder failed.

        Running out of memory is most likely at a kind's first batch. Later batches exchange no messages between hosts.
        Communicates if a kind is new.
        """
        new = [kind for kind in counts if kind not in self._outputs_of]
        if not new:
            return run_all()
        outputs = self._ranks.all_succeed(run_all)
        is_holder = self._ranks.rank == self._holder
        specs = [tuple(RowSpec.of(*item) for item in outputs[kind].items()) for kind in new] if is_holder else []
        self._outputs_of.update(zip(new, self._ranks.gather(specs)[self._holder], strict=True))
        return outputs

    def _transfer(self, operation: Callable[..., dist.Work | None], tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Sends contiguous tensors to other ranks, or receives them; sender and receiver list them in the same order.

        Communicates. On a GPU the current stream waits and the host does not.
        """
        # As bytes, since not every backend supports every dtype. NCCL cannot send empty tensors: both sides skip them.
        operations = [
            dist.P2POp(operation, tensor.view(-1).view(torch.uint8), rank, self._group)
            for rank, tensor in tensors
            if tensor.numel()
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _without_holder(self, parts: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        return [(rank, part) for rank, part in enumerate(parts) if rank != self._holder]


def _batch(kind: CallKind, calls: Sequence[Call]) -> dict[str, Tensor]:
    """Name -> inputs of calls of one kind, concatenated along the batch dimension; contiguous."""
    # Channels-last tensors stay channels-last when concatenated, and only contiguous ones can be sent as bytes.
    return {rows.name: torch.cat([call.inputs[rows.name] for call in calls]).contiguous() for rows in kind.inputs}


def _num_rows(tensors: Mapping[str, Tensor]) -> int:
    return len(next(iter(tensors.values())))
