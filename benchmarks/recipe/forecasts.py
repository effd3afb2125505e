"""What seeds promise on a host that was watched for two epochs: a regression over portfolios says what they gain.

Each problem is judged by trees that never saw it. What seeds cost is known, so it is told, not left to be learnt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from portfolio import NONE, PLANS
from seen import BLUEPRINT, costs_and_room
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from esper.env.observation import OVERALL_FIELDS, SLOT_FIELDS
from esper.offline.episodes import Episodes

SEEN = 3
"""Observations that a plan is chosen by: before the first epoch, and after two."""
FOLDS = 5
LEAF = 6
"""Cases that a forecast averages at least: with fewer, the best of many forecasts is often just the most mistaken."""
ROUNDING = 1e-4
"""Sizes of a host that do not count: a budget may have room for a seed and nothing more."""

Row = NDArray[np.float32]
States = NDArray[np.float32]
"""[episodes, steps, features], or fewer of these dimensions."""
Seeds = tuple[tuple[int, int], ...]
"""(slot, number of the blueprint), the first slot first."""
_LAYOUTS = [index for index, name in enumerate(SLOT_FIELDS) if name.startswith("layout_")]
_CHANNELS = list(SLOT_FIELDS).index("channels")
_SEEDS_LEFT = list(OVERALL_FIELDS).index("seeds_left")


class Host:
    """How many slots and seeds there may be, what a seed costs in each slot, and how much room there is: in sizes of
    the host."""

    def __init__(self, episodes: Episodes, row: int) -> None:
        self.slots = int(episodes.observation.present[row, 0].sum())
        self.most = round(self.slots * float(episodes.observation.overall[row, 0, _SEEDS_LEFT]))
        self.costs, self.room = costs_and_room(episodes, row)

    def carried_out(self, plan: str, there: Seeds = ()) -> Seeds:
        """The seeds that are there, and those of the plan that may be planted beside them, in its order.

        By what an observation says of costs, which is with a learned gate: without one, a little more may fit.
        """
        found, spent = dict(there), self.cost(there)
        for slot, blueprint in plantings(plan, self.slots):
            cost = self.costs[slot, blueprint]
            if slot not in found and len(found) < self.most and spent + cost <= self.room + ROUNDING:
                found[slot] = blueprint
                spent += cost
        return tuple(sorted(found.items()))

    def cost(self, seeds: Seeds) -> float:
        return float(sum(self.costs[slot, blueprint] for slot, blueprint in seeds))

    def described(self, seeds: Seeds) -> Row:
        """Which blueprints are in the first slot, in the second and in the others; what they cost, and what is left."""
        where = np.zeros((3, len(BLUEPRINT)), np.float32)
        for slot, blueprint in seeds:
            where[min(slot, 2), blueprint] = 1.0
        cost, count = self.cost(seeds), len(seeds)
        numbers = [cost, count, self.room - cost, count / self.slots]
        return np.concatenate([where.flatten(), np.array(numbers, np.float32)])


@dataclass
class Portfolio:
    """The problems of one layout."""

    looks: dict[int, Row] = field(default_factory=dict)
    """How each of them looked at first."""
    hosts: dict[int, Host] = field(default_factory=dict)
    gains: dict[int, dict[str, float]] = field(default_factory=dict)
    """What each plan earned more than no growth."""

    @cached_property  # asked in every state of every play, when all gains are known
    def plans(self) -> list[str]:
        return sorted({plan for gains in self.gains.values() for plan in gains})


def portfolios(episodes: Episodes, seen: States) -> dict[str, Portfolio]:
    """By layout; `seen` are the states of the episodes."""
    returns = episodes.returns()
    rows: dict[int, dict[str, int]] = defaultdict(dict)
    for row, number in enumerate(episodes.draw.tolist()):
        rows[number][episodes.controllers[int(episodes.controller[row])]] = row
    found: dict[str, Portfolio] = defaultdict(Portfolio)
    for number, by_name in rows.items():
        layouts = {name.split()[0] for name in by_name} & set(PLANS)
        if NONE not in by_name or not layouts:
            continue
        own, first = found[layouts.pop()], by_name[NONE]
        own.looks[number], own.hosts[number] = seen[first, :SEEN].flatten(), Host(episodes, first)
        own.gains[number] = {}
        for name, row in by_name.items():
            if name.split()[0] in PLANS:
                own.gains[number][name.split()[1]] = float(returns[row] - returns[first])
    return dict(found)


def states(episodes: Episodes) -> States:
    """What there is to see, whatever the number of slots: the run, some slots and all of them together, the seeds."""
    slots = episodes.observation.slots  # [E, T, slots, fields]
    there = slots[..., _LAYOUTS].sum(-1, keepdim=True) > 0
    count = there.sum(2, keepdim=True).clamp(min=1)
    mean = (slots * there).sum(2) / count[:, :, 0]
    most = slots.masked_fill(~there, -10.0).amax(2)
    some = [_slot(slots, torch.minimum(place, count - 1)) for place in (torch.tensor(0), torch.tensor(1), count - 1)]
    planted = torch.nn.functional.one_hot(episodes.observation.blueprints.long(), len(BLUEPRINT) + 1)[..., 1:].float()
    places = [planted[:, :, :1].amax(2), planted[:, :, 1:2].amax(2), planted[:, :, 2:].sum(2).clamp(max=1)]
    sizes = [count[:, :, 0], slots.masked_fill(~there, 10.0).amin(2)[..., _CHANNELS : _CHANNELS + 1]]
    found: States = torch.cat([episodes.observation.overall, mean, most, *some, *places, *sizes], -1).numpy()
    return found


def _slot(slots: Tensor, place: Tensor) -> Tensor:
    return slots.gather(2, place.expand(*slots.shape[:2], 1, 1).expand(-1, -1, -1, slots.shape[-1]))[:, :, 0]


def plantings(plan: str, slots: int) -> Iterator[tuple[int, int]]:
    """The slots and blueprints of a plan in the order in which it plants; a slot may come twice, the first that fits
    counts."""
    for part in plan.split("+") if plan != NONE else ():
        blueprint, _, where = part.partition("@")
        for slot in range(slots) if where == "*" else (int(where),):
            if slot < slots:
                yield slot, BLUEPRINT[blueprint]


def fold_of(number: int) -> int:
    """The part of the problems that this one is in; no regression that is asked about it learnt from that part."""
    return int(np.random.default_rng(number).integers(FOLDS))


Forecast = Callable[[Iterable[tuple[int, Seeds]]], dict[tuple[int, Seeds], float]]
"""What seeds gain on problems of one fold, in points more than without growth."""


def forecasts(portfolio: Portfolio, fold: int) -> Forecast:
    """From the plans that were played on the problems of the other folds."""
    known = [
        (number, plan) for number in portfolio.looks if fold_of(number) != fold for plan in portfolio.gains[number]
    ]
    model = ExtraTreesRegressor(200, min_samples_leaf=LEAF, max_features=0.4, n_jobs=2, random_state=fold)

    def case(number: int, seeds: Seeds) -> Row:
        return np.concatenate([portfolio.looks[number], portfolio.hosts[number].described(seeds)])

    inputs = [case(number, portfolio.hosts[number].carried_out(plan)) for number, plan in known]
    model.fit(inputs, [portfolio.gains[number][plan] for number, plan in known])

    def forecast(asked: Iterable[tuple[int, Seeds]]) -> dict[tuple[int, Seeds], float]:
        keys = [key for key in dict.fromkeys(asked) if key[1]]
        said = model.predict([case(*key) for key in keys]).tolist() if keys else []
        return defaultdict(float, zip(keys, said, strict=True))  # without seeds, nothing is gained

    return forecast
