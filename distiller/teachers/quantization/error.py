"""Relative error of a quantised teacher's outputs against the same weights unquantised, on the run's own inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import final

import torch

from distiller.errors import UserError
from distiller.teachers.base import (
    Figures,
    HasErrorBands,
    HasTokenErrors,
    Network,
    Outputs,
    Request,
    Setup,
    Teacher,
)
from distiller.teachers.disk import DiskTeacher

NUM_SAMPLES = 2
"""Samples used for each module, and in each band where the network has bands."""
MAX_SAMPLES_EXAMINED = 64
"""Requests among which these samples are looked for."""


@final
@dataclass(frozen=True)
class QuantizationError:
    """How far quantised outputs are from those of the same weights unquantised.

    Attributes:
        relative: ||q - f|| / ||f|| of the output for which it is largest, in the 2-norm over all samples.
        bands: the same over the samples of each band of inputs, by the band's name; empty without bands.
        figures: of the distribution over tokens, by name; empty for other networks.
    """

    relative: float
    bands: Figures
    figures: Figures

    @property
    def largest(self) -> float:
        """`relative`, or the largest value of a band."""
        return max(self.relative, *self.bands.values(), 0.0)


def measure_error(network: Network, setup: Setup, teacher: Teacher, requests: Iterable[Request]) -> QuantizationError:
    """The error of the quantised teacher's outputs; rank 0 prints it.

    Communicates. Rank 0 reads the unquantised weights from their files once. Beside the quantised teacher its device
    holds two blocks of them and the weights outside of blocks, then a language model's output layer. Returns the same
    on every rank. Raises UserError on all of them if the error, in a band if there are bands, is above
    `teacher.max_quantization_error`.

    Args:
        teacher: the quantised teacher.
        requests: of one sample each, on any device, the same on every rank; the first `NUM_SAMPLES` of each kind are
            used.
    """
    chosen = [_to(request, setup.ranks.device) for request in _choose(network, requests)]
    quantised = teacher.predict(chosen)
    error, name, num_outputs = setup.ranks.broadcast_from_main(lambda: _measure(network, setup, chosen, quantised))
    kind, dtype = setup.options.quantization, str(setup.dtype).removeprefix("torch.")
    if setup.ranks.is_main:
        output_text = f"{name}, the worst of {num_outputs}; " if num_outputs > 1 else ""
        figures = [f"{band}: {value:.2%}" for band, value in error.bands.items()]
        figures += [f"{figure}: {value:.3g}" for figure, value in error.figures.items()]
        figures_text = "".join(f"; {figure}" for figure in figures)
        print(
            f"{kind} teacher: its outputs differ from {dtype}'s by {error.relative:.1%} "
            f"({output_text}relative, {len(chosen)} samples{figures_text})"
        )
    limit = setup.options.max_quantization_error
    if limit is not None and error.largest > limit:
        where = "".join(f" at {band}" for band, value in error.bands.items() if value == error.largest)
        raise UserError(
            f"{kind} teacher: the error of its outputs{where}, {error.largest:.2%}, is above "
            f"teacher.max_quantization_error ({limit:.2%}); choose another teacher.quantization, or a higher limit"
        )
    return error


def _measure(
    network: Network, setup: Setup, requests: Sequence[Request], quantised: Sequence[Outputs]
) -> tuple[QuantizationError, str, int]:
    """(The error, the output for which it is largest, the number of outputs). One rank alone."""
    reference = _unquantised(network, setup, requests)
    errors = _errors(quantised, reference)
    name = max(errors, key=errors.__getitem__)
    figures, by_band = {}, {}
    if isinstance(network, HasErrorBands):
        bands = [network.error_band(request) for request in requests]
        for band in sorted(set(bands)):
            pairs = [pair for pair, at in zip(zip(quantised, reference, strict=True), bands, strict=True) if at == band]
            by_band[band] = max(_errors(*zip(*pairs, strict=True)).values())
    if isinstance(network, HasTokenErrors):
        figures = network.token_errors(quantised, reference, setup.dtype)
    return QuantizationError(errors[name], by_band, figures), name, len(errors)


def _choose(network: Network, requests: Iterable[Request]) -> list[Request]:
    """The first `NUM_SAMPLES` requests for each module and band."""
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    band_of = network.error_band if isinstance(network, HasErrorBands) else None
    chosen: list[Request] = []
    for request in islice(requests, MAX_SAMPLES_EXAMINED):
        kind = request.modules, "" if band_of is None else band_of(request)
        if counts[kind] < NUM_SAMPLES:
            counts[kind] += 1
            chosen.append(request)
        if band_of is None and len(chosen) == NUM_SAMPLES * len(network.module_names):
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


def _errors(quantised: Sequence[Outputs], reference: Sequence[Outputs]) -> dict[str, float]:
    """Output's name -> ||q - f|| / ||f||, with q from `quantised` and f from `reference`, computed in float32.

    Infinite where a value of q is not finite, or where all of f are 0 and q's are not.
    """
    errors = {}
    for name in reference[0]:
        pairs = [(q[name].float(), f[name].float()) for q, f in zip(quantised, reference, strict=True)]
        distance = math.hypot(*(float(torch.linalg.vector_norm(q - f)) for q, f in pairs))
        norm = math.hypot(*(float(torch.linalg.vector_norm(f)) for _, f in pairs))
        errors[name] = distance / norm if norm else (math.inf if distance else 0.0)
        if math.isnan(errors[name]):
            errors[name] = math.inf
    return errors
