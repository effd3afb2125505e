"""Generated data: each kind can be classified by one kind of computation, and not by the others.

Every function is `(labels, rng, …) -> inputs`: labels [count] from 0 to 3, inputs [count, …] in float64, all random
numbers from `rng`. What is not the needed computation is made useless by design: classes have the same values in
another order, the same counts at other places, the same directions at another gain. `docs/need_and_place.md` has the
measurements that say whether it worked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Inputs = NDArray[np.float64]

CLASSES = 4
HINTS = 2
"""Inputs beside those that a need is about; see `with_hints`."""

# The same four levels in four orders: no statistic of single positions tells the classes apart.
MOTIFS = np.array([[1, -1, 2, -2], [2, 1, -2, -1], [-1, 2, -2, 1], [-2, -1, 1, 2]]) * 1.2
MARK = 3.0  # height of a mark that stands for one sign


# -- series [count, 2, length] ---------------------------------------------------------------------------------------


def motif(labels: Labels, rng: np.random.Generator, *, length: int, scale: int, noise: float) -> Inputs:
    """An ordered motif somewhere in the first channel; each of its four levels lasts `scale` positions."""
    series = noise * rng.standard_normal((len(labels), 2, length))
    # A level swells and fades: hard edges between levels would tell their order to a filter narrower than a level.
    swell = np.sin(np.pi * (np.arange(scale) + 0.5) / scale) * (1.0 if scale == 1 else 1.3)
    pattern = np.repeat(MOTIFS, scale, axis=1) * np.tile(swell, 4)  # [class, 4 scale]
    _add(series, 0, rng.integers(0, length - 4 * scale + 1, len(labels)), pattern[labels])
    return series


def distant_relation(
    labels: Labels, rng: np.random.Generator, *, length: int, distractors: int, noise: float
) -> Inputs:
    """Two marks, one near each end, of equal or opposite sign, in one of the two channels.

    The marks between them have random signs and channels. Without those, how many marks there are of each sign would
    tell the class, and a norm over the whole example would see it (measured: 98 % against 45 % with three of them).
    """
    count, zone = len(labels), length // 6
    series = noise * rng.standard_normal((count, 2, length))
    channel, near = labels // 2, rng.choice([-1.0, 1.0], count)
    far = np.where(labels % 2 == 0, near, -near)
    row = np.arange(count)
    series[row, channel, rng.integers(0, zone, count)] += MARK * near
    series[row, channel, rng.integers(length - zone, length, count)] += MARK * far
    for _ in range(distractors):
        place = rng.integers(zone + 4, length - zone - 4, count)
        series[row, rng.integers(0, 2, count), place] += MARK * rng.choice([-1.0, 1.0], count)
    return series


def agreement(labels: Labels, rng: np.random.Generator, *, length: int, noise: float) -> Inputs:
    """The two marks of `distant_relation` alone: whether they agree shows in the example's own mean and spread."""
    return distant_relation(labels, rng, length=length, distractors=0, noise=noise)


def distribution(
    labels: Labels, rng: np.random.Generator, *, length: int, gain_spread: float, offset_spread: float, noise: float
) -> Inputs:
    """How the values of a series are distributed (flat, two-valued, skewed up, down), at an unknown gain and offset."""
    uniform = rng.random((len(labels), 2, length))
    skewed = -np.log1p(-uniform) - 1.0
    shapes = np.stack([(uniform - 0.5) * 12**0.5, np.sign(uniform - 0.5), skewed, -skewed])  # zero mean, unit variance
    series = shapes[labels, np.arange(len(labels))] + noise * rng.standard_normal(uniform.shape)
    gain = np.exp(gain_spread * rng.standard_normal((len(labels), 1, 1)))
    inputs: Inputs = gain * series + offset_spread * rng.standard_normal((len(labels), 1, 1))
    return inputs


def motif_order(labels: Labels, rng: np.random.Generator, *, length: int, distance: int, noise: float) -> Inputs:
    """Two different motifs, `distance` apart, out of one of two pairs (one bit), in one of two orders (the other bit).

    The first bit needs the motifs to be seen, the second needs them to be seen and then to be compared: counts of
    motifs do not tell their order, and no filter reaches from one motif to the other.
    """
    count = len(labels)
    series = noise * rng.standard_normal((count, 2, length))
    start = rng.integers(0, length - distance - 3, count)
    first, second = 2 * (labels // 2) + labels % 2, 2 * (labels // 2) + 1 - labels % 2
    _add(series, 0, start, MOTIFS[first])
    _add(series, 0, start + distance, MOTIFS[second])
    return series


# -- images [count, 2, size, size] -------------------------------------------------------------------------------------


def folded_motif(labels: Labels, rng: np.random.Generator, *, size: int, scale: int, noise: float) -> Inputs:
    """`motif` folded into a square: four levels, two by two, each a patch of `scale` by `scale` positions."""
    images = noise * rng.standard_normal((len(labels), 2, size, size))
    swell = np.sin(np.pi * (np.arange(scale) + 0.5) / scale) * (1.0 if scale == 1 else 1.3)
    patch = np.outer(swell, swell)
    pattern = np.kron(MOTIFS.reshape(CLASSES, 2, 2), patch)  # [class, 2 scale, 2 scale]
    width = 2 * scale
    top, left = (rng.integers(0, size - width + 1, len(labels)) for _ in range(2))
    row = np.arange(len(labels))[:, None, None]
    down, right = np.arange(width)[:, None], np.arange(width)[None, :]
    images[row, 0, top[:, None, None] + down, left[:, None, None] + right] += pattern[labels]
    return images


def image_distribution(
    labels: Labels, rng: np.random.Generator, *, size: int, gain_spread: float, offset_spread: float, noise: float
) -> Inputs:
    """`distribution` of the values of an image: their places do not matter."""
    series = distribution(
        labels, rng, length=size * size, gain_spread=gain_spread, offset_spread=offset_spread, noise=noise
    )
    return series.reshape(len(labels), 2, size, size)


# -- vectors [count, features] and sequences of them [count, time, features] ------------------------------------------


def board(labels: Labels, rng: np.random.Generator, *, basis: Inputs, cells: int, noise: float) -> Inputs:
    """A point on a board of cells, seen through the linear map `basis` [2, features]; its colour is the class."""
    inputs: Inputs = _board_points(labels, rng, cells) @ basis
    return inputs + noise * rng.standard_normal(inputs.shape)


def board_sequence(
    labels: Labels, rng: np.random.Generator, *, basis: Inputs, cells: int, noise: float, time: int
) -> Inputs:
    """A sequence of points, all in cells of one colour."""
    points = _board_points(np.repeat(labels, time), rng, cells).reshape(len(labels), time, 2)
    inputs: Inputs = points @ basis
    return inputs + noise * rng.standard_normal(inputs.shape)


def sectors(
    labels: Labels, rng: np.random.Generator, *, basis: Inputs, turns: int, gain_spread: float, noise: float
) -> Inputs:
    """A direction in a plane, whose length says nothing; the sectors of the classes alternate `turns` times around."""
    count = len(labels)
    sector = labels + CLASSES * rng.integers(0, turns, count)
    angle = 2 * np.pi * (sector + 0.1 + 0.8 * rng.random(count)) / (CLASSES * turns)
    seen: Inputs = np.stack([np.cos(angle), np.sin(angle)], 1) @ basis
    seen += noise * rng.standard_normal(seen.shape)
    return seen * np.exp(gain_spread * rng.standard_normal((count, 1)))


def majority(
    labels: Labels, rng: np.random.Generator, *, basis: Inputs, time: int, gain_spread: float, noise: float
) -> Inputs:
    """A sequence of four kinds of token, of which one is the commonest; each token has a gain of its own."""
    count = len(labels)
    kind = np.where(rng.random((count, time)) < 0.25, labels[:, None], rng.integers(0, CLASSES, (count, time)))
    tokens: Inputs = basis[kind]  # [count, time, features]
    tokens = tokens + noise * rng.standard_normal(tokens.shape)
    return tokens * np.exp(gain_spread * rng.standard_normal((count, time, 1)))


def token_relation(labels: Labels, rng: np.random.Generator, *, basis: Inputs, time: int, noise: float) -> Inputs:
    """Two flagged tokens, one in the first and one in the last third, of equal or opposite sign in one of two ways."""
    count, zone = len(labels), time // 3
    row, way = np.arange(count), labels // 2
    early, late = rng.integers(0, zone, count), rng.integers(time - zone, time, count)
    first = rng.choice([-1.0, 1.0], count)
    second = np.where(labels % 2 == 0, first, -first)
    tokens = noise * rng.standard_normal((count, time, basis.shape[1]))
    tokens[row, early] += 2.0 * (first[:, None] * basis[way] + basis[2])
    tokens[row, late] += 2.0 * (second[:, None] * basis[way] + basis[3])
    return tokens


def with_hints(inputs: Inputs, labels: Labels, rng: np.random.Generator, *, share: float, axis: int) -> Inputs:
    """Two more channels (along `axis`), which tell the class of a share of the examples to any host, and are noise
    for the others: without them, the accuracy of a host that lacks something would say what it lacks."""
    easy = rng.random(len(labels)) < share
    angle = 2 * np.pi * labels / CLASSES
    hint = easy[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.25 * rng.standard_normal((len(labels), 2))
    shape = [1] * inputs.ndim
    shape[0], shape[axis] = len(labels), HINTS
    target = list(inputs.shape)
    target[axis] = HINTS
    return np.concatenate([inputs, np.broadcast_to(hint.reshape(shape), target)], axis)


def orthogonal_rows(rng: np.random.Generator, rows: int, features: int) -> Inputs:
    """Random directions at right angles, so that no two of them are confused by chance. [rows, features]"""
    q, _ = np.linalg.qr(rng.standard_normal((features, rows)))
    return np.ascontiguousarray(q.T)


def _board_points(labels: Labels, rng: np.random.Generator, cells: int) -> Inputs:
    """Points in [−1, 1]² within cells whose colour is the label, off the cells' borders. [count, 2]"""
    cell = np.stack(np.meshgrid(np.arange(cells), np.arange(cells), indexing="ij"), -1).reshape(-1, 2)
    colour = (cell[:, 0] + 2 * cell[:, 1]) % CLASSES
    order = np.argsort(colour, kind="stable")  # cells by colour, so that a label picks from its own range
    size = np.bincount(colour, minlength=CLASSES)
    start = np.cumsum(size) - size
    picked = order[start[labels] + (rng.random(len(labels)) * size[labels]).astype(np.int64)]
    points: Inputs = (cell[picked] + 0.08 + 0.84 * rng.random((len(labels), 2))) / cells * 2.0 - 1.0
    return points


def _add(series: Inputs, channel: int, start: Labels, pattern: Inputs) -> None:
    """Add each example's pattern [count, width] to its series, from its own start on."""
    row = np.arange(len(series))[:, None]
    series[row, channel, start[:, None] + np.arange(pattern.shape[1])] += pattern
