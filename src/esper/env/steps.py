"""What a step of N networks gives: to an agent, to people, and as columns all that the store keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from esper.engine.eager import EpochRecord
from esper.engine.epoch import EpochColumns
from esper.env.reward.reward import RewardColumns
from esper.env.reward.suspicion import Suspicion
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import World


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One environment's step, for people and logs."""

    record: EpochRecord
    reward: RewardStep
    slots: tuple[str, ...]
    """Paths, by index."""
    parameters: int
    """Of the network as it acts now: the host and the seeds that take part in its output."""
    host_parameters: int


@dataclass(frozen=True, slots=True)
class RewardStep:
    """The reward of one step of one environment, for people."""

    terms: dict[str, float]
    """By name, scaled: `TERMS`."""
    events: tuple[Suspicion, ...]
    score: float | None
    """At the end: the true score on validation, neither clamped nor scaled."""

    @property
    def total(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of N networks [N, …], or all steps of their episodes [N, T, …]."""

    epoch: EpochColumns
    """`played` says which steps happened."""
    reward: RewardColumns
    stage: Tensor
    """[…, S] int64: of each slot after the end of the epoch, when its seed may have moved on."""
    parameters: Tensor
    """[…] of the network as it acts after the epoch: `World.acting_parameters`."""

    @classmethod
    def of(cls, epoch: EpochColumns, reward: RewardColumns, world: World) -> StepFacts:
        """`world` is that after the step, which goes on to change."""
        return cls(epoch, reward, world.slots.stage.clone(), world.acting_parameters)


@dataclass(frozen=True, slots=True)
class EnvStep:
    """What a step gave. `acted` is False for environments whose episode was over before it: ignore their rows."""

    observation: Observation
    masks: ActionMasks
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: this step ended the episode
    acted: Tensor  # [N] bool
    infos: tuple[StepInfo | None, ...] = ()
    """For people, of engines that have records of each network."""
    facts: StepFacts | None = None
    """The same as columns."""
