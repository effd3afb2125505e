"""The environments of a training run: in this process, or spread over worker processes, with the same numbers.

An environment's episode depends on its draw and its actions alone, so where it runs changes nothing. The policy stays
in the parent and decides for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.env.growth_env import EnvStep, GrowthEnv
from esper.env.reward import RewardConfig
from esper.env.spaces import ActionMasks, Observation
from esper.tasks.family import Family
from esper.training.workers import Worker, start_workers

_Record = TypeVar("_Record", Observation, ActionMasks)


@dataclass(frozen=True, slots=True)
class Reset:
    """A command to a worker: begin these draws."""

    numbers: tuple[int, ...]
    held_out: bool


class EnvServer:
    """What a worker runs: its share of the environments."""

    def __init__(self, family: Family, size: int, reward: RewardConfig, slots: int, device: str) -> None:
        self._settings: dict[str, Any] = {"reward": reward, "slots": slots, "device": device}
        self._family, self._size = family, size
        self._env: GrowthEnv | None = None

    def __call__(self, command: Reset | Tensor) -> tuple[Observation, ActionMasks] | EnvStep:
        if self._env is None:  # made here, not in the parent: an environment does not travel
            self._env = GrowthEnv(self._family, self._size, **self._settings)
        if isinstance(command, Reset):
            return self._env.reset(command.numbers, held_out=command.held_out)
        return self._env.step(command)


class Fleet:
    """All environments of a run, as one."""

    def __init__(
        self, family: Family, size: int, *, reward: RewardConfig, slots: int, device: str = "cpu", workers: int = 1
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.size = size
        shares = [len(range(i, size, workers)) for i in range(min(workers, size))]
        servers = [EnvServer(family, share, reward, slots, device) for share in shares]
        self._bounds = [sum(shares[:i]) for i in range(len(shares) + 1)]
        self._local = servers[0] if len(servers) == 1 else None
        self._workers: list[Worker] = [] if self._local else start_workers(servers)

    def reset(self, numbers: Sequence[int], *, held_out: bool = False) -> tuple[Observation, ActionMasks]:
        parts = self._call([Reset(tuple(share), held_out) for share in self._shares(numbers)])
        return _join([part[0] for part in parts]), _join([part[1] for part in parts])

    def step(self, actions: Tensor) -> EnvStep:
        """Actions [N, heads]."""
        steps: list[EnvStep] = self._call(self._shares(actions.cpu()))
        return EnvStep(
            _join([step.observation for step in steps]),
            _join([step.masks for step in steps]),
            torch.cat([step.reward for step in steps]),
            torch.cat([step.terminated for step in steps]),
            torch.cat([step.acted for step in steps]),
            tuple(info for step in steps for info in step.infos),
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _shares(self, rows: Any) -> list[Any]:
        return [rows[start:stop] for start, stop in zip(self._bounds, self._bounds[1:], strict=False)]

    def _call(self, commands: Sequence[Any]) -> list[Any]:
        if self._local is not None:
            return [self._local(commands[0])]
        for worker, command in zip(self._workers, commands, strict=True):
            worker.send(command)
        return [worker.receive() for worker in self._workers]


def _join(parts: Sequence[_Record]) -> _Record:
    if len(parts) == 1:
        return parts[0]
    kind = type(parts[0])
    return kind(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(kind)))
