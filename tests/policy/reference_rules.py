"""The heuristic and the schedule as plain rules over records of one network: what the rules over columns must equal."""

from __future__ import annotations

import fnmatch
from collections import Counter

from esper.actions import WAIT, Action, Op
from esper.env.rent import RENT_RATE, extra_rent
from esper.env.situation import Situation, SlotView
from esper.lifecycle import LIVE, Stage
from esper.policy.heuristic import HeuristicSettings
from esper.policy.schedule import Planting


class PlainSchedule:
    """For one network."""

    def __init__(self, plantings: tuple[Planting, ...]) -> None:
        self.plantings = plantings
        self.followed: set[tuple[int, int]] = set()

    def __call__(self, situation: Situation) -> Action:
        for slot in situation.slots_for(Op.FOSSILIZE):
            return Action(Op.FOSSILIZE, slot.index, reason="on schedule: its gate has passed")
        for number, planting in enumerate(self.plantings):
            for slot in situation.slots:
                due = situation.epoch >= planting.epoch and self._concerns(planting, slot)
                blueprint = planting.blueprints.get(slot.layout)
                if due and blueprint in slot.growable and (number, slot.index) not in self.followed:
                    self.followed.add((number, slot.index))
                    return Action(Op.GERMINATE, slot.index, blueprint, planting.blend, reason="on schedule")
        return Action(reason="nothing on the schedule is due and possible")

    def _concerns(self, planting: Planting, slot: SlotView) -> bool:
        if isinstance(planting.slot, int):
            return slot.index == planting.slot
        return fnmatch.fnmatchcase(slot.path, planting.slot)


class PlainHeuristic:
    def __init__(self, settings: HeuristicSettings) -> None:
        self.settings = settings

    def __call__(self, situation: Situation) -> Action:
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
            return Action(Op.FOSSILIZE, slot.index, reason=f"it contributes {contribution:+z.1f} points")
        if not slot.prunable or (slot.dwell < s.patience and slot.stage is not Stage.BLENDING):
            return WAIT
        if slot.stage is Stage.TRAINING:
            promise = "nothing" if slot.shadow_benefit is None else f"{slot.shadow_benefit.accuracy:+z.1f} points"
            return Action(Op.PRUNE, slot.index, reason=f"after {slot.dwell} epochs its shadow promises {promise}")
        if slot.stage is Stage.HOLDING:
            asks = "" if situation.rent == RENT_RATE else f"; the rent asks for {self._least(slot, situation):.1f}"
            return Action(Op.PRUNE, slot.index, reason=f"it contributes only {contribution or 0.0:+z.1f} points{asks}")
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
            return f"accuracy still rose by {s.plateau_gain:g} points or more over {s.plateau_epochs} epochs"
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
