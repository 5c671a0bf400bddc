"""DeepSpeed's ZeRO-1 and ZeRO-2: module weights on every rank, float32 masters and moments partitioned over the ranks.

The parameters of a group are concatenated in one flat tensor, padded and split into as many equal partitions as there
are ranks. A parameter's `_hp_mapping` says which of its elements are in this rank's partition, and where; a parameter
may be in two partitions.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.deepspeed_optimizer import (
    counters_of,
    load_loss_scale,
    new_moments,
    replay_bias_correction,
)
from distiller.student_state.saved_tensors import SavedTensors


@final
class Zero12State(StudentState):
    """For the optimizer on the device or on the CPU, in any precision, and for both optimizers of DeepSpeed.

    Frozen parameters are replicated; rank 0 saves them.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._rank, self._precision = accelerator.process_index, accelerator.mixed_precision
        self._saved = SavedTensors(accelerator.unwrap_model(student, keep_torch_compile=False))
        self._zero: Any = student.optimizer
        self._inner: Any = self._zero.optimizer

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState."""
        return {name: tuple(tensor.shape) for name, tensor in self._saved.tensors.items()}

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the flat partitions. Does not communicate."""
        for name, start, flat, span in self._fragments():
            state = self._inner.state.get(flat, {})
            source = flat.detach() if kind == "weights" else state.get(kind)
            if source is not None:
                yield Piece(name, start, source[span], is_persistent=True)
        if kind == "weights" and self._rank == 0:
            for name, parameter in self._saved.frozen.items():
                yield Piece(name, 0, parameter.detach().reshape(-1).float())
            yield from self._saved.buffer_pieces()

    def counters(self) -> Counters:
        """See StudentState."""
        return counters_of(self._zero, self._inner, self._precision)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Communicates: the module's weights are gathered from the masters."""
        if counters.updates:
            for group in self._inner.param_groups:
                flat = group["params"][0]
                self._inner.state[flat] = new_moments(self._inner, group, flat, counters.updates)
        with torch.no_grad():
            for name, start, flat, span in self._fragments():
                count = span.stop - span.start
                flat[span].copy_(read("weights", name, start, count))
                if counters.updates:
                    state = self._inner.state[flat]
                    state["exp_avg"][span].copy_(read("exp_avg", name, start, count))
                    state["exp_avg_sq"][span].copy_(read("exp_avg_sq", name, start, count))
            for name, parameter in self._saved.frozen.items():
                parameter.copy_(read("weights", name, 0, parameter.numel()).view(parameter.shape))
        self._saved.load_buffers(read)
        replay_bias_correction(self._inner, counters.updates)
        load_loss_scale(self._zero, counters.loss_scale, self._precision)
        self._zero.update_lp_params()

    def _fragments(self) -> Iterator[tuple[str, int, Tensor, slice]]:
        """(name, first element, flat partition, slice of it) of every parameter that is in this rank's partition."""
        for name, parameter in self._saved.trained.items():
            mapping = parameter._hp_mapping
            if mapping is not None:
                flat = self._inner.param_groups[mapping.param_group_index]["params"][0]
                address = mapping.hp_fragment_address
                yield name, mapping.lp_fragment_address.start, flat, slice(address.start, address.start + address.numel)
