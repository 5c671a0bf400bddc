"""DeepSpeed's own way to a disk, an operator that it builds at first use: whether it can be built here."""

from __future__ import annotations

import os
import re

import torch

from distiller.errors import UserError

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def check_asynchronous_io(what: str, instead: str) -> None:
    """Refuses (UserError) an offload to NVMe where libaio is missing, and otherwise makes ready for the build.

    Args:
        what: was asked for.
        instead: would do without it.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"{what}: DeepSpeed reads and writes with libaio, which is not installed; apt-get install libaio-dev, or "
            f"use {instead}"
        )
    _settle_architectures()
    _load_cudnn()


def _settle_architectures() -> None:
    """Lets DeepSpeed look at the GPUs itself where it cannot read torch's list of them: "9.0a", or a name."""
    names = os.environ.get(ARCHITECTURES, "").replace(";", " ").split()
    if not all(re.fullmatch(r"\d+\.\d+(\+PTX)?", name) for name in names):
        os.environ.pop(ARCHITECTURES, None)


def _load_cudnn() -> None:
    """Lets cuDNN open its libraries before the operator is there, beside which they crash the first convolution.

    DeepSpeed's library shows its symbols to all that is opened after it. On this process's GPU; nothing without one.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.nn.functional.conv2d(torch.zeros(1, 1, 1, 1, device=device), torch.zeros(1, 1, 1, 1, device=device))
