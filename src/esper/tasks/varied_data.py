"""Data that were not made to need anything, each set as hard as it happens to be: for `varied`.

Noise, sizes and numbers of examples are drawn with every set, so that a small network learns some of them in a few
epochs, and others never.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.tasks.data import Split, Splits, generated_splits
from esper.tasks.registry import load_task

CLASSES = 10
TRAIN, VAL, TEST = (1_000, 3_000), 1_000, 1_000
"""Examples; how many there are to train on differs."""
LENGTH = 40
"""Of a series."""
PIECES = 10
"""Into which a series is cut where it is a sequence."""
FIRST_CURVES, CURVE_SETS = 100, 4
"""Seeds of `mnist1d` that nothing else uses: this many to train on, and as many to judge by."""

_mnist1d = lru_cache(maxsize=2 * CURVE_SETS)(partial(load_task, "mnist1d"))


def mnist1d_curves(rng: np.random.Generator, held_out: bool) -> Splits:
    """The digits of `mnist1d`."""
    seed = FIRST_CURVES + int(rng.integers(CURVE_SETS)) + (CURVE_SETS if held_out else 0)
    return _mnist1d(seed=seed).splits


def waves(rng: np.random.Generator) -> Splits:
    """Series [count, 1, LENGTH]: every class is a sum of three waves, which may be shifted, in noise."""
    strength, phase = rng.uniform(0.3, 1.0, (CLASSES, 3)), rng.uniform(0.0, 2 * np.pi, (CLASSES, 3))
    turns = rng.integers(1, 7, (CLASSES, 3))
    shift, noise = int(rng.choice([1, 8, LENGTH])), rng.uniform(0.2, 1.2)

    def series(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
        when = (np.arange(LENGTH) + rng.integers(0, shift, (len(labels), 1)))[..., None] / LENGTH
        each = strength[labels, None] * np.sin(2 * np.pi * turns[labels, None] * when + phase[labels, None])
        drawn: NDArray[np.float64] = each.sum(-1) + noise * rng.standard_normal((len(labels), LENGTH))
        return drawn[:, None]

    return _splits(series, rng)


def pieces(splits: Splits) -> Splits:
    """Series as sequences."""
    return Splits(*(Split(in_pieces(part.x), part.y) for part in (splits.train, splits.val, splits.test)))


def in_pieces(series: Tensor) -> Tensor:
    """[count, 1, length] cut into pieces, each with its place: [count, PIECES, length / PIECES + 1]."""
    count = len(series)
    when = torch.linspace(-1.0, 1.0, PIECES).expand(count, PIECES)[..., None]
    return torch.cat([series.reshape(count, PIECES, -1), when], -1)


def signs(rng: np.random.Generator) -> Splits:
    """Images [count, 1, size, size] with one of ten random signs somewhere, in noise."""
    size, extent = int(rng.integers(8, 13)), int(rng.choice([3, 5]))
    shapes = rng.choice([-1.0, 1.0], (CLASSES, extent, extent))
    room, noise = int(rng.choice([2, size - extent + 1])), rng.uniform(0.1, 0.8)

    def images(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
        drawn = noise * rng.standard_normal((len(labels), 1, size, size))
        top, left = (rng.integers(0, room, len(labels)) for _ in range(2))
        for row in range(extent):
            for column in range(extent):
                drawn[np.arange(len(labels)), 0, top + row, left + column] += shapes[labels, row, column]
        return drawn

    return _splits(images, rng)


def clusters(rng: np.random.Generator) -> Splits:
    """Points [count, features] around one of several centres per class."""
    features, each = int(rng.choice([8, 16, 32, 64])), int(rng.integers(1, 5))
    centres, noise = rng.standard_normal((CLASSES, each, features)), rng.uniform(0.4, 1.4)

    def points(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
        centre = centres[labels, rng.integers(0, each, len(labels))]
        return centre + noise * rng.standard_normal(centre.shape)

    return _splits(points, rng)


def regions(rng: np.random.Generator) -> Splits:
    """Points [count, features] whose class is what a random network says about them."""
    features, hidden = int(rng.choice([8, 16, 32])), int(rng.integers(4, 17))
    first = rng.standard_normal((features, hidden)) * rng.uniform(0.5, 2.0) / np.sqrt(features)
    last = rng.standard_normal((hidden, CLASSES))
    points = rng.standard_normal((int(rng.integers(*TRAIN)) + VAL + TEST, features))
    votes = np.tanh(points @ first) @ last
    return _labelled(points, ((votes - votes.mean(0)) / votes.std(0)).argmax(1))


def bands(rng: np.random.Generator) -> Splits:
    """Points of a space of few dimensions, seen in more: the class says how high they lie in a hilly landscape."""
    features, dimensions = int(rng.choice([8, 16, 32])), int(rng.integers(1, 4))
    count, steepness = int(rng.integers(*TRAIN)) + VAL + TEST, rng.uniform(0.3, 3.0)
    places = rng.uniform(-1.0, 1.0, (count, dimensions))
    slopes, phase = steepness * rng.standard_normal((dimensions, 6)), rng.uniform(0.0, 2 * np.pi, 6)
    height = np.sin(places @ slopes + phase).sum(1)
    points = places @ rng.standard_normal((dimensions, features))
    points += rng.uniform(0.0, 0.1) * rng.standard_normal(points.shape)
    return _labelled(points, CLASSES * height.argsort().argsort() // count)  # as many points in every class


def _labelled(points: NDArray[np.float64], labels: NDArray[np.int64]) -> Splits:
    x, y = torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels)
    return Splits(
        Split(x[VAL + TEST :], y[VAL + TEST :]),
        Split(x[:VAL], y[:VAL]),
        Split(x[VAL : VAL + TEST], y[VAL : VAL + TEST]),
    )


def _splits(
    inputs: Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.float64]], rng: np.random.Generator
) -> Splits:
    return generated_splits(inputs, (int(rng.integers(*TRAIN)), VAL, TEST), CLASSES, rng)


def write_language(lines: int, seed: int) -> str:
    """Lines of made-up words. A line is about a few of the words that it may be about, which keep coming back."""
    rng = random.Random(seed)
    consonants = rng.sample("bdfgklmnprst", rng.randint(5, 9))
    syllables = [consonant + vowel for consonant in consonants for vowel in rng.sample("aeiou", 3)]
    words = ["".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(rng.choice([24, 48, 96]))]
    small, about = words[: len(words) // 3], words[len(words) // 3 :]
    subjects = rng.randint(2, 4)
    written = []
    for _ in range(lines):
        own = rng.sample(about, subjects)
        written.append(" ".join(rng.choice(small if place % 2 else own) for place in range(rng.randint(6, 10))))
    return "\n".join(written) + "\n"
