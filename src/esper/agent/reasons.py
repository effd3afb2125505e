"""Why a learned policy decided as it did, in a line: how sure it was, what came next, what it expects, what it saw.

It reads what one pass of the network gave anyway, and must not change which action is taken. Asked at every decision of
a comparison: one table for all learners, then a few words each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from esper.actions import BLENDS, Action, Op
from esper.env.observation import decode_one
from esper.env.rent import seed_rent
from esper.env.situation import Situation, SlotView
from esper.growth.blueprints import blueprint_names
from esper.policy.distribution import FactoredPolicy


@torch.inference_mode()
def with_reasons(
    actions: Tensor, policy: FactoredPolicy, returns: Tensor | None, situations: Sequence[Situation]
) -> list[Action]:
    """Actions [N, heads] as records with their reasons; `returns` [N] is what the critic expects, in points."""
    joint = policy.joint()  # [N, O, S, B, K]
    _, slots, blueprints, blends = joint.shape[1:]
    flat = joint.flatten(1)
    values, places = (part.tolist() for part in flat.topk(2))
    expected = [None] * len(situations) if returns is None else returns.tolist()
    found = []
    for row, taken in enumerate(actions.tolist()):
        slot, blueprint, blend, op = taken
        place = ((op * slots + slot) * blueprints + blueprint) * blends + blend
        is_best = places[row][0] == place  # heads are chosen one after the other, so another whole may be likelier
        probability = math.exp(values[row][0] if is_best else flat[row, place].item())
        rest, other_blend = divmod(places[row][is_best], blends)
        rest, other_blueprint = divmod(rest, blueprints)
        other_op, other_slot = divmod(rest, slots)
        other = (other_slot, other_blueprint, other_blend, other_op)
        reason = _certainty(probability, taken, math.exp(values[row][is_best]), other, situations[row])
        if op != Op.WAIT:
            reason += _expectation(expected[row]) + _measured(op, slot, situations[row])
        found.append(decode_one(taken, reason, probability))
    return found


def _certainty(
    probability: float, taken: Sequence[int], next_probability: float, other: Sequence[int], situation: Situation
) -> str:
    if next_probability == 0.0:
        return "nothing else is possible"
    named = _named(other, taken, situation)
    return f"{percent(probability)} sure (next: {named}, {percent(next_probability)})"


def percent(probability: float) -> str:
    """In whole percent; what is rounded to certainty or to nothing is said to be close to it."""
    if probability >= 0.995:
        return "over 99 %"
    return "under 1 %" if probability < 0.005 else f"{100 * probability:.0f} %"


def _named(other: Sequence[int], taken: Sequence[int], situation: Situation) -> str:
    """A decision in words; both are in the order of `HEAD_NAMES`."""
    slot, blueprint, blend, op = other
    if op == Op.WAIT:
        return "wait"
    path = situation.slots[slot].path
    if op != Op.GERMINATE:
        return f"{'keep' if op == Op.FOSSILIZE else 'prune'} {path}"
    if taken[3] == op and (slot, blueprint) == (taken[0], taken[1]):
        return f"the same with a {BLENDS[blend]} blend"
    return f"{blueprint_names()[blueprint]} at {path}"


def _expectation(points: float | None) -> str:
    return "" if points is None else f"; expects {points:+z.1f} points"


def _measured(op: int, slot: int, situation: Situation) -> str:
    """What was known about the seed that is kept or pruned; of the network, where one is planted."""
    if op != Op.GERMINATE:
        return _worth(op, situation.slots[slot], situation)
    if not situation.history:
        return ""
    return f"; accuracy {situation.history[-1].measured.accuracy:.1f} %"


def _worth(op: int, slot: SlotView, situation: Situation) -> str:
    """Against its rent. A policy may decide against these two numbers: the reason must not read like the opposite."""
    for name, found in (("contribution", slot.contribution), ("shadow benefit", slot.shadow_benefit)):
        if found is not None:
            due = seed_rent(slot.parameters, situation.host_parameters, situation.rent)
            kept = op == Op.FOSSILIZE
            opposes = found.accuracy < due if kept else found.accuracy > due
            though = f"{'kept' if kept else 'removed'} although " if opposes else ""
            stands = "above" if found.accuracy > due else "below" if found.accuracy < due else "equal to"
            return f"; {though}its {name} {found.accuracy:+z.1f} ± {found.error:.1f} is {stands} its rent of {due:.1f}"
    return ""
