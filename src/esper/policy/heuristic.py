"""The heuristic: what a careful person would do by hand, looking at the measurements.

One seed at a time. Plant when the host stops improving quickly; give up on a seed whose shadow promises nothing or that
harms; keep a seed that contributes. Its thresholds are settings, so that it can be tuned as a baseline.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from esper.actions import WAIT, Action, Op
from esper.config import AT_LEAST_0, WHOLE_AT_LEAST_0, WHOLE_AT_LEAST_1, check_ranges
from esper.env.rent import RENT_RATE, extra_rent
from esper.env.situation import Situation, SlotView
from esper.errors import shown
from esper.growth.blueprints import get_blueprint
from esper.lifecycle import LIVE, Stage
from esper.policy.controller import RuleController

ROTATION = ("conv", "attention", "mlp", "depthwise", "mlp_small", "pointwise", "lora", "norm", "squeeze_excite")
"""Kinds of computation in the order in which they are tried; a slot takes those that fit it."""


@dataclass(frozen=True, slots=True)
class HeuristicSettings:
    first_epoch: int = 2
    """Do not plant before."""
    plateau_gain: float = 3.0
    """Plant when the best accuracy rose by fewer points than this over `plateau_epochs`."""
    plateau_epochs: int = 2
    patience: int = 4
    """Epochs of incubation, or of holding, after which a seed that shows no benefit is pruned."""
    harm: float = 5.0
    """Prune a blending seed that costs more than this many accuracy points."""
    keep_above: float = 0.5
    """Fossilize a seed that contributes more than this many accuracy points."""
    late_margin: int = 8
    """Do not plant when fewer epochs than this remain: the seed could not finish."""
    rotation: tuple[str, ...] = ROTATION

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


class Heuristic(RuleController[None]):
    """Rules on measured signals; see the module's description.

    It remembers nothing of its own: what was tried is read from the history of what really happened. So its decision
    can also be had where another controller acts, as recordings with exploration noise need.
    """

    def __init__(self, settings: HeuristicSettings | None = None, name: str = "heuristic") -> None:
        super().__init__()
        self.name = name
        self.settings = settings or HeuristicSettings()

    def new_memory(self, seed: int) -> None:
        return None

    def rule(self, situation: Situation, memory: None) -> Action:
        live = [slot for slot in situation.slots if slot.stage in LIVE]
        for slot in live:
            action = self._tend(slot, situation)
            if action.op is not Op.WAIT:
                return action
        if live:
            return Action(reason="a seed is being tried")
        if reason := self._why_not_plant(situation):
            return Action(reason=reason)
        return self._plant(situation)

    def _tend(self, slot: SlotView, situation: Situation) -> Action:
        """What a seed's own measurements call for."""
        s = self.settings
        contribution = None if slot.contribution is None else slot.contribution.accuracy
        if slot.fossilizable and contribution is not None and contribution > self._least(slot, situation):
            return Action(Op.FOSSILIZE, slot.index, reason=f"it contributes {contribution:+.1f} points")
        if not slot.prunable or (slot.dwell < s.patience and slot.stage is not Stage.BLENDING):
            return WAIT
        if slot.stage is Stage.TRAINING:
            promise = "nothing" if slot.shadow_benefit is None else f"{slot.shadow_benefit.accuracy:+.1f} points"
            return Action(Op.PRUNE, slot.index, reason=f"after {slot.dwell} epochs its shadow promises {promise}")
        if slot.stage is Stage.HOLDING:
            asks = "" if situation.rent == RENT_RATE else f"; the rent asks for {self._least(slot, situation):.1f}"
            return Action(Op.PRUNE, slot.index, reason=f"it contributes only {contribution or 0.0:+.1f} points{asks}")
        if contribution is not None and contribution < -s.harm:
            return Action(Op.PRUNE, slot.index, reason=f"it costs {-contribution:.1f} points")
        return WAIT

    def _least(self, slot: SlotView, situation: Situation) -> float:
        """What a seed must contribute to be kept: the settings are for the default rent, so only extra rent counts."""
        least = self.settings.keep_above
        extra = extra_rent(situation.rent, slot.parameters, situation.host_parameters)
        return max(min(least, 0.0), least + extra)

    def _why_not_plant(self, situation: Situation) -> str:
        """Empty when it is time to plant."""
        s = self.settings
        if situation.remaining < s.late_margin:
            return f"fewer than {s.late_margin} epochs remain, too few for a seed"
        accuracies = [record.measured.accuracy for record in situation.history]
        if situation.epoch < s.first_epoch or len(accuracies) <= s.plateau_epochs:
            return f"it plants after {max(s.first_epoch, s.plateau_epochs + 1)} epochs at the earliest"
        if max(accuracies) - max(accuracies[: -s.plateau_epochs]) >= s.plateau_gain:
            return f"accuracy still rose by {s.plateau_gain:g} points or more in {s.plateau_epochs} epochs"
        return ""

    def _plant(self, situation: Situation) -> Action:
        """The least tried combination; among those, the rotation's first, at the first slot."""
        effects = [record.effect for record in situation.history]
        planted = [effect.action for effect in effects if effect.action.op is Op.GERMINATE and effect.changed]
        tried = Counter((action.slot, action.blueprint) for action in planted)
        options = [
            (tried[slot.index, name], self.settings.rotation.index(name), slot.index, name)
            for slot in situation.slots_for(Op.GERMINATE)
            for name in slot.growable
            if name in self.settings.rotation
        ]
        if not options:
            return Action(reason="no seed that it knows fits an empty slot and the limits")
        _, _, index, name = min(options)
        recent = [record.measured.accuracy for record in situation.history][-self.settings.plateau_epochs - 1 :]
        return Action(Op.GERMINATE, index, name, "linear", reason=f"accuracy stands at {recent[-1]:.1f} %")
