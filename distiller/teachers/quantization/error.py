"""Relative error of a quantised teacher's outputs against the same weights unquantised, on the run's own inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import torch

from distiller.errors import UserError
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher
from distiller.teachers.disk import DiskTeacher

NUM_SAMPLES_PER_MODULE = 2
MAX_SAMPLES_EXAMINED = 64
"""Requests that are searched for `NUM_SAMPLES_PER_MODULE` of each module."""


def measure_error(network: Network, setup: Setup, teacher: Teacher, requests: Iterable[Request]) -> float:
    """||q - f|| / ||f|| of the output for which it is largest, in the 2-norm over all samples; rank 0 prints it.

    q are the quantised teacher's outputs, f those of the unquantised weights in `teacher.dtype`. Communicates. Rank 0
    reads the unquantised weights from their files once; its device holds two blocks of them and the weights outside of
    blocks, beside the quantised teacher. Returns the same number on every rank. Raises UserError on all of them if it
    is above `teacher.max_quantization_error`.

    Args:
        teacher: the quantised teacher.
        requests: of one sample each, on any device, the same on every rank; of each module the first
            `NUM_SAMPLES_PER_MODULE` are used.
    """
    chosen = [_to(request, setup.ranks.device) for request in _choose(requests, len(network.module_names))]
    quantized = teacher.predict(chosen)
    errors = setup.ranks.broadcast_from_main(lambda: _errors(quantized, _unquantised(network, setup, chosen)))
    name = max(errors, key=lambda name: errors[name])
    if setup.ranks.is_main:
        dtype = str(setup.dtype).removeprefix("torch.")
        which = f"{name}, the worst of {len(errors)}; " if len(errors) > 1 else ""
        print(
            f"{setup.options.quantization} teacher: its outputs differ from {dtype}'s by {errors[name]:.1%} "
            f"({which}relative, {len(chosen)} samples)"
        )
    limit = setup.options.max_quantization_error
    if limit is not None and errors[name] > limit:
        raise UserError(
            f"{setup.options.quantization} teacher: the error of its outputs, {errors[name]:.2%}, is above "
            f"teacher.max_quantization_error ({limit:.2%}); choose another teacher.quantization, or a higher limit"
        )
    return errors[name]


def _choose(requests: Iterable[Request], num_modules: int) -> list[Request]:
    """The first `NUM_SAMPLES_PER_MODULE` requests for each module."""
    counts: Counter[tuple[int, ...]] = Counter()
    chosen = []
    for request in islice(requests, MAX_SAMPLES_EXAMINED):
        if counts[request.modules] < NUM_SAMPLES_PER_MODULE:
            counts[request.modules] += 1
            chosen.append(request)
        if len(chosen) == NUM_SAMPLES_PER_MODULE * num_modules:
            break
    return chosen


def _to(request: Request, device: torch.device) -> Request:
    return replace(request, inputs={name: value.to(device) for name, value in request.inputs.items()})


def _unquantised(network: Network, setup: Setup, requests: Sequence[Request]) -> list[Outputs]:
    """Outputs of the unquantised weights, read block by block; one rank alone, without communication."""
    options = setup.options.model_copy(
        update={"placement": "disk", "quantization": "none", "ring_blocks": 2, "resident_blocks": 0, "amortise": True}
    )
    teacher = DiskTeacher(network, replace(setup, options=options, ranks=setup.ranks.as_single_process()))
    outputs = teacher.predict(requests)
    teacher.close()
    del teacher
    if setup.ranks.device.type == "cuda":
        # Under `balanced` other processes allocate on this GPU too, and cannot use what this allocator has cached.
        torch.cuda.empty_cache()
    return outputs


def _errors(quantized: Sequence[Outputs], reference: Sequence[Outputs]) -> dict[str, float]:
    """Output's name -> ||q - f|| / ||f||, with q from `quantized` and f from `reference`, computed in float32.

    Infinite where a value of q is not finite, or where all of f are 0 and q's are not.
    """
    errors = {}
    for name in reference[0]:
        pairs = [(q[name].float(), f[name].float()) for q, f in zip(quantized, reference, strict=True)]
        distance = math.hypot(*(float(torch.linalg.vector_norm(q - f)) for q, f in pairs))
        norm = math.hypot(*(float(torch.linalg.vector_norm(f)) for _, f in pairs))
        errors[name] = distance / norm if norm else (math.inf if distance else 0.0)
        if math.isnan(errors[name]):
            errors[name] = math.inf
    return errors
