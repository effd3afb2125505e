"""Where a learner's minibatches come from: tensors sampled by index, or a person's own data loaders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.growth.probe import arguments
from esper.tasks.data import Split, check_split, crop_and_flip, draw_crops

EVALUATION_CHUNK = 1024
"""Examples per evaluation pass; bounds the memory of replays."""

Batch = tuple[Any, Tensor]
"""Model inputs (a tensor, a tuple of arguments or a dict of keyword arguments) and targets."""


class Feed(Protocol):
    """Training minibatches without end, and the validation set in chunks that are the same every time."""

    updates_per_epoch: int

    def next_batch(self) -> Batch: ...

    def validation(self) -> Iterable[Batch]: ...


class TensorFeed:
    """Tensors on the device, sampled by index from a generator of its own.

    What to sample is drawn on the CPU (`plan`), so that every device sees the same minibatches; it is gathered on the
    device (`gather`), so that many minibatches cost one small transfer.
    """

    def __init__(
        self,
        train: Split,
        val: Split,
        *,
        batch_size: int,
        updates_per_epoch: int | None = None,
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        self.train, self.val = train, val
        self.batch_size = min(batch_size, len(train))
        self.updates_per_epoch = updates_per_epoch or max(1, len(train) // self.batch_size)
        self.augment = augment
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> Batch:
        return self.gather(self.plan(1).to(self.train.x.device, non_blocking=True))[0]

    def plan(self, updates: int) -> Tensor:
        """[updates, batch, 1 or 4]: for each example its index, and how to crop it if the feed augments.

        Drawn with replacement, so that the stream's whole state is its generator's state.
        """
        if self.augment:
            return torch.stack([self._draw_augmented() for _ in range(updates)])
        return self._draw(updates, self.batch_size, 1)  # the numbers of one draw per update, at once

    def gather(self, plan: Tensor, train: Split | None = None) -> list[tuple[Tensor, Tensor]]:
        """The planned minibatches, on the device of the plan; `train` is a copy of the data elsewhere."""
        x, y = (train or self.train).x, (train or self.train).y
        rows = plan.flatten(0, 1)
        index = rows[:, 0]
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):  # and so shall the minibatches be
            x = x.movedim(1, -1)[index].movedim(-1, 1)
        else:
            x = x[index]
        x = crop_and_flip(x, rows[:, 1:]) if self.augment else x
        size = plan.shape[1]
        return list(zip(torch.split(x, size), torch.split(y[index], size), strict=True))

    def _draw(self, *shape: int) -> Tensor:
        return torch.randint(len(self.train), shape, generator=self.generator)

    def _draw_augmented(self) -> Tensor:
        return torch.cat([self._draw(self.batch_size, 1), draw_crops(self.generator, self.batch_size)], 1)

    def validation(self) -> Iterable[Batch]:
        return chunks(self.val)


class LoaderFeed:
    """Two iterables of (inputs, targets), such as `DataLoader`s. An epoch is one pass over the training one."""

    def __init__(
        self,
        train: Iterable[Batch],
        val: Iterable[Batch],
        device: torch.device,
        *,
        labels: bool = False,
        val_name: str = "val",
    ) -> None:
        self.train, self.val, self.device = train, val, device
        self.labels = labels
        """Integer targets are numbers of classes."""
        self.classes: int | None = None
        """How many there are, once it is known: every batch is checked."""
        self.val_name = val_name
        self.updates_per_epoch = _length(train)
        self._batches: Iterator[Batch] = iter(())

    def next_batch(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.train)
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError("the training loader gives no batches")
        return self._checked(batch, "train")

    def validation(self) -> Iterable[Batch]:
        empty = True
        for batch in self.val:
            empty = False
            yield self._checked(batch, self.val_name)
        if empty:
            raise ValueError(f"the {self.val_name} loader gives no batches")

    def _checked(self, batch: Any, name: str) -> Batch:
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            what = f"a {type(batch).__name__}"
            if isinstance(batch, tuple | list):
                what += f" of {len(batch)}: " + ", ".join(type(part).__name__ for part in batch[:3])
            raise ValueError(f"the {name} loader must give (inputs, targets) pairs of tensors, and gave {what}")
        inputs, targets = batch
        if targets.dim() == 0:
            raise ValueError(f"the {name} loader gives single examples, not batches: wrap it in a DataLoader")
        for part in tensors_of(inputs):
            check_split(Split(part, targets), name)
        if self.labels:
            targets = class_numbers(targets, name)
            if self.classes is not None:
                check_classes(targets, self.classes, name)
        return move(inputs, self.device), targets.to(self.device, non_blocking=True)


def class_numbers(targets: Tensor, name: str) -> Tensor:
    """Integers (and yes or no) of any type as numbers of classes; other targets as they are."""
    if targets.is_complex():
        raise ValueError(f"the {name} targets are {targets.dtype}: give class numbers or real values")
    return targets if targets.is_floating_point() else targets.long()


def check_classes(targets: Tensor, classes: int, name: str) -> None:
    """Refuse numbers of classes that the model has no output for."""
    if targets.is_floating_point() or targets.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(targets))
    if least < 0 or most >= classes:
        raise ValueError(
            f"the {name} targets go from {least} to {most}, but the model has {classes} outputs per example, for "
            f"classes 0 to {classes - 1}: renumber the classes, or pass loss= and metric= of your own"
        )


def chunks(split: Split, size: int = EVALUATION_CHUNK) -> Iterator[Batch]:
    """The examples in order, in parts of nearly the same length, so that few shapes occur."""
    parts = math.ceil(len(split) / size)
    for i in range(parts):
        part = slice(i * len(split) // parts, (i + 1) * len(split) // parts)
        yield split.x[part], split.y[part]


def tensors_of(inputs: Any) -> list[Tensor]:
    args, kwargs = arguments(inputs)
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def move(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, dict):
        return {key: move(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(move(value, device) for value in inputs)
    return inputs


def _length(loader: Iterable[Batch]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError("the training loader has no length: give a DataLoader over a sized dataset") from None
