"""The settings of many problems of the family `grammar` at once: everything about them but their data.

All are columns [N], drawn on the CPU, independently of each other: no width, rate or size says what a host lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from esper.growth.blueprints import SlotShape
from esper.growth.seed import parameter_count
from esper.tasks.counted import Purpose, chosen, uniforms
from esper.tasks.grammar_forms import CLASSES, FORMS, LAYOUTS, SIZES, STAGES, first_pool, forms_of
from esper.tasks.grammar_kinds import (
    CLASS_RULES,
    CODES,
    EXPRESSIONS,
    SPREAD_OUT,
    STRUCTURES,
    UNSEEN,
    ClassRule,
    Code,
    Expression,
    Structure,
)

# One row per layout: dense, sequence, conv1d, conv2d. Least and most.
FEATURES = ((4, 20), (5, 10), (2, 4), (2, 3))
WIDTHS = ((6, 24), (6, 20), (6, 20), (6, 18))
NARROW, NARROW_OFTEN = (3, 6), 0.3
"""Channels of one stage of the hosts with a narrow stage, and how often a host is one."""
UPDATES = ((20, 60), (16, 40), (10, 24), (10, 20))
LATENT = (4, 4, 2, 2)
"""Channels of the signal before it is seen through a random map."""
EXAMPLES, VAL, TEST = (256, 1024), 400, 400
RATE = (2e-3, 2e-2)
DECAYS = (0.0, 1e-3, 1e-2)
HORIZON = (16, 30)
ROOM, UNLIMITED = (0.3, 4.0), 0.25
"""Parameters for seeds in sizes of the host, and how often they are not limited."""
SEEDS = {1: 0.35, 2: 0.3, 3: 0.2, torch.inf: 0.15}
STRAIGHT, MIXED = 0.45, 0.15
"""How often no stage bends anything; how often every stage does or does not by itself (vectors and sequences)."""
NOISE_VECTOR, NOISE_SPREAD_OUT, NOISE_SPARSE = (0.02, 0.2), (0.15, 0.8), (0.1, 0.5)
# How often, and from where to where.
GAIN, OFFSET, LOUD = (0.35, 0.3, 1.5), (0.3, 0.3, 1.5), (0.4, 0.5, 2.0)
EASY, WRONG = (0.4, 0.15, 0.6), (0.3, 0.02, 0.15)
GAIN_THAT_NEEDS_A_NORM = 0.8

LACKS = ("neighbour", "attention", "nonlinearity", "norm")
ANSWERS: tuple[tuple[str, ...], ...] = (
    ("mlp_small", "attention", "depthwise", "depthwise"),
    ("mlp_small", "attention", "attention", "attention"),
    ("mlp_small", "mlp_small", "pointwise", "pointwise"),
    ("norm", "norm", "norm", "norm"),
)
"""The seed that is meant to supply what is lacking, by layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """Columns [N] of problems."""

    keys: Tensor
    draw: Tensor
    layout: Tensor
    form: Tensor
    features: Tensor
    widths: Tensor
    """[N, STAGES]; 0 after the last stage."""
    bends: Tensor
    host_parameters: Tensor
    structure: Tensor
    code: Tensor
    rule: Tensor
    first: Tensor
    second: Tensor
    dimensions: Tensor
    """Coordinates that expressions use: 2 to 4, 2 within a code."""
    steepness: Tensor
    share: Tensor
    """Of positions that hold the class's symbol in `Structure.MOST`."""
    distractors: Tensor
    scale: Tensor
    """Positions of each of the four heights of a motif."""
    noise: Tensor
    gain: Tensor
    offset: Tensor
    loud: Tensor
    easy: Tensor
    wrong: Tensor
    examples: Tensor
    updates: Tensor
    learning_rate: Tensor
    weight_decay: Tensor
    horizon: Tensor
    budget: Tensor
    max_seeds: Tensor
    lacks: Tensor
    """[N, 4] bool, in the order of LACKS: what the host lacks of what the data need."""
    places: Tensor
    """[N, 2]: slots where the first and the second of it are meant to be grown."""

    def rows(self, index: Tensor | slice) -> Settings:
        return Settings(*(getattr(self, field.name)[index] for field in fields(self)))

    def to(self, device: torch.device | str) -> Settings:
        return Settings(*(getattr(self, field.name).to(device) for field in fields(self)))

    def __len__(self) -> int:
        return len(self.keys)


def draw_settings(keys: Tensor, draw: Tensor, layout: Tensor, unseen: bool) -> Settings:
    """The settings of the draws with these keys [N]; `layout` [N] are indices into LAYOUTS."""
    u = iter(uniforms(keys, Purpose.SETTINGS, 40 + 2 * STAGES).double().unbind(1))
    form = _by_layout(layout, next(u), [forms_of(name) for name in LAYOUTS])
    structure, code, rule, first, second = _kind(layout, u, unseen)
    features = _between(next(u), *_ends(FEATURES, layout))
    widths, bends = _host(layout, form, u)
    is_vector = structure == Structure.VECTOR
    spread_out = _is_in(structure, (*SPREAD_OUT, Structure.WAVES))
    noise = _log_between(next(u), *_three(NOISE_VECTOR, NOISE_SPREAD_OUT, NOISE_SPARSE, is_vector, spread_out))
    gain, offset, loud, easy, wrong = (_sometimes(u, *how) for how in (GAIN, OFFSET, LOUD, EASY, WRONG))
    latent = torch.tensor(LATENT)[layout]
    distractors = _between(next(u), 0, 2)
    needs = _needs(layout, structure, code, rule, first, second, distractors, gain)
    lacks = _lacks(form, bends, needs)
    places = _places(form, widths)
    room, seeds = next(u), next(u)
    size = host_parameters(form, features, widths)
    return Settings(
        keys=keys,
        draw=draw,
        layout=layout,
        form=form,
        features=features,
        widths=widths,
        bends=bends,
        host_parameters=size,
        structure=structure,
        code=code,
        rule=rule,
        first=first,
        second=second,
        dimensions=torch.where(is_vector, _between(next(u), 2, 4), 2),
        steepness=_log_between(next(u), 1.0, 3.0),
        share=_uniform(next(u), 0.2, 0.5),
        distractors=distractors,
        # A wide motif does not fit twice into a short sequence.
        scale=torch.where((LAYOUTS.index("sequence") == layout) | (structure != Structure.ONE), 1, 1 + (next(u) < 0.4)),
        noise=noise,
        gain=gain,
        offset=offset,
        loud=torch.where(features > latent, loud, 0.0),  # else it would drown the signal for good
        easy=easy,
        wrong=wrong,
        examples=_log_between(next(u), *EXAMPLES).round().long(),
        updates=_between(next(u), *_ends(UPDATES, layout)),
        learning_rate=_log_between(next(u), *RATE),
        weight_decay=torch.tensor(DECAYS, dtype=torch.float64)[_between(next(u), 0, len(DECAYS) - 1)],
        horizon=_between(next(u), *HORIZON),
        budget=_budget(size, _answer_parameters(layout, lacks, places, widths), room),
        max_seeds=torch.maximum(_weighted(seeds, SEEDS).double(), answers(lacks).sum(1)),
        lacks=lacks,
        places=places,
    )


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _kind(layout: Tensor, u: Iterator[Tensor], unseen: bool) -> tuple[Tensor, ...]:
    is_vector = layout == LAYOUTS.index("dense")
    structure = torch.where(is_vector, int(Structure.VECTOR), _weighted(next(u), STRUCTURES))
    rule = _weighted(next(u), CLASS_RULES)
    first, second = (_between(next(u), 0, len(EXPRESSIONS) - 1) for _ in range(2))
    if unseen:
        kind = _by_layout(layout, next(u), [[int(one) for one in UNSEEN[name]] for name in LAYOUTS])
        structure, first = torch.where(is_vector, structure, kind), torch.where(is_vector, kind, first)
        rule = torch.where(is_vector, int(ClassRule.BANDS), rule)
    weights = torch.tensor([CODES[one] for one in Structure], dtype=torch.float64).cumsum(1)
    code = 1 + (next(u)[:, None] >= weights[structure, :-1]).sum(1)
    return structure, torch.where(is_vector, int(Code.NONE), code), rule, first, second


def _host(layout: Tensor, form: Tensor, u: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Widths and nonlinearities [N, STAGES]."""
    stages = torch.tensor([one.stages for one in FORMS])[form]
    least, most = _ends(WIDTHS, layout)
    widths = torch.stack([_between(next(u), least, most) for _ in range(STAGES)], 1)
    at = torch.where(next(u) < NARROW_OFTEN, (next(u) * stages).long(), -1)  # [N]
    stage = torch.arange(STAGES)
    widths = torch.where(stage == at[:, None], _between(next(u), *NARROW)[:, None], widths)
    how = next(u)[:, None]
    mixed = torch.stack([next(u) < 0.5 for _ in range(STAGES)], 1)
    # The stages of a convolutional host bend together.
    mixed = torch.where((layout < LAYOUTS.index("conv1d"))[:, None], mixed, mixed[:, :1])
    bends = torch.where(how < STRAIGHT, torch.tensor(False), torch.where(how < STRAIGHT + MIXED, mixed, True))
    there = stage < stages[:, None]
    return widths * there, bends & there


def _needs(
    layout: Tensor,
    structure: Tensor,
    code: Tensor,
    rule: Tensor,
    first: Tensor,
    second: Tensor,
    distractors: Tensor,
    gain: Tensor,
) -> Tensor:
    """[N, 4] bool in the order of LACKS: what the data need."""
    # Ordered bands of a linear expression are the one relation that a linear classifier can compute.
    straight = (first == Expression.LINEAR) & (rule == ClassRule.BANDS)
    straight |= (
        (first == Expression.LINEAR) & (second == Expression.LINEAR) & _is_in(rule, (ClassRule.SUM, ClassRule.BITS))
    )
    has_relation = (structure == Structure.VECTOR) | (code == Code.POINT)
    neighbour = (code == Code.MOTIF) | (structure == Structure.WAVES)
    far = _is_in(structure, (Structure.ORDER, Structure.GAP, Structure.LEADER))
    far |= (structure == Structure.RELATION) & (distractors > 0)
    far |= neighbour & (layout == LAYOUTS.index("sequence"))  # where only attention sees neighbours
    bend = (has_relation & ~straight) | (code == Code.SHAPE) | neighbour
    bend |= _is_in(structure, (Structure.RELATION, Structure.COUNT))
    bend |= (structure == Structure.MOST) & (code == Code.LEVEL)
    return torch.stack([neighbour & (layout >= LAYOUTS.index("conv1d")), far, bend, gain > GAIN_THAT_NEEDS_A_NORM], 1)


def _lacks(form: Tensor, bends: Tensor, needs: Tensor) -> Tensor:
    sees = torch.tensor([max(one.kernels[: first_pool(one) + 1]) > 1 for one in FORMS])[form]
    attends = torch.tensor([any(one.attends) for one in FORMS])[form]
    lacks = needs & ~torch.stack([sees, attends, bends.any(1), torch.zeros_like(sees)], 1)
    lacks[:, 2] &= ~lacks[:, 0]  # the seed that sees neighbours bends, too
    return lacks


def _places(form: Tensor, widths: Tensor) -> Tensor:
    """[N, 2]: the narrowest slot before anything is pooled, and its neighbour."""
    last = torch.tensor([min(first_pool(one), max(one.stages - 2, 0)) for one in FORMS])[form]
    stages = torch.tensor([one.stages for one in FORMS])[form]
    allowed = torch.arange(STAGES) <= last[:, None]
    place = torch.where(allowed, widths, 1_000).argmin(1)
    return torch.stack([place, torch.where(place + 1 < stages, place + 1, place - 1)], 1)


def answers(lacks: Tensor) -> Tensor:
    """[N, 4] bool: the first two things that are lacking; a third would leave no room to choose."""
    return lacks & (lacks.cumsum(1) <= 2)


# -- sizes and limits --------------------------------------------------------------------------------------------------


def host_parameters(form: Tensor, features: Tensor, widths: Tensor) -> Tensor:
    """[N] int64: parameters of each host."""
    size = torch.zeros_like(features)
    inputs, last = features, features
    for stage in range(STAGES):
        width = widths[:, stage]
        facts = [_stage_facts(number, stage) for number in range(len(FORMS))]
        reach, per_channel, attends = torch.tensor(facts)[form].unbind(1)
        size += width * (inputs * reach + per_channel) + attends * (4 * width * width + 3 * width)
        inputs, last = width, torch.where(width > 0, width, last)
    return size + CLASSES * (last + 1)


@cache
def _stage_facts(number: int, stage: int) -> tuple[int, int, int]:
    """Weights per pair of channels, biases and norms per channel, and whether the stage attends."""
    form = FORMS[number]
    if stage >= form.stages:
        return 0, 0, 0
    return form.kernels[stage] ** len(SIZES[form.layout]), 2 if form.norm else 1, int(form.attends[stage])


@cache
def _seed_sizes() -> Tensor:
    """[LACKS, layouts, channels]: parameters of the seeds that answer. Made once: the sizes are asked of real seeds."""
    most = 1 + max(high for _, high in WIDTHS)
    return torch.tensor(
        [
            [
                [0, *(parameter_count(row[i], SlotShape(layout, width), "gated") for width in range(1, most))]
                for i, layout in enumerate(LAYOUTS)
            ]
            for row in ANSWERS
        ]
    )


def _answer_parameters(layout: Tensor, lacks: Tensor, places: Tensor, widths: Tensor) -> Tensor:
    """[N]: parameters that the meant seeds have."""
    wanted = answers(lacks)
    turn = (wanted.cumsum(1) - 1).clamp(0, 1)  # [N, 4]: the first or the second place
    width = widths.gather(1, places).gather(1, turn)
    sizes = _seed_sizes()[torch.arange(len(LACKS)), layout[:, None], width]
    return (sizes * wanted).sum(1)


def _budget(size: Tensor, needed: Tensor, u: Tensor) -> Tensor:
    """[N] float64: room for the answer, and not for everything."""
    room = _log_between(((u - UNLIMITED) / (1.0 - UNLIMITED)).clamp(0.0), *ROOM)
    return torch.where(u < UNLIMITED, torch.inf, size + torch.maximum(needed, (size * room).long()))


# -- columns from uniform numbers --------------------------------------------------------------------------------------


def _uniform(u: Tensor, least: Tensor | float, most: Tensor | float) -> Tensor:
    return least + u * (most - least)


def _log_between(u: Tensor, least: Tensor | float, most: Tensor | float) -> Tensor:
    low, high = (torch.as_tensor(end, dtype=torch.float64).log() for end in (least, most))
    return (low + u * (high - low)).exp()


def _between(u: Tensor, least: Tensor | int, most: Tensor | int) -> Tensor:
    """Whole numbers, both ends included."""
    return least + (u * (most - least + 1)).long()


def _sometimes(u: Iterator[Tensor], often: float, least: float, most: float) -> Tensor:
    return torch.where(next(u) < often, _uniform(next(u), least, most), 0.0)


def _weighted(u: Tensor, weights: Mapping[Any, float]) -> Tensor:
    """One of the keys, as often as its weight says."""
    return torch.tensor(list(weights))[chosen(u, list(weights.values()))]


def _by_layout(layout: Tensor, u: Tensor, options: Sequence[Sequence[int]]) -> Tensor:
    """One of the options of each row's layout, equally often."""
    counts = torch.tensor([len(row) for row in options])
    table = torch.tensor([[*row, *[0] * (int(counts.max()) - len(row))] for row in options])
    return table[layout, (u * counts[layout]).long()]


def _ends(ranges: Sequence[tuple[int, int]], layout: Tensor) -> tuple[Tensor, Tensor]:
    least, most = torch.tensor(ranges)[layout].unbind(1)
    return least, most


def _three(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float], is_a: Tensor, is_b: Tensor
) -> tuple[Tensor, Tensor]:
    least, most = (torch.where(is_a, a[end], torch.where(is_b, b[end], c[end])).double() for end in range(2))
    return least, most


def _is_in(column: Tensor, kinds: Sequence[int]) -> Tensor:
    return torch.isin(column, torch.tensor([int(kind) for kind in kinds]))
