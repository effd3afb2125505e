"""What the learned controller cost to train, and when that has paid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.training.statistics import Floats
from results.estimates import Content, gains
from results.markdown import plain, signed, table
from results.measure import SCHEDULE

_NOT_SHOWN = ("blueprints", "layout", "format")


def cost_section(made: Mapping[str, Any], mixed: Content, need_and_place: Path) -> list[str]:
    """`made` is the shipped controller's provenance; whatever it does not say is left out."""
    facts = [
        [key.replace("_", " "), _cell(value)]
        for key, value in made.items()
        if key not in _NOT_SHOWN and value not in (None, "", [], {}) and not isinstance(value, Mapping)
    ]
    shown = table(["training the shipped controller", ""], facts) if facts else ["Its provenance is not recorded yet."]
    steps, seconds = made.get("env_steps"), made.get("wall_seconds")
    rate = ["", f"That is {steps / seconds:,.0f} env-steps a second."] if steps and seconds else []
    return [*shown, *rate, "", "### Break-even", "", *break_even(steps, mixed, need_and_place)]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "<br>".join(_cell(item) for item in value)
    if isinstance(value, int | float):
        return f"{value:,}"
    text = str(value).replace("|", "\\|")
    return f"`{text}`" if text.startswith(("esper ", "python ")) else text


def break_even(steps: float | None, mixed: Content, need_and_place: Path) -> list[str]:
    """Against a person who tries schedules on each problem: that is what the controller saves."""
    text = [
        "Without a controller, a person with a new problem would try fixed schedules on it and keep the network that "
        "validates best. The controller saves the trials that such a search needs, on average, to gain as much over "
        "the best single schedule as the controller does; it has paid when they add up to the env-steps of its "
        "training (one env-step is one epoch of one network). Not counted: what was tried and dropped "
        "([experiments](experiments.md)).",
        "",
    ]
    if not need_and_place.exists():
        return [*text, "Not measured yet."]
    found = search(json.loads(need_and_place.read_text("utf-8"))["mixed"])
    shown = [count for count in dict.fromkeys((1, 2, 4, 8, 16, len(found.gains))) if count <= len(found.gains)]
    curve = table(["trials", *map(str, shown)], [["gain", *(signed(found.gains[k - 1]) for k in shown)]])
    return [
        *text,
        *curve,
        "",
        "Expected gain of such a search over the best single schedule, in points of score, from [need and "
        "place](need_and_place.md): training draws, every blueprint at every slot and some combinations, planted at "
        "epoch 2.",
        "",
        *_conclusion(float(np.mean(gains(mixed, SCHEDULE))), found, steps),
    ]


def _conclusion(gain: float, found: Search, steps: float | None) -> list[str]:
    trials = found.trials_for(gain)
    least = trials or len(found.gains)
    reach = f"takes {least} trials" if trials else f"is out of reach even for all {least} schedules"
    line = f"The controller's gain on held-out draws, {signed(gain)} points, {reach}."
    saved = (least - 1) * found.horizon
    if saved <= 0:
        return [f"{line} So it saves nothing, and never pays."]
    line += f" Growing once with the controller in place of that search saves {plain(saved, 0)} env-steps a problem"
    line += " or more." if trials is None else "."
    if steps is None:
        return [line, "", "How many problems that takes cannot be told before the provenance names the env-steps."]
    return [line, "", f"**Break-even: {math.ceil(steps / saved):,} problems** ({steps:,.0f} / {plain(saved, 0)})."]


# -- what a search would cost ------------------------------------------------------------------------------------------


class Search(NamedTuple):
    """Trying schedules at random on one's own problem and keeping the one that validates best."""

    gains: list[float]
    """Expected score over the best single schedule, after 1, 2, … trials; mean over the problems of a table."""
    horizon: float
    """Epochs of one trial."""

    def trials_for(self, gain: float) -> int | None:
        """The least number of trials that is expected to give this gain; None if all of them do not."""
        return next((count for count, found in enumerate(self.gains, 1) if found >= gain), None)


def search(problems: Sequence[Mapping[str, Any]]) -> Search:
    """From `docs/need_and_place.json`: every schedule on each of some training draws, by random seed.

    The network that a person keeps is the one of the trial itself: it is chosen by its validation score and judged by
    its test score. Schedules that a draw's limits make the same are one trial. The single schedule, one per layout, is
    the best of this very table, which flatters it.
    """
    single = {layout: _best_single(problems, layout) for layout in {problem["layout"] for problem in problems}}
    curves = []
    for problem in problems:
        fixed = float(np.mean(problem["test"][single[problem["layout"]]]))
        names = list({plan: name for name, plan in reversed(problem["planted"].items())}.values())
        val, test = (np.array([problem[split][name] for name in names]) for split in ("val", "test"))
        curves += [expected_best(val[:, seed], test[:, seed]) - fixed for seed in range(val.shape[1])]
    most = max(len(curve) for curve in curves)
    # Where there are fewer schedules than trials, all were tried: the last value stands.
    padded = np.array([np.pad(curve, (0, most - len(curve)), mode="edge") for curve in curves])
    return Search(padded.mean(0).tolist(), float(np.mean([problem["horizon"] for problem in problems])))


def _best_single(problems: Sequence[Mapping[str, Any]], layout: str) -> str:
    of = [problem["test"] for problem in problems if problem["layout"] == layout]
    names = [name for name in of[0] if all(name in scores for scores in of)]
    return max(names, key=lambda name: float(np.mean([np.mean(scores[name]) for scores in of])))


def expected_best(chosen_by: Floats, judged_by: Floats) -> Floats:
    """Expected `judged_by` of the option with the best `chosen_by` among k random ones, for k = 1 … n."""
    n = len(chosen_by)
    ranked = judged_by[np.argsort(-chosen_by, kind="stable")]
    # The option of rank j is the best of k if it is in and the k − 1 others come from behind it.
    weights = [[comb(n - 1 - j, k - 1) / comb(n, k) for j in range(n)] for k in range(1, n + 1)]
    found: Floats = np.array(weights) @ ranked
    return found
