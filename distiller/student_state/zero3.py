"""DeepSpeed's ZeRO-3: every parameter is padded and split into as many equal partitions as there are ranks.

A rank's partitions of many parameters are concatenated in the flat float32 tensor of a sub-group, with moments of the
same layout; each in GPU memory, in host memory, or in a file from which whole sub-groups are swapped in.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import nn

from distiller.student_state.base import Counters, Kind, Piece, Read, StudentState
from distiller.student_state.deepspeed_optimizer import (
    counters_of,
    load_loss_scale,
    new_moments,
    replay_bias_correction,
)
from distiller.student_state.saved_tensors import SavedTensors


@final
class Zero3State(StudentState):
    """For optimizer and parameters on the device, on the CPU or on a disk, in any precision.

    DeepSpeed's `safe_get_local_fp32_param` and similar functions give the same values, but move each to the GPU, and
    read a sub-group's files again for every parameter in it. Here a sub-group is swapped in once for each kind.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._rank, self._precision = accelerator.process_index, accelerator.mixed_precision
        self._saved = SavedTensors(accelerator.unwrap_model(student, keep_torch_compile=False))
        self._names = {id(parameter): name for name, parameter in self._saved.parameters.items()}
        self._zero: Any = student.optimizer

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See StudentState."""
        return {
            name: tuple(tensor.ds_shape if name in self._saved.parameters else tensor.shape)
            for name, tensor in self._saved.tensors.items()
        }

    def pieces(self, kind: Kind) -> Iterator[Piece]:
        """See StudentState; views of the flat tensors. Communicates for frozen parameters."""
        for i, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            state = self._inner(i).state.get(flat, {})
            if kind != "weights" and kind not in state:
                continue
            is_swapped = self._zero._swappable_optimizer_subgroup(i)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_in(i)
            source = flat.detach() if kind == "weights" else state[kind]
            for name, start, span in self._partitions(i):
                yield Piece(name, start, source[span], is_persistent=not is_swapped)
            if is_swapped:
                self._zero._release_swap_buffers(i)
        if kind == "weights":
            yield from self._frozen_pieces()

    def counters(self) -> Counters:
        """See StudentState."""
        return counters_of(self._zero, self._inner(0), self._precision)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Communicates: small parameters that every rank keeps gathered are gathered again."""
        from deepspeed import zero

        # Release gathered parameters: writes to a partition do not change a parameter that is gathered.
        self._zero.checkpoint_event_prologue()
        for i in range(len(self._zero.fp32_partitioned_groups_flat)):
            is_swapped = self._zero._swappable_optimizer_subgroup(i)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_in(i)
            self._load_sub_group(i, read, counters.updates)
            # Copies the float32 values into the module's own parameters, in their precision and on their device.
            self._zero._reassign_or_swap_out_partitioned_parameters(i)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_out(i)
        for name, parameter in self._saved.frozen.items():
            with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if self._rank == 0:
                    parameter.copy_(read("weights", name, 0, parameter.numel()).view(parameter.shape))
        self._saved.load_buffers(read)
        replay_bias_correction(self._zero.optimizer, counters.updates)
        load_loss_scale(self._zero, counters.loss_scale, self._precision)
        self._zero.checkpoint_event_epilogue()

    def _load_sub_group(self, i: int, read: Read, updates: int) -> None:
        flat, inner = self._zero.fp32_partitioned_groups_flat[i], self._inner(i)
        if updates:
            group = inner.param_groups[self._zero.sub_group_to_group_id[i]]
            inner.state[flat] = new_moments(inner, group, flat, updates)
        with torch.no_grad():
            for name, start, span in self._partitions(i):
                count = span.stop - span.start
                flat[span].copy_(read("weights", name, start, count))
                if updates:
                    inner.state[flat]["exp_avg"][span].copy_(read("exp_avg", name, start, count))
                    inner.state[flat]["exp_avg_sq"][span].copy_(read("exp_avg_sq", name, start, count))

    def _partitions(self, i: int) -> Iterator[tuple[str, int, slice]]:
        """(name, first element, slice of the flat tensor), without the padding of the last ranks."""
        offset = 0
        for parameter in self._zero.fp16_groups[i]:
            width = parameter.partition_numel()
            start = self._rank * width
            count = min(width, parameter.ds_numel - start)
            if count > 0:
                yield self._names[id(parameter)], start, slice(offset, offset + count)
            offset += width

    def _inner(self, i: int) -> Any:
        """The AdamW of a sub-group: with partial offload, sub-groups on the GPU have a separate optimizer."""
        is_partial = self._zero.offload_optimizer and self._zero.subgroup_to_device[i] != "cpu"
        return self._zero.backup_optimizer if is_partial else self._zero.optimizer

    def _frozen_pieces(self) -> Iterator[Piece]:
        from deepspeed import zero

        for name, parameter in self._saved.frozen.items():
            with zero.GatheredParameters([parameter]):
                if self._rank == 0:
                    yield Piece(name, 0, parameter.detach().reshape(-1).float())
        if self._rank == 0:
            yield from self._saved.buffer_pieces()
