"""FSDP1: parameters of a unit lie end to end in a flat one, of which every rank holds an equal run.

The optimizer has the original parameters (`use_orig_params`): each is a view of what this rank has of it, if anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.modeling import get_non_persistent_buffers
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.torch_adamw import MomentsOf, load_moments, load_scaler, read_counters


class Fsdp1State(StudentState):
    """A rank's share is what it has of each flat parameter, as that one's own description says.

    torch's state-dict functions would gather whole units on the GPU to say the same.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._runs: list[tuple[str, nn.Parameter, int]] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for path, unit in student.named_modules():
            if isinstance(unit, FullyShardedDataParallel) and (flat := unit._flat_param) is not None:
                shapes |= self._add(_original_name(path), flat)
                self._is_first_replica = 0 in dist.get_process_group_ranks(unit.process_group)
        fleeting = {_original_name(name) for name in get_non_persistent_buffers(student, recurse=True, fqns=True)}
        buffers = {_original_name(name): buffer for name, buffer in student.named_buffers()}
        self._buffers = {name: buffer for name, buffer in buffers.items() if name not in fleeting}
        order = [_original_name(name) for name, _ in student.named_parameters()]
        self._shapes = {name: shapes[name] for name in order if name in shapes}
        self._shapes |= {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState; parameters, then buffers."""
        return self._shapes

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the live shards. Does not communicate."""
        moments = MomentsOf(self._optimizer, kind)
        for name, parameter, start in self._runs if self._is_first_replica else ():
            source = parameter.detach() if kind == "weights" else moments.of(parameter)
            if source is not None:
                yield Piece(name, start, source, is_lasting=True)
        if kind == "weights" and self._accelerator.is_main_process:
            for name, buffer in self._buffers.items():
                yield Piece(name, 0, buffer.reshape(-1), is_lasting=True)

    def counters(self) -> Counters:
        """See StudentState."""
        return read_counters(self._optimizer, self._accelerator.scaler)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""
        starts = {name: start for name, _, start in self._runs}

        def fill(kind: Kind, name: str, target: Tensor) -> None:
            target.copy_(read(kind, name, starts.get(name, 0), target.numel()).view(target.shape))

        with torch.no_grad():
            for name, parameter, _ in self._runs:
                fill("weights", name, parameter.detach())
            for name, buffer in self._buffers.items():
                fill("weights", name, buffer)
            names = {id(parameter): name for name, parameter, _ in self._runs}
            load_moments(self._optimizer, names, fill, counters.updates)
        load_scaler(self._accelerator.scaler, counters)

    def _add(self, path: str, flat: Any) -> dict[str, tuple[int, ...]]:
        """Takes up a unit's parameters, and returns their shapes."""
        names = [f"{path}.{name}" if path else name for name in flat._fqns]
        for name, parameter, run in zip(names, flat._params, flat._shard_param_infos, strict=True):
            if run.in_shard:
                self._runs.append((name, parameter, run.intra_param_start_idx))
        return {name: tuple(shape) for name, shape in zip(names, flat._shapes, strict=True)}


def _original_name(name: str) -> str:
    """A module's or tensor's name before FSDP and torch.compile wrapped what is on its path."""
    wrappers = ("_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)
