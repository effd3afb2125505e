"""What removing seeds is worth: the shipped controller, and the same one with PRUNE forbidden, on the same draws.

    python benchmarks/removals.py grammar            # 96 held-out draws: minutes on one core
    python benchmarks/removals.py mixed --draws 24
    python benchmarks/removals.py mixed --rule losses --first 800000   # on training draws: a rule that was tried

The rule `losses`: what was measured to be worth less than its rent while it holds must be removed, and cannot be kept.

A removal can pay where a need shows only after a seed was tried. In `grammar` these are the draws that lack a
relation, a motif, a distribution or a nonlinear rule: nothing before growing tells them apart (docs/grammar.md).
Nothing is kept; the figures are in docs/controllers.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Literal

import numpy as np
import torch
import tyro

from esper.actions import Op
from esper.agent import policies
from esper.agent.removals import without_costly_removals
from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.env.rent import seed_rent
from esper.env.spaces import ActionMasks
from esper.env.world import World
from esper.lifecycle import Stage
from esper.tasks.draws import comparison_draws
from esper.tasks.family import get_family
from esper.training.engines import choose_engine
from esper.training.evaluation import batch_size, jobs_for, run_jobs
from esper.training.results import EpisodeResult
from esper.training.statistics import bootstrap
from page_text import in_points, plain, share, table

ALL = "all draws"
Masking = Callable[[ActionMasks, World], ActionMasks]


def no_removals(masks: ActionMasks, world: World) -> ActionMasks:
    """The masks with PRUNE illegal everywhere."""
    slot, op = masks.slot.clone(), masks.op.clone()
    slot[:, Op.PRUNE], op[:, Op.PRUNE] = False, False
    return replace(masks, slot=slot, op=op)


def no_losses(masks: ActionMasks, world: World) -> ActionMasks:
    """The masks as they are, but that a holding seed whose contribution is below its rent must be removed."""
    masks, slots = without_costly_removals(masks, world), world.slots
    due = seed_rent(slots.size, world.host_parameters[:, None], world.rent[:, None])
    losing = (slots.stage == Stage.HOLDING) & (slots.contribution_points < due)
    must = losing & masks.slot[:, Op.PRUNE]
    acts = must.any(-1, keepdim=True)
    slot = masks.slot.clone()
    slot[:, Op.PRUNE] = torch.where(acts, must, slot[:, Op.PRUNE])
    slot[:, Op.FOSSILIZE] &= ~losing
    op = masks.op.clone()
    op[:, Op.FOSSILIZE] &= slot[:, Op.FOSSILIZE].any(-1)
    only = torch.arange(len(Op), device=op.device) == Op.PRUNE
    return replace(masks, slot=slot, op=torch.where(acts, only, op))


def play(family: str, draws: range, masking: Masking, held_out: bool) -> Mapping[int, EpisodeResult]:
    """In this process, because another one would not see the masking."""
    policies.without_costly_removals = masking
    problems = get_family(family)
    engine = choose_engine("auto", problems, "cpu", first=draws[0]).name
    batch = batch_size(engine, len(draws), "cpu")
    return run_jobs(jobs_for(problems, {"": DEFAULT_CONTROLLER}, draws, batch=batch, engine=engine, held_out=held_out))[
        ""
    ]


def removed(episode: EpisodeResult) -> int:
    """Seeds that were planted and do not act at the end."""
    return episode.planted - len(episode.kept)


def group_of(episode: EpisodeResult) -> str:
    """What the host lacks, where the family says so."""
    return f"lacks {episode.facts['lacks']}" if "lacks" in episode.facts else str(episode.facts.get("kind", ALL))


def row(name: str, pairs: list[tuple[EpisodeResult, EpisodeResult]]) -> list[str]:
    free, forbidden = zip(*pairs, strict=True)
    leads = [one.score - other.score for one, other in pairs]
    planted, gone = sum(one.planted for one in free), sum(map(removed, free))
    where = [lead for one, lead in zip(free, leads, strict=True) if removed(one)]
    return [
        name,
        str(len(pairs)),
        f"{gone} of {planted}",
        share(float(np.mean([removed(one) > 0 for one in free]))),
        plain(float(np.mean([one.score for one in free]))),
        plain(float(np.mean([one.score for one in forbidden]))),
        in_points(bootstrap(leads)),
        in_points(bootstrap(where)) if where else "–",
    ]


def main(
    family: tyro.conf.Positional[str],
    draws: int = 96,
    rule: Literal["none", "losses"] = "none",
    first: int | None = None,
) -> int:
    """Play the same draws twice, and compare.

    Args:
        family: Such as grammar, grammar-unseen, mixed.
        draws: How many.
        rule: With none, the policy as it ships is compared with PRUNE forbidden; with losses, the rule with the policy
            as it ships.
        first: The first of these training draws; without it they are held-out draws.
    """
    numbers = comparison_draws(draws) if first is None else range(first, first + draws)
    maskings = (without_costly_removals, no_removals) if rule == "none" else (no_losses, without_costly_removals)
    one, other = (play(family, numbers, masking, first is None) for masking in maskings)
    pairs = [(one[number], other[number]) for number in numbers]
    groups: dict[str, list[tuple[EpisodeResult, EpisodeResult]]] = {ALL: pairs}
    for pair in pairs:
        groups.setdefault(group_of(pair[0]), []).append(pair)
    compared = "without PRUNE" if rule == "none" else "without the rule"
    head = ["draws of", "draws", "seeds removed", "episodes with a removal", "score", compared]
    rows = list(starmap(row, sorted(groups.items(), key=lambda item: (item[0] != ALL, item[0]))))
    print("\n".join(table([*head, "lead", "lead where a seed was removed"], rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))
