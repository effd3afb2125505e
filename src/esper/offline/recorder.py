"""Playing episodes to record them: a controller decides, exploration noise may overrule it, both are noted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from esper.actions import Action
from esper.env.growth_env import GrowthEnv
from esper.env.observation import to_tensor
from esper.env.reward import RewardConfig
from esper.env.spaces import ActionMasks, Observation
from esper.offline.episodes import Episodes
from esper.policy.controller import Controller, RandomLegal
from esper.tasks.family import Family, get_family

BATCH = 4
"""Networks that train side by side in one job, as in a comparison."""


@dataclass(frozen=True, slots=True)
class Play:
    """Some training draws under one controller. A family by name is made by the worker that plays."""

    family: Family | str
    name: str
    controller: Controller
    numbers: tuple[int, ...]
    noise: float = 0.0
    """Probability that a decision is replaced by a random legal one."""
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise <= 1.0:
            raise ValueError(f"noise is a probability, not {self.noise}")


def plays(
    family: Family | str, controllers: dict[str, Controller], numbers: Sequence[int], noise: float
) -> Iterator[Play]:
    """Every controller on every draw, the first draws first: stopped early, all have played the same problems."""
    for start in range(0, len(numbers), BATCH):
        for name, controller in controllers.items():
            yield Play(family, name, controller, tuple(numbers[start : start + BATCH]), noise)


def play(job: Play) -> Episodes:
    """The job's episodes from beginning to end. They depend on the job alone, not on where or beside what it runs."""
    family = get_family(job.family) if isinstance(job.family, str) else job.family
    env = GrowthEnv(family, len(job.numbers), reward=job.reward)
    observation, masks = env.reset(job.numbers)
    job.controller.reset(job.numbers)
    explorer = Explorer(job.noise, [f"{job.name}/{number}" for number in job.numbers])
    tape = Tape()
    while not env.over:
        decided = job.controller.decide(env.situations)
        taken = [explorer(i, env, action) for i, action in enumerate(decided)]
        step = env.step(taken)
        tape.note(observation, masks, to_tensor(decided), to_tensor(taken), step.reward, step.terminated, step.acted)
        observation, masks = step.observation, step.masks
    return tape.episodes(torch.tensor(job.numbers), job.name)


class Explorer:
    """Now and then, a random legal decision in place of the controller's; each episode has its own dice."""

    def __init__(self, noise: float, seeds: Sequence[str]) -> None:
        self.noise = noise
        self._dice = [random.Random(seed) for seed in seeds]
        self._random = RandomLegal()

    def __call__(self, row: int, env: GrowthEnv, decided: Action) -> Action:
        dice = self._dice[row]
        return self._random.rule(env.situations[row], dice) if dice.random() < self.noise else decided


class Tape:
    """Collects steps of E environments until each has played one episode."""

    def __init__(self) -> None:
        self._steps: list[tuple[Observation, ActionMasks, tuple[Tensor, ...]]] = []

    def note(
        self,
        observation: Observation,
        masks: ActionMasks,
        label: Tensor,
        taken: Tensor,
        reward: Tensor,
        terminated: Tensor,
        acted: Tensor,
    ) -> None:
        """One step of all of them, as before the action; all [E, ...]. `acted` is False once an episode is over."""
        self._steps.append((observation, masks, (label, taken, reward, terminated, acted)))

    def episodes(self, draw: Tensor, controller: str) -> Episodes:
        label, taken, reward, terminated, acted = (torch.stack(column, 1) for column in zip(*self._plain, strict=True))
        return Episodes(
            observation=Observation(
                *(torch.stack([getattr(s[0], f.name) for s in self._steps], 1) for f in fields(Observation))
            ),
            masks=ActionMasks(
                *(torch.stack([getattr(s[1], f.name) for s in self._steps], 1) for f in fields(ActionMasks))
            ),
            label=label,
            taken=taken,
            reward=reward,
            terminated=terminated,
            lengths=acted.sum(1),
            draw=draw,
            controller=torch.zeros_like(draw),
            controllers=(controller,),
        )

    @property
    def _plain(self) -> list[tuple[Tensor, ...]]:
        return [plain for _, _, plain in self._steps]
