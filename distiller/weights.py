"""The student's whole weights in float32, under any engine; and their moving average."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from distiller.optim import average_unless


def full_weights(accelerator: Accelerator, student: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole float32 tensor) of every parameter and saved buffer, one at a time.

    Under ZeRO the float32 masters are gathered parameter by parameter: every rank iterates to the end. A tensor is only
    valid until the next one is asked for.
    """
    module = accelerator.unwrap_model(student, keep_torch_compile=False)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        yield from _deepspeed_parameters(module)
    elif accelerator.distributed_type is DistributedType.FSDP:
        yield from _fsdp_parameters(student)
        return
    else:
        for name, parameter in module.named_parameters():
            yield name, parameter.detach().float()
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict(keep_vars=True).items():
        if name not in names:
            yield name, value.detach()


def gather_weights(accelerator: Accelerator, student: nn.Module) -> dict[str, Tensor]:
    """The whole state on rank 0's CPU, empty elsewhere. Communicates under ZeRO."""
    state = {}
    for name, value in full_weights(accelerator, student):
        if accelerator.is_main_process:
            state[name] = value.cpu().clone()
    return state


class MovingAverage:
    """Exponential moving average of the student's float32 weights, held by rank 0 on its device.

    average <- decay * average + (1 - decay) * weights after every update; it starts from the first weights.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, decay: float) -> None:
        self._accelerator, self._decay = accelerator, decay
        self.state: dict[str, Tensor] = {}
        for name, value in full_weights(accelerator, student):
            if accelerator.is_main_process:
                self.state[name] = value.clone()

    def update(self, student: nn.Module, is_skipped: Tensor) -> None:
        """Takes one update's weights in, unless it was skipped (1 in a float32 scalar on the device).

        Every rank calls it. Communicates under ZeRO (one gather a parameter).
        """
        names, values = [], []
        for name, value in full_weights(self._accelerator, student):
            if not self._accelerator.is_main_process:
                continue
            if self._accelerator.distributed_type is DistributedType.DEEPSPEED or not value.is_floating_point():
                self.state[name] = (
                    value.clone() if not value.is_floating_point() else self._one(name, value, is_skipped)
                )
            else:
                names.append(name)
                values.append(value)
        if names:
            # One fused kernel over all tensors: a small student's update would otherwise be all launches.
            average_unless([self.state[name] for name in names], values, 1 - self._decay, is_skipped)

    def load(self, state: dict[str, Tensor]) -> None:
        """Continues from a saved average (rank 0)."""
        for name, value in state.items():
            self.state[name].copy_(value)

    def _one(self, name: str, value: Tensor, is_skipped: Tensor) -> Tensor:
        average = self.state[name]
        average_unless([average], [value.to(average.device)], 1 - self._decay, is_skipped.to(average.device))
        return average


def _fsdp_parameters(student: nn.Module) -> Iterator[tuple[str, Tensor]]:
    with FullyShardedDataParallel.summon_full_params(student, writeback=False):
        for name, parameter in student.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name.replace("_fsdp_wrapped_module.", ""), whole.detach()


def _deepspeed_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in module.named_parameters():
        if parameter.dtype is not torch.float32:
            master = safe_get_full_fp32_param(parameter)
            assert master is not None, f"{name} has no float32 master"
            yield name, master.detach()
        elif hasattr(parameter, "ds_id"):
            with zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
        else:
            yield name, parameter.detach()
