"""Data as tensors: three disjoint splits, checked once, sampled by index from a generator that the caller owns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)  # eq: tensors do not compare to a bool
class Split:
    """Inputs and targets, example by example along the first axis."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> Split:
        return Split(self.x.to(device), self.y.to(device))

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """`size` examples drawn with replacement, so that a stream's whole state is its generator's state.

        The indices come from the generator's device: a CPU generator gives the same batches on every device.
        """
        index = torch.randint(len(self), (size,), generator=generator, device=generator.device)
        index = index.to(self.x.device, non_blocking=True)
        return self.x[index], self.y[index]


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

    def __post_init__(self) -> None:
        for name in ("train", "val", "test"):
            split: Split = getattr(self, name)
            check_split(split, name)
            if split.x.shape[1:] != self.train.x.shape[1:]:
                raise ValueError(
                    f"the {name} inputs have shape {tuple(split.x.shape[1:])} per example but the train inputs "
                    f"{tuple(self.train.x.shape[1:])}: all splits need one shape"
                )

    def to(self, device: torch.device | str) -> Splits:
        return Splits(self.train.to(device), self.val.to(device), self.test.to(device))


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shift each image by up to `padding` pixels (zeros, the mean colour, move in) and mirror every second one.

    One gather for the whole batch, on the device of the images.
    """
    batch, channels, height, width = images.shape
    device, draws = images.device, generator.device
    shift = torch.randint(2 * padding + 1, (2, batch), generator=generator, device=draws).to(device)
    flip = torch.randint(2, (batch,), generator=generator, device=draws).to(device)
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
