"""What several seeds contribute together: all of them off, and each one's share (Shapley value).

Every answer is a weighted sum of the scores of networks with some seeds left out, each of them measured on the same
examples. Per example, the standard error is that of the paired difference; of a score of the whole set it is a
jackknife. Leaving out one seed is part of every evaluation (`measure.evaluate`). The questions here cost more:
`esper.grow` answers them once, at the end of a run (`seed_values`).

A seed whose alpha is 0 takes no part in the output: leaving it out changes nothing, and it is measured by its shadow
benefit. It is refused here, so that a 0 is never mistaken for a measurement (R138).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from esper.engine.measure import (
    BLOCKS,
    Loss,
    Pending,
    Score,
    SetScore,
    Variant,
    jackknife_error,
    scores_of_set,
    standard_error,
    summed,
)
from esper.growth.model import GrowingModel
from esper.growth.randomness import preserved_rng
from esper.growth.slot import Slot, SlotMode
from esper.lifecycle import Contrast
from esper.tasks.feed import Batch

MOST_EXACT = 6
"""Exact Shapley values of k seeds need 2^k networks: 64 of six. Of more seeds, some orders are sampled."""
SAMPLED_ORDERS = 8
"""Sampled orders need at most 8 (k - 1) + 2 networks: 50 of seven seeds. Half of them are the other half reversed."""
NETWORKS_PER_PASS = 8
"""Networks in one pass over the data for a score of the whole set, which keeps the outputs of each."""

Off = frozenset[Slot]
"""A network, named by the seeds that are left out of it."""
WeightedSum = Mapping[Off, float]
"""A question: how much each network counts."""
Batches = Iterable[Batch] | Callable[[], Iterable[Batch]]
"""For a score of the whole set and many networks, something that can be read more than once."""


@dataclass(frozen=True, slots=True)
class SeedValue:
    """What one seed contributes to a network, in points of the metric."""

    contribution: Contrast
    """The network as it is minus the network without this seed (leave-one-out)."""
    shapley: Contrast
    """The gain by this seed, averaged over the orders in which the seeds could have been added."""


def seed_values(
    model: GrowingModel, batches: Batches, loss: Loss, score: Score, slots: Sequence[Slot] | None = None
) -> Pending[dict[int, SeedValue]]:
    """By slot, for these seeds (default: all that take part). The Shapley values sum to `all_off` of the same seeds.

    Seeds that are not among them stay as they are.
    """
    players = _players(model, slots)
    orders = orders_of(players)
    questions = [{Off(): 1.0, Off({player}): -1.0} for player in players]
    questions += [shapley_weights(orders, player) for player in players]
    pending = _ask(model, batches, loss, score, questions)

    def read(numbers: list[float]) -> dict[int, SeedValue]:
        answers = pending.read(numbers)
        pairs = zip(players, answers, answers[len(players) :], strict=False)
        return {player.index: SeedValue(contribution, share) for player, contribution, share in pairs}

    return Pending(pending.numbers, read)


def all_off(
    model: GrowingModel, batches: Batches, loss: Loss, score: Score, slots: Sequence[Slot] | None = None
) -> Pending[Contrast]:
    """The network as it is against the network without any of these seeds (default: all that take part)."""
    players = _players(model, slots)
    pending = _ask(model, batches, loss, score, [{Off(): 1.0, Off(players): -1.0} if players else {}])
    return Pending(pending.numbers, lambda numbers: pending.read(numbers)[0])


def orders_of(players: Sequence[Slot]) -> list[tuple[Slot, ...]]:
    """All orders of few players; of many, the same sample of orders every time."""
    if len(players) <= MOST_EXACT:
        return list(permutations(players))
    rng = random.Random(0)
    sampled = [tuple(rng.sample(players, len(players))) for _ in range(SAMPLED_ORDERS // 2)]
    return sampled + [order[::-1] for order in sampled]


def shapley_weights(orders: Sequence[Sequence[Slot]], player: Slot) -> dict[Off, float]:
    """The mean over orders of v(the player and those before it) - v(those before it)."""
    counts: Counter[Off] = Counter()
    for order in orders:
        after = Off(order[order.index(player) + 1 :])
        counts[after] += 1
        counts[after | {player}] -= 1
    return {off: count / len(orders) for off, count in counts.items()}


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
    model: GrowingModel, batches: Batches, loss: Loss, score: Score, questions: Sequence[WeightedSum]
) -> Pending[list[Contrast]]:
    """Measure every network that the questions name, once, and answer each question."""
    networks = list(dict.fromkeys([Off(), *(off for question in questions for off in question)]))
    variants: list[Variant] = [dict.fromkeys(off, SlotMode.OFF) for off in networks[1:]]
    weights = torch.tensor(
        [[question.get(off, 0.0) for off in networks] for question in questions],
        dtype=torch.float64,
        device=model.device,
    ).reshape(len(questions), len(networks))
    read_batches = batches if callable(batches) else lambda: batches
    with preserved_rng(model.device):  # measuring must not change what the training draws next
        if isinstance(score, SetScore):
            return _ask_of_set(model, read_batches, loss, score, variants, weights)

        def numbers_of(losses: Tensor, scores: Tensor) -> Tensor:
            gains = weights @ scores  # [questions, batch]: the answer for each example by itself
            return torch.cat([gains.sum(1), gains.square().sum(1), -(weights @ losses)])

        total, count = summed(model, read_batches(), loss, score, variants, numbers_of)

    def read(numbers: list[float]) -> list[Contrast]:
        means, n = [number / count for number in numbers], len(questions)
        return [Contrast(means[i], means[2 * n + i], standard_error(means[i], means[n + i], count)) for i in range(n)]

    return Pending(total, read)


def _ask_of_set(
    model: GrowingModel,
    read_batches: Callable[[], Iterable[Batch]],
    loss: Loss,
    score: SetScore,
    variants: Sequence[Variant],
    weights: Tensor,
) -> Pending[list[Contrast]]:
    """The same for a score of the whole set."""
    losses, scores = scores_of_set(model, read_batches(), loss, score, variants[:NETWORKS_PER_PASS], BLOCKS)
    for start in range(NETWORKS_PER_PASS, len(variants), NETWORKS_PER_PASS):
        more = scores_of_set(model, read_batches(), loss, score, variants[start : start + NETWORKS_PER_PASS], BLOCKS)
        losses, scores = torch.cat([losses, more[0][1:]]), scores + more[1][1:]
    gains = (weights.cpu() @ torch.tensor(scores, dtype=torch.float64)).tolist()  # [questions][1 + blocks]

    def read(saved: list[float]) -> list[Contrast]:
        return [Contrast(gain[0], saved[i], jackknife_error(gain[1:])) for i, gain in enumerate(gains)]

    return Pending(-(weights @ losses), read)
