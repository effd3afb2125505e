"""Generalised advantage estimation as pure functions of tensors [N, T].

    δ_t = r_t + γ·(1 − terminated_t)·V'_t − V_t          V'_t: value of the state that the action led to
    A_t = δ_t + γλ·(1 − done_t)·A_{t+1}

Two flags, not one. `terminated` removes the bootstrap: nothing follows. `done` (terminated, or cut short) cuts the
recursion: what follows in the row is another episode. A truncated step therefore bootstraps from V' (the post-action
state, not the next episode's first) and passes nothing back from its successor. Steps that are not `valid` are as if
they were not there: they get advantage 0 and hand the recursion through unchanged. Rows never touch each other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    valid: Tensor,
    discount: float,
    decay: float,
) -> Tensor:
    """In log2(T) passes, never compiled: Python's control flow over so few gains nothing. [N, T]

    Each step is the map a ↦ δ + c·a. Composing the map of step t with that of step t + 2^k doubles how far it reaches;
    an invalid step is the identity (δ = 0, c = 1).
    """
    zero = torch.zeros_like(reward)
    bootstrap = torch.where(terminated, zero, next_value)
    delta = torch.where(valid, reward + discount * bootstrap - value, zero)
    carry = torch.where(valid, torch.where(done, zero, zero + discount * decay), zero + 1.0)
    reach, steps = 1, reward.shape[1]
    while reach < steps:
        further, further_carry = delta[:, reach:], carry[:, reach:]
        near = delta[:, :-reach] + carry[:, :-reach] * further
        near_carry = carry[:, :-reach] * further_carry
        delta = torch.cat((near, delta[:, -reach:]), dim=1)
        carry = torch.cat((near_carry, carry[:, -reach:]), dim=1)
        reach *= 2
    return torch.where(valid, delta, zero)


def against_siblings(advantage: Tensor, valid: Tensor, siblings: int) -> Tensor:
    """Each row's advantage less the mean of its siblings' at the same step: rows come in groups of so many that play
    the same problem. [N, T]

    What the critic misses of a problem is the same for all rows that play it, and cancels. A row's own action has
    no part in what is subtracted, so the gradient's expectation does not change. Where no sibling is left, nothing is.
    """
    if siblings == 1:
        return advantage
    groups, mask = (tensor.reshape(-1, siblings, tensor.shape[1]) for tensor in (advantage, valid))
    kept = torch.where(mask, groups, torch.zeros_like(groups))
    others = mask.sum(1, keepdim=True) - mask.to(torch.int64)
    baseline = (kept.sum(1, keepdim=True) - kept) / others.clamp(min=1)
    return torch.where(mask, groups - baseline, torch.zeros_like(groups)).flatten(0, 1)


def normalise_advantages(advantage: Tensor, valid: Tensor, mean: Tensor, std: Tensor, least_std: float) -> Tensor:
    """Once, over the whole rollout and before any head's mask. The floor on the std keeps a rollout in which nothing
    happened from turning rounding noise into unit-variance advantages. [N, T]"""
    return torch.where(valid, (advantage - mean) / std.clamp(min=least_std), torch.zeros_like(advantage))
