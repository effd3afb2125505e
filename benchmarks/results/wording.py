"""Numbers as the page writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from esper.training.statistics import Estimate


def plain(value: float, digits: int = 1) -> str:
    text = f"{value:.{digits}f}"
    return (text.removeprefix("-") if float(text) == 0.0 else text).replace("-", "−").replace("inf", "∞")


def signed(value: float, digits: int = 1) -> str:
    text = plain(value, digits)
    return text if text.startswith("−") or float(text.replace("∞", "inf")) == 0.0 else f"+{text}"


def with_interval(estimate: Estimate, digits: int = 1) -> str:
    if estimate.low is None or estimate.high is None:
        return plain(estimate.value, digits)
    ends = f"{plain(estimate.low, digits)} to {plain(estimate.high, digits)}"
    return f"{plain(estimate.value, digits)} ({ends})"


def in_points(estimate: Estimate, digits: int = 1) -> str:
    """A difference."""
    if estimate.low is None or estimate.high is None:
        return signed(estimate.value, digits)
    return f"{signed(estimate.value, digits)} ({signed(estimate.low, digits)} to {signed(estimate.high, digits)})"


def share(value: float) -> str:
    return f"{plain(100.0 * value, 0)} %"


def share_with_interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return share(estimate.value)
    return f"{share(estimate.value)} ({plain(100 * estimate.low, 0)} to {plain(100 * estimate.high, 0)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]
