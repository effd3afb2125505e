"""Running statistics: of observations (what the policy sees) and of returns (what the critic predicts).

Not thread-safe and not meant to be: one agent owns a normaliser and calls it from one thread. Moments are kept in
float64, whatever the data.

An observation normaliser is frozen during a rollout: the agent takes in a rollout's observations when it learns from
them, after it has normalised them as the policy saw them. The next rollout uses one set of statistics.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.env.spaces import Observation

LEAST_STD = 1e-4
"""A feature that never varies is centred, not blown up."""
LEAST_RETURN_STD = 1e-2
"""Returns that hardly vary (in reward units: percentage points) must not be magnified into targets of unit size."""
CLIP = 10.0
"""Normalised features are cut here: one wild step must not saturate the LSTM."""


class RunningMoments:
    """Mean and variance per feature, from batches (Chan's form of Welford), or exponentially forgetting.

    Merging takes the moments of the mixture: the batch weighs as many rows as it has, or, with `momentum` m, 1 − m (the
    first batch: 1). The distance between the two means is part of the variance in both modes.
    """

    def __init__(
        self,
        features: int,
        momentum: float | None = None,
        device: torch.device | str = "cpu",
        least_std: float = LEAST_STD,
    ) -> None:
        if momentum is not None and not 0.0 < momentum < 1.0:
            raise ValueError(f"momentum must lie between 0 and 1, not {momentum}")
        self.momentum = momentum
        self.least_std = least_std
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(features, dtype=torch.float64, device=device)
        self.variance = torch.ones(features, dtype=torch.float64, device=device)

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt().clamp(min=self.least_std)

    def merge(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Take in another set of moments. Branch-free, so no device synchronisation."""
        total = self.count + count
        share = count / total.clamp(min=1.0)
        if self.momentum is not None:
            share = torch.where(self.count > 0, 1.0 - self.momentum, 1.0) * (count > 0)
        shift = mean - self.mean
        between = shift * shift * share * (1.0 - share)
        self.variance = self.variance * (1.0 - share) + variance * share + between
        self.mean = self.mean + shift * share
        self.count = total

    def update(self, batch: Tensor, where: Tensor | None = None) -> None:
        """Take in rows [..., features]; `where` [...] bool leaves some out."""
        self.merge(*moments(batch, where))

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.count = state["count"].to(self.count)
        self.mean = state["mean"].to(self.mean).clone()
        self.variance = state["variance"].to(self.variance)

    def to(self, device: torch.device) -> None:
        self.count, self.mean, self.variance = (t.to(device) for t in (self.count, self.mean, self.variance))


def moments(batch: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Count [], mean and population variance [features] of the rows of [..., features], in float64."""
    rows = batch.detach().reshape(-1, batch.shape[-1]).double()
    weight = torch.ones_like(rows[:, 0]) if where is None else where.reshape(-1).double()
    count = weight.sum()
    mean = (rows * weight[:, None]).sum(0) / count.clamp(min=1.0)
    variance = ((rows - mean).square() * weight[:, None]).sum(0) / count.clamp(min=1.0)
    return count, mean, variance


class ObservationNormaliser:
    """Standardises `overall` and `slots`, feature by feature; slots share statistics because they share weights."""

    def __init__(self, overall: int, slots: int, device: torch.device | str = "cpu") -> None:
        widths = {"overall": overall, "slots": slots}
        self.frozen = {name: RunningMoments(width, device=device) for name, width in widths.items()}
        self.fixed = False
        """Keep the statistics as they are, whatever is seen: for an agent that started from another's policy."""

    def __call__(self, observation: Observation) -> Observation:
        return Observation(
            overall=self._apply("overall", observation.overall),
            slots=self._apply("slots", observation.slots),
            blueprints=observation.blueprints,
            costs=observation.costs,
            present=observation.present,
        )

    def _apply(self, name: str, x: Tensor) -> Tensor:
        moments = self.frozen[name]
        return ((x - moments.mean.float()) / moments.std.float()).clamp(-CLIP, CLIP)

    def update(self, observation: Observation, valid: Tensor) -> None:
        """Take in raw observations; padding and steps that are not valid are left out."""
        if self.fixed:
            return
        self.frozen["overall"].update(observation.overall, valid)
        if observation.present.numel():
            self.frozen["slots"].update(observation.slots, observation.present & valid[..., None])

    def state(self) -> dict[str, Tensor]:
        return {f"{name}/{key}": t for name, kept in self.frozen.items() for key, t in kept.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, kept in self.frozen.items():
            kept.load({key: state[f"{name}/{key}"] for key in ("count", "mean", "variance")})

    def to(self, device: torch.device) -> None:
        for kept in self.frozen.values():
            kept.to(device)


class ValueNormaliser:
    """The one place where returns and the critic's output change units (PopArt).

    The critic predicts standardised returns. When the statistics move, the critic's last layer is rescaled so that the
    values it stands for stay where they were: rollout values, GAE and the clipping reference never mix two scales.
    """

    def __init__(self, momentum: float | None = None, device: torch.device | str = "cpu") -> None:
        self.moments = RunningMoments(1, momentum, device, least_std=LEAST_RETURN_STD)
        self._cached: tuple[Tensor, Tensor, Tensor] | None = None

    def to_returns(self, normalised: Tensor) -> Tensor:
        mean, std = self._units()
        return normalised * std + mean

    def to_normalised(self, returns: Tensor) -> Tensor:
        mean, std = self._units()
        return (returns - mean) / std

    def _units(self) -> tuple[Tensor, Tensor]:
        """Mean and std in float32, computed once per change: they are asked for at every step of a rollout."""
        if self._cached is None or self._cached[0] is not self.moments.mean:
            self._cached = (self.moments.mean, self.moments.mean.float(), self.moments.std.float())
        return self._cached[1], self._cached[2]

    @torch.no_grad()
    def update(self, returns: Tensor, valid: Tensor, last: nn.Linear) -> None:
        """Take in a rollout's returns [N, T] and rescale the critic's last layer to match."""
        mean, std = self.moments.mean, self.moments.std
        self.moments.update(returns[..., None], valid)
        new_mean, new_std = self.moments.mean, self.moments.std
        last.weight.copy_(last.weight.double() * (std / new_std))
        last.bias.copy_((last.bias.double() * std + mean - new_mean) / new_std)
