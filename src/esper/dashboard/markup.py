"""HTML and SVG from Python: text is escaped wherever it goes in, so that no name and no message becomes markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = object
"""Markup, text, a number, several of them, or None."""


def tag(name: str, attributes: Mapping[str, object] | None = None, *children: Child) -> Html:
    """An element; attributes that are None are left out."""
    known = {key: value for key, value in (attributes or {}).items() if value is not None}
    given = "".join(f' {key}="{html.escape(str(value))}"' for key, value in known.items())
    if name in ("line", "rect", "path", "circle", "meta", "col") and not children:
        return Html(f"<{name}{given}/>" if name != "meta" else f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Child) -> Html:
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, Iterable) and not isinstance(children, str):
        return Html("".join(joined(child) for child in children))
    return Html(html.escape(str(children)))


def table(headings: list[str], rows: Iterable[Iterable[Child]], numbers: Iterable[int] = ()) -> Html:
    """`numbers` are the columns that are aligned to the right."""
    right = set(numbers)

    def cells(name: str, row: Iterable[Child], **more: object) -> Html:
        return joined(tag(name, {"class": "r" if i in right else None, **more}, cell) for i, cell in enumerate(row))

    head = tag("thead", None, tag("tr", None, cells("th", headings, scope="col")))
    body = tag("tbody", None, (tag("tr", None, cells("td", row)) for row in rows))
    return tag("div", {"class": "wide"}, tag("table", None, head, body))


def number(value: object, form: str = ".1f") -> Child:
    """A number, or that it was not measured."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return tag("span", {"class": "none"}, "not measured")
    return format(value, form).replace("-", "−")
