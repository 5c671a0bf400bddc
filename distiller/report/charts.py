"""A chart: as a figure of plotly, as a sentence for screen readers, and as a table of its numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from textwrap import wrap
from typing import Any, Literal, final

import plotly.graph_objects as plotly

from distiller.report.numbers import extremes, shortened, shown, thinned

COLOURS = ("#0072b2", "#d55e00", "#00896a", "#b8629a", "#9c7400", "#7b6fd0", "#7f7f7f")
"""Told apart without red and green, each with a contrast of 3 or more on the light and on the dark page."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PATTERNS = ("", "/", "x", ".", "\\", "-", "+")
MAX_ROWS = 50
MAX_MARKED_POINTS = 40
LOGARITHMIC_FROM = 20.0
"""Ratio of the highest to the lowest value from which an axis that may be is logarithmic."""

Position = int | str
Kind = Literal["lines", "areas", "bars", "stacked bars"]


@final
@dataclass(frozen=True)
class Line:
    """A named row of values at steps, or at names of bands; finite, or None where there is none.

    `is_total`: drawn as a line over the areas of a chart.
    """

    name: str
    positions: Sequence[Position]
    values: Sequence[float | None]
    is_total: bool = False


@final
@dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        x, y: names of the axes with their units.
        note: a sentence below the chart.
        may_be_logarithmic: the values' axis is, where they are positive and differ much.
        from_zero: whether the values' axis begins at 0, where it is not logarithmic.
        limit: a name, and the value of a horizontal line.
        names_runs: whether the lines are runs, which a legend names also where there is one.
        highest: the end of the values' axis; None for that of the values.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    kind: Kind = "lines"
    note: str = ""
    may_be_logarithmic: bool = False
    from_zero: bool = False
    limit: tuple[str, float] | None = None
    highest: float | None = None
    names_runs: bool = False

    @property
    def height(self) -> int:
        """Of the figure, in pixels."""
        return 290 + 20 * len(self.lines)

    @property
    def is_logarithmic(self) -> bool:
        """Whether the values' axis is logarithmic."""
        values = self.numbers()
        return self.may_be_logarithmic and bool(values) and 0 < min(values) * LOGARITHMIC_FROM <= max(values)

    def numbers(self) -> list[float]:
        """All values of all lines."""
        return [value for line in self.lines for value in line.values if value is not None]


def figure_json(chart: Chart) -> str:
    """The figure as JSON that may stand in a script element."""
    figure = plotly.Figure([_trace(chart, number, line) for number, line in enumerate(chart.lines)])
    y_title = f"{chart.y} (logarithmic)" if chart.is_logarithmic else chart.y
    figure.update_layout(
        template="none",
        # The legend stands above the plot, a row an entry on a phone.
        height=chart.height,
        margin={"l": 60, "r": 12, "t": 8, "b": 48},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        showlegend=len(chart.lines) > 1 or chart.names_runs,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified" if chart.kind in ("lines", "areas") else "closest",
        barmode="stack" if chart.kind == "stacked bars" else "group",
        xaxis={"title": {"text": _plain(chart.x), "standoff": 10}, "automargin": True, "zeroline": False},
        yaxis={"title": {"text": _plain(y_title), "standoff": 10}, "automargin": True, "zeroline": False},
    )
    if any(isinstance(place, str) for line in chart.lines for place in line.positions):
        figure.update_xaxes(type="category")
    if chart.is_logarithmic:
        ticks = _decimal_ticks(chart.numbers())
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[shown(tick) for tick in ticks])
    elif chart.highest is not None:
        figure.update_yaxes(range=[0, chart.highest])
    elif (constant := {*chart.numbers()}) and len(constant) == 1 and min(constant) >= 0:
        # Around a constant plotly's own axis reaches from one below it to one above.
        figure.update_yaxes(range=[0, 1.25 * constant.pop() or 1.0])
    elif chart.kind != "lines" or chart.from_zero:
        figure.update_yaxes(rangemode="tozero")
    if chart.limit is not None:
        name, value = chart.limit
        figure.add_hline(value, line={"dash": "dash", "width": 2, "color": COLOURS[1]}, annotation_text=_plain(name))
    text = json.dumps(figure.to_plotly_json(), allow_nan=False)
    # A JSON string may hold these as escapes, and no text of a file ends the script element.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def describe(chart: Chart) -> str:
    """What the chart shows, with the first, the last, the lowest and the highest value of every line."""
    parts = [f"{chart.title}: {chart.kind} of {chart.y} by {chart.x}."]
    for line in chart.lines:
        pairs = [(value, place) for value, place in zip(line.values, line.positions, strict=True) if value is not None]
        if not pairs:
            continue
        (first, at_first), (last, at_last) = pairs[0], pairs[-1]
        low, high = min(pairs, key=lambda pair: pair[0]), max(pairs, key=lambda pair: pair[0])
        parts.append(
            f"{line.name}: first {shown(first)} at {at_first}, last {shown(last)} at {at_last}, lowest {shown(low[0])} "
            f"at {low[1]}, highest {shown(high[0])} at {high[1]}."
        )
    if chart.limit is not None:
        parts.append(f"{chart.limit[0]}: {shown(chart.limit[1])}.")
    return " ".join(parts)


def numbers_of(chart: Chart) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table with the chart's numbers, of at most `MAX_ROWS` of its positions."""
    places = list(dict.fromkeys(place for line in chart.lines for place in line.positions))
    if all(isinstance(place, int) for place in places):
        places.sort(key=int)
    columns = [dict(zip(line.positions, line.values, strict=True)) for line in chart.lines]
    rows = [
        [str(places[number]), *(shown(column.get(places[number])) for column in columns)]
        for number in thinned(len(places), MAX_ROWS)
    ]
    return [chart.x, *(line.name for line in chart.lines)], rows


def _trace(chart: Chart, number: int, line: Line) -> Any:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    pattern = {"shape": PATTERNS[number % len(PATTERNS)], "solidity": 0.25, "size": 8}
    kept = extremes(line.values) if chart.kind in ("lines", "areas") else range(len(line.values))
    x = [_wrapped(place) if isinstance(place := line.positions[i], str) else place for i in kept]
    y, name = [line.values[i] for i in kept], _plain(line.name)
    if chart.kind in ("bars", "stacked bars"):
        return plotly.Bar(x=x, y=y, name=name, marker={"color": colour, "pattern": pattern | {"fillmode": "replace"}})
    is_area = chart.kind == "areas" and not line.is_total
    mode = "lines+markers" if len(x) <= MAX_MARKED_POINTS and not is_area else "lines"
    drawn = {"x": x, "y": y, "name": name, "mode": mode, "line": {"color": colour, "dash": dash, "width": 2}}
    if is_area:
        area = pattern | {"fgcolor": colour, "fillmode": "overlay"}
        return plotly.Scatter(**drawn, stackgroup="parts", fillpattern=area, fillcolor=_faint(colour))
    return plotly.Scatter(**drawn, marker={"symbol": number % len(COLOURS), "size": 6})


def _decimal_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 of every power of ten over the values' range; the powers alone where these are many."""
    powers = range(floor(log10(min(values))), ceil(log10(max(values))) + 1)
    return [digit * 10.0**power for power in powers for digit in ((1, 2, 5) if len(powers) <= 4 else (1,))]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.3)"


def _wrapped(text: str) -> str:
    """The name of a place on an axis, in short lines."""
    return "<br>".join(escape(part, quote=False) for part in wrap(shortened(text), 14))


def _plain(text: str) -> str:
    """Text for plotly, which would read tags in it."""
    return escape(shortened(text), quote=False)
