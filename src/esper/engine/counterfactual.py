"""What several seeds are worth together: all of them off, in pairs, and each one's fair share (Shapley value).

Every answer is a weighted sum of networks with some seeds left out, each of them measured on the same examples; nothing
is filled in. Because the sum is taken per example, its standard error is that of the paired difference. Leaving out one
seed is part of every evaluation (`measure.evaluate`); the questions here cost more and are asked on request.

A seed whose alpha is 0 takes no part in the output: leaving it out changes nothing, and its promise is its shadow
benefit. It is refused here, so that a 0 is never mistaken for a measurement (R138).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from esper.engine.measure import Loss, Pending, Score, Variant, standard_error, summed
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot, SlotMode, preserved_rng
from esper.lifecycle import Contrast
from esper.tasks.feed import Batch

MOST_PLAYERS = 4
"""Exact Shapley values need 2^k networks; with more seeds than this the price is no longer worth it."""

Off = frozenset[Slot]
"""A network, named by the seeds that are left out of it."""
WeightedSum = Mapping[Off, float]
"""A question: how much each network counts."""


def all_off(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, slots: Sequence[Slot] | None = None
) -> Pending[Contrast]:
    """The network as it is against the network without any of these seeds (default: all that take part)."""
    players = _players(model, slots)
    question = {Off(): 1.0, Off(players): -1.0} if players else {}
    pending = _ask(model, batches, loss, score, [question])
    return Pending(pending.numbers, lambda numbers: pending.read(numbers)[0])


def interaction(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, first: Slot, second: Slot
) -> Pending[Contrast]:
    """What two seeds are worth together beyond what each is worth without the other; all other seeds as they are.

    Positive: they help each other. Negative: they do the same work, or disturb each other.
    """
    a, b = _players(model, (first, second))
    question = {Off(): 1.0, Off({a}): -1.0, Off({b}): -1.0, Off({a, b}): 1.0}
    pending = _ask(model, batches, loss, score, [question])
    return Pending(pending.numbers, lambda numbers: pending.read(numbers)[0])


def shapley(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, slots: Sequence[Slot] | None = None
) -> Pending[dict[int, Contrast]]:
    """By slot: the seed's gain averaged over all orders in which these seeds (default: all) could have been added.

    The values sum to `all_off` of the same seeds. Seeds that are not among them stay as they are.
    """
    players = _players(model, slots)
    if len(players) > MOST_PLAYERS:
        raise ValueError(
            f"exact Shapley values of {len(players)} seeds need {2 ** len(players)} networks; "
            f"name at most {MOST_PLAYERS} slots, and the others stay as they are"
        )
    pending = _ask(model, batches, loss, score, [shapley_weights(players, player) for player in players])
    indices = [player.index for player in players]
    return Pending(pending.numbers, lambda numbers: dict(zip(indices, pending.read(numbers), strict=True)))


def shapley_weights(players: Sequence[Slot], player: Slot) -> dict[Off, float]:
    """The sum over coalitions S of the others: |S|! (k - |S| - 1)! / k! times v(S with the player) - v(S)."""
    others = [other for other in players if other is not player]
    weights: dict[Off, float] = {}
    for size in range(len(players)):
        weight = factorial(size) * factorial(len(others) - size) / factorial(len(players))
        for coalition in combinations(others, size):
            off = Off(others) - Off(coalition)
            weights[off] = weight
            weights[off | {player}] = -weight
    return weights


def _players(model: GrowingModel, slots: Sequence[Slot] | None) -> tuple[Slot, ...]:
    joined = model.joined
    if slots is None:
        return tuple(joined)
    for slot in slots:
        if slot not in joined:
            raise ValueError(
                f"slot {slot.path} is {slot.life.stage.name} with alpha {slot.life.alpha:g}: no seed takes part in the "
                "output there (an incubating seed is measured by its shadow benefit)"
            )
    if len(set(slots)) != len(slots):
        raise ValueError(f"a slot is named twice: {', '.join(slot.path for slot in slots)}")
    return tuple(slots)


def _ask(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, questions: Sequence[WeightedSum]
) -> Pending[list[Contrast]]:
    """Measure every network that the questions name, once, and answer each question."""
    networks = list(dict.fromkeys([Off(), *(off for question in questions for off in question)]))
    variants: list[Variant] = [dict.fromkeys(off, SlotMode.OFF) for off in networks[1:]]
    weights = torch.tensor(
        [[question.get(off, 0.0) for off in networks] for question in questions],
        dtype=torch.float64,
        device=model.device,
    ).reshape(len(questions), len(networks))

    def numbers_of(losses: Tensor, scores: Tensor) -> Tensor:
        gains = weights @ scores  # [questions, batch]: the answer for each example by itself
        return torch.cat([gains.sum(1), gains.square().sum(1), -(weights @ losses)])

    with preserved_rng(model.device):  # asking must not change what the training draws next
        total, count = summed(model, batches, loss, score, variants, numbers_of)

    def read(numbers: list[float]) -> list[Contrast]:
        means, n = [number / count for number in numbers], len(questions)
        return [Contrast(means[i], means[2 * n + i], standard_error(means[i], means[n + i], count)) for i in range(n)]

    return Pending(total, read)
