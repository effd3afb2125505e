"""What the learned controller cost to train, and when that has paid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from results.figures import Content, Search, gains, search
from results.kept import SCHEDULE
from results.wording import plain, signed, table

_STEPS = ("env_steps", "total_env_steps", "environment_steps", "steps")
_SECONDS = ("wall_seconds", "wall_time_s", "wall_time", "seconds")
_PLUMBING = ("blueprints", "layout", "format")


def cost_section(made: Mapping[str, Any], mixed: Content | None, need_and_place: Path) -> list[str]:
    """`made` is the shipped controller's provenance; whatever it does not say is left out."""
    steps, seconds = number_of(made, _STEPS), number_of(made, _SECONDS)
    facts = [
        [key.replace("_", " "), _told(value)]
        for key, value in made.items()
        if key not in _PLUMBING and _tellable(value)
    ]
    told = table(["training the shipped controller", ""], facts) if facts else ["Its provenance is not recorded yet."]
    rate = [] if steps is None or not seconds else ["", f"That is {steps / seconds:,.0f} env-steps a second."]
    return [*told, *rate, "", "### Break-even", "", *break_even(steps, mixed, need_and_place)]


def break_even(steps: float | None, mixed: Content | None, need_and_place: Path) -> list[str]:
    """Against a person who tries schedules on each problem: that is what the controller saves."""
    text = [
        "Without a controller, a person with a new problem would try fixed schedules on it and keep the network that "
        "validates best. The controller saves the trials that such a search needs, on average, to gain as much over "
        "the best single schedule as the controller does; it has paid when they add up to the env-steps of its "
        "training (one env-step is one epoch of one network). Not counted: what was tried and dropped "
        "([experiments](experiments.md)).",
        "",
    ]
    if mixed is None or not need_and_place.exists():
        return [*text, "Not measured yet."]
    found = search(json.loads(need_and_place.read_text("utf-8"))["mixed"])
    gain = float(np.mean(gains(mixed, SCHEDULE)))
    trials = found.trials_for(gain)
    shown = sorted({1, 2, 4, 8, 16, len(found.gains)} & set(range(1, len(found.gains) + 1)))
    curve = table(["trials", *map(str, shown)], [["gain", *(signed(found.gains[k - 1]) for k in shown)]])
    return [
        *text,
        *curve,
        "",
        "Expected gain of such a search over the best single schedule, in points of score, from [need and "
        "place](need_and_place.md): training draws, every blueprint at every slot and some combinations, planted at "
        "epoch 2.",
        "",
        *_conclusion(gain, trials, found, steps),
    ]


def _conclusion(gain: float, trials: int | None, found: Search, steps: float | None) -> list[str]:
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


def number_of(made: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """The first of these that is a number, wherever it stands."""
    for name in names:
        value = made.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    for value in made.values():
        if isinstance(value, Mapping) and (found := number_of(value, names)) is not None:
            return found
    return None


def _tellable(value: Any) -> bool:
    return value not in (None, "", [], {}) and not isinstance(value, Mapping)


def _told(value: Any) -> str:
    if isinstance(value, list):
        return "<br>".join(_told(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    text = str(value).replace("|", "\\|")
    return f"`{text}`" if text.startswith(("esper ", "python ", "torchrun ")) else text
