"""Parts that every report has: the document with its style, boxes of facts, sections."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from esper.dashboard.drawings import known
from esper.dashboard.markup import Child, Html, joined, number, tag

NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'"
"""Of a file that came by mail: no script runs, and nothing is fetched."""


def page(title: str, sub: str, *parts: Child) -> Html:
    """A whole document."""
    style = Html((resources.files("esper.dashboard") / "report.css").read_text("utf-8"))
    head = tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": NOTHING_ELSE}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", None, f"{title} · Esper"),
        tag("style", None, style),
    )
    body = tag("main", None, tag("h1", None, title), tag("p", {"class": "sub"}, sub), parts)
    footer = tag("footer", None, "Written by esper report. Scores are accuracy minus rent, in points.")
    return Html("<!doctype html>\n" + tag("html", {"lang": "en"}, head, tag("body", None, body, footer)) + "\n")


def fact_boxes(named: Mapping[str, tuple[Child, Child]]) -> Html:
    boxes = (
        tag("div", None, tag("span", {"class": "label"}, label), tag("b", None, value), tag("small", None, more))
        for label, (value, more) in named.items()
    )
    return tag("div", {"class": "facts"}, boxes)


def section(title: str, *parts: Child) -> Html:
    return tag("section", None, tag("h2", None, title), parts)


def folded(title: str, *parts: Child) -> Html:
    """For those who look closer."""
    return tag("details", None, tag("summary", None, title), parts)


def interval(low: object, high: object) -> Child:
    return joined((number(low), " to ", number(high))) if known(low) and known(high) else number(None)
