"""How far a quantised teacher's answers are from those of the same weights unquantised, on the run's own inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import torch

from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher
from distiller.teachers.disk import DiskTeacher

SAMPLES_A_MODULE = 2
MOST_LOOKED_AT = 64
"""Samples among which those for each module are sought."""


def measure_error(network: Network, setup: Setup, teacher: Teacher, requests: Iterable[Request]) -> float:
    """||q - f|| / ||f|| of the output for which it is largest, said in one line on rank 0. Communicates.

    f are the answers in `teacher.dtype`. Rank 0 reads those weights from their files once, and holds two blocks of them
    and what is outside of blocks, beside the quantised teacher.

    Args:
        teacher: the quantised one, in its place.
        requests: of one sample each, on any device, the same on every rank; the first for each module are asked.
    """
    asked = [_to(request, setup.ranks.device) for request in _choose(requests, len(network.module_names))]
    ours = teacher.predict(asked)
    errors = setup.ranks.broadcast_from_main(lambda: _errors(ours, _unquantised(network, setup, asked)))
    name = max(errors, key=lambda name: errors[name])
    if setup.ranks.is_main:
        dtype = str(setup.dtype).removeprefix("torch.")
        which = f"{name}, the worst of {len(errors)}; " if len(errors) > 1 else ""
        print(
            f"{setup.options.quantization} teacher: its outputs differ from {dtype}'s by {errors[name]:.1%} "
            f"({which}relative, {len(asked)} samples)"
        )
    return errors[name]


def _choose(requests: Iterable[Request], num_modules: int) -> list[Request]:
    """The first two for each module."""
    counts: Counter[tuple[int, ...]] = Counter()
    chosen = []
    for request in islice(requests, MOST_LOOKED_AT):
        if counts[request.modules] < SAMPLES_A_MODULE:
            counts[request.modules] += 1
            chosen.append(request)
        if len(chosen) == SAMPLES_A_MODULE * num_modules:
            break
    return chosen


def _to(request: Request, device: torch.device) -> Request:
    return replace(request, inputs={name: value.to(device) for name, value in request.inputs.items()})


def _unquantised(network: Network, setup: Setup, requests: Sequence[Request]) -> list[Outputs]:
    options = setup.options.model_copy(
        update={"placement": "disk", "quantization": "none", "ring_blocks": 2, "resident_blocks": 0, "amortise": True}
    )
    teacher = DiskTeacher(network, replace(setup, options=options, ranks=setup.ranks.as_single_process()))
    outputs = teacher.predict(requests)
    teacher.close()
    del teacher
    if setup.ranks.device.type == "cuda":
        # Under balanced other processes allocate on this GPU too.
        torch.cuda.empty_cache()
    return outputs


def _errors(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> dict[str, float]:
    errors = {}
    for name in theirs[0]:
        pairs = [(q[name].float(), f[name].float()) for q, f in zip(ours, theirs, strict=True)]
        distance = math.hypot(*(float(torch.linalg.vector_norm(q - f)) for q, f in pairs))
        errors[name] = distance / math.hypot(*(float(torch.linalg.vector_norm(f)) for _, f in pairs))
    return errors
