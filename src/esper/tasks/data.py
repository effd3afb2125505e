"""Data as tensors: three disjoint splits, checked once, sampled by index from a generator that the caller owns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_COPIES: dict[tuple[int, torch.device | str], Tensor] = {}


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`; one copy for all who ask, while the original lives. Many networks share one data set."""
    where = torch.device(device)
    if tensor.device == where:
        return tensor
    return _copied(tensor, where, lambda: tensor.to(where))


def channels_last(images: Tensor) -> Tensor:
    """The images in the order in which a GPU convolves in half precision; one copy for all who ask."""
    return _copied(images, "channels last", lambda: images.contiguous(memory_format=torch.channels_last))


def _copied(tensor: Tensor, how: torch.device | str, copy: Callable[[], Tensor]) -> Tensor:
    key = (id(tensor), how)
    if key not in _COPIES:
        made = copy()
        if made is tensor:  # it was there already; kept here it would keep itself alive
            return tensor
        _COPIES[key] = made
        weakref.finalize(tensor, _COPIES.pop, key, None)
    return _COPIES[key]


@dataclass(frozen=True, slots=True, eq=False)  # eq: tensors do not compare to a bool
class Split:
    """Inputs and targets, example by example along the first axis."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> Split:
        x, y = moved(self.x, device), moved(self.y, device)
        return self if x is self.x and y is self.y else Split(x, y)


def check_split(split: Split, name: str) -> None:
    """Refuse data that would otherwise fail later, or teach nothing, with one line that says which split and why."""
    if len(split.x) == 0:
        raise ValueError(f"the {name} data are empty: give at least one example")
    if len(split.x) != len(split.y):
        raise ValueError(f"the {name} data have {len(split.x)} inputs but {len(split.y)} targets: pair them one to one")
    for part, values in (("inputs", split.x), ("targets", split.y)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = ~torch.isfinite(values).reshape(len(values), -1).all(1)
            first = int(bad.nonzero()[0])
            raise ValueError(
                f"the {name} {part} contain NaN or infinity in {int(bad.sum())} of {len(values)} examples "
                f"(the first is example {first}): clean or drop them"
            )


@dataclass(frozen=True, slots=True, eq=False)  # eq: tensors do not compare to a bool
class Splits:
    """Train feeds SGD, val feeds every decision, test is for evaluation commands only. They share no example."""

    train: Split
    val: Split
    test: Split
    check: InitVar[bool] = field(default=True, kw_only=True)
    """False for data that have been checked: to look through all of them makes a GPU wait."""

    def __post_init__(self, check: bool) -> None:
        if not check:
            return
        for name in ("train", "val", "test"):
            split: Split = getattr(self, name)
            check_split(split, name)
            if split.x.shape[1:] != self.train.x.shape[1:]:
                raise ValueError(
                    f"the {name} inputs have shape {tuple(split.x.shape[1:])} per example but the train inputs "
                    f"{tuple(self.train.x.shape[1:])}: all splits need one shape"
                )

    def to(self, device: torch.device | str) -> Splits:
        parts = self.train.to(device), self.val.to(device), self.test.to(device)
        there = parts[0] is self.train and parts[1] is self.val and parts[2] is self.test
        return self if there else Splits(*parts, check=False)


def generated_splits(
    inputs: Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.float64]],
    counts: Sequence[int],
    classes: int,
    rng: np.random.Generator,
) -> Splits:
    """Splits with so many examples each, in which all classes are equally common; `inputs` makes them of labels."""
    parts = []
    for count in counts:
        labels = rng.permutation(np.arange(count, dtype=np.int64) % classes)
        parts.append(Split(torch.from_numpy(inputs(labels, rng).astype(np.float32)), torch.from_numpy(labels)))
    return Splits(*parts)


CROP_PADDING = 4
"""Pixels by which an image may be shifted in each direction."""


def draw_crops(generator: torch.Generator, batch: int) -> Tensor:
    """[batch, 3] for `crop_and_flip`: down, right, and whether to mirror. Equally likely each."""
    shift = torch.randint(2 * CROP_PADDING + 1, (2, batch), generator=generator, device=generator.device)
    flip = torch.randint(2, (batch,), generator=generator, device=generator.device)
    return torch.stack([*shift, flip], 1)


def crop_and_flip(images: Tensor, crops: Tensor) -> Tensor:
    """Shift each image (zeros, the mean colour, move in) and mirror it, as `crops` says.

    One gather for the whole batch, on the device of the images.
    """
    batch, channels, height, width = images.shape
    device, padding = images.device, CROP_PADDING
    shift, flip = crops[:, :2].t(), crops[:, 2]
    rows = shift[0, :, None] + torch.arange(height, device=device)  # [batch, height]
    columns = torch.arange(width, device=device).expand(batch, width)
    columns = torch.where(flip[:, None] == 1, width - 1 - columns, columns) + shift[1, :, None]  # [batch, width]
    padded = F.pad(images, (padding, padding, padding, padding))
    index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # [batch, height, width], into a flat image
    index = index.reshape(batch, 1, -1).expand(batch, channels, -1)
    return padded.flatten(2).gather(2, index).view(batch, channels, height, width)


def stratified_parts(
    labels: NDArray[np.int64], fractions: tuple[float, ...], rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Disjoint sets of indices, one per fraction, each with (to one example) the class balance of `labels`."""
    if sum(fractions) > 1 + 1e-9:
        raise ValueError(f"the fractions {fractions} of a split add up to more than 1")
    parts: list[list[NDArray[np.int64]]] = [[] for _ in fractions]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        bounds = np.round(np.cumsum((0.0, *fractions)) * len(members)).astype(int)
        for part, start, stop in zip(parts, bounds[:-1], bounds[1:], strict=True):
            part.append(members[start:stop])
    return [rng.permutation(np.concatenate(part)) for part in parts]
