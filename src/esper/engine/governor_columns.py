"""The governor's judgement of N networks at once, as columns on any device; `engine.governor` is the reference.

Here a fault ends the episode, so there are no snapshots and nothing is restored: a row that had a fault is not judged
again. The order of the rules is that of `Governor.check`.

After every epoch: check -> codes of faults, then keep for the rows that had none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.engine.governor import (
    DIVERGENCE_CERTAIN,
    DIVERGENCE_FACTOR,
    DIVERGENCE_KEPT,
    DIVERGENCE_SPREAD,
    DIVERGENCE_START,
    FAULTS,
    LEARNT_LOSS,
    LEARNT_POINTS,
    LOST_SHARE,
    TRAINING_RISE,
    WINDOW,
    Fault,
)

_NON_FINITE, _RETURN_TO_CHANCE, _DIVERGENCE = (
    FAULTS.index(fault) for fault in (Fault.NON_FINITE, Fault.RETURN_TO_CHANCE, Fault.DIVERGENCE)
)


class GovernorColumns:
    """Watches N networks. Columns are [N] unless noted; numbers are float64."""

    def __init__(self, chance_accuracy: Tensor, chance_loss: Tensor) -> None:
        """What untrained networks score; where that loss is not finite, the first healthy epoch stands for it."""
        known = chance_loss.isfinite()
        self._chance_accuracy = torch.where(known, chance_accuracy, math.nan)
        self._chance_loss = torch.where(known, chance_loss, math.nan)
        networks, device = chance_loss.shape[0], chance_loss.device
        empty = torch.full((networks, WINDOW), math.inf, dtype=torch.float64, device=device)
        self._loss, self._accuracy, self._training = empty, empty, empty
        """[N, window] healthy epochs since the network was last reduced; infinity is an empty place."""
        self._count = torch.zeros(networks, dtype=torch.int64, device=device)
        """Epochs that were kept since then; the next one is written at this place, modulo the window."""
        self._alpha = torch.zeros((networks, 0), dtype=torch.float64, device=device)
        self._seed = torch.zeros((networks, 0), dtype=torch.int64, device=device)
        """[N, S] how much of which seed was part of the network that was judged last."""

    # -- judging ------------------------------------------------------------------------------------------------------

    def check(
        self, train_loss: Tensor, finite: Tensor, loss: Tensor, accuracy: Tensor, alpha: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Index into `FAULTS`, -1 where all is well; the loss that was judged and its limit, NaN where all is well.

        `finite`: every weight is a number. `alpha`, `seed` [N, S]: strength and number of each seed in this epoch.
        Rows that did not play get a verdict as well: it means nothing.
        """
        broken = ~(train_loss.isfinite() & loss.isfinite() & finite)
        self._notice_reduction(alpha, seed, ~broken)
        filled = self._count > 0
        training = torch.where(filled, self._median(self._training), math.inf)
        rose = train_loss > training + TRAINING_RISE * training.abs()
        level_loss = torch.where(filled, self._median(self._loss), self._chance_loss)
        level_accuracy = torch.where(filled, self._median(self._accuracy), self._chance_accuracy)
        back, back_limit = self._back_at_chance(loss, accuracy, level_loss, level_accuracy)
        diverged, limit = self._diverged(loss, accuracy, level_loss, level_accuracy, rose)
        back = back & rose
        fault = torch.where(diverged, _DIVERGENCE, torch.full_like(self._count, -1))
        fault = torch.where(broken, _NON_FINITE, torch.where(back, _RETURN_TO_CHANCE, fault))
        seen = torch.where(train_loss.isfinite(), loss, train_loss)
        limit = torch.where(broken, math.inf, torch.where(back, back_limit, limit))
        return fault, torch.where(fault >= 0, seen, math.nan), torch.where(fault >= 0, limit, math.nan)

    def _diverged(
        self, loss: Tensor, accuracy: Tensor, level_loss: Tensor, level_accuracy: Tensor, rose: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Whether the loss is far above its level, and the limit; a level that is NaN, of nothing known, never is."""
        start = self._chance_loss
        deviation = self._median((self._loss - level_loss[:, None]).abs())  # empty places stay infinite
        spread = torch.where(self._count > 0, 1.4826 * deviation, 0.0)
        # Distances instead of products, for losses that may be negative.
        margin = torch.maximum((DIVERGENCE_FACTOR - 1.0) * level_loss.abs(), DIVERGENCE_SPREAD * spread)
        limit = torch.maximum(level_loss + margin, start + (DIVERGENCE_START - 1.0) * start.abs())
        points, kept = level_accuracy - self._chance_accuracy, accuracy - self._chance_accuracy
        unclear = ~rose | (kept >= DIVERGENCE_KEPT * points.clamp(min=LEARNT_POINTS))
        limit = torch.where(unclear, level_loss + DIVERGENCE_CERTAIN * (limit - level_loss), limit)
        return (loss > level_loss) & (loss > limit), limit  # no limit lies below the level

    def _back_at_chance(
        self, loss: Tensor, accuracy: Tensor, level_loss: Tensor, level_accuracy: Tensor
    ) -> tuple[Tensor, Tensor]:
        points, saved = level_accuracy - self._chance_accuracy, self._chance_loss - level_loss
        limit = level_loss + LOST_SHARE * saved
        learnt = (points >= LEARNT_POINTS) & (saved >= LEARNT_LOSS * self._chance_loss.abs())
        lost = (level_accuracy - accuracy >= LOST_SHARE * points) & (loss >= limit)
        return learnt & lost, limit

    def _notice_reduction(self, alpha: Tensor, seed: Tensor, where: Tensor) -> None:
        """Removing a seed on purpose may lower the accuracy at once. That was decided, so it is no fault."""
        if self._alpha.shape != alpha.shape:
            self._alpha, self._seed = torch.zeros_like(alpha), torch.zeros_like(seed)
        left = torch.where(seed == self._seed, alpha, 0.0)
        reduced = where & (left < self._alpha).any(1)
        self._count = torch.where(reduced, 0, self._count)
        self._loss, self._accuracy, self._training = (
            torch.where(reduced[:, None], math.inf, kept) for kept in (self._loss, self._accuracy, self._training)
        )
        self._alpha = torch.where(where[:, None], alpha, self._alpha)
        self._seed = torch.where(where[:, None], seed, self._seed)

    def _median(self, kept: Tensor) -> Tensor:
        """[N] of the places of [N, window] that are filled; of none, infinity."""
        count = self._count.clamp(min=1, max=kept.shape[1])[:, None]
        ordered = kept.sort(1).values
        low, high = (ordered.gather(1, place).squeeze(1) for place in ((count - 1) // 2, count // 2))
        return torch.where(low == high, low, (low + high) / 2)

    # -- the window of healthy epochs ---------------------------------------------------------------------------------

    def keep(self, healthy: Tensor, train_loss: Tensor, loss: Tensor, accuracy: Tensor) -> None:
        """Where the epoch was `healthy` (bool), its level is the new normal."""
        first = healthy & self._chance_loss.isnan()
        self._chance_accuracy = torch.where(first, accuracy, self._chance_accuracy)
        self._chance_loss = torch.where(first, loss, self._chance_loss)
        places = torch.arange(WINDOW, device=loss.device)
        here = healthy[:, None] & (places == (self._count % WINDOW)[:, None])  # [N, window]
        self._loss = torch.where(here, loss[:, None], self._loss)
        self._accuracy = torch.where(here, accuracy[:, None], self._accuracy)
        self._training = torch.where(here, train_loss[:, None], self._training)
        self._count = self._count + healthy
