"""StackedEnv: thousands of growing networks of a generated family as one vectorised decision process, all in columns.

It is `GrowthEnv` on the stacked engine: the same problems, rules, observations and rewards, on the device of the
networks, without a Python object per network and step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, Action, Op
from esper.engine.precision import Precision
from esper.engine.stacked.engine import StackedEngine
from esper.env.observation import encode, legal_actions, to_tensor
from esper.env.rent import RENT_RATE
from esper.env.rents import Rent, rents_of
from esper.env.reward.config import RewardConfig
from esper.env.reward.reward import Reward
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import EnvStep, StepFacts
from esper.env.world import World
from esper.lifecycle import Rules
from esper.tasks.family import Family
from esper.tasks.stacking import stacked_problems
from esper.telemetry.profiler import PhaseTimers


class StackedEnv:
    """A batch of episodes. `reset` draws problems by their ids, `step` advances all of them by one epoch."""

    def __init__(
        self,
        family: Family,
        size: int,
        *,
        reward: RewardConfig | None = None,
        rules: Rules | None = None,
        held_out: bool = False,
        slots: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: Precision = Precision.FP32,
        rent: Rent = RENT_RATE,
    ) -> None:
        if size < 1:
            raise ValueError(f"an environment needs at least one network, not {size}")
        self.family, self.size, self.held_out, self.slots = family, size, held_out, slots
        self.reward, self.rules, self.rent = reward or RewardConfig(), rules or Rules(), rent
        self.device, self.dtype, self.precision = torch.device(device), dtype, precision
        self._phase = PhaseTimers()
        self.seconds = self._phase.seconds
        """Wall time by phase, since construction."""
        self._engine: StackedEngine | None = None

    def reset(self, draws: Sequence[int], *, held_out: bool | None = None) -> tuple[Observation, ActionMasks]:
        """Begin new episodes, one per draw id; the same id is the same problem, data, host and minibatches."""
        self.held_out = self.held_out if held_out is None else held_out
        if len(draws) != self.size:
            raise ValueError(f"this environment has {self.size} networks; reset was given {len(draws)} draw ids")
        self._engine = None  # old and new networks never share the memory
        with self._phase("reset"):
            groups = stacked_problems(self.family, draws, held_out=self.held_out, device=self.device)
            engine = StackedEngine(
                groups, rules=self.rules, width=self.slots, dtype=self.dtype, bf16=self.precision is Precision.BF16
            )
            engine.begin()
            self.world = World.start(
                engine.columns,
                layout=engine.layout,
                channels=engine.channels,
                position=engine.position,
                costs=engine.costs,
                host_parameters=engine.host_parameters,
                budget=engine.budget,
                max_seeds=engine.max_seeds,
                horizon=engine.horizon,
                rent=rents_of(self.rent, draws, held_out=self.held_out),
            )
            self.kinds = [""] * engine.networks
            for places, problems in groups:
                for place, facts in zip(places, problems.facts, strict=False):
                    self.kinds[place] = str(facts.get("kind", ""))
            self._reward = Reward(self.reward, self.world, engine.classes.tolist())
            self._left = int(engine.horizon.max())
            self._engine = engine
            self._shown = encode(self.world)
            return self._shown

    def step(self, actions: Tensor | Sequence[Action]) -> EnvStep:
        """One epoch for every network whose episode goes on, after its action: a tensor [N, heads] or records."""
        if self._engine is None:
            raise RuntimeError("call reset before step")
        chosen = (actions if isinstance(actions, Tensor) else to_tensor(actions)).to(self.device)
        before, active = self.world.snapshot(), ~self.world.over
        engine, self._engine = self._engine, None  # if it fails, only a reset can follow
        with self._phase("engine"):
            epoch = engine.step(chosen, allowed(chosen, legal_actions(self.world)), active)
        self._engine = engine
        with self._phase("reward"):
            self.world.record(epoch)
            ended = epoch.played & ((self.world.epoch >= self.world.horizon) | epoch.undone)
            rewards = self._reward.step(before, self.world, epoch, ended)
            self.world.end(ended)
        with self._phase("observe"):
            self._shown = encode(self.world)
        self._left -= 1
        facts = StepFacts.of(epoch, rewards, self.world)
        return EnvStep(*self._shown, rewards.total.float(), ended, active, facts=facts)

    @property
    def situations(self) -> World:
        """What a controller reads; valid until the next step."""
        return self.world

    @property
    def over(self) -> bool:
        return self._left <= 0 or bool(self.world.over.all())

    @property
    def engine(self) -> StackedEngine:
        """The networks as the episodes have left them."""
        if self._engine is None:
            raise RuntimeError("there are no networks: call reset")
        return self._engine


def allowed(actions: Tensor, masks: ActionMasks) -> Tensor:
    """[N] bool: the action [N, heads] is one that the masks allow. What an operation does not use is not looked at."""
    slot, blueprint, blend, op = (actions[:, HEAD_NAMES.index(name)] for name in ("slot", "blueprint", "blend", "op"))
    row, width = torch.arange(len(actions), device=actions.device), masks.blueprint.shape[1]
    at = slot.clamp(0, max(0, width - 1))
    grows = masks.blueprint[row, at, blueprint.clamp(min=0)] & masks.blend[row, at, blend] & (blueprint >= 0)
    here = (slot >= 0) & (slot < width) & masks.slot[row, op, at] & torch.where(op == Op.GERMINATE, grows, True)
    return masks.op[row, op] & ((op == Op.WAIT) | here)
