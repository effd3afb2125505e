"""What is recorded of a rollout of thousands of episodes: a row of each, counts over all, and a sample step by step.

Everything is computed from columns; only the sampled episodes become records of single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, Op
from esper.engine.governor import FAULTS
from esper.env.reward.config import TERMS
from esper.env.reward.suspicion import SUSPICION_KINDS
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import Stage
from esper.rollout.episodes import Episodes
from esper.rollout.facts import Facts
from esper.rollout.render import fault_message
from esper.telemetry.records import EpisodeColumns

BULK = 256
"""Rollouts of more episodes are recorded in bulk: at 25 steps each, every decision would be over 1 MB an update."""
EPISODES_IN_FULL = 8
"""Episodes of such a rollout whose decisions and events are recorded."""
KIND_WORDS = 2
"""Words of a kind that the metric of its score is named after: "series distant" of "series distant @0"."""


def sample(draws: Tensor, count: int = EPISODES_IN_FULL) -> Tensor:
    """[count] rows to record step by step: those with the least hash of draw id and row, the same ones every time."""
    rows = torch.arange(len(draws), device=draws.device)
    mixed = draws * -7046029254386353131 + rows * -4658895280553007687  # odd constants of splitmix64; wraps
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    mixed = mixed ^ (mixed >> 32)
    return mixed.argsort(stable=True)[:count].sort().values


def episode_columns(
    episodes: Episodes, facts: Facts, governor: Sequence[str | None], update: int, arm: str
) -> EpisodeColumns:
    """A row of every episode; `governor` says why it was ended, if it was."""
    epoch, rewards = facts.steps.epoch, facts.rewards()
    return EpisodeColumns(
        update=update,
        draw=episodes.draw.tolist(),
        episode_return=rewards.sum(1).tolist(),
        score=facts.at_the_end(facts.steps.reward.score).nan_to_num(0.0).tolist(),
        accuracy=facts.at_the_end(epoch.accuracy).tolist(),
        parameters=facts.at_the_end(facts.steps.parameters).long().tolist(),
        host_parameters=facts.host_parameters.long().tolist(),
        length=facts.lengths.tolist(),
        governor=governor,
        terms=TERMS,
        rewards=rewards.tolist(),
        arm=arm,
    )


def verdicts(facts: Facts) -> list[str | None]:
    """Why the governor ended an episode, as far as columns say; few are."""
    epoch = facts.steps.epoch
    fault = facts.at_the_end(epoch.fault)
    said: list[str | None] = [None] * len(fault)
    rows = (fault >= 0).nonzero().flatten()
    numbers = (fault, facts.at_the_end(epoch.fault_seen), facts.at_the_end(epoch.fault_limit))
    for row, code, seen, limit in zip(rows.tolist(), *(n[rows].tolist() for n in numbers), strict=True):
        said[row] = fault_message(FAULTS[code], seen, limit)
    return said


def counts(episodes: Episodes, facts: Facts) -> dict[str, float]:
    """Named numbers over all steps and episodes; what never happened is left out where there are many names."""
    found = _actions(episodes, facts)
    found |= _named("transitions", [stage.name for stage in Stage], facts.entered())
    fault = facts.steps.epoch.fault[facts.played]
    found |= _named("faults", FAULTS, torch.bincount(fault[fault >= 0], minlength=len(FAULTS)))
    suspected = facts.steps.reward.suspicions & facts.played[..., None, None]
    found |= _named("suspicions", SUSPICION_KINDS, suspected.sum((0, 1, 2)))
    found |= _named("reward", TERMS, facts.rewards().mean(0))
    return found | _scores(facts)


def _actions(episodes: Episodes, facts: Facts) -> dict[str, float]:
    """How often each operation was decided on, had an effect, and where; with the mean probability of the decision."""
    epoch, played, ops = facts.steps.epoch, facts.played, [op.name for op in Op]
    op = epoch.op[played]
    changed = played & epoch.changed
    times = torch.bincount(op, minlength=len(Op))
    found = _named("actions", ops, times)
    found |= _named("effective", ops, torch.bincount(epoch.op[changed], minlength=len(Op)))
    if episodes.log_prob is not None:
        chosen = episodes.log_prob[..., HEAD_NAMES.index("op")].to(op.device)[:, : played.shape[1]]
        sums = torch.bincount(op, chosen[played].exp().double(), minlength=len(Op))
        found |= {f"probability/{op}": p for op, p in zip(ops, (sums / times).tolist(), strict=True) if p == p}
    slots, blueprints = facts.steps.stage.shape[2], blueprint_names()
    at = (epoch.op * slots + epoch.slot) * len(blueprints) + epoch.blueprint.clamp(min=0)
    table = torch.bincount(at[changed], minlength=len(Op) * slots * len(blueprints))
    for code, number in enumerate(table.tolist()):
        place, blueprint = divmod(code, len(blueprints))
        what, slot = divmod(place, slots)
        if number:
            kind = f"/{blueprints[blueprint]}" if what == Op.GERMINATE else ""
            found[f"effective/{ops[what]}/slot {slot}{kind}"] = float(number)
    return found


def _scores(facts: Facts) -> dict[str, float]:
    """Mean score by kind of problem, where that is known: by its first words, since `grammar` has over a thousand."""
    known = facts.kind >= 0
    if not facts.kinds or not bool(known.any()):
        return {}
    shortened = [" ".join(kind.split()[:KIND_WORDS]) for kind in facts.kinds]
    names = tuple(dict.fromkeys(shortened))
    group = torch.tensor([names.index(name) for name in shortened], device=facts.kind.device)[facts.kind[known]]
    score = facts.at_the_end(facts.steps.reward.score)[known].nan_to_num(0.0)
    number = torch.bincount(group, minlength=len(names))
    means = (torch.bincount(group, score, minlength=len(names)) / number).tolist()
    return {f"score/{name}": mean for name, mean in zip(names, means, strict=True) if not math.isnan(mean)}


def _named(what: str, names: Sequence[str], values: Tensor) -> dict[str, float]:
    return {f"{what}/{name}": float(value) for name, value in zip(names, values.tolist(), strict=True)}
