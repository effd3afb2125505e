"""What a step of N networks did and showed, as columns: all that the store keeps of it and people read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from esper.engine.epoch import EpochColumns
from esper.env.reward.reward import RewardColumns
from esper.env.world import World


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
