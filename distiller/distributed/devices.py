"""The device of this process, its dtypes, and library settings that depend on it."""

from __future__ import annotations

import os
import sys

import torch

from distiller.errors import UserError


def best_device() -> torch.device:
    """The GPU of a single-process command, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def with_index(device: torch.device) -> torch.device:
    """The device with its index, which a single process may have left out (`cuda`)."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the GPU computes in bfloat16 without emulation (compute capability 8.0); False on the CPU."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def teacher_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `teacher.dtype` means on this device; UserError for bfloat16 on a GPU without it."""
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not has_bfloat16(device):
        raise UserError("teacher.dtype is bfloat16, which this GPU does not have; choose float16 or float32")
    return getattr(torch, name)


def set_tf32(allowed: bool) -> None:
    """Sets whether float32 products on a GPU may use TF32.

    torch allows it in convolutions by default, so that float32 results differ from a CPU's.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def quiet_libraries() -> None:
    """Turns off the progress bars of loaded libraries, and DeepSpeed's notice that there is no GPU."""
    for name in ("diffusers", "transformers"):
        if name in sys.modules:
            sys.modules[f"{name}.utils.logging"].disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
