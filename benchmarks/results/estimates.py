"""Estimates with intervals, paired differences and shares, from stored results.

`content` is always one part's JSON, or one family's or host's share of it: draws, episodes, controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from esper.training.statistics import (
    RESAMPLES,
    Estimate,
    Floats,
    Statistic,
    bootstrap,
    expanded_tail,
    mean,
    paired,
    share_above_zero,
)
from results.measure import LEARNED

Content = Mapping[str, Any]
HARM_LIMIT = -0.5
"""Points of test accuracy: a draw below this was harmed."""


def rows_of(content: Content, label: str) -> Mapping[str, Any]:
    """The columns of a controller or of a static control."""
    found: Mapping[str, Any] = content["episodes"].get(label) or content["controls"][label]
    return found


def column(content: Content, label: str, name: str) -> dict[int, float]:
    """One label's values by draw id; draws without a value are left out."""
    rows = rows_of(content, label)
    return {n: float(v) for n, v in zip(rows["number"], rows[name], strict=True) if v is not None}


def estimate(content: Content, label: str, name: str, statistic: Statistic = mean) -> Estimate:
    return bootstrap(list(column(content, label, name).values()), statistic)


def shortfall(content: Content, label: str) -> Estimate:
    """Capacity regret where there is any: points below the best static host of the same size, 0 where growth beat it.

    Without this, a controller could make up for what it did badly on one problem by a host that no width can help.
    """
    return bootstrap([max(0.0, regret) for regret in column(content, label, "regret").values()])


def gains(content: Content, over: str, name: str = "score") -> Floats:
    """The learned controller minus another one, draw by draw."""
    return paired(column(content, LEARNED, name), column(content, over, name))


def difference(content: Content, rival: str, name: str = "score") -> Estimate:
    return bootstrap(gains(content, rival, name))


def improvement(content: Content, rival: str) -> Estimate:
    """Probability that the learned controller's score is better, ties counted half."""
    return bootstrap(gains(content, rival), share_above_zero)


def rivals(content: Content) -> list[str]:
    """The controllers that the learned one has to beat."""
    return [label for label in content["episodes"] if not label.startswith(LEARNED)]


def best_rival(content: Content) -> str:
    return max(rivals(content), key=lambda label: estimate(content, label, "score").value)


# -- by kind of problem ------------------------------------------------------------------------------------------------


def kinds(content: Content) -> dict[str, list[int]]:
    """The draw ids of each kind of problem, kinds in the order of their names."""
    found: dict[str, list[int]] = {}
    for draw in content["draws"]:
        found.setdefault(str(draw["kind"]), []).append(draw["number"])
    return dict(sorted(found.items()))


def answers(content: Content) -> dict[str, str]:
    """What each kind of problem was made to need."""
    return {str(draw["kind"]): str(draw.get("answer", "")) for draw in content["draws"]}


def mean_over(content: Content, label: str, draws: Sequence[int]) -> float:
    values = column(content, label, "score")
    return float(np.mean([values[draw] for draw in draws]))


def difference_over(content: Content, rival: str, draws: Sequence[int]) -> float:
    return mean_over(content, LEARNED, draws) - mean_over(content, rival, draws)


def most_common(values: Sequence[str]) -> str:
    return max(dict.fromkeys(values), key=values.count)


# -- harmlessness and transfer -----------------------------------------------------------------------------------------


def harm(content: Content) -> dict[int, float]:
    """Learned minus none in test accuracy, the mean over a draw's random seeds, by draw; the worst draw first."""
    accuracies = [column(content, label, "accuracy") for label in (LEARNED, "none")]
    of_draw: dict[int, list[float]] = {}
    for number in sorted(accuracies[0].keys() & accuracies[1].keys()):
        of_draw.setdefault(number // int(content["seeds"]), []).append(accuracies[0][number] - accuracies[1][number])
    means = {draw: float(np.mean(values)) for draw, values in of_draw.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def share_kept(elsewhere: Sequence[Floats], at_home: Floats) -> Estimate | None:
    """The mean gain elsewhere (families count equally) over the mean gain at home; None where there is none to keep.

    The interval resamples draws within each family and at home. Where a resampled gain at home is not positive, the
    ratio says nothing: it counts as unlimited, with the sign of the gain elsewhere; nothing of it stays nothing.
    """
    home = float(at_home.mean())
    if home <= 0.0 or not elsewhere:
        return None
    value = float(np.mean([values.mean() for values in elsewhere])) / home
    rng = np.random.default_rng(0)
    away = np.mean([_resampled_means(values, rng) for values in elsewhere], axis=0)
    homes = _resampled_means(at_home, rng)
    unlimited = np.where(away == 0.0, 0.0, np.copysign(np.inf, away))
    ratios = np.where(homes > 0.0, away / np.where(homes > 0.0, homes, 1.0), unlimited)
    count = min(len(values) for values in elsewhere)
    if count < 2:
        return Estimate(value, None, None, count)
    tail = expanded_tail(count)
    low, high = np.quantile(ratios, [tail, 1.0 - tail], method="nearest")
    return Estimate(value, float(low), float(high), count)


def _resampled_means(values: Floats, rng: np.random.Generator) -> Floats:
    found: Floats = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    return found
