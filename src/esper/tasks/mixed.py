"""`mixed`: a family of small generated problems in which it matters what is grown, and where, and whether.

A draw is a host that lacks one kind of computation, data that need it, and a limit that forbids growing everything. The
place is decided in one of two ways: the host pools away what the seed would need, so that a seed helps only before
that; or the slots differ in width, so that the same seed is cheap at one and ruinous at the others. Some hosts lack
nothing. The kinds are measured in `docs/need_and_place.md`, written by `benchmarks/need_and_place.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from esper.growth.blueprints import Layout, SlotShape
from esper.growth.seed import parameter_count
from esper.tasks import needs
from esper.tasks.data import generated_splits
from esper.tasks.family import Draw, dashed, draw_rng, draw_seed
from esper.tasks.hosts import Conv1dHost, Conv2dHost
from esper.tasks.needs import CLASSES, Inputs, Labels
from esper.tasks.registry import Task
from esper.tasks.token_host import TokenHost

SLOTS = 3
VAL, TEST = 600, 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """A host, data for it, and what it lacks."""

    layout: Layout
    need: str
    answer: tuple[tuple[str, int], ...]
    """The seeds that were meant to be worth growing: (blueprint, slot). The budget always has room for them."""
    inputs: Callable[[Labels, np.random.Generator], Inputs]
    widths: tuple[int, ...]
    host: Callable[[], nn.Module]
    learning_rate: float = 1e-2

    def shape(self, slot: int) -> SlotShape:
        return SlotShape(self.layout, self.widths[slot])


# -- series, for convolutional hosts of 1×1 kernels -------------------------------------------------------------------


def _conv_host(
    kind: type[Conv1dHost | Conv2dHost], widths: Sequence[int], pools: Sequence[int], first_kernel: int = 1
) -> Callable[[], nn.Module]:
    return partial(
        kind,
        in_channels=2,
        widths=list(widths),
        kernels=[first_kernel] + [1] * (SLOTS - 1),
        classes=CLASSES,
        pools=list(pools),
        pooling="average",
    )


def _widths(rng: np.random.Generator, narrow: int, at: int, wide: tuple[int, int]) -> tuple[int, ...]:
    """`narrow` channels at one slot, more at the others."""
    widths = [int(width) for width in rng.integers(wide[0], wide[1] + 1, SLOTS)]
    widths[at] = narrow
    return tuple(widths)


def series_motif(rng: np.random.Generator, place: int) -> Problem:
    """Pooling blurs a fine motif right after slot 0; a coarse one is wider than a filter at slot 0 reaches."""
    widths = _widths(rng, 8, place, (16, 20))
    scale, length, pools = ((1, 48, (4, 4, 1)), (5, 60, (5, 4, 1)))[place]
    noise = float(rng.uniform(*((0.4, 0.6), (0.7, 0.85))[place]))
    inputs = partial(needs.motif, length=length, scale=scale, noise=noise)
    return Problem("conv1d", "motif", (("depthwise", place),), inputs, widths, _conv_host(Conv1dHost, widths, pools))


def series_distant(rng: np.random.Generator, place: int) -> Problem:
    """The host is narrow at the place, and averages over all positions right after it."""
    widths = _widths(rng, 8, place, (16, 20))
    pools = ((48, 1, 1), (2, 24, 1))[place]
    distractors, noise = int(rng.integers(4, 7)), float(rng.uniform(0.25, 0.35))
    inputs = partial(needs.distant_relation, length=48, distractors=distractors, noise=noise)
    return Problem("conv1d", "distant", (("attention", place),), inputs, widths, _conv_host(Conv1dHost, widths, pools))


def series_channel(rng: np.random.Generator, place: int) -> Problem:
    """How values are distributed, before pooling makes every distribution a bell."""
    widths = _widths(rng, int(rng.integers(6, 8)), place, (16, 20))
    gain, offset = float(rng.uniform(0.6, 0.8)), float(rng.uniform(1.6, 2.2))
    inputs = partial(needs.distribution, length=48, gain_spread=gain, offset_spread=offset, noise=0.1)
    return Problem(
        "conv1d", "channel", (("pointwise", place),), inputs, widths, _conv_host(Conv1dHost, widths, (4, 4, 1))
    )


def series_scale(rng: np.random.Generator, place: int) -> Problem:
    """Whether two marks agree changes the example's own mean and spread, and nothing else."""
    widths = _widths(rng, 10, place, (16, 20))
    inputs = partial(needs.agreement, length=48, noise=float(rng.uniform(0.35, 0.5)))
    return Problem("conv1d", "scale", (("norm", place),), inputs, widths, _conv_host(Conv1dHost, widths, (2, 1, 1)))


def series_composition(rng: np.random.Generator, place: int) -> Problem:
    """Fine motifs must be seen before they are pooled, and their order after that."""
    widths = (8, int(rng.integers(8, 11)), int(rng.integers(16, 21)))
    inputs = partial(needs.motif_order, length=50, distance=10, noise=float(rng.uniform(0.25, 0.4)))
    answer = (("depthwise", place), ("depthwise", place + 1))
    return Problem("conv1d", "composition", answer, inputs, widths, _conv_host(Conv1dHost, widths, (5, 2, 1)))


def series_nothing(rng: np.random.Generator, place: int) -> Problem:
    """As `series_scale`, but the host has a stage after the mean over all positions, which can compare by itself."""
    widths = _widths(rng, int(rng.integers(8, 11)), place, (16, 20))
    inputs = partial(needs.agreement, length=48, noise=float(rng.uniform(0.25, 0.35)))
    return Problem("conv1d", "nothing", (), inputs, widths, _conv_host(Conv1dHost, widths, (4, 12, 1)))


# -- images, for convolutional hosts -----------------------------------------------------------------------------------


def image_motif(rng: np.random.Generator, place: int) -> Problem:
    """As `series_motif`, in two dimensions."""
    widths = _widths(rng, 8, place, (16, 20))
    scale, size, pools = ((1, 12, (4, 3, 1)), (3, 12, (3, 4, 1)))[place]
    inputs = partial(
        needs.folded_motif, size=size, scale=scale, noise=float(rng.uniform(*((0.3, 0.5), (0.7, 0.9))[place]))
    )
    return Problem("conv2d", "motif", (("depthwise", place),), inputs, widths, _conv_host(Conv2dHost, widths, pools))


def image_channel(rng: np.random.Generator, place: int) -> Problem:
    """As `series_channel`: how the brightness of an image is distributed."""
    widths = _widths(rng, int(rng.integers(6, 8)), place, (16, 20))
    gain, offset = float(rng.uniform(0.6, 0.8)), float(rng.uniform(1.6, 2.2))
    inputs = partial(needs.image_distribution, size=8, gain_spread=gain, offset_spread=offset, noise=0.1)
    return Problem(
        "conv2d", "channel", (("pointwise", place),), inputs, widths, _conv_host(Conv2dHost, widths, (4, 2, 1))
    )


def image_nothing(rng: np.random.Generator, place: int) -> Problem:
    """The fine motif, for a host whose first stage sees neighbours."""
    widths = _widths(rng, int(rng.integers(12, 15)), place, (16, 20))
    inputs = partial(needs.folded_motif, size=12, scale=1, noise=float(rng.uniform(0.2, 0.3)))
    return Problem("conv2d", "nothing", (), inputs, widths, _conv_host(Conv2dHost, widths, (4, 3, 1), first_kernel=3))


# -- vectors and sequences ---------------------------------------------------------------------------------------------


def _token_host(
    features: int,
    widths: Sequence[int],
    *,
    bends: bool = True,
    attends_at: int | None = None,
    pools: Sequence[int] = (1,) * SLOTS,
) -> Callable[[], nn.Module]:
    return partial(
        TokenHost,
        features=features,
        widths=list(widths),
        classes=CLASSES,
        bends=[bends] * SLOTS,
        attends=[slot == attends_at for slot in range(SLOTS)],
        pools=list(pools),
    )


def _pool_after(place: int, time: int) -> list[int]:
    return [time if slot == place else 1 for slot in range(SLOTS)]


def vector_channel(rng: np.random.Generator, place: int) -> Problem:
    """A host without nonlinearity, narrow at one slot."""
    widths = _widths(rng, 12, place, (20, 24))
    basis = 2.0 * needs.orthogonal_rows(rng, 2, 12)
    inputs = partial(needs.board, basis=basis, cells=4, noise=float(rng.uniform(0.03, 0.07)))
    host = _token_host(12, widths, bends=False)
    return Problem("dense", "channel", (("mlp_small", place),), inputs, widths, host, learning_rate=2e-2)


def vector_scale(rng: np.random.Generator, place: int) -> Problem:
    """Directions at gains of several orders of magnitude. Wide throughout: an MLP has a norm in it, but costs more."""
    widths = _widths(rng, 15, place, (16, 18))
    basis = 2.0 * needs.orthogonal_rows(rng, 2, 8)
    inputs = partial(needs.sectors, basis=basis, turns=4, gain_spread=float(rng.uniform(2.2, 2.6)), noise=0.02)
    host = _token_host(8, widths)
    return Problem("dense", "scale", (("norm", place),), inputs, widths, host, learning_rate=5e-3)


def vector_nothing(rng: np.random.Generator, place: int) -> Problem:
    """The board of `vector_channel` with fewer cells, for a host that bends by itself."""
    widths = _widths(rng, 8, place, (14, 18))
    basis = 2.0 * needs.orthogonal_rows(rng, 2, 12)
    inputs = partial(needs.board, basis=basis, cells=3, noise=float(rng.uniform(0.04, 0.1)))
    return Problem("dense", "nothing", (), inputs, widths, _token_host(12, widths))


def token_distant(rng: np.random.Generator, place: int) -> Problem:
    """A transformer without attention, narrow at one slot."""
    widths = _widths(rng, 8, place, (16, 20))
    basis = needs.orthogonal_rows(rng, 4, 6)
    inputs = partial(needs.token_relation, basis=basis, time=12, noise=float(rng.uniform(0.1, 0.15)))
    return Problem("sequence", "distant", (("attention", place),), inputs, widths, _token_host(6, widths))


def token_channel(rng: np.random.Generator, place: int) -> Problem:
    """A host without nonlinearity that averages over time after the place."""
    widths = _widths(rng, 10, place, (16, 20))
    basis = 2.0 * needs.orthogonal_rows(rng, 2, 8)
    inputs = partial(needs.board_sequence, basis=basis, cells=4, noise=0.1, time=4)
    host = _token_host(8, widths, bends=False, pools=_pool_after(place, 4))
    return Problem("sequence", "channel", (("mlp_small", place),), inputs, widths, host)


def token_scale(rng: np.random.Generator, place: int) -> Problem:
    """Tokens of very different gain, to be counted: the loudest must not decide."""
    widths = _widths(rng, 8, place, (14, 18))
    basis, gain = needs.orthogonal_rows(rng, 4, 6), float(rng.uniform(1.3, 1.8))
    inputs = partial(needs.majority, basis=basis, time=16, gain_spread=gain, noise=0.1)
    host = _token_host(6, widths, pools=_pool_after(place, 16))
    return Problem("sequence", "scale", (("norm", place),), inputs, widths, host)


def token_nothing(rng: np.random.Generator, place: int) -> Problem:
    """The relation of `token_distant`, for a host with attention."""
    widths = _widths(rng, 10, place, (14, 18))
    basis = needs.orthogonal_rows(rng, 4, 6)
    inputs = partial(needs.token_relation, basis=basis, time=12, noise=float(rng.uniform(0.1, 0.15)))
    return Problem("sequence", "nothing", (), inputs, widths, _token_host(6, widths, attends_at=place))


def token_pooled(rng: np.random.Generator, place: int) -> Problem:
    """The same relation; after the mean over time there are stages that can compare the two tokens by themselves."""
    widths = _widths(rng, 8, place, (14, 18))
    basis = needs.orthogonal_rows(rng, 4, 6)
    inputs = partial(needs.token_relation, basis=basis, time=12, noise=float(rng.uniform(0.1, 0.15)))
    host = _token_host(6, widths, pools=_pool_after(place, 12))
    return Problem("sequence", "nothing", (), inputs, widths, host)


KINDS: dict[str, Callable[[np.random.Generator], Problem]] = {
    "series motif @0": partial(series_motif, place=0),
    "series motif @1": partial(series_motif, place=1),
    "series distant @0": partial(series_distant, place=0),
    "series distant @1": partial(series_distant, place=1),
    "series channel @0": partial(series_channel, place=0),
    "series scale @1": partial(series_scale, place=1),
    "series composition @0": partial(series_composition, place=0),
    "series nothing": partial(series_nothing, place=0),
    "image motif @0": partial(image_motif, place=0),
    "image motif @1": partial(image_motif, place=1),
    "image channel @0": partial(image_channel, place=0),
    "image nothing": partial(image_nothing, place=0),
    "vector channel @0": partial(vector_channel, place=0),
    "vector channel @1": partial(vector_channel, place=1),
    "vector channel @2": partial(vector_channel, place=2),
    "vector scale @0": partial(vector_scale, place=0),
    "vector nothing": partial(vector_nothing, place=1),
    "token distant @0": partial(token_distant, place=0),
    "token distant @1": partial(token_distant, place=1),
    "token channel @0": partial(token_channel, place=0),
    "token channel @1": partial(token_channel, place=1),
    "token scale @0": partial(token_scale, place=0),
    "token nothing": partial(token_nothing, place=0),
    "token pooled nothing": partial(token_pooled, place=0),
}
"""Each kind of problem by name: what the data are, what is needed, and the slot where it is meant to be grown."""

UPDATES: dict[Layout, int] = {"conv1d": 20, "conv2d": 20, "dense": 60, "sequence": 40}
"""Per epoch. As many as the cheaper hosts can afford: attention and small boards are learned slowly."""


class Mixed:
    """All kinds in turn, in an order that changes from round to round; everything else at random."""

    name = "mixed"
    slots = SLOTS
    horizon = 25

    def __init__(self, *, kinds: Sequence[str] | None = None) -> None:
        self.kinds = tuple(KINDS if kinds is None else kinds)
        self.round = len(self.kinds)
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind of problem {kind!r}; there are {', '.join(KINDS)}")

    def problem(self, kind: str, rng: np.random.Generator) -> Problem:
        return KINDS[kind](rng)

    def kind_of(self, number: int, *, held_out: bool = False) -> str:
        turn, place = divmod(number, len(self.kinds))
        # Every run of draws then holds the kinds in equal shares, which makes comparisons on few draws less noisy.
        order = draw_rng(self.name, turn, held_out, use=1).permutation(len(self.kinds))
        return self.kinds[int(order[place])]

    def sorts(self, draw_ids: Sequence[int], *, held_out: bool = False) -> list[str]:
        """Of each draw what its data are: series, image, vector or token."""
        return [self.kind_of(number, held_out=held_out).split()[0] for number in draw_ids]

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        kind = self.kind_of(number, held_out=held_out)
        rng = draw_rng(self.name, number, held_out)
        problem = self.problem(kind, rng)
        task = _task(self.name, kind, problem, rng)
        host = task.host_parameters
        budget, max_seeds = _limits(problem, host, rng)
        facts: dict[str, str | int | float] = {
            "number": number,
            "kind": kind,
            "layout": problem.layout,
            "need": problem.need,
            "answer": "+".join(f"{blueprint}@{slot}" for blueprint, slot in problem.answer) or "none",
            "widths": dashed(problem.widths),
            "host_parameters": host,
            "train_examples": len(task.splits.train),
        }
        return Draw(task, draw_seed(rng, held_out), int(rng.integers(18, self.horizon + 1)), budget, max_seeds, facts)


def _task(name: str, kind: str, problem: Problem, rng: np.random.Generator) -> Task:
    train = int(rng.integers(1200, 2001))
    return Task(
        name=name,
        description=f"generated: {kind}",
        splits=generated_splits(problem.inputs, (train, VAL, TEST), CLASSES, rng),
        make_host=problem.host,
        slots=tuple(f"stages.{i}" for i in range(len(problem.widths))),
        labels=tuple(str(label) for label in range(CLASSES)),
        batch_size=64,
        updates_per_epoch=UPDATES[problem.layout],
        learning_rate=problem.learning_rate,
        visibility="causal" if problem.layout == "sequence" else "both",
    )


def _limits(problem: Problem, host: int, rng: np.random.Generator) -> tuple[int, int]:
    """A budget in parameters and a limit of seeds, with room for the answer and not for everything."""
    needed = sum(parameter_count(blueprint, problem.shape(slot), "gated") for blueprint, slot in problem.answer)
    # From tight to loose: a budget that always forbade the wide slots would choose the place for the controller.
    room = max(needed, int(host * np.exp(rng.uniform(np.log(0.6), np.log(4.0)))))
    most = max(len(problem.answer), int(rng.choice([1, 1, 2, 3])))
    return host + room, most
