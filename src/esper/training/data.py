"""A person's own data: what `esper.grow` accepts, and what it assumes when it is told nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from esper.engine.measure import Loss, Score
from esper.growth.probe import arguments, untouched
from esper.tasks.data import Split, check_split
from esper.tasks.feed import Batch, Feed, LoaderFeed, TensorFeed, check_classes, chunks, class_numbers
from esper.tasks.registry import cross_entropy, percent_correct

Data = tuple[Tensor, Tensor] | tuple[NDArray[Any], NDArray[Any]] | Split | Iterable[Batch]
"""(inputs, targets) as tensors or arrays, or something that gives such pairs of tensors batch by batch, such as a
`DataLoader`."""
Checked = Split | Iterable[Batch]
"""Data that have been looked at as far as one can without drawing from them."""


class ObjectiveError(ValueError):
    """Outputs and targets that the default loss and metric cannot compare. The message says what to do."""


def checked_data(data: Data, name: str, *, labels: bool) -> Checked:
    """Checked tensors, or the loader as it is; with `labels`, integer targets are made numbers of classes."""
    parts = data if isinstance(data, tuple | list) else ()
    if len(parts) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in parts):
        data = Split(_tensor(parts[0], f"{name} inputs"), _tensor(parts[1], f"{name} targets"))
    if isinstance(data, Split):
        check_split(data, name)
        return Split(data.x, class_numbers(data.y, name)) if labels else data
    if isinstance(data, Dataset):
        raise ValueError(f"the {name} data are a dataset: wrap it in a torch.utils.data.DataLoader")
    if isinstance(data, str | dict) or not isinstance(data, Iterable):
        raise ValueError(
            f"the {name} data must be (inputs, targets) as tensors or arrays, or a DataLoader, not "
            f"{type(data).__name__}"
        )
    return data  # type: ignore[return-value]  # what is not tensors gives batches; each of them is looked at


def _tensor(part: Any, what: str) -> Tensor:
    """An array as a tensor; its real numbers in torch's precision, which is what models are made of."""
    if isinstance(part, np.ndarray):
        try:
            part = torch.from_numpy(np.require(part, requirements=["C", "W"]))
        except TypeError:
            raise ValueError(f"the {what} are an array of {part.dtype}: give numbers") from None
        part = part.to(torch.get_default_dtype()) if part.is_floating_point() else part
    assert isinstance(part, Tensor)
    if part.dim() == 0:
        raise ValueError(f"the {what} are a single number: give one row per example")
    return part


def as_feed(
    train: Checked,
    val: Checked,
    device: torch.device,
    batch_size: int,
    updates_per_epoch: int | None,
    seed: int,
    *,
    labels: bool,
) -> tuple[Feed, Batch, Tensor]:
    """The feed, its first batch of validation examples, and some of its targets."""
    if isinstance(train, Split) and isinstance(val, Split):
        check_same_inputs(train, val, "val")
        train, val = train.to(device), val.to(device)
        tensors = TensorFeed(train, val, batch_size=batch_size, updates_per_epoch=updates_per_epoch, seed=seed)
        return tensors, next(chunks(val)), train.y
    if isinstance(train, Split) or isinstance(val, Split):
        raise ValueError("train and val data must both be tensors, or both be loaders")
    loaders = LoaderFeed(train, val, device, labels=labels)
    batch = next(iter(loaders.validation()))
    return loaders, batch, batch[1]


def check_same_inputs(train: Split, other: Split, name: str) -> None:
    if train.x.shape[1:] != other.x.shape[1:]:
        raise ValueError(
            f"the {name} inputs have shape {tuple(other.x.shape[1:])} per example but the train inputs "
            f"{tuple(train.x.shape[1:])}"
        )


def evaluation_batches(
    data: Checked, device: torch.device, feed: Feed, classes: int | None
) -> Callable[[], Iterable[Batch]]:
    """The test data, checked as far as the training data were."""
    if isinstance(data, Split):
        if isinstance(feed, TensorFeed):
            check_same_inputs(feed.train, data, "test")
        if classes is not None:
            check_classes(data.y, classes, "test")
        on_device = data.to(device)
        return lambda: chunks(on_device)
    loader = LoaderFeed([], data, device, labels=classes is not None, val_name="test")
    loader.classes = classes
    return loader.validation


# -- what is assumed ----------------------------------------------------------------------------------------------


def default_objective(targets: Tensor) -> tuple[Loss, Score]:
    """Cross-entropy and accuracy for integer targets; squared error and variance explained for others."""
    if not targets.is_floating_point():
        return class_loss, class_score
    variance = targets.detach().double().var(0, unbiased=False).mean().clamp_min(1e-12)

    def variance_explained(outputs: Tensor, targets: Tensor) -> Tensor:
        _check_values(outputs, targets)
        squares = (outputs.detach() - targets).double().square().reshape(len(targets), -1).mean(1)
        return 100.0 * (1.0 - squares / variance)

    return squared_error, variance_explained


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    check_class_shapes(outputs, targets)
    return cross_entropy(outputs, targets)


def class_score(outputs: Tensor, targets: Tensor) -> Tensor:
    check_class_shapes(outputs, targets)
    return percent_correct(outputs, targets)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    _check_values(outputs, targets)
    return F.mse_loss(outputs, targets.to(outputs.dtype))


def check_class_shapes(outputs: Any, targets: Tensor) -> None:
    """One row of scores for each class number. Else torch compares every example with every other."""
    _check_outputs(outputs)
    if outputs.shape[:-1] != targets.shape or targets.is_floating_point():
        raise ObjectiveError(
            f"the model gives {_described(outputs)}, so the targets must be class numbers of shape "
            f"{list(outputs.shape[:-1])}, not {_described(targets)}: reshape them, or pass loss= and metric="
        )


def _check_values(outputs: Any, targets: Tensor) -> None:
    _check_outputs(outputs)
    if outputs.shape != targets.shape:
        raise ObjectiveError(
            f"the model gives {_described(outputs)} and the targets are {_described(targets)}: reshape the targets to "
            "the outputs' shape (or the outputs), or pass loss= and metric="
        )


def _check_outputs(outputs: Any) -> None:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        raise ObjectiveError(
            f"the model gives {_described(outputs)}: pass loss= and metric= that know what to make of it"
        )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


# -- tried once before the training -------------------------------------------------------------------------------


def check_objective(
    model: nn.Module, feed: Feed, batch: Batch, loss: Loss, score: Score, *, labels: bool
) -> int | None:
    """Try loss and metric on a batch, and with `labels` look whether all targets are classes. Gives how many."""
    inputs, targets = batch
    args, kwargs = arguments(inputs)
    with untouched(model), torch.no_grad():
        outputs = model(*args, **kwargs)
        classes = None
        if labels and not targets.is_floating_point():
            check_class_shapes(outputs, targets)
            classes = int(outputs.shape[-1])
            _check_all_classes(feed, batch, classes)
        found = _tried("loss", loss, outputs, targets)
        if not isinstance(found, Tensor) or found.dim() > 0:
            raise ValueError(f"the loss must give one number, a tensor without axes, not {_described(found)}")
        found = _tried("metric", score, outputs, targets)
        if not isinstance(found, Tensor) or found.shape not in ((), (len(targets),)):
            raise ValueError(
                f"the metric must give a tensor with one number per example ({len(targets)}) or one per batch, not "
                f"{_described(found)}"
            )
    return classes


def _check_all_classes(feed: Feed, batch: Batch, classes: int) -> None:
    if isinstance(feed, TensorFeed):
        check_classes(feed.train.y, classes, "train")
        check_classes(feed.val.y, classes, "val")
    elif isinstance(feed, LoaderFeed):
        check_classes(batch[1], classes, "val")
        feed.classes = classes  # the others as they come


def _tried(what: str, function: Loss | Score, outputs: Any, targets: Tensor) -> Any:
    try:
        return function(outputs, targets)
    except ObjectiveError:
        raise
    except Exception as error:
        detail = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"the {what} fails for the model's outputs ({_described(outputs)}) and targets ({_described(targets)}): "
            f"{detail}"
        ) from error
