"""Gates of `distiller evaluate`: bounds on figures of its report (`--min key=value`, `--max key=value`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from distiller.config.sections import flatten
from distiller.errors import UserError, nearest


@final
@dataclass(frozen=True)
class Gate:
    """A bound on one figure.

    Attributes:
        side: which bound it is.
        key: the figure's dotted key in the report, such as `by_noise_level.0.0-0.2.cosine`.
        bound: the figure may equal it.
    """

    side: Literal["min", "max"]
    key: str
    bound: float

    def describe_miss(self, figures: Mapping[str, float]) -> str | None:
        """What the figure misses; None where it keeps the bound. A figure without a value keeps none."""
        reached = figures.get(self.key)
        if reached is None:
            return f"{self.key} has no value, and --{self.side} demands {self.bound:g}"
        if reached >= self.bound if self.side == "min" else reached <= self.bound:
            return None
        return f"{self.key} is {reached:.6g}, {'below' if self.side == 'min' else 'above'} --{self.side} {self.bound:g}"


def make_gates(minima: Iterable[tuple[str, float]], maxima: Iterable[tuple[str, float]]) -> tuple[Gate, ...]:
    """Gates from the command line's (key, bound) pairs."""
    sides: tuple[tuple[Literal["min", "max"], Iterable[tuple[str, float]]], ...] = (("min", minima), ("max", maxima))
    return tuple(Gate(side, key, bound) for side, pairs in sides for key, bound in pairs)


def figures_of(report: Mapping[str, Any]) -> dict[str, float]:
    """The report's numbers by their dotted keys; figures without a value (None) are left out."""
    return {key: value for key, value in flatten(report).items() if isinstance(value, int | float)}


def check_keys(gates: Sequence[Gate], known: Sequence[str], open_prefixes: Sequence[str] = ()) -> None:
    """Raises UserError for a gate on a figure that the report will not have.

    Args:
        gates: the gates.
        known: the dotted keys that the report may have.
        open_prefixes: beginnings of keys that nobody knows before they are measured.
    """
    for gate in gates:
        if gate.key in known or any(gate.key.startswith(prefix) for prefix in open_prefixes):
            continue
        meant = nearest(gate.key, known)
        # Of both models' figures the student's, and of one that stands for several the first of them.
        likelier = (key for key in known if key in (f"student_{gate.key}",) or key.startswith(f"{gate.key}."))
        meant = next(likelier, meant)
        hint = "" if meant is None else f"did you mean '{meant}'? "
        listed = ", ".join(sorted(known))
        raise UserError(f"--{gate.side}: {gate.key} is no figure of this run; {hint}there are {listed}")
