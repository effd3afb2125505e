"""From what was kept to what is told: estimates with intervals, paired differences, shares. Pure, for tests.

`content` is always one part's JSON, or one family's or host's share of it: draws, episodes, controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from esper.training.statistics import (
    RESAMPLES,
    Estimate,
    Floats,
    bootstrap,
    expanded_tail,
    interquartile_mean,
    mean,
    paired,
    share_above_zero,
)
from results.kept import LEARNED

Content = Mapping[str, Any]


def column(content: Content, label: str, name: str) -> dict[int, float]:
    """One label's numbers by draw; draws where it is not known are left out."""
    rows = content["episodes"].get(label) or content.get("controls", {})[label]
    return {n: float(v) for n, v in zip(rows["number"], rows[name], strict=True) if v is not None}


def estimate(content: Content, label: str, name: str) -> Estimate:
    return bootstrap(list(column(content, label, name).values()))


def shortfall(content: Content, label: str) -> Estimate:
    """Capacity regret where there is any: points below the best static host of the same size, 0 where growth beat it.

    Without this, a controller could make up for what it did badly on one problem by a host that no width can help.
    """
    return bootstrap([max(0.0, regret) for regret in column(content, label, "regret").values()])


# -- the main table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One controller, or one static control."""

    label: str
    accuracy: Estimate
    score: Estimate
    score_iqm: Estimate
    size: float
    """Mean of parameters over the host's."""
    flops: float | None
    """Mean of one example's FLOPs over the host's."""
    training: float
    """Mean of the training's FLOPs over the host's."""
    regret: Estimate | None
    behind: Versus | None
    """How much better the learned controller is; None for itself."""


@dataclass(frozen=True, slots=True)
class Versus:
    """The learned controller against another one, draw by draw."""

    score: Estimate
    accuracy: Estimate
    better: Estimate
    """Probability of improvement of the score, ties counted half."""


def lines(content: Content) -> list[Line]:
    """Controllers as they were given, then static controls."""
    return [_line(content, label) for label in (*content["episodes"], *content.get("controls", {}))]


def _line(content: Content, label: str) -> Line:
    rows = content["episodes"].get(label) or content["controls"][label]
    scores = list(column(content, label, "score").values())
    regrets = list(column(content, label, "regret").values()) if "regret" in rows else []
    return Line(
        label=label,
        accuracy=estimate(content, label, "accuracy"),
        score=bootstrap(scores),
        score_iqm=bootstrap(scores, interquartile_mean),
        size=float(np.mean(rows["size"])),
        flops=float(np.mean(rows["flops"])) if "flops" in rows else None,
        training=float(np.mean(rows["training"])),
        regret=bootstrap(regrets) if regrets else None,
        behind=None if label == LEARNED else versus(content, label),
    )


def versus(content: Content, rival: str, who: str = LEARNED) -> Versus:
    scores, accuracies = (
        paired(column(content, who, name), column(content, rival, name)) for name in ("score", "accuracy")
    )
    return Versus(bootstrap(scores, mean), bootstrap(accuracies, mean), bootstrap(scores, share_above_zero))


def rivals(content: Content) -> list[str]:
    """The controllers that the learned one has to beat."""
    return [label for label in content["episodes"] if label != LEARNED]


def best_rival(content: Content) -> str:
    return max(rivals(content), key=lambda label: estimate(content, label, "score").value)


# -- by kind of problem -----------------------------------------------------------------------------------------------


def kinds(content: Content) -> dict[str, list[int]]:
    """The draws of each kind of problem, kinds in the order of their names."""
    found: dict[str, list[int]] = {}
    for draw in content["draws"]:
        found.setdefault(str(draw["kind"]), []).append(draw["number"])
    return dict(sorted(found.items()))


def kind_mean(content: Content, label: str, numbers: Sequence[int], name: str = "score") -> float:
    values = column(content, label, name)
    return float(np.mean([values[number] for number in numbers]))


def kind_difference(content: Content, rival: str, numbers: Sequence[int]) -> float:
    return kind_mean(content, LEARNED, numbers) - kind_mean(content, rival, numbers)


def answers(content: Content) -> dict[str, str]:
    return {str(draw["kind"]): str(draw.get("answer", "")) for draw in content["draws"]}


def mostly_kept(content: Content, numbers: Sequence[int]) -> str:
    """What the learned controller kept most often in these draws, and in how many of them."""
    rows = content["episodes"][LEARNED]
    kept = dict(zip(rows["number"], rows["kept"], strict=True))
    found = [kept[number] for number in numbers]
    common = max(dict.fromkeys(found), key=found.count)
    return f"{common} ({found.count(common)} of {len(found)})"


# -- harmlessness -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Harm:
    """Learned minus none in test accuracy: one number per draw, the mean over its seeds."""

    differences: dict[int, float]
    limit: float

    @property
    def below(self) -> list[int]:
        """Draws that fall below the limit, worst first."""
        return sorted((n for n, d in self.differences.items() if d < self.limit), key=self.differences.__getitem__)

    @property
    def share(self) -> float:
        return len(self.below) / len(self.differences)

    def quantiles(self, *wanted: float) -> list[float]:
        return [float(q) for q in np.quantile(list(self.differences.values()), wanted)]

    @property
    def mean(self) -> Estimate:
        return bootstrap(list(self.differences.values()))


def harm(content: Content, limit: float) -> Harm:
    seeds = int(content["seeds"])
    by_episode = {label: column(content, label, "accuracy") for label in (LEARNED, "none")}
    shared = sorted(by_episode[LEARNED].keys() & by_episode["none"].keys())
    of_draw: dict[int, list[float]] = {}
    for number in shared:
        difference = by_episode[LEARNED][number] - by_episode["none"][number]
        of_draw.setdefault(number // seeds, []).append(difference)
    return Harm({draw: float(np.mean(values)) for draw, values in of_draw.items()}, limit)


# -- transfer ---------------------------------------------------------------------------------------------------------


def gains(content: Content, over: str) -> Floats:
    return paired(column(content, LEARNED, "score"), column(content, over, "score"))


def share_kept(elsewhere: Sequence[Floats], at_home: Floats, *, seed: int = 0) -> Estimate | None:
    """The mean gain elsewhere (families count equally) over the mean gain at home; None where there is none to keep.

    The interval resamples draws within each family and at home. Where a resampled gain at home is not positive, the
    ratio says nothing: it counts as unlimited, with the sign of the gain elsewhere; nothing of it stays nothing.
    """
    home = float(at_home.mean())
    if home <= 0.0 or not elsewhere:
        return None
    value = float(np.mean([values.mean() for values in elsewhere])) / home
    rng = np.random.default_rng(seed)
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


# -- what a search would cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Search:
    """Trying schedules at random on one's own problem and keeping the one that validates best."""

    gains: tuple[float, ...]
    """Expected score over the best single schedule, after 1, 2, … trials; mean over the problems of a table."""
    horizon: float
    """Epochs of one trial."""

    def trials_for(self, gain: float) -> int | None:
        """The least number of trials that is expected to give this gain; None if all of them do not."""
        return next((count for count, found in enumerate(self.gains, 1) if found >= gain), None)


def search(table: Sequence[Mapping[str, Any]]) -> Search:
    """From `docs/need_and_place.json`: every schedule on each of some training draws, by random seed.

    The network that a person keeps is the one of the trial itself: it is chosen by its validation score and judged by
    its test score. Schedules that a draw's limits make the same are one trial. The single schedule, one per layout, is
    the best of this very table, which flatters it.
    """
    single = _single_schedules(table)
    curves = []
    for row in table:
        fixed = float(np.mean(row["test"][single[row["layout"]]]))
        plans = {plan: name for name, plan in reversed(row["planted"].items())}
        names = list(plans.values())
        for seed in range(len(row["val"][names[0]])):
            val = np.array([row["val"][name][seed] for name in names])
            test = np.array([row["test"][name][seed] for name in names])
            curves.append(expected_best(val, test) - fixed)
    most = max(len(curve) for curve in curves)
    # Where there are fewer schedules than trials, all were tried: the last value stands.
    padded = np.array([np.pad(curve, (0, most - len(curve)), mode="edge") for curve in curves])
    return Search(tuple(float(g) for g in padded.mean(0)), float(np.mean([row["horizon"] for row in table])))


def expected_best(chosen_by: Floats, judged_by: Floats) -> Floats:
    """Expected `judged_by` of the option with the best `chosen_by` among k random ones, for k = 1 … n."""
    n = len(chosen_by)
    order = np.argsort(-chosen_by, kind="stable")
    ranked = judged_by[order]
    found = []
    for k in range(1, n + 1):
        # The option of rank j is the best of k if it is in and the k − 1 others come from behind it.
        weights = np.array([comb(n - 1 - j, k - 1) / comb(n, k) for j in range(n)])
        found.append(float(weights @ ranked))
    return np.array(found)


def _single_schedules(table: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    chosen = {}
    for layout in {row["layout"] for row in table}:
        of = [row for row in table if row["layout"] == layout]
        names = [name for name in of[0]["test"] if all(name in row["test"] for row in of)]
        means = {name: np.mean([np.mean(row["test"][name]) for row in of]) for name in names}
        chosen[layout] = max(names, key=means.__getitem__)
    return chosen
