"""GrowthEnv for everyone else's agents, as a Gymnasium environment and as a `VectorEnv`.

    import gymnasium, esper.env.gym
    env = gymnasium.make("esper/Growth-v0", task="mnist1d", discount=0.99)  # the agent's own γ

Gymnasium has no word for masks that depend on each other (of slots on the operation, of blueprints on the slot). So
the factored action becomes one `Discrete` number over all combinations, and its mask is exact: an agent that respects
`action_masks()` (the name that sb3-contrib looks for; also `info["action_mask"]`) never chooses the impossible.

    0                                    WAIT
    1 + (slot · B + blueprint) · K + blend   GERMINATE   for S slots, B blueprints, K blends
    then one number per slot             PRUNE
    then one number per slot             FOSSILIZE

The observation is one vector: the run's fields, then per slot its fields, its blueprint (one-hot) and the costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.actions import BLENDS, WAIT, Action, Op
from esper.env.growth_env import GrowthEnv
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SLOT_FIELDS
from esper.env.reward.config import DISCOUNT, RewardConfig, RewardMode
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import EnvStep, StepInfo
from esper.growth.blueprints import blueprint_names
from esper.tasks.family import get_family

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError("esper.env.gym needs gymnasium: pip install 'esper[gym]'") from error

Vector = NDArray[np.float32]
Mask = NDArray[np.bool_]


class FlatActions:
    """The numbering of all combinations, for a fixed number of slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.blueprints = blueprint_names()
        self.plantings = slots * len(self.blueprints) * len(BLENDS)
        self.size = 1 + self.plantings + 2 * slots

    def action(self, number: int, present: int) -> Action:
        """What a number means; one that names a slot which this network does not have is a WAIT."""
        if not 0 <= number < self.size:
            raise ValueError(f"actions are numbered 0 to {self.size - 1}; got {number}")
        if number == 0:
            return WAIT
        if number <= self.plantings:
            rest, blend = divmod(number - 1, len(BLENDS))
            slot, blueprint = divmod(rest, len(self.blueprints))
            if slot >= present:
                return WAIT
            return Action(Op.GERMINATE, slot, self.blueprints[blueprint], BLENDS[blend])
        op, slot = divmod(number - 1 - self.plantings, self.slots)
        return WAIT if slot >= present else Action((Op.PRUNE, Op.FOSSILIZE)[op], slot)

    def mask(self, masks: ActionMasks) -> Mask:
        """Of one environment (the first row)."""
        slot, blueprint, blend = (part[0].numpy() for part in (masks.slot, masks.blueprint, masks.blend))
        planting = slot[Op.GERMINATE][:, None, None] & blueprint[:, :, None] & blend[:, None, :]  # [S, B, K]
        parts = [np.ones(1, bool), planting.reshape(-1), slot[Op.PRUNE], slot[Op.FOSSILIZE]]
        return np.concatenate(parts)


def flatten(observation: Observation) -> Vector:
    """One environment's observation as one vector."""
    count = len(blueprint_names())
    planted = np.eye(count + 1, dtype=np.float32)[observation.blueprints[0].numpy()][:, 1:]  # [S, B]
    slots = np.concatenate([observation.slots[0].numpy(), planted, observation.costs[0].numpy()], 1)
    return np.concatenate([observation.overall[0].numpy(), slots.reshape(-1)])


class GrowthGymEnv(gymnasium.Env[Vector, np.int64]):
    """One growing network. An episode is one training; every `reset` without a seed draws another problem.

    `slots` is the number that the spaces have room for; None is the most that a network of this family has.
    `discount` is the agent's own γ. Shaping pays γΦ(s′) − Φ(s), which leaves the best policy alone under that γ only:
    set it to what the agent discounts with, or take reward="sparse", which shapes nothing.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (gymnasium's own spelling)

    def __init__(
        self,
        task: str = "mnist1d",
        *,
        slots: int | None = None,
        reward: RewardMode = "shaped",
        discount: float = DISCOUNT,
        held_out: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"there is nothing to render: render_mode must be None, not {render_mode!r}")
        self.render_mode = None
        family = get_family(task)
        slots = family.slots if slots is None else slots
        if slots < family.slots:
            raise ValueError(
                f"networks of {task!r} have up to {family.slots} slots: slots={slots} is too few; leave it out"
            )
        config = RewardConfig(mode=reward, discount=discount)
        self._env = GrowthEnv(family, 1, reward=config, held_out=held_out, slots=slots)
        self._actions = FlatActions(slots)
        width = len(OVERALL_FIELDS) + slots * (len(SLOT_FIELDS) + 2 * len(blueprint_names()))
        self.observation_space = spaces.Box(NOT_MEASURED, 1.0, (width,), np.float32)
        self.action_space = spaces.Discrete(self._actions.size)
        self._mask: Mask = np.zeros(self._actions.size, bool)
        self._running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Vector, dict[str, Any]]:
        """`seed` fixes the problem and all that follow; without it the next problem is drawn."""
        super().reset(seed=seed)
        observation, masks = self._env.reset([int(self.np_random.integers(2**31))])
        self._mask, self._running = self._actions.mask(masks), True
        return flatten(observation), {"action_mask": self._mask}

    def step(self, action: np.int64 | int) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise gymnasium.error.ResetNeeded("no episode is going on: reset the environment before a step")
        present = len(self._env.situations[0].slots)
        step = self._env.step([self._actions.action(int(action), present)])
        self._mask, self._running = self._actions.mask(step.masks), not bool(step.terminated[0])
        return flatten(step.observation), float(step.reward[0]), bool(step.terminated[0]), False, self._info(step)

    def action_masks(self) -> Mask:
        """What is possible now; sb3-contrib's MaskablePPO asks for it by this name."""
        return self._mask

    def _info(self, step: EnvStep) -> dict[str, Any]:
        info = step.infos[0]
        assert isinstance(info, StepInfo)  # the episode was going on
        said: dict[str, Any] = {"action_mask": self._mask, "reward_terms": dict(info.reward.terms)}
        said |= {"val_accuracy": info.record.measured.accuracy, "parameters": info.record.parameters}
        if info.reward.score is not None:
            said["score"] = info.reward.score
        return said


class GrowthVectorEnv(VectorEnv[Vector, NDArray[np.int64], NDArray[Any]]):
    """Several growing networks; one whose episode is over begins another with its next step."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        self.num_envs = num_envs
        self._envs = [GrowthGymEnv(**settings) for _ in range(num_envs)]
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._over = [False] * num_envs

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        if len(seeds) != self.num_envs:
            raise ValueError(f"there are {self.num_envs} environments, and {len(seeds)} seeds")
        self._over = [False] * self.num_envs
        begun = [env.reset(seed=one) for env, one in zip(self._envs, seeds, strict=True)]
        return np.stack([observation for observation, _ in begun]), self._joined([info for _, info in begun])

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Vector, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        if len(actions) != self.num_envs:
            raise ValueError(f"there are {self.num_envs} environments, and {len(actions)} actions")
        observations, rewards, infos = [], [], []
        for i, env in enumerate(self._envs):
            if self._over[i]:
                (observation, info), reward, self._over[i] = env.reset(), 0.0, False
            else:
                observation, reward, self._over[i], _, info = env.step(actions[i])
            observations.append(observation)
            rewards.append(reward)
            infos.append(info)
        over, cut_short = np.array(self._over), np.zeros(self.num_envs, bool)
        return np.stack(observations), np.array(rewards), over, cut_short, self._joined(infos)

    def action_masks(self) -> Mask:
        return np.stack([env.action_masks() for env in self._envs])

    def _joined(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        """One column of each entry, and where it was given, as in every vector environment of Gymnasium."""
        joined: dict[str, Any] = {}
        for i, info in enumerate(infos):
            joined = self._add_info(joined, info, i)
        return joined


# Gymnasium looks for no plugins any more: importing this module is what makes the name known.
gymnasium.register(
    id="esper/Growth-v0",
    entry_point="esper.env.gym:GrowthGymEnv",
    vector_entry_point="esper.env.gym:GrowthVectorEnv",
)
