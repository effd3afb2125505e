"""How different the recorded actions are in similar states: what offline learning can improve on.

Where everybody always does the same, the data say nothing about anything else. States are grouped by k-means on what a
policy sees; for each group, the effective number of different decisions is exp(entropy): 1 is always the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from esper.actions import HEAD_NAMES
from esper.policy.distribution import GROWTH_ACTIONS, OP
from esper.rollout.episodes import Episodes

CLUSTERS = 8


@dataclass(frozen=True, slots=True)
class Cluster:
    """A group of similar states."""

    steps: int
    progress: float
    """Mean of how far into their episodes they are, from 0 to 1."""
    ops: float
    """Effective number of different operations that were done."""
    decisions: float
    """The same of whole decisions."""
    explored: float
    """Share of the steps on which exploration noise overruled the controller."""


def diversity(episodes: Episodes, clusters: int = CLUSTERS) -> list[Cluster]:
    """The groups, by how far into an episode they are."""
    valid = episodes.valid
    states = _states(episodes)[valid]
    group = torch.from_numpy(KMeans(min(clusters, len(states)), n_init=1, random_state=0).fit_predict(states.numpy()))
    action, label = (_used(a[valid]) for a in (episodes.action, episodes.label))
    when = (torch.arange(valid.shape[1]) / episodes.lengths[:, None])[valid]
    found = []
    for number in torch.unique(group).tolist():
        of = group == number
        found.append(
            Cluster(
                steps=int(of.sum()),
                progress=float(when[of].mean()),
                ops=effective_number(action[of][:, [OP]]),
                decisions=effective_number(action[of]),
                explored=float((action[of] != label[of]).any(1).float().mean()),
            )
        )
    return sorted(found, key=lambda cluster: cluster.progress)


def effective_number(rows: Tensor) -> float:
    """exp(entropy) of the different rows of [n, k]."""
    counts = torch.unique(rows, dim=0, return_counts=True)[1].double()
    share = counts / counts.sum()
    return float((-(share * share.log()).sum()).exp())


def _states(episodes: Episodes) -> Tensor:
    """What a policy sees, slots pooled, [E, T, features]."""
    seen = episodes.observation
    if not seen.slots.shape[-1]:
        return seen.overall
    present = seen.present[..., None]
    pooled = (seen.slots * present).sum(-2) / present.sum(-2).clamp(min=1)
    return torch.cat((seen.overall, pooled), dim=-1)


def _used(action: Tensor) -> Tensor:
    """Choices that the operation does not use are all the same choice."""
    assert action.shape[-1] == len(HEAD_NAMES)
    return action * GROWTH_ACTIONS.table()[action[..., OP]]
