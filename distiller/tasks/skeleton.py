"""A library's model on the meta device, in the dtypes that its `from_pretrained` would give it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast_skeleton(model: Any, dtype: torch.dtype) -> None:
    """Changes a new model of diffusers or transformers in place: frozen parameters, in `dtype`, on the meta device.

    As `from_pretrained` of diffusers does: modules that the class names in `_keep_in_fp32_modules` stay in float32, and
    saved floating-point buffers take `dtype`. Buffers that are not saved stay as the model made them, with values.
    """
    float32_modules = set(model._keep_in_fp32_modules or ())
    saved = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = torch.float32 if float32_modules.intersection([*path.split("."), name]) else dtype
                module._parameters[name] = nn.Parameter(parameter.detach().to(own), requires_grad=False)
        for name, buffer in module._buffers.items():
            # Such as running statistics, which come from the files.
            if buffer is not None and f"{path}.{name}".lstrip(".") in saved:
                own = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = buffer.to(device="meta", dtype=own)
