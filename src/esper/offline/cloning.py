"""Behaviour cloning: the agent's own network learns to say what a recorded controller said.

Choices are balanced by class: a controller waits nine times of ten, and a policy that always waits would look good. The
critic learns the returns of the recorded episodes beside the policy, so that PPO can start from the result with values
that mean something. Accuracy is reported on problems that neither taught nor decided anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.config import SHARE, check_number
from esper.offline.agreement import agreement_with_teacher, choices_given
from esper.offline.fitting import FitConfig, Learned, OnEpoch, imitate, mean_where, new_network, silent
from esper.offline.rows import EpisodeRows, prepare_rows, split, units_of
from esper.policy.distribution import OP
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.rollout.episodes import Episodes


@dataclass(frozen=True, slots=True)
class CloneConfig(FitConfig):
    """How to clone."""

    balance: float = 0.2
    """0 counts every step alike, 1 every choice of a head alike however rare, and between is between."""

    def __post_init__(self) -> None:
        FitConfig.__post_init__(self)
        check_number("balance", self.balance, SHARE)


def clone(
    episodes: Episodes, network_config: NetworkConfig, config: CloneConfig, on_epoch: OnEpoch = silent
) -> Learned:
    """Imitate the controllers of these episodes: what they decided, not what exploration noise did instead."""
    parts = split(episodes, config.seed)
    network = new_network(network_config, config.seed)
    units = units_of(parts[0], network, config.discount)
    rows, stop_rows, judge_rows = (prepare_rows(part, units, config.discount, action="label") for part in parts)
    weights = [class_weights(counts, config.balance) for counts in counted(rows, network.uses)]
    stop_rows = balanced(stop_rows, weights)
    imitate(network, balanced(rows, weights), lambda: wrong(network, stop_rows), config, on_epoch)
    return Learned(network, units, agreement_with_teacher(network, judge_rows))


def wrong(network: FactoredRecurrentActorCritic, rows: EpisodeRows) -> Tensor:
    """Weighted share of the choices that are not the teacher's, summed over heads: what a controller is judged by.

    The cross-entropy is no good guide: one sure mistake in a rare head outweighs a hundred decisions that got better.
    """
    policy = network(rows.observation, rows.masks, network.initial_state(len(rows))).policy
    used = policy.relevant(rows.action) & rows.valid[..., None]
    error = (choices_given(policy, rows.action) != rows.action) * rows.weight
    return torch.stack([mean_where(error[..., h], used[..., h]) for h in range(used.shape[-1])]).sum()


def balanced(rows: EpisodeRows, weights: list[Tensor]) -> EpisodeRows:
    """The rows with each choice weighted by its class; `weights` has a tensor [classes] per head."""
    return replace(rows, weight=torch.stack([w[rows.action[..., h]] for h, w in enumerate(weights)], dim=-1))


def counted(rows: EpisodeRows, uses: Tensor) -> list[Tensor]:
    """Per head, how often each choice was made where the head mattered, [classes]."""
    used = uses[rows.action[..., OP]] & rows.valid[..., None]
    classes = (rows.masks.slot.shape[-1], rows.masks.blueprint.shape[-1], rows.masks.blend.shape[-1], len(uses))
    return [torch.bincount(rows.action[..., h][used[..., h]], minlength=k) for h, k in enumerate(classes)]


def class_weights(counts: Tensor, balance: float) -> Tensor:
    """A weight per choice, [classes], from how often each was made: (1 / share)^balance, scaled so that the mean over
    the steps is 1. Choices that never occurred get 0; with `balance` 1 those that did weigh the same in sum."""
    share = counts / counts.sum().clamp(min=1)
    raw = torch.where(counts > 0, share.clamp(min=1e-12) ** -balance, torch.zeros_like(share))
    mean = (raw * share).sum()
    return raw / mean if bool(mean > 0) else raw
