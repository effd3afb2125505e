"""The definition of generalised advantage estimation: the obvious loop, which `esper.agent.gae` must agree with."""

from __future__ import annotations

import torch
from torch import Tensor


def advantages_by_loop(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    valid: Tensor,
    discount: float,
    decay: float,
) -> Tensor:
    """The definition, last step first. [N, T]"""
    advantage = torch.zeros_like(reward)
    after = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        bootstrap = torch.where(terminated[:, t], torch.zeros_like(after), next_value[:, t])
        delta = reward[:, t] + discount * bootstrap - value[:, t]
        here = delta + discount * decay * torch.where(done[:, t], torch.zeros_like(after), after)
        advantage[:, t] = torch.where(valid[:, t], here, advantage[:, t])
        after = torch.where(valid[:, t], here, after)
    return advantage
