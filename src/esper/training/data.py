"""A person's own data: what `esper.grow` accepts, and what it assumes when it is told nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.measure import Loss, Score
from esper.tasks.data import Split, check_split
from esper.tasks.feed import Batch, Feed, LoaderFeed, TensorFeed, chunks
from esper.tasks.registry import cross_entropy, percent_correct

Data = tuple[Tensor, Tensor] | Split | Iterable[Batch]
"""(inputs, targets) tensors, or something that gives such pairs batch by batch, such as a `DataLoader`."""


def as_feed(
    train: Data, val: Data, device: torch.device, batch_size: int, updates_per_epoch: int | None, seed: int
) -> tuple[Feed, Any, Tensor]:
    """The feed, an example of its inputs, and some of its targets."""
    train_split, val_split = as_split(train, "train"), as_split(val, "val")
    if (train_split is None) != (val_split is None):
        raise ValueError("train and val data must both be tensors, or both be loaders")
    if train_split is not None and val_split is not None:
        if train_split.x.shape[1:] != val_split.x.shape[1:]:
            raise ValueError(
                f"the val inputs have shape {tuple(val_split.x.shape[1:])} per example but the train inputs "
                f"{tuple(train_split.x.shape[1:])}"
            )
        train_split, val_split = train_split.to(device), val_split.to(device)
        tensors = TensorFeed(
            train_split, val_split, batch_size=batch_size, updates_per_epoch=updates_per_epoch, seed=seed
        )
        return tensors, train_split.x[:2], train_split.y
    loaders = LoaderFeed(train, val, device)  # type: ignore[arg-type]  # what is not tensors is an iterable
    inputs, targets = next(iter(loaders.validation()), (None, None))
    if targets is None:
        raise ValueError("the validation loader gives no batches")
    return loaders, inputs, targets


def as_split(data: Data, name: str) -> Split | None:
    """Checked tensors; None for a loader."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        data = Split(*data)
    if not isinstance(data, Split):
        return None
    check_split(data, name)
    return data


def evaluation_batches(data: Data, device: torch.device) -> Callable[[], Iterable[Batch]]:
    split = as_split(data, "test")
    if split is not None:
        on_device = split.to(device)
        return lambda: chunks(on_device)
    feed = LoaderFeed([], data, device)  # type: ignore[arg-type]
    return feed.validation


def default_objective(targets: Tensor) -> tuple[Loss, Score]:
    """Cross-entropy and accuracy for integer targets; squared error and variance explained for others."""
    if not targets.is_floating_point():
        return cross_entropy, percent_correct
    variance = targets.detach().double().var(0, unbiased=False).mean().clamp_min(1e-12)

    def variance_explained(outputs: Tensor, targets: Tensor) -> Tensor:
        squares = (outputs.detach() - targets).double().square().reshape(len(targets), -1).mean(1)
        return 100.0 * (1.0 - squares / variance)

    return F.mse_loss, variance_explained
