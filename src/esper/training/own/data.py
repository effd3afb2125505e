"""A person's own data: what `esper.grow` accepts, checked as far as can be before the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from esper.growth.probe import call, untouched, with_batch
from esper.tasks.batches import LABELS, is_array, to_tensor
from esper.tasks.data import Split, check_split
from esper.tasks.feed import Batch, Feed, LoaderFeed, TensorFeed, check_classes, chunks, class_numbers

Data = tuple[Tensor, Tensor] | tuple[NDArray[Any], NDArray[Any]] | Split | Iterable[Any]
"""(inputs, targets) as tensors, arrays or frames, or something that gives batches of them, such as a `DataLoader`."""
Checked = Split | Iterable[Any]
"""Data that have been looked at as far as one can without drawing from them."""


def checked_data(data: Data, name: str, *, labels: bool) -> Checked:
    """Checked tensors, or the loader as it is; with `labels`, integer targets are made numbers of classes."""
    parts = data if isinstance(data, tuple | list) else ()
    if len(parts) > 1 and all(isinstance(part, Tensor) or is_array(part) for part in parts):
        if len(parts) > 2:
            raise ValueError(
                f"the {name} data are {len(parts)} tensors: give (inputs, targets), or for several inputs a DataLoader "
                "over a TensorDataset of them"
            )
        data = Split(_rows(parts[0], f"{name} inputs"), _rows(parts[1], f"{name} targets"))
    if isinstance(data, Split):
        check_split(data, name)
        return Split(data.x, class_numbers(data.y, name)) if labels else data
    if isinstance(data, Dataset):
        raise ValueError(f"the {name} data are a dataset: wrap it in a torch.utils.data.DataLoader")
    if (
        len(parts) == 2
        and isinstance(parts[0], tuple | list | dict)
        and (isinstance(parts[1], Tensor) or is_array(parts[1]))
    ):
        raise ValueError(
            f"the {name} data are ({type(parts[0]).__name__} of inputs, targets): for several inputs give a DataLoader "
            "over a dataset of such pairs"
        )
    if len(parts) == 2 and all(isinstance(part, list) and not any(map(_is_data, part)) for part in parts):
        raise ValueError(f"the {name} data are lists of numbers: make tensors of them, torch.tensor(inputs)")
    if isinstance(data, str | dict | Tensor) or is_array(data) or not isinstance(data, Iterable):
        raise ValueError(
            f"the {name} data must be (inputs, targets) as tensors or arrays, or a DataLoader, not "
            f"{type(data).__name__}"
        )
    if length_of(data) == 0:
        raise ValueError(f"the {name} data are empty: give at least one example (a loader: at least one batch)")
    if isinstance(data, Iterator):
        raise ValueError(
            f"the {name} data can be read only once ({type(data).__name__}): give a DataLoader, or an object whose "
            "__iter__ starts again"
        )
    return data  # what is not tensors gives batches; each of them is looked at


def _is_data(part: Any) -> bool:
    return isinstance(part, Tensor | tuple | dict) or is_array(part)


def length_of(data: Any) -> int | None:
    """None where it is not known, as of a DataLoader over an IterableDataset."""
    try:
        return len(data)
    except TypeError:
        return None


def _rows(part: Any, what: str) -> Tensor:
    tensor = to_tensor(part, what)
    if tensor.dim() == 0:
        raise ValueError(f"the {what} are a single number: give one row per example")
    return tensor


def as_feed(
    model: nn.Module,
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
    loaders = LoaderFeed(
        train,
        val,
        device,
        updates_per_epoch=updates_per_epoch,
        labels=labels,
        pass_labels=takes_labels(model),
    )
    batch = next(iter(loaders.validation()))
    return loaders, batch, batch[1]


def as_validation(model: nn.Module, val: Checked, device: torch.device, *, labels: bool) -> tuple[Feed, Batch]:
    """The feed of somebody who brings the minibatches, and its first batch of validation examples."""
    if isinstance(val, Split):
        val = val.to(device)
        return TensorFeed(val, val, batch_size=2, train_name="val"), next(chunks(val))
    feed = LoaderFeed([], val, device, updates_per_epoch=1, labels=labels, pass_labels=takes_labels(model))
    return feed, next(iter(feed.validation()))


def takes_labels(model: nn.Module) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # it is not written in Python
        return True
    return LABELS in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def example_of(feed: Feed, batch: Batch) -> Any:
    """The inputs of two examples, as the model gets them in training, in memory of their own.

    A view of the data would keep all of them, in a pickle too.
    """
    inputs = feed.train.x[:2] if isinstance(feed, TensorFeed) else with_batch(batch[0], 2)
    inputs = inputs[0] if isinstance(inputs, tuple) and isinstance(batch[0], Tensor) else inputs
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), inputs)


def without_labels(model: nn.Module, example: Any) -> Any:
    """What the model is called with once it is trained; with its labels, where it cannot do without."""
    if not isinstance(example, dict) or LABELS not in example:
        return example
    bare = {key: value for key, value in example.items() if key != LABELS}
    try:
        with untouched(model):
            model(**bare)
    except Exception:  # an encoder-decoder makes its decoder's inputs of them
        return example
    return bare


def check_same_inputs(train: Split, other: Split, name: str) -> None:
    if train.x.shape[1:] != other.x.shape[1:]:
        raise ValueError(
            f"the {name} inputs have shape {tuple(other.x.shape[1:])} per example but the train inputs "
            f"{tuple(train.x.shape[1:])}"
        )


def evaluation_batches(
    data: Checked, device: torch.device, feed: Feed, classes: int | None, ignored: int
) -> Callable[[], Iterable[Batch]]:
    """The test data, checked as far as the training data were."""
    if isinstance(data, Split):
        if isinstance(feed, TensorFeed):
            check_same_inputs(feed.train, data, "test")
        if classes is not None:
            check_classes(data.y, classes, "test", ignored)
        on_device = data.to(device)
        return lambda: chunks(on_device)
    pass_labels = not isinstance(feed, LoaderFeed) or feed.pass_labels
    loader = LoaderFeed([], data, device, labels=classes is not None, pass_labels=pass_labels, val_name="test")
    loader.classes, loader.ignored = classes, ignored
    return loader.validation


# -- batches of one -----------------------------------------------------------------------------------------------


def check_batches_of_one(model: nn.Module, feed: Feed, example: Any) -> None:
    """A BatchNorm of single values per channel fails for one example: refused now if it will happen, else then."""
    if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        return
    if _takes_one_example(model, example):
        return
    if isinstance(feed, TensorFeed) and feed.batch_size == 1:
        raise ValueError("the model's BatchNorm needs at least 2 examples in a batch: pass batch_size=2 or more")
    if isinstance(feed, LoaderFeed):
        if _last_batch(feed.train) == 1:
            raise ValueError(
                "the last batch of the training loader has 1 example, and the model's BatchNorm needs at least 2: pass "
                "drop_last=True to the DataLoader, or another batch_size"
            )
        feed.fewest = 2


def _takes_one_example(model: nn.Module, example: Any) -> bool:
    with untouched(model):
        model.train()
        try:
            call(model, with_batch(example, 1))
        except Exception as error:  # other errors of a batch of one are not checked here
            return "more than 1 value per channel" not in str(error)
    return True


def _last_batch(loader: Iterable[Any]) -> int | None:
    """How many examples it has, where that is known."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    examples = length_of(loader.sampler)
    if examples is None:
        return None
    rest = examples % loader.batch_size
    return rest if rest and not loader.drop_last else loader.batch_size
