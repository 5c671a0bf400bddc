"""HTML elements whose text and attributes are escaped by construction."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import final

_WITHOUT_END = ("meta", "img", "br")


@final
class Markup(str):
    """HTML that is already escaped; any other string is text."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """An element; of attributes' names a `_` at the end is dropped, and others become `-`."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value, quote=True)}"' for name, value in attributes.items()
    )
    if tag in _WITHOUT_END:
        return Markup(f"<{tag}{named}>")
    return Markup(f"<{tag}{named}>{join(*children)}</{tag}>")


def join(*children: str) -> Markup:
    """Elements and texts one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def heading(level: int, text: str, **attributes: str) -> Markup:
    """`<h1>` to `<h6>`."""
    return element(f"h{min(level, 6)}", text, **attributes)


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table that scrolls by itself where it is wider than the page, also by the keyboard.

    The first cell of each row is its heading.
    """
    lines = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))),
        element("tbody", *lines),
    )
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(rows: Sequence[tuple[str, str]]) -> Markup:
    """Names and what they are, as a description list."""
    pairs = (element("div", element("dt", name), element("dd", value)) for name, value in rows)
    return element("dl", *pairs)


def folded(summary: str, *children: str, is_open: bool = False) -> Markup:
    """Content that is shown on demand."""
    attributes = {"open": ""} if is_open else {}
    return element("details", element("summary", summary), *children, **attributes)
