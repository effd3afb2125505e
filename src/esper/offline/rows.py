"""Episodes made ready to learn from: split by problem, normalised once, with returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.env.spaces import ActionMasks, Observation
from esper.offline.recording import RecordingError
from esper.policy.network import FactoredRecurrentActorCritic
from esper.rollout.episodes import Episodes, map_tensors, minibatches

SPLIT_SHARES = (0.7, 0.15, 0.15)
"""Of the problems: to learn from, to decide when to stop by, to judge by."""
LARGEST = 1e15
"""Of recorded numbers: float32 must hold the square of what a policy sees and of what it earned."""
LEAST_DRAWS = 7
"""With fewer problems one of the three parts would be empty."""


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """Padded episodes [E, T, ...] as the network reads them; steps that are not `valid` mean nothing."""

    observation: Observation
    """Normalised."""
    masks: ActionMasks
    action: Tensor
    """[E, T, heads] int64: to be imitated, or to be valued."""
    weight: Tensor
    """[E, T, heads]: how much each choice of the action counts where it is imitated."""
    value: Tensor
    """[E, T]: what a critic beside the policy is to predict, in return-stds."""
    reward: Tensor
    terminated: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return self.valid.shape[0]

    def select(self, rows: Tensor) -> EpisodeRows:
        """These episodes, cut after the longest of them."""
        steps = int(self.valid[rows].sum(1).max())
        return map_tensors(self, lambda tensor: tensor[rows, :steps])

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[EpisodeRows]:
        """All of them once, about `size` at a time."""
        for chosen in minibatches(len(self), -(-len(self) // size), generator):
            yield self.select(chosen)


@dataclass(frozen=True, slots=True)
class Units:
    """What turns observations and returns into what the network reads and predicts; part of every checkpoint."""

    observations: ObservationNormaliser
    values: ValueNormaliser


def split(episodes: Episodes, seed: int) -> tuple[Episodes, Episodes, Episodes]:
    """To learn from, to stop by, to judge by. All episodes of a problem are on one side: a controller that is played
    twice, or two controllers on one problem, would otherwise give the answer away."""
    _check_sizes(episodes)
    draws = torch.unique(episodes.draw)
    if len(draws) < LEAST_DRAWS:
        raise RecordingError(
            f"{len(draws)} recorded problems are too few to learn from and to judge by: record at least {LEAST_DRAWS}"
        )
    order = draws[torch.randperm(len(draws), generator=torch.Generator().manual_seed(seed))]
    ends = [max(1, round(share * len(draws))) for share in SPLIT_SHARES[1:]]
    cuts = (len(draws) - sum(ends), len(draws) - ends[1])
    parts = (order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :])
    chosen = [torch.isin(episodes.draw, part).nonzero().flatten() for part in parts]
    return episodes.select(chosen[0]), episodes.select(chosen[1]), episodes.select(chosen[2])


def _check_sizes(episodes: Episodes) -> None:
    """Refuse numbers whose moments would be infinite: no policy with such moments can be loaded."""
    for name, tensor in episodes.tensors().items():
        if name.startswith("final.") or not tensor.is_floating_point() or not tensor.numel():
            continue
        largest = float(tensor[episodes.valid].abs().max())
        if largest > LARGEST:
            raise RecordingError(f"{name} holds {largest:.0e}, which is too large to learn from (limit {LARGEST:.0e})")


def units_of(episodes: Episodes, network: FactoredRecurrentActorCritic, discount: float) -> Units:
    """Measured on the episodes to learn from; the critic's last layer is brought into the units of the returns."""
    config = network.config
    observations = ObservationNormaliser(config.overall_features, config.slot_features)
    observations.update(episodes.observation, episodes.valid)
    values = ValueNormaliser()
    values.update(discounted_returns(episodes, discount), episodes.valid, network.value_output)
    return Units(observations, values)


def prepare_rows(
    episodes: Episodes, units: Units, discount: float, *, action: Literal["label", "action"]
) -> EpisodeRows:
    """Every choice with weight 1, and the recorded returns as values."""
    chosen = episodes.label if action == "label" else episodes.action
    return EpisodeRows(
        observation=units.observations(episodes.observation),
        masks=episodes.masks,
        action=chosen,
        weight=torch.ones(chosen.shape),
        value=units.values.to_normalised(discounted_returns(episodes, discount)),
        reward=episodes.reward,
        terminated=episodes.terminated,
        valid=episodes.valid,
    )


def discounted_returns(episodes: Episodes, discount: float) -> Tensor:
    """[E, T] of what was really done, last step first; 0 beyond an episode's end."""
    reward = episodes.reward * episodes.valid
    returns, after = torch.zeros_like(reward), torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        after = reward[:, t] + discount * after
        returns[:, t] = after
    return returns
