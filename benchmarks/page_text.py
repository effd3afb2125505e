"""Numbers and tables as the pages write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from esper.training.statistics import Estimate


def plain(value: float, digits: int = 1) -> str:
    text = f"{value:.{digits}f}"
    return (text.removeprefix("-") if float(text) == 0.0 else text).replace("-", "−").replace("inf", "∞")


def signed(value: float) -> str:
    text = plain(value)
    return text if text.startswith("−") or text == "0.0" else f"+{text}"


def share(value: float) -> str:
    return f"{plain(100.0 * value, 0)} %"


def with_interval(estimate: Estimate) -> str:
    return plain(estimate.value) + _interval(estimate, plain)


def in_points(estimate: Estimate) -> str:
    """A difference."""
    return signed(estimate.value) + _interval(estimate, signed)


def _interval(estimate: Estimate, write: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({write(estimate.low)} to {write(estimate.high)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def page_of(sections: Iterable[Iterable[str]]) -> str:
    return "\n\n".join("\n".join(section) for section in sections) + "\n"
