"""A teacher of what to do in any state of a portfolio's problems, and of what it would cost to do otherwise.

What it knows are forecasts of what seeds gain (`forecasts.py`). A label alone would hide that many plans are as good as
the best one, and that some are ruinous; `Promises` tell a policy which mistakes matter. It learns from both
(`learn.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from forecasts import FOLDS, SEEN, Forecast, Portfolio, Seeds, fold_of, forecasts, portfolios, states
from portfolio import FIRST_EPOCH, NONE
from seen import Seen, action
from torch import Tensor

from esper.actions import Op
from esper.offline.episodes import Episodes

WORTH = 0.5
"""Points that a seed must promise to be planted."""
DELAY = 0.5
"""Points that planting an epoch later costs. In 339 pairs of plays with the same seeds it was 0.25 ± 0.28."""
TIME_FOR_ANOTHER = 7
"""Epochs that a new seed needs to be worth it."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What decisions are expected to come to: points more than without growth. NaN where there is nothing to decide."""

    plant: Tensor
    """[E, T, slots, blueprints]: of the best plan with this seed in it. NaN also where no plan has it."""
    wait: Tensor
    """[E, T]: of planting nothing, with the benefit of the doubt."""

    def select(self, rows: Tensor, steps: int | None = None) -> Promises:
        return Promises(self.plant[rows, :steps], self.wait[rows, :steps])

    def after(self, episodes: Episodes) -> Promises:
        """The same of the last of these episodes; about the others nothing is promised."""
        found = Promises.none_for(episodes)
        (*_, slots, _), (count, steps) = self.plant.shape, self.wait.shape
        first = len(found.wait) - count
        found.plant[first:, :steps, :slots] = self.plant
        found.wait[first:, :steps] = self.wait
        return found

    @staticmethod
    def none_for(episodes: Episodes) -> Promises:
        masks = episodes.masks.blueprint
        return Promises(torch.full(masks.shape, torch.nan), torch.full(masks.shape[:2], torch.nan))


def care(seen: Seen) -> Tensor | None:
    """Seeds become permanent as soon as they may, and are never removed: giving up costs more than it saves."""
    for slot in seen.seeds:
        if seen.may[Op.FOSSILIZE, slot]:
            return action(Op.FOSSILIZE, slot)
    return None


def offers(seen: Seen, step: int, promise: Tensor) -> Tensor:
    """Of what plantings promise, [slots, blueprints], what can be had now; NaN elsewhere. A slot gets one seed."""
    now = step >= FIRST_EPOCH and seen.epochs_left >= TIME_FOR_ANOTHER
    fresh = torch.tensor([seen.field("seeds_before", slot) == 0 for slot in range(len(seen.planted))])
    return promise.masked_fill(~(seen.growable & fresh[:, None] & now), torch.nan)


def choose(offered: Tensor, wait: float) -> Tensor:
    """The planting that promises most, if that is more than waiting does."""
    best = int(torch.nan_to_num(offered, nan=-torch.inf).argmax())
    slot, blueprint = divmod(best, offered.shape[1])
    return action(Op.GERMINATE, slot, blueprint) if offered[slot, blueprint] > wait else action(Op.WAIT)


def lessons(episodes: Episodes) -> tuple[Episodes, Promises]:
    """The plays of portfolios, each state with what should be done there, and what plantings promise."""
    seen, label, promises = states(episodes), torch.zeros_like(episodes.label), Promises.none_for(episodes)
    done: list[int] = []
    for layout, portfolio in sorted(portfolios(episodes, seen).items()):
        if len({fold_of(number) for number in portfolio.looks}) < 2:
            raise SystemExit(f"too few {layout} problems to forecast one from the others: play more with portfolio.py")
        rows = [row for row, number in enumerate(episodes.draw.tolist()) if number in portfolio.looks]
        best: dict[int, str] = {}
        guessed: dict[int, str] = {}
        for fold in range(FOLDS):
            own = [row for row in rows if fold_of(int(episodes.draw[row])) == fold]
            if own:
                said = _asked(portfolio, episodes, own, forecasts(portfolio, fold))
                for number in set(episodes.draw[own].tolist()):
                    best[number] = best_plan(portfolio, number, said, portfolio.plans)
                    guessed[number] = best_plan(portfolio, number, said, portfolio.gains[number])
                for row in own:
                    _teach(portfolio, episodes, row, said, label, promises)
        report(layout, portfolio, best, guessed)
        done += rows
    kept = torch.tensor(sorted(done))
    return replace(episodes, label=label).select(kept), promises.select(kept)


Said = Mapping[tuple[int, Seeds], float]
"""What seeds gain on a problem."""


def _asked(portfolio: Portfolio, episodes: Episodes, rows: Sequence[int], forecast: Forecast) -> Said:
    """All that will be asked of these rows at once: trees are slow to answer, but not slower for many questions."""
    states_of = defaultdict(set)
    for row in rows:
        number = int(episodes.draw[row])
        states_of[number] |= {(), *(planted_at(episodes, row, step) for step in range(int(episodes.lengths[row])))}
    asked = [
        (number, seeds)
        for number, found in states_of.items()
        for there in sorted(found)
        for seeds in (there, *(portfolio.hosts[number].carried_out(plan, there) for plan in portfolio.plans))
    ]
    return forecast(asked)


def planted_at(episodes: Episodes, row: int, step: int) -> Seeds:
    planted = episodes.observation.blueprints[row, step].tolist()
    return tuple((slot, blueprint - 1) for slot, blueprint in enumerate(planted) if blueprint)


def best_plan(portfolio: Portfolio, number: int, said: Said, plans: Iterable[str]) -> str:
    """Of these; none, if none is worth it."""
    promise = {plan: said[number, portfolio.hosts[number].carried_out(plan)] for plan in plans}
    best = max(promise, key=lambda plan: promise[plan])
    return best if promise[best] >= WORTH else NONE


def _teach(
    portfolio: Portfolio,
    episodes: Episodes,
    row: int,
    said: Said,
    label: Tensor,
    promises: Promises,
) -> None:
    """Write down what is right in each state of a play."""
    number = int(episodes.draw[row])
    for step in range(int(episodes.lengths[row])):
        seen = Seen(episodes, row, step)
        if (called_for := care(seen)) is not None:
            label[row, step] = called_for
            continue
        there = planted_at(episodes, row, step)
        offered = offers(seen, step, _plantings(portfolio, number, there, said, promises.plant.shape[2:]))
        if offered.isnan().all():  # nothing to plant: the label stays at waiting
            continue
        wait = said[number, there] + WORTH
        if step < SEEN - 1:  # who waits will know what the forecasts know, and can still plant
            wait = max(wait, float(offered.nan_to_num(-torch.inf).max()) - DELAY)
        promises.plant[row, step], promises.wait[row, step] = offered, wait
        label[row, step] = choose(offered, wait)


def _plantings(portfolio: Portfolio, number: int, there: Seeds, said: Said, shape: Sequence[int]) -> Tensor:
    """What each seed promises beside those that are there, as part of the best plan that has it."""
    found = torch.full(tuple(shape), torch.nan)
    for plan in portfolio.plans:
        seeds = portfolio.hosts[number].carried_out(plan, there)
        for slot, blueprint in set(seeds) - set(there):
            found[slot, blueprint] = torch.fmax(found[slot, blueprint], torch.tensor(said[number, seeds]))
    return found


def report(layout: str, portfolio: Portfolio, best: Mapping[int, str], guessed: Mapping[int, str]) -> None:
    """What was chosen, and how good the forecasts are: `guessed` is the best one of the plans that were played."""
    by_plan: dict[str, list[float]] = defaultdict(list)
    for gains in portfolio.gains.values():
        for plan, gain in gains.items():
            by_plan[plan].append(gain)
    mean = {plan: float(np.mean(gains)) for plan, gains in by_plan.items()}
    results = []
    for number, gains in portfolio.gains.items():
        usual = max(gains, key=lambda plan: mean[plan])
        won = max(0.0, *gains.values())
        results.append((gains[usual] if mean[usual] > 0 else 0.0, gains.get(guessed[number], 0.0), won))
    usually, guess, winner = np.mean(results, 0)
    print(
        f"{layout}: {len(results)} problems; of the plans that were played, the usually best one gains {usually:.1f} "
        f"points, the one with the best forecast {guess:.1f}, the winner {winner:.1f}"
    )
    for plan, count in Counter(best.values()).most_common():
        print(f"    {plan}: chosen for {count}, mean gain {mean.get(plan, 0.0):+.1f}")
