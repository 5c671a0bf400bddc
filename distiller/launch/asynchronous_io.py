"""DeepSpeed's asynchronous I/O operator, which it builds at first use: whether it can be built, and preparations."""

from __future__ import annotations

import os
import re

import torch

from distiller.errors import UserError

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def check_asynchronous_io(what: str, instead: str) -> None:
    """Refuses (UserError) an offload to NVMe where libaio is missing, and otherwise prepares the build.

    Args:
        what: the setting that needs it, for the message.
        instead: a launch file that works without it, for the message.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"{what}: DeepSpeed reads and writes with libaio, which is not installed; apt-get install libaio-dev, or "
            f"use {instead}"
        )
    _drop_unreadable_architectures()
    _load_cudnn()


def _drop_unreadable_architectures() -> None:
    """Unsets TORCH_CUDA_ARCH_LIST where DeepSpeed cannot parse it ("9.0a", or a name), so that it asks the GPUs."""
    names = os.environ.get(ARCHITECTURES, "").replace(";", " ").split()
    if not all(re.fullmatch(r"\d+\.\d+(\+PTX)?", name) for name in names):
        os.environ.pop(ARCHITECTURES, None)


def _load_cudnn() -> None:
    """Makes cuDNN load its libraries before the operator's library, by a convolution on this process's GPU, if any.

    DeepSpeed's library exports its symbols to all libraries that are loaded later, and cuDNN then crashes in the first
    convolution.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.nn.functional.conv2d(torch.zeros(1, 1, 1, 1, device=device), torch.zeros(1, 1, 1, 1, device=device))
