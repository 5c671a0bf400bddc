"""FSDP1: the parameters of a unit are concatenated in a flat parameter, of which every rank holds an equal range.

The optimizer has the original parameters (`use_orig_params`). Each is a view of its elements on this rank, if any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.modeling import get_non_persistent_buffers
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.torch_adamw import Moments, load_moments, load_scaler, read_counters


@final
class Fsdp1State(StudentState):
    """A rank's pieces are its ranges of the flat parameters, found in FSDP's metadata (`_shard_param_infos`).

    torch's state-dict functions give the same result, but gather whole units on the GPU.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._local_parameters: list[tuple[str, nn.Parameter, int]] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for path, unit in student.named_modules():
            if isinstance(unit, FullyShardedDataParallel) and (flat := unit._flat_param) is not None:
                shapes |= self._add(_original_name(path), flat)
                self._is_first_replica = 0 in dist.get_process_group_ranks(unit.process_group)
        unsaved = {_original_name(name) for name in get_non_persistent_buffers(student, recurse=True, fqns=True)}
        buffers = {_original_name(name): buffer for name, buffer in student.named_buffers()}
        self._buffers = {name: buffer for name, buffer in buffers.items() if name not in unsaved}
        order = [_original_name(name) for name, _ in student.named_parameters()]
        self._shapes = {name: shapes[name] for name in order if name in shapes}
        self._shapes |= {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState; parameters, then buffers."""
        return self._shapes

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the live shards. Does not communicate."""
        moments = Moments(self._optimizer, kind)
        for name, parameter, start in self._local_parameters if self._is_first_replica else ():
            source = parameter.detach() if kind == "weights" else moments.get(parameter)
            if source is not None:
                yield Piece(name, start, source, is_persistent=True)
        if kind == "weights" and self._accelerator.is_main_process:
            for name, buffer in self._buffers.items():
                yield Piece(name, 0, buffer.reshape(-1), is_persistent=True)

    def counters(self) -> Counters:
        """See StudentState."""
        return read_counters(self._optimizer, self._accelerator.scaler)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Does not communicate."""
        starts = {name: start for name, _, start in self._local_parameters}

        def load_tensor(kind: Kind, name: str, target: Tensor) -> None:
            target.copy_(read(kind, name, starts.get(name, 0), target.numel()).view(target.shape))

        with torch.no_grad():
            for name, parameter, _ in self._local_parameters:
                load_tensor("weights", name, parameter.detach())
            for name, buffer in self._buffers.items():
                load_tensor("weights", name, buffer)
            names = {id(parameter): name for name, parameter, _ in self._local_parameters}
            load_moments(self._optimizer, names, load_tensor, counters.updates)
        load_scaler(self._accelerator.scaler, counters)

    def _add(self, path: str, flat: Any) -> dict[str, tuple[int, ...]]:
        """Adds a unit's parameters to `_local_parameters`, and returns their shapes."""
        names = [f"{path}.{name}" if path else name for name in flat._fqns]
        for name, parameter, shard in zip(names, flat._params, flat._shard_param_infos, strict=True):
            if shard.in_shard:
                self._local_parameters.append((name, parameter, shard.intra_param_start_idx))
        return {name: tuple(shape) for name, shape in zip(names, flat._shapes, strict=True)}


def _original_name(name: str) -> str:
    """A module's or tensor's name before FSDP and torch.compile wrapped what is on its path."""
    wrappers = ("_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)
