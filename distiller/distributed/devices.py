"""What the device at hand can compute with."""

from __future__ import annotations

import os
import sys

import torch

from distiller.errors import UserError


def best_device() -> torch.device:
    """The GPU of a single-process command, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bfloat16(device: torch.device) -> bool:
    """Whether the GPU computes in bfloat16 itself (compute capability 8.0); False on the CPU."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def teacher_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `teacher.dtype` stands for here; UserError for bfloat16 on a GPU without it."""
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not has_bfloat16(device):
        raise UserError("teacher.dtype is bfloat16, which this GPU does not have; choose float16 or float32")
    return getattr(torch, name)


def set_tf32(allowed: bool) -> None:
    """Whether float32 products may use TF32 on a GPU.

    Torch allows it in convolutions unless told otherwise: float32 on a GPU would not be float32 on a CPU.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def quiet_libraries() -> None:
    """Turns off the progress bars of libraries that are loaded (ours says what runs); DeepSpeed's notice of no GPU."""
    for name in ("diffusers", "transformers"):
        if name in sys.modules:
            sys.modules[f"{name}.utils.logging"].disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
