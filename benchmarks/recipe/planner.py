"""What should have been done: labels for recorded states by somebody who knows what usually comes of them.

    python benchmarks/recipe/planner.py portfolios/varied portfolios/disguised --also rounds/1 --out recordings/labelled
    esper clone recordings/labelled --out policy.safetensors

Two forecasts, both in points that a play earns more than one without growth, both by regressions that never saw the
problem in question. The first says, from the first epochs of the bare host, what each plan of `portfolio.py` would
gain. The best one by that is what a policy could know and should do; the plan that happened to win is partly luck. The
second says what will come of the seeds that are there: where that is a loss, they are removed. Else the teacher plants
the best plan and keeps its seeds, and of others those that contribute more than their rent; the rest it gives up by age
and stage. It reads states as they were recorded, so any play can be labelled: those of the portfolio, and what a policy
did on its own (`--also`). Plans of a portfolio begin an epoch earlier than the teacher, who looks at the host first.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from portfolio import NONE, PLANS
from rounds import chosen_options
from seen import BLUEPRINT, Seen, action
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from esper.actions import Op
from esper.env.observation import SLOT_FIELDS
from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.recording import append, read

SEEN = 3
"""Observations that a plan is chosen by: before the first epoch, and after two."""
FOLDS = 5
WORTH = 0.5
"""Points that a plan must promise to be begun."""
LOSS = -1.0
"""Points below which what is there is given up."""
TIME_FOR_ANOTHER = 7
"""Epochs that a new seed needs to be worth it."""
TIME_TO_RECOVER = 4
"""Epochs that a host needs after a seed was removed."""

LEAF = 8
"""Cases that a forecast averages at least: with fewer, the best of many forecasts is often just the most mistaken."""

Row = NDArray[np.float32]
States = NDArray[np.float32]
"""[episodes, steps, features], or fewer of these dimensions."""
_LAYOUTS = [index for index, name in enumerate(SLOT_FIELDS) if name.startswith("layout_")]
_CHANNELS = list(SLOT_FIELDS).index("channels")


@dataclass
class Portfolio:
    """The problems of one layout."""

    looks: dict[int, Row] = field(default_factory=dict)
    """How each of them looked at first."""
    gains: dict[int, dict[str, float]] = field(default_factory=dict)
    """What each plan earned more than no growth."""
    plays: list[tuple[int, float]] = field(default_factory=list)
    """Rows of the episodes, with their gains."""


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
        own.looks[number] = seen[first, :SEEN].flatten()
        own.gains[number] = {}
        for name, row in by_name.items():
            gain = float(returns[row] - returns[first])
            if name == NONE or name.split()[0] in PLANS:
                own.plays.append((row, gain))
            if name.split()[0] in PLANS:
                own.gains[number][name.split()[1]] = gain
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


def described(plan: str) -> Row:
    """Which blueprint a plan has for the first slot, the second, and the others."""
    found = np.zeros((3, len(BLUEPRINT)), np.float32)
    for place in range(3):
        if (blueprint := planned(plan, place)) is not None:
            found[place, blueprint] = 1.0
    return found.flatten()


def planned(plan: str, slot: int) -> int | None:
    """The number of the blueprint that a plan has for a slot: of its parts, the first that fits counts."""
    for part in plan.split("+") if plan != NONE else ():
        blueprint, _, where = part.partition("@")
        if where in ("*", str(slot)):
            return BLUEPRINT[blueprint]
    return None


def fold_of(number: int) -> int:
    """The part of the problems that this one is in; no regression that is asked about it learnt from that part."""
    return int(np.random.default_rng(number).integers(FOLDS))


def plan_forecasts(portfolio: Portfolio) -> dict[int, dict[str, float]]:
    """Per problem, what each plan is expected to gain."""
    plans = sorted({plan for gains in portfolio.gains.values() for plan in gains})
    texts = {plan: described(plan) for plan in plans}
    found: dict[int, dict[str, float]] = {}
    for fold in range(FOLDS):
        known = [(n, p) for n in portfolio.looks if fold_of(n) != fold for p in portfolio.gains[n]]
        inputs = [np.concatenate([portfolio.looks[n], texts[p]]) for n, p in known]
        model = ExtraTreesRegressor(300, min_samples_leaf=LEAF, max_features=0.4, n_jobs=2, random_state=fold)
        model.fit(inputs, [portfolio.gains[n][p] for n, p in known])
        for number in (n for n in portfolio.looks if fold_of(n) == fold):
            rows = [np.concatenate([portfolio.looks[number], texts[plan]]) for plan in plans]
            found[number] = dict(zip(plans, model.predict(rows).tolist(), strict=True))
    return found


def best_plan(forecast: Mapping[str, float]) -> str:
    best = max(forecast, key=lambda plan: forecast[plan])
    return best if forecast[best] >= WORTH else NONE


def outlooks(portfolio: Portfolio, episodes: Episodes, seen: States, rows: Sequence[int]) -> dict[int, list[float]]:
    """Per row, at each step, what is expected to come of the seeds that are there: points more than without growth."""
    found = {}
    for fold in range(FOLDS):
        own = [row for row in rows if fold_of(int(episodes.draw[row])) == fold]
        if not own:
            continue
        known = [(row, gain) for row, gain in portfolio.plays if fold_of(int(episodes.draw[row])) != fold]
        later = [(row, range(SEEN, int(episodes.lengths[row]), 2), gain) for row, gain in known]
        inputs = [_situations(portfolio, episodes, seen, row, steps) for row, steps, _ in later]
        gains = [gain for _, steps, gain in later for _ in steps]
        model = ExtraTreesRegressor(80, min_samples_leaf=LEAF, max_features=0.3, n_jobs=2, random_state=fold)
        model.fit(np.concatenate(inputs), gains)
        asked = [_situations(portfolio, episodes, seen, row, range(int(episodes.lengths[row]))) for row in own]
        said = np.split(model.predict(np.concatenate(asked)), np.cumsum([len(steps) for steps in asked])[:-1])
        found.update({row: steps.tolist() for row, steps in zip(own, said, strict=True)})
    return found


def _situations(portfolio: Portfolio, episodes: Episodes, seen: States, row: int, steps: range) -> States:
    first = portfolio.looks[int(episodes.draw[row])]
    return np.concatenate([np.tile(first, (len(steps), 1)), seen[row, list(steps)]], 1)


def decide(seen: Seen, step: int, plan: str, outlook: float) -> Tensor:
    """What the seeds that are there call for, then what the plan does."""
    promising = outlook >= LOSS or seen.epochs_left < TIME_TO_RECOVER
    for slot in seen.seeds:
        own = planned(plan, slot) == seen.planted[slot]
        if promising and (own or seen.helps(slot)) and seen.may[Op.FOSSILIZE, slot]:
            return action(Op.FOSSILIZE, slot)
        if not own and seen.hopeless(slot) and seen.may[Op.PRUNE, slot]:
            return action(Op.PRUNE, slot)
    removable = [slot for slot in seen.seeds if seen.may[Op.PRUNE, slot]]
    if not promising and removable:
        return action(Op.PRUNE, min(removable, key=seen.surplus))
    if step >= SEEN - 1 and seen.epochs_left >= TIME_FOR_ANOTHER:
        for slot in range(len(seen.planted)):
            blueprint = planned(plan, slot)
            if blueprint is not None and seen.growable[slot, blueprint] and seen.field("seeds_before", slot) == 0:
                return action(Op.GERMINATE, slot, blueprint)
    return action(Op.WAIT)


def report(layout: str, portfolio: Portfolio, forecast: Mapping[int, Mapping[str, float]]) -> None:
    """How good the forecasts are, among the plans that were played."""
    by_plan: dict[str, list[float]] = defaultdict(list)
    for gains in portfolio.gains.values():
        for plan, gain in gains.items():
            by_plan[plan].append(gain)
    mean = {plan: float(np.mean(gains)) for plan, gains in by_plan.items()}
    results = []
    for number, gains in portfolio.gains.items():
        usual = max(gains, key=lambda plan: mean[plan])
        guess = best_plan({plan: forecast[number][plan] for plan in gains})
        results.append((gains[usual] if mean[usual] > 0 else 0.0, gains.get(guess, 0.0), max(0.0, *gains.values())))
    usual, guessed, won = np.mean(results, 0)
    print(
        f"{layout}: {len(results)} problems; of the plans that were played, the usually best one gains {usual:.1f} "
        f"points, the one with the best forecast {guessed:.1f}, the winner {won:.1f}"
    )
    for plan, count in Counter(best_plan(forecast[number]) for number in portfolio.looks).most_common():
        print(f"    {plan}: chosen for {count}, mean gain {mean.get(plan, 0.0):+.1f}")


def _read_all(folders: Sequence[Path]) -> Episodes:
    """All together. A number is one problem, so no two families may share it."""
    recordings = [read(folder, growth_schema()) for folder in folders]
    family_of: dict[int, str | None] = {}
    for folder, recording in zip(folders, recordings, strict=True):
        for number in recording.episodes.draw.tolist():
            if family_of.setdefault(number, recording.task) != recording.task:
                raise SystemExit(f"problem {number} of {recording.task} in {folder} is one of {family_of[number]}, too")
    return join([recording.episodes for recording in recordings])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("portfolios", type=Path, nargs="+", help="folders of portfolio.py")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="plays of the same problems, of own_plays.py")
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    episodes = _read_all([*chosen.portfolios, *chosen.also])
    label, seen = torch.zeros_like(episodes.label), states(episodes)
    done = []
    for layout, portfolio in sorted(portfolios(episodes, seen).items()):
        if len({fold_of(number) for number in portfolio.looks}) < 2:
            parser.error(f"too few {layout} problems to forecast one from the others: play more with portfolio.py")
        forecast = plan_forecasts(portfolio)
        report(layout, portfolio, forecast)
        rows = [row for row, number in enumerate(episodes.draw.tolist()) if number in portfolio.looks]
        for row, outlook in outlooks(portfolio, episodes, seen, rows).items():
            plan = best_plan(forecast[int(episodes.draw[row])])
            for step, promise in enumerate(outlook):
                label[row, step] = decide(Seen(episodes, row, step), step, plan, promise)
        done += rows
    labelled = replace(episodes, label=label).select(torch.tensor(sorted(done)))
    append(chosen.out, labelled, growth_schema(), {"command": shlex.join(["python", *sys.argv])})
    changed = (labelled.label != labelled.taken).any(-1)[labelled.valid].float().mean()
    print(f"{len(labelled):,} episodes; the teacher would have done otherwise in {changed:.1%} of the steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
