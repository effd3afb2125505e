"""Tasks: data, a host for it, and how the host is trained. A new task is one decorated function in one file.

A task function is called as `function(seed, **options)` and returns a `Task` on the CPU; its keyword-only parameters
are the task's options. It must not touch the global random state, so that the seed alone decides the data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.errors import did_you_mean
from esper.growth.blueprints import Visibility
from esper.growth.tensors import count_parameters
from esper.tasks.counted_init import DrawNumbers
from esper.tasks.data import Splits


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over examples (and positions) of outputs [batch, …, classes] against targets [batch, …]."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def percent_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per example [batch]: 0 or 100 for a classifier, the percentage of correct symbols for a language model."""
    correct = (outputs.argmax(-1) == targets).to(torch.float32)
    return 100.0 * correct.reshape(len(targets), -1).mean(1)


@dataclass(frozen=True, slots=True, eq=False)  # eq: tensors do not compare to a bool
class Task:
    """All that is needed to train and judge a host. Change a setting with `dataclasses.replace`."""

    name: str
    description: str
    splits: Splits
    make_host: Callable[[], nn.Module]
    """Builds a fresh host from the current torch random state, always of the same architecture."""
    slots: tuple[str, ...]
    """Module paths in the host; the outputs of these modules can grow."""
    labels: tuple[str, ...]
    """What each output class means: a digit, a kind of image, a character."""
    batch_size: int
    updates_per_epoch: int
    learning_rate: float
    weight_decay: float = 1e-3
    augment: bool = False
    """Crop and flip training images."""
    visibility: Visibility = "both"
    """What seeds may read. Said here, so that a draw means the same whatever a probe of its host would find."""
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    """(outputs, targets) → scalar"""
    score: Callable[[Tensor, Tensor], Tensor] = percent_correct
    """(outputs, targets) → percentage per example [batch]"""
    numbers: DrawNumbers | None = None
    """What minibatches and seeds are made of; None is torch's generator with the seed of the draw."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.updates_per_epoch < 1:
            raise ValueError(
                f"task {self.name!r} needs a batch size and updates per epoch of at least 1; "
                f"got {self.batch_size} and {self.updates_per_epoch}"
            )
        if self.augment and self.splits.train.x.dim() != 4:
            shape = tuple(self.splits.train.x.shape[1:])
            raise ValueError(f"task {self.name!r} cannot crop and flip: its inputs {shape} are not images")

    @property
    def host_parameters(self) -> int:
        """Of a fresh host. Built without memory, and without touching the random state."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return count_parameters(self.make_host())

    def to(self, device: torch.device | str) -> Task:
        splits = self.splits.to(device)
        return self if splits is self.splits else replace(self, splits=splits)


_REGISTRY: dict[str, Callable[..., Task]] = {}


def task(name: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Register a function `(seed, *, options…) -> Task` under `name`."""

    def register(function: Callable[..., Task]) -> Callable[..., Task]:
        if name in _REGISTRY:
            raise ValueError(f"task {name!r} is registered already, in {_REGISTRY[name].__module__}")
        _REGISTRY[name] = function
        return function

    return register


def task_names() -> tuple[str, ...]:
    return tuple(sorted(_REGISTRY))


def task_options(name: str) -> tuple[str, ...]:
    """The options that this task understands besides the seed."""
    parameters = inspect.signature(_find(name)).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def load_task(
    name: str,
    *,
    seed: int = 0,
    data_dir: str | Path | None = None,
    text_file: str | Path | None = None,
    **options: object,
) -> Task:
    """The task, on the CPU. `seed` fixes what is generated and which example lies in which split.

    `data_dir`, `text_file` and every further option must be one that the task understands (`task_options`).
    """
    function = _find(name)
    given = {"data_dir": data_dir, "text_file": text_file}
    options |= {key: value for key, value in given.items() if value is not None}
    check_task_options(name, options)
    return function(seed, **options)


def check_task_options(name: str, options: Iterable[str]) -> None:
    """Refuse an option that the task does not have."""
    known = task_options(name)
    for option in options:
        if option not in known:
            offer = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ValueError(f"task {name!r} has no option {option!r}{_nearest(option, known)}; {offer}")


def _find(name: str) -> Callable[..., Task]:
    if name not in _REGISTRY:
        raise ValueError(
            f"unknown task {name!r}{_nearest(name, task_names())}; the tasks are {', '.join(task_names())}"
        )
    return _REGISTRY[name]


def _nearest(name: str, known: tuple[str, ...]) -> str:
    hint = did_you_mean(name, known, cutoff=0.4)
    return f" ({hint})" if hint else ""
