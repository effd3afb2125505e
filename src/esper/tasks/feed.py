"""Where a learner's minibatches come from: tensors sampled by index, or a person's own data loaders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.growth.probe import input_tensors
from esper.tasks.batches import LABELS, as_batch, move
from esper.tasks.batches import Batch as Batch
from esper.tasks.counted_init import DrawNumbers
from esper.tasks.data import Split, check_split, crop_and_flip, draw_crops

EVALUATION_CHUNK = 1024
"""Examples per evaluation pass; bounds the memory of replays."""

IGNORED = -100
"""The class number that torch's cross-entropy leaves out."""


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
        numbers: DrawNumbers | None = None,
        train_name: str = "train",
    ) -> None:
        """`numbers` is where examples come from instead of the seed; it cannot augment."""
        self.train_name = train_name
        """What errors call the training data."""
        self.train, self.val = train, val
        self.batch_size = min(batch_size, len(train))
        self.updates_per_epoch = updates_per_epoch or max(1, len(train) // self.batch_size)
        self.augment = augment
        self.generator = torch.Generator().manual_seed(seed)
        self.numbers = numbers
        self.drawn = 0
        """Examples so far: where a feed of counted numbers is."""

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
        if self.numbers is not None:
            first, self.drawn = self.drawn, self.drawn + math.prod(shape)
            return self.numbers.examples(first, math.prod(shape), len(self.train)).view(shape)
        return torch.randint(len(self.train), shape, generator=self.generator)

    def _draw_augmented(self) -> Tensor:
        return torch.cat([self._draw(self.batch_size, 1), draw_crops(self.generator, self.batch_size)], 1)

    def validation(self) -> Iterable[Batch]:
        return chunks(self.val)


class LoaderFeed:
    """Two iterables of batches (see `as_batch`), such as `DataLoader`s.

    An epoch is one pass over the training one, or `updates_per_epoch` batches, going on where the last epoch ended.
    """

    def __init__(
        self,
        train: Iterable[Any],
        val: Iterable[Any],
        device: torch.device,
        *,
        updates_per_epoch: int | None = None,
        labels: bool = False,
        pass_labels: bool = True,
        val_name: str = "val",
    ) -> None:
        self.train, self.val, self.device = train, val, device
        self.labels = labels
        """Integer targets are numbers of classes."""
        self.pass_labels = pass_labels
        """The model takes the labels of a dict as an argument."""
        self.classes: int | None = None
        """How many there are, once it is known: every batch is checked."""
        self.ignored = IGNORED
        self.fewest = 1
        """Examples that a training batch must have."""
        self.val_name = val_name
        self.updates_per_epoch = updates_per_epoch or _length(train)
        self._batches: Iterator[Any] = iter(())
        self._given = 0
        """Batches of this pass."""

    def next_batch(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._batches, self._given = iter(self.train), 0
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError("the training loader gives no batches")
        self._given += 1
        if self._given == self._batches_of_a_pass():
            # A sampler draws once more when it is asked past its end: before the state of an epoch is taken, not after.
            more = list(islice(self._batches, 1))
            self._batches = chain(more, self._batches)
        inputs, targets = self.checked(batch, "train")
        if len(targets) < self.fewest:
            raise ValueError(
                "the training loader gave a batch of 1 example, and the model's BatchNorm needs at least 2: pass "
                "drop_last=True to the DataLoader, or another batch_size"
            )
        return inputs, targets

    def _batches_of_a_pass(self) -> int | None:
        try:
            return len(self.train)  # type: ignore[arg-type]
        except TypeError:  # a stream
            return None

    def validation(self) -> Iterable[Batch]:
        empty = True
        for batch in self.val:
            empty = False
            yield self.checked(batch, self.val_name)
        if empty:
            raise ValueError(f"the {self.val_name} loader gives no batches")

    def checked(self, batch: Any, name: str) -> Batch:
        """A batch of a loader, on the device."""
        inputs, targets = as_batch(batch, name, pass_labels=self.pass_labels)
        if targets.dim() == 0:
            raise ValueError(f"the {name} loader gives single examples, not batches: wrap it in a DataLoader")
        for part in input_tensors(inputs):
            check_split(Split(part, targets), name)
        if self.labels:
            targets = class_numbers(targets, name)
            if self.classes is not None:
                check_classes(targets, self.classes, name, self.ignored)
            if isinstance(inputs, dict) and LABELS in inputs:
                inputs[LABELS] = targets
        return move(inputs, self.device), targets.to(self.device, non_blocking=True)


def class_numbers(targets: Tensor, name: str) -> Tensor:
    """Integers (and yes or no) of any type as numbers of classes; other targets as they are."""
    if targets.is_complex():
        raise ValueError(f"the {name} targets are {targets.dtype}: give class numbers or real values")
    return targets if targets.is_floating_point() else targets.long()


def check_classes(targets: Tensor, classes: int, name: str, ignored: int = IGNORED) -> None:
    """Refuse numbers of classes that the model has no output for."""
    if targets.is_floating_point():
        return
    targets = targets[targets != ignored]
    if targets.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(targets))
    if classes == 1 and most >= 1:
        raise ValueError(
            f"the {name} targets are whole numbers from {least} to {most}, and the model has one output per example: "
            "pass real numbers in a column, y.float()[:, None], for two classes with "
            "loss=torch.nn.BCEWithLogitsLoss(); or give the model an output for each class"
        )
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


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            "the training loader has no length: pass updates_per_epoch=, the batches of an epoch"
        ) from None
