"""`varied`: hosts of random build on data that were not made to need anything: for training beside `mixed`.

In `mixed`, something is missing or nothing is. Here hosts are just more or less suited: narrow here, blind to what is
near there, a nonlinearity short; accuracy rises by itself, and growing pays a little, a lot, or not at all. The data
are the curves of `mnist1d` as series and as sequences, images with a sign somewhere in them, points in clusters, and
text in a made-up language.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.growth.blueprints import Layout
from esper.tasks.data import Split, Splits
from esper.tasks.family import Draw, Fact, draw_rng, draw_seed
from esper.tasks.hosts import Conv1dHost, Conv2dHost
from esper.tasks.registry import Task, load_task
from esper.tasks.text import language_task
from esper.tasks.token_host import TokenHost

FIRST_DATA, DATA_SEEDS = 100, 4
"""Data sets that nothing else uses: this many to train on, and as many to judge by."""
CLASSES = 10
EXAMPLES = (3_000, 1_000, 1_000)
"""To train on, to decide by and to test on."""
PIECES = 10
"""Into which a curve is cut where it is a sequence."""
SIZE = 12
"""Of an image, in pixels."""
FEATURES, CENTRES = 16, 3
"""Of the clusters: dimensions, and clusters per class."""


class Varied:
    """Each sort of data in turn, each time another host, with room to grow or without."""

    name = "varied"
    slots = 4
    horizon = 25

    def __init__(self) -> None:
        self.round = len(SORTS)

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        sort = tuple(SORTS)[number % len(SORTS)]
        rng = draw_rng(self.name, number, held_out)
        data_seed = FIRST_DATA + int(rng.integers(DATA_SEEDS)) + (DATA_SEEDS if held_out else 0)
        layout, make = SORTS[sort]
        task, host = make(rng, data_seed)
        facts: dict[str, Fact] = {"number": number, "kind": sort, "layout": layout, "data_seed": data_seed, **host}
        size = task.host_parameters
        unlimited = rng.random() < 0.4
        budget = None if unlimited else size + int(size * np.exp(rng.uniform(np.log(0.3), np.log(4.0))))
        most = int(rng.choice([1, 2, 2, 3]))
        return Draw(task, draw_seed(rng, held_out), int(rng.integers(18, self.horizon + 1)), budget, most, facts)


# -- hosts -------------------------------------------------------------------------------------------------------------

Host = dict[str, Fact]
"""What is worth knowing about a host that was drawn."""


def _series(rng: np.random.Generator, data_seed: int) -> tuple[Task, Host]:
    return _convolutional(Conv1dHost, rng, _curves(data_seed), kernels=[1, 3, 5], widths=(4, 13))


def _image(rng: np.random.Generator, data_seed: int) -> tuple[Task, Host]:
    return _convolutional(Conv2dHost, rng, _signs(data_seed), kernels=[1, 1, 3], widths=(5, 15))


def _convolutional(
    kind: type[Conv1dHost | Conv2dHost],
    rng: np.random.Generator,
    splits: Splits,
    kernels: Sequence[int],
    widths: tuple[int, int],
) -> tuple[Task, Host]:
    stages = int(rng.integers(2, 5))
    wide = [int(width) for width in rng.integers(*widths, stages)]
    reach = [int(kernel) for kernel in rng.choice(kernels, stages)]
    pools = [int(rng.choice([1, 2])) for _ in range(stages - 1)] + [1]
    make = partial(kind, in_channels=1, widths=wide, kernels=reach, classes=CLASSES, pools=pools)
    facts: Host = {"widths": _dashed(wide), "kernels": _dashed(reach), "pools": _dashed(pools)}
    return _task(splits, make, stages, rng, updates=20), facts


def _sequence(rng: np.random.Generator, data_seed: int) -> tuple[Task, Host]:
    return _of_tokens(rng, _pieces(data_seed), attention=0.3)


def _vector(rng: np.random.Generator, data_seed: int) -> tuple[Task, Host]:
    return _of_tokens(rng, _clusters(data_seed), attention=0.0)


def _of_tokens(rng: np.random.Generator, splits: Splits, attention: float) -> tuple[Task, Host]:
    stages = int(rng.integers(2, 5))
    widths = [int(width) for width in rng.integers(6, 21, stages)]
    bends = [bool(rng.random() < 0.7) for _ in range(stages)]
    attends = [bool(rng.random() < attention) for _ in range(stages)]
    features = splits.train.x.shape[-1]
    make = partial(TokenHost, features, widths, CLASSES, bends, attends, pools=[1] * stages)
    facts: Host = {"widths": _dashed(widths), "bends": _dashed(bends), "attends": _dashed(attends)}
    return _task(splits, make, stages, rng, updates=40), facts


def _text(rng: np.random.Generator, data_seed: int) -> tuple[Task, Host]:
    sizes = {
        "context": 48,
        "width": 4 * int(rng.integers(2, 6)),
        "heads": int(rng.choice([1, 2])),
        "layers": int(rng.integers(1, 4)),
    }
    task = language_task("varied", "a made-up language", _language(data_seed), 0, "the generated text", sizes)
    return task, {"width": sizes["width"], "heads": sizes["heads"], "layers": sizes["layers"]}


SORTS: dict[str, tuple[Layout, Callable[[np.random.Generator, int], tuple[Task, Host]]]] = {
    "series": ("conv1d", _series),
    "sequence": ("sequence", _sequence),
    "image": ("conv2d", _image),
    "vector": ("dense", _vector),
    "text": ("sequence", _text),
}


def _task(
    splits: Splits, make_host: Callable[[], nn.Module], stages: int, rng: np.random.Generator, updates: int
) -> Task:
    return Task(
        name="varied",
        description="generated",
        splits=splits,
        make_host=make_host,
        slots=tuple(f"stages.{i}" for i in range(stages)),
        labels=tuple("0123456789"),
        batch_size=100,
        updates_per_epoch=updates,
        learning_rate=float(rng.choice([5e-3, 1e-2])),
    )


def _dashed(numbers: Sequence[int]) -> str:
    return "-".join(str(int(number)) for number in numbers)


# -- data --------------------------------------------------------------------------------------------------------------

_cached = lru_cache(maxsize=2 * DATA_SEEDS)


@_cached
def _curves(seed: int) -> Splits:
    return load_task("mnist1d", seed=seed).splits


@_cached
def _pieces(seed: int) -> Splits:
    splits = _curves(seed)
    return Splits(*(Split(in_pieces(part.x), part.y) for part in (splits.train, splits.val, splits.test)))


def in_pieces(series: Tensor) -> Tensor:
    """[count, 1, length] cut into pieces, each with its place: [count, PIECES, length / PIECES + 1]."""
    count = len(series)
    when = torch.linspace(-1.0, 1.0, PIECES).expand(count, PIECES)[..., None]
    return torch.cat([series.reshape(count, PIECES, -1), when], -1)


@_cached
def _signs(seed: int) -> Splits:
    """Images of SIZE² pixels with one of ten random signs of 5×5 somewhere, in noise."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], (CLASSES, 5, 5))

    def images(labels: NDArray[np.int64]) -> NDArray[np.float64]:
        drawn = 0.7 * rng.standard_normal((len(labels), 1, SIZE, SIZE))
        top, left = (rng.integers(0, SIZE - 4, len(labels)) for _ in range(2))
        for row in range(5):
            for column in range(5):
                drawn[np.arange(len(labels)), 0, top + row, left + column] += signs[labels, row, column]
        return drawn

    return _splits(images, rng)


@_cached
def _clusters(seed: int) -> Splits:
    """Points around one of several centres per class."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((CLASSES, CENTRES, FEATURES))

    def points(labels: NDArray[np.int64]) -> NDArray[np.float64]:
        centre = centres[labels, rng.integers(0, CENTRES, len(labels))]
        return centre + 0.6 * rng.standard_normal(centre.shape)

    return _splits(points, rng)


def _splits(inputs: Callable[[NDArray[np.int64]], NDArray[np.float64]], rng: np.random.Generator) -> Splits:
    parts = []
    for count in EXAMPLES:
        labels = rng.permutation(np.arange(count, dtype=np.int64) % CLASSES)
        parts.append(Split(torch.from_numpy(inputs(labels).astype(np.float32)), torch.from_numpy(labels)))
    return Splits(*parts)


def write_language(lines: int, seed: int) -> str:
    """Lines of made-up words. A line is about three of the words that it may be about, which keep coming back."""
    rng = random.Random(seed)
    syllables = [consonant + vowel for consonant in rng.sample("bdfgklmnprst", 7) for vowel in rng.sample("aeiou", 3)]
    words = ["".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(48)]
    small, about = words[:16], words[16:]
    written = []
    for _ in range(lines):
        own = rng.sample(about, 3)
        written.append(" ".join(rng.choice(small if place % 2 else own) for place in range(rng.randint(6, 10))))
    return "\n".join(written) + "\n"


_language = _cached(partial(write_language, 2_500))
