"""`mnist1d`: our own generator of the MNIST-1D task (Greydanus and Kobak, 2020), the default arena.

Each of the ten digits is a short curve: the sideways position of a pen that draws the digit from top to bottom. A
series holds one such curve at a random place and of a random width, scaled, tilted and buried in smooth noise. It takes
a moment to make, and tells good networks from bad ones in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.data import Split, Splits, stratified_parts
from esper.tasks.hosts import Conv1dHost
from esper.tasks.registry import Task, task

LENGTH = 40
POOL, TEST = 4_000, 1_000
VAL = 1_000  # out of the pool

# Where the pen is, left (−) or right (+) of the middle, at twelve heights from top to bottom.
TEMPLATES = np.array(
    [
        [0.1, 0.5, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 0.1],  # 0: one wide bow
        [-0.9, -0.4, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],  # 1: a flick, then straight down
        [-0.6, 0.2, 0.8, 1.0, 0.8, 0.4, -0.1, -0.6, -1.0, -0.6, 0.2, 0.9],  # 2: bow to the right, foot to the right
        [-0.5, 0.5, 0.9, 0.7, 0.1, -0.4, 0.2, 0.8, 1.0, 0.7, 0.1, -0.7],  # 3: two bows to the right
        [0.5, 0.1, -0.3, -0.7, -1.0, -0.6, 0.6, 0.7, 0.5, 0.5, 0.5, 0.5],  # 4: slant to the left, bar, stem
        [0.9, 0.1, -0.8, -0.8, -0.8, -0.3, 0.4, 0.8, 0.9, 0.6, 0.1, -0.6],  # 5: corner on the left, bow to the right
        [0.8, 0.2, -0.3, -0.7, -0.9, -1.0, -0.7, -0.1, 0.5, 0.4, -0.1, -0.6],  # 6: sweep to the left, small ring
        [-0.9, -0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, -0.2, -0.4, -0.6],  # 7: bar, then one long slant
        [0.2, 0.8, 0.9, 0.3, -0.5, -0.9, -0.5, 0.3, 0.9, 1.0, 0.6, 0.0],  # 8: right, left, right
        [0.7, 0.2, -0.5, -0.7, -0.1, 0.7, 0.8, 0.7, 0.6, 0.4, 0.3, 0.1],  # 9: small ring, then a tail
    ]
)
PADDING = (36, 60)  # how much longer than its curve a series is, before it is resampled to LENGTH
SCALE = 0.4  # relative spread of the height
SHEAR = 0.75  # spread of the tilt over a whole series
SMOOTH_NOISE, SMOOTHNESS, WHITE_NOISE = 0.25, 2.0, 0.02


def make_series(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float32]:
    """One series per label. [count, LENGTH]"""
    count, points = len(labels), TEMPLATES.shape[1]
    padding = rng.integers(PADDING[0], PADDING[1] + 1, size=(count, 1))
    start = rng.uniform(0.0, padding)  # where the curve begins, anywhere within the series
    ticks = np.linspace(0.0, 1.0, LENGTH) * (points + padding - 1)  # [count, LENGTH], in units of template points
    series = _interpolate(TEMPLATES[labels], ticks - start)
    series *= 1.0 + SCALE * rng.standard_normal((count, 1))
    series += SHEAR * rng.standard_normal((count, 1)) * np.linspace(-0.5, 0.5, LENGTH)
    series += SMOOTH_NOISE * _smooth(rng.standard_normal((count, LENGTH)))
    series += WHITE_NOISE * rng.standard_normal((count, LENGTH))
    return series.astype(np.float32)


def _interpolate(curves: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each curve [count, points], zero outside its points, read off at fractional positions [count, n]."""
    padded = np.pad(curves, ((0, 0), (1, 1)))
    at = np.clip(at + 1.0, 0.0, padded.shape[1] - 1.0)
    left = np.minimum(at.astype(np.int64), padded.shape[1] - 2)
    fraction = at - left
    low, high = np.take_along_axis(padded, left, 1), np.take_along_axis(padded, left + 1, 1)
    interpolated: NDArray[np.float64] = low + fraction * (high - low)
    return interpolated


def _smooth(noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """White noise smoothed along the series by a Gaussian, wrapped at the ends, back at unit variance."""
    distance = np.minimum(np.arange(LENGTH), LENGTH - np.arange(LENGTH))
    kernel = np.exp(-0.5 * (distance / SMOOTHNESS) ** 2)
    kernel /= np.sqrt((kernel**2).sum())
    smooth: NDArray[np.float64] = np.fft.irfft(np.fft.rfft(noise) * np.fft.rfft(kernel), n=LENGTH)
    return smooth


@task("mnist1d")
def mnist1d(seed: int, *, widths: Sequence[int] = (8, 8, 8), kernels: Sequence[int] = (3, 3, 3)) -> Task:
    """Ten kinds of curve hidden in noisy series, 1-D convolutional host."""
    rng = np.random.default_rng(seed)
    labels = np.arange(POOL + TEST, dtype=np.int64) % 10
    series = torch.from_numpy(make_series(labels, rng))[:, None]  # [5000, 1, LENGTH]
    series = series / series.std()
    total = POOL + TEST
    parts = stratified_parts(labels, ((POOL - VAL) / total, VAL / total, TEST / total), rng)
    train, val, test = (Split(series[part], torch.from_numpy(labels[part])) for part in parts)
    host = partial(Conv1dHost, in_channels=1, widths=list(widths), kernels=list(kernels), classes=10)
    return Task(
        name="mnist1d",
        description="ten kinds of curve hidden in noisy series of length 40",
        splits=Splits(train, val, test),
        make_host=host,
        slots=tuple(f"stages.{i}" for i in range(len(widths))),
        labels=tuple("0123456789"),
        batch_size=100,
        updates_per_epoch=25,
        learning_rate=1e-2,
    )
