"""The heuristic: what a careful person would do by hand, looking at the measurements.

One seed at a time. Plant when the host stops improving quickly; give up on a seed whose shadow promises nothing or that
harms; keep a seed that contributes. Its thresholds are settings, so that it can be tuned as a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.actions import BLENDS, Op
from esper.config import AT_LEAST_0, WHOLE_AT_LEAST_0, WHOLE_AT_LEAST_1, check_ranges
from esper.env.rent import RENT_RATE, extra_rent
from esper.env.situation import Situation, SlotView
from esper.env.spaces import ActionMasks
from esper.env.world import World
from esper.errors import shown
from esper.growth.blueprints import blueprint_names, get_blueprint
from esper.lifecycle import LIVE, Stage
from esper.policy.controller import RuleController, first

ROTATION = ("conv", "attention", "mlp", "depthwise", "mlp_small", "pointwise", "lora", "norm", "squeeze_excite")
"""Kinds of computation in the order in which they are tried; a slot takes those that fit it."""


@dataclass(frozen=True, slots=True)
class HeuristicSettings:
    first_epoch: int = 2
    """Do not plant before."""
    plateau_gain: float = 3.0
    """Plant when the best accuracy rose by fewer points than this over `plateau_epochs`."""
    plateau_epochs: int = 2
    """Epochs over which that rise is measured."""
    patience: int = 4
    """Epochs of incubation, or of holding, after which a seed that shows no benefit is pruned."""
    harm: float = 5.0
    """Prune a blending seed that costs more than this many accuracy points."""
    keep_above: float = 0.5
    """Fossilize a seed that contributes more than this many accuracy points."""
    late_margin: int = 8
    """Do not plant when fewer epochs than this remain: the seed could not finish."""
    rotation: tuple[str, ...] = ROTATION
    """Blueprints to plant, in this order; what does not fit a slot is left out."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if not self.rotation or len(set(self.rotation)) != len(self.rotation):
            raise ValueError(f"rotation must be a list of different blueprints, not {shown(self.rotation)}")
        for name in self.rotation:
            get_blueprint(name)


_RANGES = {
    **dict.fromkeys(("first_epoch", "patience", "late_margin"), WHOLE_AT_LEAST_0),
    **dict.fromkeys(("plateau_gain", "harm"), AT_LEAST_0),
    "plateau_epochs": WHOLE_AT_LEAST_1,  # a plateau needs two epochs to compare
}


class Wait(IntEnum):
    """Why the heuristic waits."""

    TRYING = 0
    LATE = 1
    EARLY = 2
    RISING = 3
    NOTHING_FITS = 4


class Heuristic(RuleController):
    """Rules on measured signals; see the module's description.

    It has no state of its own: what was tried is in the columns of what really happened. So its decision can also
    be had where another controller acts, as recordings with exploration noise need.
    """

    def __init__(self, settings: HeuristicSettings | None = None, name: str = "heuristic") -> None:
        super().__init__()
        self.name = name
        self.settings = settings or HeuristicSettings()

    def choose(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor]:
        """Keep or remove the first seed that is ready for it; without a live seed, plant or wait."""
        keep, prune = self._tend(world, masks)
        tend, slot = first(keep | prune)
        kept = F.pad(keep, (0, 1)).gather(1, slot[:, None]).squeeze(1)  # padded: there may be no slot at all
        wait = self._why_not_plant(world)
        fits, place, blueprint = self._where(world, masks)
        plant = ~tend & (wait == Wait.NOTHING_FITS) & fits
        op = torch.where(tend, torch.where(kept, int(Op.FOSSILIZE), int(Op.PRUNE)), plant * int(Op.GERMINATE))
        linear = torch.full_like(op, BLENDS.index("linear")) * plant
        return torch.stack((torch.where(plant, place, slot), blueprint * plant, linear, op), -1), wait

    def _tend(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor]:
        """[N, S] bool: the seeds that their own measurements say to keep, and those to prune."""
        s, v = self.settings, world.slots
        contribution = v.contribution_points
        extra = extra_rent(world.rent[:, None], v.size, world.host_parameters[:, None])
        keep = masks.slot[:, Op.FOSSILIZE] & (contribution > self._least(extra))
        patient = (v.dwell < s.patience) & (v.stage != Stage.BLENDING)
        idle = (v.stage == Stage.TRAINING) | (v.stage == Stage.HOLDING)
        prune = masks.slot[:, Op.PRUNE] & ~patient & (idle | (contribution < -s.harm))
        return keep, prune & ~keep

    def _least(self, extra: Tensor) -> Tensor:
        """What a seed must contribute to be kept: the settings are for the default rent, so only extra rent counts."""
        least = self.settings.keep_above
        return (least + extra).clamp(min=min(least, 0.0))

    def _why_not_plant(self, world: World) -> Tensor:
        """[N] a `Wait`; NOTHING_FITS when it is time to plant, if anything fits."""
        s = self.settings
        ago = world.epoch - 1 - s.plateau_epochs
        before = world.bests.gather(1, ago.clamp(min=0, max=world.bests.shape[1] - 1)[:, None]).squeeze(1)
        reasons = (
            (Wait.RISING, world.best - before >= s.plateau_gain),
            (Wait.EARLY, (world.epoch < s.first_epoch) | (ago < 0) | before.isnan()),
            (Wait.LATE, world.horizon - world.epoch < s.late_margin),
            (Wait.TRYING, world.slots.within(LIVE).any(1)),
        )
        wait = torch.full_like(world.epoch, int(Wait.NOTHING_FITS))
        for code, where in reasons:  # the last one counts
            wait = torch.where(where, int(code), wait)
        return wait

    def _where(self, world: World, masks: ActionMasks) -> tuple[Tensor, Tensor, Tensor]:
        """The least tried combination; among those, the rotation's first, at the first slot. Each [N]: whether there
        is one, the slot and the blueprint."""
        slots, blueprints = masks.blueprint.shape[1:]
        rank = _ranks(self.settings.rotation, blueprint_names()[:blueprints], world.tried.device)
        places = torch.arange(slots, device=rank.device)[:, None]
        order = (world.tried * len(self.settings.rotation) + rank) * slots + places  # [N, S, B], lowest first
        order = torch.where(masks.blueprint & (rank >= 0), order, _NEVER).flatten(1)
        index = F.pad(order, (0, 1), value=_NEVER - 1).argmin(1)  # one more column: nothing
        fits = index < slots * blueprints
        index = index * fits
        return fits, index // max(1, blueprints), index % max(1, blueprints)

    # -- for people ---------------------------------------------------------------------------------------------------

    def reason(self, action: Sequence[int], code: int, situation: Situation) -> str:
        s, op = self.settings, action[3]
        if op == Op.GERMINATE:
            return f"accuracy stands at {situation.history[-1].measured.accuracy:.1f} %"
        if op != Op.WAIT:
            return self._of_seed(op, situation.slots[action[0]], situation)
        return {
            Wait.TRYING: "a seed is being tried",
            Wait.LATE: f"fewer than {s.late_margin} epochs remain, too few for a seed",
            Wait.EARLY: f"it plants after {max(s.first_epoch, s.plateau_epochs + 1)} epochs at the earliest",
            Wait.RISING: f"accuracy still rose by {s.plateau_gain:g} points or more over {s.plateau_epochs} epochs",
            Wait.NOTHING_FITS: "no seed that it knows fits an empty slot and the limits",
        }[Wait(code)]

    def _of_seed(self, op: int, slot: SlotView, situation: Situation) -> str:
        contribution = 0.0 if slot.contribution is None else slot.contribution.accuracy
        if op == Op.FOSSILIZE:
            return f"it contributes {contribution:+z.1f} points"
        if slot.stage is Stage.TRAINING:
            promise = "nothing" if slot.shadow_benefit is None else f"{slot.shadow_benefit.accuracy:+z.1f} points"
            return f"after {slot.dwell} epochs its shadow promises {promise}"
        if slot.stage is not Stage.HOLDING:
            return f"it costs {-contribution:z.1f} points"
        extra = torch.tensor(extra_rent(situation.rent, slot.parameters, situation.host_parameters))
        asks = "" if situation.rent == RENT_RATE else f"; the rent asks for {float(self._least(extra)):.1f}"
        return f"it contributes only {contribution or 0.0:+z.1f} points{asks}"


_NEVER = 2**40
"""After every combination that can be tried; a whole number in float64 as well, which `F.pad` goes through."""


@cache
def _ranks(rotation: tuple[str, ...], names: tuple[str, ...], device: torch.device) -> Tensor:
    """[B] place of each blueprint in the rotation; -1 is none."""
    return torch.tensor([rotation.index(name) if name in rotation else -1 for name in names], device=device)
