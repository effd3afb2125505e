"""Data of the family `grammar`, for many problems of one layout at once.

A *signal* [n, examples, positions, channels] that holds the classes, then what hides it: a random map into more
features, noise, a loud distractor, gains, offsets, hints that make a share of the examples easy, and wrong labels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.growth.blueprints import Layout
from esper.tasks.counted import Purpose, noise, normals, random_bits, uniforms
from esper.tasks.grammar_forms import CLASSES, LAYOUTS, SIZES
from esper.tasks.grammar_kinds import SPREAD_OUT, Code, Structure
from esper.tasks.grammar_relations import COORDINATES, classes_of
from esper.tasks.grammar_settings import EXAMPLES, FEATURES, LATENT, TEST, VAL, Settings

FIRST_TRAINED = VAL + TEST
"""Examples are numbered: those to validate on, those to test on, those to train on. So the last can be left out."""
VARIANTS = 128
"""Forms that each symbol of a code comes in."""
ENTITIES = 5
"""Most symbols of an example where symbols are few."""
LOUDNESS = 2.5
"""Of a symbol among positions without one."""
HINT = 1.5
MOTIFS = ((1.0, -1.0, 2.0, -2.0), (2.0, 1.0, -2.0, -1.0), (-1.0, 2.0, -2.0, 1.0), (-2.0, -1.0, 1.0, 2.0))
"""The same heights in four orders: no statistic of single positions tells them apart."""


def make_data(on_cpu: Settings, settings: Settings, layout: Layout) -> tuple[Tensor, Tensor]:
    """Inputs [n, count, *sizes, features] and labels [n, count]; the same settings twice, on the CPU and on the device.

    There are as many examples as the largest of the problems has, and as many features as its layout has at most.
    """
    # The classes of vectors are ranks among all points, so all must be there.
    most = EXAMPLES[1] if layout == "dense" else int(on_cpu.examples.max())
    count = FIRST_TRAINED + most
    signal, classes = _signal(on_cpu, settings, layout, count)
    inputs = _seen(signal, classes, settings, layout)
    u = uniforms(settings.keys, Purpose.LABEL, 2 * count).view(-1, count, 2)
    is_wrong = u[..., 0] < settings.wrong[:, None]
    labels = torch.where(is_wrong, (u[..., 1] * CLASSES).long(), classes)
    return inputs.view(len(settings), count, *SIZES[layout], -1), labels


# -- the signal --------------------------------------------------------------------------------------------------------


def _signal(on_cpu: Settings, settings: Settings, layout: Layout, count: int) -> tuple[Tensor, Tensor]:
    """[n, count, positions, channels + 1] with an empty last channel, and classes [n, count]."""
    n, device = len(settings), settings.keys.device
    positions, channels = math.prod(SIZES[layout]), LATENT[LAYOUTS.index(layout)]
    signal = torch.zeros(n, count, positions, channels + 1, device=device)
    if layout == "dense":
        points = _points(settings, count)
        used = torch.arange(COORDINATES, device=device) < settings.dimensions[:, None]
        signal[:, :, 0, :COORDINATES] = points * used[:, None]
        return signal, classes_of(settings, points)
    classes = (torch.arange(count, device=device) % CLASSES).expand(n, count)
    spread_out = torch.isin(on_cpu.structure, torch.tensor([int(one) for one in SPREAD_OUT]))
    waves, motif = on_cpu.structure == Structure.WAVES, on_cpu.code == Code.MOTIF
    groups = {
        _spread_out: spread_out,
        _waves: waves,
        _motifs: motif & ~waves & ~spread_out,
        _marks: ~(motif | waves | spread_out),
    }
    for make, chosen in groups.items():
        index = chosen.nonzero()[:, 0].to(device)
        if len(index) == n:
            make(signal, settings, classes, layout)
        elif len(index):
            part = signal[index]
            make(part, settings.rows(index), classes[index], layout)
            signal[index] = part
    return signal, classes


def _points(settings: Settings, count: int) -> Tensor:
    """[n, count, COORDINATES] of unit variance."""
    u = uniforms(settings.keys, Purpose.LATENT, count * COORDINATES).view(-1, count, COORDINATES)
    return (2.0 * u - 1.0) * math.sqrt(3.0)


def _codebook(settings: Settings) -> Tensor:
    """[n, CLASSES, VARIANTS, 2]: what the symbols of each problem look like."""
    device = settings.keys.device
    corners = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], device=device)
    heights = torch.tensor([[-1.5, 0.0], [-0.5, 0.0], [0.5, 0.0], [1.5, 0.0]], device=device)
    points = _points(settings, CLASSES * VARIANTS)
    order = classes_of(settings, points).argsort(dim=1, stable=True)
    of_class = points.gather(1, order[..., None].expand(-1, -1, 2)).view(-1, CLASSES, VARIANTS, 2)
    u = uniforms(settings.keys, Purpose.VARIANT, CLASSES * VARIANTS * 2).view(-1, CLASSES, VARIANTS, 2)
    skewed = -torch.log1p(-u) - 1.0
    flat, two = (u - 0.5) * math.sqrt(12.0), torch.where(u < 0.5, -1.0, 1.0)
    shapes = torch.stack([flat[:, 0], two[:, 1], skewed[:, 2], -skewed[:, 3]], 1)  # zero mean, unit variance
    code = settings.code[:, None, None, None]
    book = torch.where(code == Code.POINT, of_class, shapes)
    book = torch.where(code == Code.LEVEL, heights[:, None], book)
    return torch.where(code == Code.DIRECTION, corners[:, None], book)


def _spread_out(signal: Tensor, settings: Settings, classes: Tensor, layout: Layout) -> None:
    """A symbol at every position."""
    n, count, positions, _ = signal.shape
    drawn = random_bits(settings.keys, Purpose.STRUCTURE, count, positions)  # [n, count, positions] of 24 bits
    share = torch.where(settings.structure == Structure.ALL, 1.0, settings.share)
    threshold = (share * 2**24).to(torch.int32)[:, None, None]
    # The highest bits say whether the symbol is the class's, the lowest which one it is otherwise, and its variant.
    own = classes.to(torch.int32)[..., None] * VARIANTS + (drawn & (VARIANTS - 1))
    row = torch.arange(n, device=signal.device, dtype=torch.int32)[:, None, None] * (CLASSES * VARIANTS)
    index = torch.where(drawn < threshold, own, drawn & (CLASSES * VARIANTS - 1)) + row
    book = _codebook(settings).view(-1, 2)
    signal[..., :2] = book.index_select(0, index.view(-1)).view(n, count, positions, 2)


def _waves(signal: Tensor, settings: Settings, classes: Tensor, layout: Layout) -> None:
    height, width = _plane(layout)
    u = uniforms(settings.keys, Purpose.STRUCTURE, 2 * classes.shape[1]).view(*classes.shape, 1, 2)
    row, column = _grid(height, width, signal.device)
    if width == 1:
        turns = (2.0 + 2.0 * classes)[..., None] * row / height
    else:
        angle = classes[..., None] * (math.pi / CLASSES)
        turns = 2.0 * (angle.cos() * row / height + angle.sin() * column / width)
    signal[..., :2] = math.sqrt(2.0) * (2 * math.pi * (turns[..., None] + u)).sin()


def _motifs(signal: Tensor, settings: Settings, classes: Tensor, layout: Layout) -> None:
    """Motifs in the first channel: 4 heights in a row, or 2 by 2 in an image, each `scale` wide."""
    height, width = _plane(layout)
    side = 4 if width == 1 else 2
    heights = torch.tensor(MOTIFS, device=signal.device).view(CLASSES, side, -1)
    for scale, loudness in ((1, 1.2), (2, 1.0)):
        index = (settings.scale == scale).nonzero()[:, 0]
        if not len(index):
            continue
        pattern = loudness * heights.repeat_interleave(scale, 1)
        pattern = pattern if width == 1 else pattern.repeat_interleave(scale, 2)
        tall, wide = pattern.shape[1:]
        entities = _entities(settings.rows(index), classes[index], layout, tall, wide)
        symbol, top, left, present = (one[..., :2] for one in entities)  # no structure of motifs has more than two
        row, column = _grid(tall, wide, signal.device)
        where = (top[..., None] + row) * width + left[..., None] + column  # [n, count, 2, cells]
        added = pattern.flatten(1)[symbol] * present[..., None]
        filled = torch.zeros(len(index), signal.shape[1], height * width, device=signal.device)
        signal[index, :, :, 0] = filled.scatter_add_(2, where.flatten(2), added.flatten(2))


def _marks(signal: Tensor, settings: Settings, classes: Tensor, layout: Layout) -> None:
    """Single positions that hold a symbol."""
    n, count, _, channels = signal.shape
    width = _plane(layout)[1]
    symbol, top, left, present = _entities(settings, classes, layout, 1, 1)
    variant = (uniforms(settings.keys, Purpose.PICK, count * ENTITIES) * VARIANTS).long()
    index = symbol * VARIANTS + variant.view(n, count, ENTITIES)
    book = _codebook(settings).view(n, -1, 2)
    looks = book.gather(1, index.view(n, -1, 1).expand(-1, -1, 2)).view(n, count, ENTITIES, 2)
    marks = torch.zeros(n, count, ENTITIES, channels, device=signal.device)
    marks[..., :2] = looks
    if layout == "sequence":  # where nothing else tells the two that matter from the distractors
        related = (settings.structure == Structure.RELATION)[:, None]
        marks[..., 0, 2] = marks[..., 1, 3] = related
    marks *= LOUDNESS * present[..., None]
    where = (top * width + left)[..., None] * channels + torch.arange(channels, device=signal.device)
    signal.view(n, count, -1).scatter_add_(2, where.flatten(2), marks.flatten(2))


def _entities(settings: Settings, classes: Tensor, layout: Layout, tall: int, wide: int) -> tuple[Tensor, ...]:
    """Symbols, places (row and column of their first position) and presence, each [n, count, ENTITIES]."""
    height, width = _plane(layout)
    free = height - tall + 1
    third = max(1, free // 3)
    u = uniforms(settings.keys, Purpose.STRUCTURE, classes.shape[1] * 3 * ENTITIES).view(*classes.shape, 3, ENTITIES)
    left = (u[:, :, 0] * (width - wide + 1)).long()
    anywhere, other = (u[:, :, 1] * free).long(), (u[:, :, 2] * CLASSES).long()
    pair, bit, sign = 2 * (classes // 2), classes % 2, other[..., 0] % 2
    structure = settings.structure[:, None, None]
    number = torch.arange(ENTITIES, device=classes.device)

    begins = (u[:, :, 1] * third).long()
    ends, middle = free - third + begins, third + (u[:, :, 1] * max(1, free - 2 * third)).long()
    zones = torch.where(number == 0, begins, torch.where(number == 1, ends, middle))
    related = torch.stack([pair + sign, pair + (sign ^ bit)], 2)
    ordered = torch.stack([pair + bit, pair + 1 - bit], 2)
    apart = max(tall, height // 3)
    start = (u[:, :, 1, :1] * (free - apart)).long()
    gap = 1 + (height // 5) * classes + (height > 8)
    near = (u[:, :, 1, 0] * (free - gap)).long()

    kinds = {
        Structure.ONE: (classes[..., None].expand_as(other), anywhere, number < 1),
        Structure.RELATION: (
            torch.cat([related, other[..., 2:]], 2),
            zones,
            number < 2 + settings.distractors[:, None, None],
        ),
        Structure.ORDER: (torch.cat([ordered, other[..., 2:]], 2), start + apart * (number == 1), number < 2),
        Structure.GAP: (other[..., :1].expand_as(other), near[..., None] + gap[..., None] * (number == 1), number < 2),
        Structure.COUNT: (other[..., :1].expand_as(other), anywhere, number <= classes[..., None]),
        Structure.LEADER: (
            torch.where(number == 0, classes[..., None], other),
            torch.where(number == 0, begins, torch.where(number == 1, middle, ends)),
            number < 3,
        ),
    }
    symbol, top, present = kinds[Structure.ONE]
    for kind, (symbols, tops, there) in kinds.items():
        symbol = torch.where(structure == kind, symbols, symbol)
        top = torch.where(structure == kind, tops.clamp(0, free - 1), top)
        present = torch.where(structure == kind, there, present)
    return symbol, top, left, present


def _plane(layout: Layout) -> tuple[int, int]:
    """Height and width; a series is an image of width 1."""
    height, *width = SIZES[layout]
    return height, width[0] if width else 1


def _grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each position of a plane, [height · width] each."""
    position = torch.arange(height * width, device=device)
    return position // width, position % width


# -- what hides it -----------------------------------------------------------------------------------------------------


def _seen(signal: Tensor, classes: Tensor, settings: Settings, layout: Layout) -> Tensor:
    """[n, count, positions, features]"""
    n, count, positions, channels = signal.shape
    features = FEATURES[LAYOUTS.index(layout)][1]
    keys = settings.keys
    signal[..., -1] = noise(keys, Purpose.DISTRACTOR, count, positions) * _wide(settings.loud)[..., 0]
    is_there = (torch.arange(features, device=keys.device) < settings.features[:, None]).float()  # [n, features]
    basis = orthogonal_directions(keys, channels + 3, is_there)
    inputs = noise(keys, Purpose.NOISE, count, positions * features).view(n, -1, features)
    inputs *= (is_there * settings.noise.float()[:, None])[:, None]
    inputs.baddbmm_(signal.view(n, -1, channels), basis[:, :channels])
    inputs = inputs.view(n, count, positions, features)
    per_token = positions if layout == "sequence" else 1
    gain = normals(keys, Purpose.GAIN, count * per_token).view(n, count, per_token, 1)
    inputs *= (gain * _wide(settings.gain)).exp()
    offset = normals(keys, Purpose.OFFSET, count).view(n, count, 1, 1) * _wide(settings.offset)
    angle = classes * (2 * math.pi / CLASSES)
    easy = (uniforms(keys, Purpose.HINT, count) < settings.easy[:, None]) * HINT
    extra = torch.stack([easy * angle.cos(), easy * angle.sin()], 2)  # [n, count, 2]
    shift = torch.cat([offset[:, :, 0], extra], 2).bmm(basis[:, channels:])  # [n, count, features]
    return inputs.add_(shift[:, :, None])


def _wide(column: Tensor) -> Tensor:
    return column.float()[:, None, None, None]


def orthogonal_directions(keys: Tensor, rows: int, is_there: Tensor) -> Tensor:
    """[n, rows, features]: random unit vectors within each problem's features, the first of them at right angles.

    As many as there are features can be; further ones point anywhere.
    """
    features = is_there.shape[1]
    drawn = normals(keys, Purpose.BASIS, rows * features).view(-1, rows, features) * is_there[:, None]
    room = is_there.sum(1, keepdim=True)  # [n, 1]
    made: list[Tensor] = []
    for number, row in enumerate(drawn.unbind(1)):
        rest = row
        for before in made:
            rest = rest - (rest * before).sum(1, keepdim=True) * before
        kept = torch.where(number < room, rest, row)
        made.append(kept / kept.norm(dim=1, keepdim=True))
    return torch.stack(made, 1)
