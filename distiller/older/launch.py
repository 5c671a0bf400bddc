"""Checks what the older flags say about the launcher against the launcher that started this process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from distiller.distributed.process import launcher_arguments, world_size
from distiller.errors import OwnUserError, UserError
from distiller.older.flags import Flags


class LocalRankError(OwnUserError):
    """--local_rank is not this process's local rank."""


@dataclass(frozen=True)
class Launch:
    """The launcher and the machine that the flags are checked against.

    Attributes:
        precision: the mixed precision that the launcher sets; `no` if it sets none.
        num_gpus: GPUs that this process sees; 0 where the launcher asks for the CPU.
    """

    is_launched: bool
    world_size: int
    local_rank: int
    precision: str
    num_gpus: int

    @staticmethod
    def here() -> Launch:
        """The launcher and the machine of this process, read from the environment. Imports torch."""
        import torch

        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
        return Launch(
            is_launched="LOCAL_RANK" in os.environ or launcher_arguments() is not None,
            world_size=world_size(),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
            num_gpus=0 if on_cpu else torch.cuda.device_count(),
        )


def check_launcher(flags: Flags, launch: Launch, command: Sequence[str]) -> list[str]:
    """Checks the flags about the launcher, and returns notices to print. `command` is the script and its flags.

    Raises:
        UserError: --multi_gpu without a launcher; the message is the command to use.
        LocalRankError: --local_rank is not this process's.
    """
    if flags.multi_gpu and not launch.is_launched:
        distributed = [] if flags.distributed else ["--distributed"]
        raise UserError(
            "--multi_gpu needs a launcher that starts one process a GPU; use: "
            f"torchrun --nproc_per_node={launch.num_gpus or 2} {shlex.join([*command, *distributed])}"
        )
    if flags.local_rank not in (None, -1, launch.local_rank):
        launcher = f"the launcher's LOCAL_RANK is {launch.local_rank}" if launch.is_launched else "no launcher runs"
        raise LocalRankError(f"--local_rank is {flags.local_rank} and {launcher}; remove it, the launcher sets its own")
    if flags.distributed and launch.world_size == 1:
        return ["--distributed is given and one process runs; torchrun --nproc_per_node=N starts more"]
    if launch.world_size > 1 and not flags.distributed:
        return [f"--distributed is not given and {launch.world_size} processes run: they train together"]
    return []
