"""Recorded states, as far as a teacher looks at them, and decisions as recordings keep them."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SLOT_FIELDS
from esper.env.rent import RENT_RATE
from esper.growth.blueprints import blueprint_names
from esper.offline.episodes import Episodes

HELPS = 0.5
"""Points beyond its rent that a seed must contribute to be worth keeping."""
BLUEPRINT = {name: index for index, name in enumerate(blueprint_names())}
_POINTS, _SIZES, _ROOM = 50.0, 20.0, 10.0
"""Scales by which an observation squashes points of accuracy, sizes over the host's, and what is left of the budget."""
_FIELD = {name: index for index, name in enumerate(SLOT_FIELDS)}
_EPOCHS_LEFT, _BUDGET_LEFT = (list(OVERALL_FIELDS).index(name) for name in ("epochs_left", "budget_left"))


class Seen:
    """One recorded state."""

    def __init__(self, episodes: Episodes, row: int, step: int) -> None:
        observation, masks = episodes.observation, episodes.masks
        self.slots = observation.slots[row, step]
        self.planted = (observation.blueprints[row, step] - 1).tolist()
        self.may = masks.slot[row, step]  # [ops, slots]
        self.growable = masks.blueprint[row, step]  # [slots, blueprints]
        self.epochs_left = round(50 * float(observation.overall[row, step, _EPOCHS_LEFT]))
        self.seeds = [slot for slot, planted in enumerate(self.planted) if planted >= 0]

    def field(self, name: str, slot: int) -> float:
        return float(self.slots[slot, _FIELD[name]])

    def gain(self, slot: int) -> float:
        """Points that the seed contributes, or promises while it does not act."""
        contribution, promise = (self.field(name, slot) for name in ("contribution_points", "shadow_points"))
        return points(promise if contribution == NOT_MEASURED else contribution)

    def surplus(self, slot: int) -> float:
        """Points of gain beyond the rent."""
        return self.gain(slot) - RENT_RATE * _unsquashed(self.field("parameters", slot), _SIZES)

    def helps(self, slot: int) -> bool:
        return self.surplus(slot) > HELPS


def points(squashed: float) -> float:
    """Of accuracy, from how an observation shows them; 0 where nothing was measured."""
    return 0.0 if squashed == NOT_MEASURED else _unsquashed(squashed, _POINTS)


def costs_and_room(episodes: Episodes, row: int) -> tuple[NDArray[np.float64], float]:
    """At first: what each blueprint costs in each slot (infinitely much where it does not fit), and what there is to
    spend; both in sizes of the host. No budget looks like the largest that an observation can show."""
    shown = episodes.observation.costs[row, 0].double()
    costs = torch.where(shown == NOT_MEASURED, torch.inf, torch.expm1(shown * math.log1p(_SIZES)))
    return costs.numpy(), _unsquashed(float(episodes.observation.overall[row, 0, _BUDGET_LEFT]), _ROOM)


def _unsquashed(squashed: float, scale: float) -> float:
    return math.copysign(math.expm1(abs(squashed) * math.log1p(scale)), squashed)


def action(op: Op, slot: int = 0, blueprint: int = 0) -> Tensor:
    named = {"slot": slot, "blueprint": blueprint, "blend": BLENDS.index("linear"), "op": int(op)}
    return torch.tensor([named[head] for head in HEAD_NAMES])
