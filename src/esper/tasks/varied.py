"""`varied`: hosts of random build on data that were not made to need anything: for training beside `mixed`.

In `mixed`, something is missing or nothing is. Here hosts are just more or less suited: narrow here, blind to what is
near there, a nonlinearity short; data are easy or hard, learnt fast or slowly. Accuracy rises by itself, and growing
pays a little, a lot, or not at all (`varied_data.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import nn

from esper.growth.blueprints import Layout, Visibility
from esper.tasks import varied_data as data
from esper.tasks.data import Splits
from esper.tasks.family import Draw, Fact, dashed, draw_rng, draw_seed
from esper.tasks.hosts import Conv1dHost, Conv2dHost
from esper.tasks.registry import Task
from esper.tasks.text import language_task
from esper.tasks.token_host import TokenHost

LINES = 2_500
"""Of a made-up language."""
STAGES, STAGES_OF_VECTORS = (2, 4), (2, 8)
"""Of a host, the fewest and the most. Vectors are cheap to train, so there is time for deep hosts."""


class Varied:
    """Each sort of data in turn, each time another host, with room to grow or without."""

    name = "varied"
    slots = STAGES_OF_VECTORS[1]
    horizon = 25

    def __init__(self, *, sorts: Sequence[str] | None = None) -> None:
        self.sorts = tuple(SORTS if sorts is None else sorts)
        self.round = len(self.sorts)

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        sort = self.sorts[number % self.round]
        rng = draw_rng(self.name, number, held_out)
        layout, make = SORTS[sort]
        task, host = make(rng, held_out)
        facts: dict[str, Fact] = {"number": number, "kind": sort, "layout": layout, **host}
        size = task.host_parameters
        unlimited = rng.random() < 0.4
        budget = None if unlimited else size + int(size * np.exp(rng.uniform(np.log(0.3), np.log(4.0))))
        most = int(rng.choice([1, 2, 2, 3]))
        return Draw(task, draw_seed(rng, held_out), int(rng.integers(18, self.horizon + 1)), budget, most, facts)


Host = dict[str, Fact]
"""What is worth knowing about a host that was drawn, and its data."""


def _series(rng: np.random.Generator, held_out: bool) -> tuple[Task, Host]:
    splits, source = _any_series(rng, held_out)
    return _convolutional(Conv1dHost, rng, splits, source, kernels=[1, 3, 5], widths=(4, 13))


def _image(rng: np.random.Generator, held_out: bool) -> tuple[Task, Host]:
    return _convolutional(Conv2dHost, rng, data.signs(rng), "signs", kernels=[1, 3], widths=(5, 15))


def _any_series(rng: np.random.Generator, held_out: bool) -> tuple[Splits, str]:
    if rng.random() < 0.5:
        return data.mnist1d_curves(rng, held_out), "curves"
    return data.waves(rng), "waves"


def _convolutional(
    kind: type[Conv1dHost | Conv2dHost],
    rng: np.random.Generator,
    splits: Splits,
    source: str,
    kernels: Sequence[int],
    widths: tuple[int, int],
) -> tuple[Task, Host]:
    stages = _between(rng, STAGES)
    wide = [int(width) for width in rng.integers(*widths, stages)]
    reach = [int(kernel) for kernel in rng.choice(kernels, stages)]
    pools = [int(rng.choice([1, 2])) for _ in range(stages - 1)] + [1]
    make = partial(kind, in_channels=1, widths=wide, kernels=reach, classes=data.CLASSES, pools=pools)
    facts: Host = {"data": source, "widths": dashed(wide), "kernels": dashed(reach), "pools": dashed(pools)}
    return _task(splits, make, stages, rng, updates=(10, 31)), facts


def _sequence(rng: np.random.Generator, held_out: bool) -> tuple[Task, Host]:
    splits, source = _any_series(rng, held_out)
    return _of_tokens(rng, data.pieces(splits), source, STAGES, attention=0.3, straight=1 / 3)


def _vector(rng: np.random.Generator, held_out: bool) -> tuple[Task, Host]:
    makers = {"clusters": data.clusters, "regions": data.regions, "bands": data.bands}
    source = str(rng.choice(list(makers), p=[0.3, 0.2, 0.5]))
    return _of_tokens(rng, makers[source](rng), source, STAGES_OF_VECTORS, attention=0.0, straight=0.5)


def _of_tokens(
    rng: np.random.Generator,
    splits: Splits,
    source: str,
    depth: tuple[int, int],
    attention: float,
    straight: float,
) -> tuple[Task, Host]:
    """`straight`: how often no stage bends anything."""
    stages = _between(rng, depth)
    widths = [int(width) for width in rng.integers(4, 21, stages)]
    bending = float(rng.choice([0.0, 0.5, 1.0], p=[straight, (1 - straight) / 2, (1 - straight) / 2]))
    bends = [bool(rng.random() < bending) for _ in range(stages)]
    attends = [bool(rng.random() < attention) for _ in range(stages)]
    features = splits.train.x.shape[-1]
    make = partial(TokenHost, features, widths, data.CLASSES, bends, attends, pools=[1] * stages)
    facts: Host = {"data": source, "widths": dashed(widths), "bends": dashed(bends), "attends": dashed(attends)}
    return _task(splits, make, stages, rng, updates=(12, 51), visibility="causal"), facts


def _text(rng: np.random.Generator, _: bool) -> tuple[Task, Host]:
    sizes = {
        "context": 48,
        "width": 4 * int(rng.integers(2, 6)),
        "heads": int(rng.choice([1, 2])),
        "layers": int(rng.integers(1, 4)),
    }
    language = data.write_language(LINES, int(rng.integers(2**31)))
    task = language_task("varied", "a made-up language", language, 0, "the generated text", sizes)
    return task, {"data": "language", "width": sizes["width"], "heads": sizes["heads"], "layers": sizes["layers"]}


SORTS: dict[str, tuple[Layout, Callable[[np.random.Generator, bool], tuple[Task, Host]]]] = {
    "series": ("conv1d", _series),
    "sequence": ("sequence", _sequence),
    "image": ("conv2d", _image),
    "vector": ("dense", _vector),
    "text": ("sequence", _text),
}


def _task(
    splits: Splits,
    make_host: Callable[[], nn.Module],
    stages: int,
    rng: np.random.Generator,
    updates: tuple[int, int],
    visibility: Visibility = "both",
) -> Task:
    return Task(
        name="varied",
        description="generated",
        splits=splits,
        make_host=make_host,
        slots=tuple(f"stages.{i}" for i in range(stages)),
        labels=tuple("0123456789"),
        batch_size=int(rng.choice([64, 100])),
        updates_per_epoch=int(rng.integers(*updates)),
        learning_rate=float(rng.choice([3e-3, 5e-3, 1e-2])),
        visibility=visibility,
    )


def _between(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    least, most = ends
    return int(rng.integers(least, most + 1))
