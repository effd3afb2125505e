"""Restrictions of training episodes: what the policy has stopped trying, some episodes make it try again.

A policy soon plants its favourite in the first epoch of every episode, and so never learns which seed is right once a
few epochs have been seen: waiting for them is worth nothing while nobody uses what they show. In a restricted episode
only a random half of the blueprints may be planted, or none before a random epoch. A restriction is a mask like any
other: it enters the distribution that the decision is drawn from, so PPO's ratios stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.actions import Op
from esper.env.spaces import ActionMasks

LATEST = 6
"""Epochs that planting may be put off by, at most."""
_OTHER = 0x5EED
"""What is drawn from the policy follows from the same seed, and must not be the same numbers."""


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Of N episodes, for as long as they last."""

    earliest: Tensor
    """[N] int64: nothing is planted before so many epochs."""
    blueprints: Tensor
    """[N, B] bool: what may be planted."""

    @classmethod
    def drawn(cls, masks: ActionMasks, share: float, seed: int) -> Restrictions:
        """For the episodes that begin under these masks: each is put off with probability `share`, and has half of the
        blueprints with probability `share`. The device has no part in what is drawn."""
        rng = torch.Generator().manual_seed(seed ^ _OTHER)
        rows, blueprints = masks.blueprint.shape[0], masks.blueprint.shape[-1]
        later, fewer = torch.rand((2, rows), generator=rng) < share
        epoch = torch.randint(1, LATEST + 1, (rows,), generator=rng)
        half = torch.rand((rows, blueprints), generator=rng) < 0.5
        device = masks.op.device
        return cls((epoch * later).to(device), (half | ~fewer[:, None]).to(device))

    def applied(self, masks: ActionMasks, epoch: int) -> ActionMasks:
        """What is left of these masks after so many epochs."""
        blueprint = masks.blueprint & self.blueprints[:, None]
        slot, op = masks.slot.clone(), masks.op.clone()
        slot[:, Op.GERMINATE] &= blueprint.any(-1) & (self.earliest <= epoch)[:, None]
        op[:, Op.GERMINATE] = slot[:, Op.GERMINATE].any(-1)
        return replace(masks, op=op, slot=slot, blueprint=blueprint)
