"""A family of very small problems, quick to train, in which growing helps; and a job that fails. For workers, too."""

from __future__ import annotations

import os
from functools import partial

import torch

from esper.tasks.data import Split, Splits
from esper.tasks.family import Draw
from esper.tasks.hosts import Conv1dHost
from esper.tasks.registry import Task


class TinyFamily:
    """Which of two marks comes first in a short noisy series? A host of 1×1 kernels cannot tell."""

    name = "tiny"
    slots = 2

    def __init__(self, horizon: int = 10) -> None:
        self.horizon = horizon

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        seed = 2 * number + held_out
        generator = torch.Generator().manual_seed(seed)
        parts = [_series(count, generator) for count in (64, 48, 48)]
        task = Task(
            name=self.name,
            description="which mark comes first",
            splits=Splits(*parts),
            make_host=partial(Conv1dHost, 1, [4, 4], [1, 1], 2),
            slots=("stages.0", "stages.1"),
            labels=("up first", "down first"),
            batch_size=16,
            updates_per_epoch=4,
            learning_rate=2e-2,
        )
        return Draw(task, seed, self.horizon - number % 2, None, None, {"parity": number % 2})


def _series(count: int, generator: torch.Generator) -> Split:
    y = torch.arange(count) % 2
    x = 0.3 * torch.randn(count, 1, 8, generator=generator)
    at = torch.randint(0, 7, (count,), generator=generator)
    sign = 1.0 - 2.0 * y
    rows = torch.arange(count)
    x[rows, 0, at] += 2.0 * sign
    x[rows, 0, at + 1] -= 2.0 * sign
    return Split(x, y)


def fail(job: str) -> None:
    """A job that goes wrong: in Python, or for good."""
    if job == "die":
        os._exit(3)
    raise ValueError(f"job {job!r} is bad")
