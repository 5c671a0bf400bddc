"""DeepSpeed's ZeRO-3: every parameter is padded and cut into as many equal runs as there are ranks.

A rank's runs of many parameters lie end to end in the flat float32 tensor of a sub-group, with moments of the same
layout; each in GPU memory, in host memory, or in a file from which whole sub-groups are swapped in.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from distiller.student_state.module import SavedTensors


class Zero3State(StudentState):
    """With optimizer and parameters on the device, on the CPU or on a disk, in any precision.

    DeepSpeed's `safe_get_local_fp32_param` and its like give the same runs, but move each to the GPU, and read a
    sub-group's files again for every parameter in it; here a sub-group is swapped in once a kind.
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
        """See StudentState; views of the flat tensors. Communicates for what is not trained."""
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            state = self._inner(number).state.get(flat, {})
            if kind != "weights" and kind not in state:
                continue
            is_swapped = self._zero._swappable_optimizer_subgroup(number)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_in(number)
            source = flat.detach() if kind == "weights" else state[kind]
            for name, start, run in self._runs(number):
                yield Piece(name, start, source[run], is_lasting=not is_swapped)
            if is_swapped:
                self._zero._release_swap_buffers(number)
        if kind == "weights":
            yield from self._untrained()

    def counters(self) -> Counters:
        """See StudentState."""
        return counters_of(self._zero, self._inner(0), self._precision)

    def load(self, read: Read, counters: Counters) -> None:
        """See StudentState. Communicates: small parameters that every rank keeps whole are gathered again."""
        from deepspeed import zero

        # Parameters that are whole now would not see what is written to their runs.
        self._zero.checkpoint_event_prologue()
        for number in range(len(self._zero.fp32_partitioned_groups_flat)):
            is_swapped = self._zero._swappable_optimizer_subgroup(number)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_in(number)
            self._load_sub_group(number, read, counters.updates)
            # The module's own copies, in their precision and place, follow the float32 ones.
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
            if is_swapped:
                self._zero._optimizer_states_and_gradient_swap_out(number)
        for name, parameter in self._saved.frozen.items():
            with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if self._rank == 0:
                    parameter.copy_(read("weights", name, 0, parameter.numel()).view(parameter.shape))
        self._saved.load_buffers(read)
        replay_bias_correction(self._zero.optimizer, counters.updates)
        load_loss_scale(self._zero, counters.loss_scale, self._precision)
        self._zero.checkpoint_event_epilogue()

    def _load_sub_group(self, number: int, read: Read, updates: int) -> None:
        flat, inner = self._zero.fp32_partitioned_groups_flat[number], self._inner(number)
        if updates:
            group = inner.param_groups[self._zero.sub_group_to_group_id[number]]
            inner.state[flat] = new_moments(inner, group, flat, updates)
        with torch.no_grad():
            for name, start, run in self._runs(number):
                count = run.stop - run.start
                flat[run].copy_(read("weights", name, start, count))
                if updates:
                    inner.state[flat]["exp_avg"][run].copy_(read("exp_avg", name, start, count))
                    inner.state[flat]["exp_avg_sq"][run].copy_(read("exp_avg_sq", name, start, count))

    def _runs(self, number: int) -> Iterator[tuple[str, int, slice]]:
        """(name, first element, where they lie in the flat tensor), without the padding of the last ranks."""
        offset = 0
        for parameter in self._zero.fp16_groups[number]:
            width = parameter.partition_numel()
            start = self._rank * width
            count = min(width, parameter.ds_numel - start)
            if count > 0:
                yield self._names[id(parameter)], start, slice(offset, offset + count)
            offset += width

    def _inner(self, number: int) -> Any:
        """The AdamW of a sub-group: with partial offload those on the GPU have one of their own."""
        is_partial = self._zero.offload_optimizer and self._zero.subgroup_to_device[number] != "cpu"
        return self._zero.backup_optimizer if is_partial else self._zero.optimizer

    def _untrained(self) -> Iterator[Piece]:
        from deepspeed import zero

        for name, parameter in self._saved.frozen.items():
            with zero.GatheredParameters([parameter]):
                if self._rank == 0:
                    yield Piece(name, 0, parameter.detach().reshape(-1).float())
        if self._rank == 0:
            yield from self._saved.buffer_pieces()
