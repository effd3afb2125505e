"""What the data of the family `grammar` are composed of, and which compositions are never trained on.

A class is one of four. For vectors it is a *rule* over one or two *expressions* of a few hidden coordinates. For
sequences, series and images it is a *structure*: which symbols stand at which positions; and a *code*: what a symbol
looks like, which for `Code.POINT` is again a rule over expressions. `docs/grammar.md` has the tables in words.
"""

from __future__ import annotations

from enum import IntEnum

from esper.growth.blueprints import Layout


class Structure(IntEnum):
    """Which symbols an example holds, and where."""

    VECTOR = 0
    """No positions: the relation itself."""
    ALL = 1
    """The symbol of the class at every position."""
    MOST = 2
    """Any symbols, that of the class a little more often."""
    ONE = 3
    """The symbol of the class somewhere, nothing elsewhere."""
    RELATION = 4
    """One symbol near the beginning and one near the end, equal or opposite, of one of two pairs."""
    ORDER = 5
    """Two different symbols, a third of the length apart, of one of two pairs, in one of two orders."""
    GAP = 6
    """Two equal symbols; how far apart they are is the class."""
    COUNT = 7
    """One to four equal symbols; how many there are is the class."""
    LEADER = 8
    """Several symbols; the first one is the class."""
    WAVES = 9
    """Waves of any phase; frequency (and in images, direction) is the class."""


SPREAD_OUT = (Structure.ALL, Structure.MOST)
"""Every position holds a symbol."""


class Code(IntEnum):
    """What a symbol looks like."""

    NONE = 0
    DIRECTION = 1
    """Up or down one of two directions: a linear map tells them apart."""
    LEVEL = 2
    """One of four heights."""
    POINT = 3
    """A point of a plane for which a rule over expressions says this symbol."""
    SHAPE = 4
    """A value of a distribution (flat, two-valued, skewed up, down) of the same mean and variance."""
    MOTIF = 5
    """The same four heights in one of four orders, at neighbouring positions."""


class Expression(IntEnum):
    """A number made of a few coordinates."""

    LINEAR = 0
    PRODUCT = 1
    RADIUS = 2
    CROSS = 3
    """Which of two coordinates is the larger in size, and by how much."""
    WAVES = 4
    """Height in a hilly landscape: a sum of six sines."""
    NETWORK = 5
    """The output of a random network of six hidden units."""
    ANGLE = 6
    FOLD = 7
    """The size of one coordinate."""
    BOARD = 8
    """Height on a board of bumps and hollows."""
    SPIRAL = 9
    PARITY = 10
    """The product of three coordinates."""


class ClassRule(IntEnum):
    """How expressions make a class."""

    BANDS = 0
    """Four bands of the first, from low to high."""
    CYCLES = 1
    """Eight bands of the first; the classes come twice."""
    BITS = 2
    """One bit from each of the two."""
    SUM = 3
    """Four bands of their sum."""


STRUCTURES = {Structure.ALL: 0.3, Structure.MOST: 0.15, Structure.ONE: 0.25, Structure.RELATION: 0.2}
STRUCTURES |= {Structure.ORDER: 0.1}
"""How often training draws with positions have each structure."""
EXPRESSIONS = tuple(Expression(number) for number in range(9))
"""Those of training draws, equally often."""
CLASS_RULES = {ClassRule.BANDS: 0.3, ClassRule.CYCLES: 0.15, ClassRule.BITS: 0.35, ClassRule.SUM: 0.2}

# How often a symbol looks how, by structure: DIRECTION, LEVEL, POINT, SHAPE, MOTIF. Relations between symbols are hard
# enough where the symbols themselves are easily told apart.
CODES: dict[Structure, tuple[float, ...]] = {
    Structure.VECTOR: (1.0, 0.0, 0.0, 0.0, 0.0),
    Structure.ALL: (0.1, 0.1, 0.5, 0.3, 0.0),
    Structure.MOST: (0.5, 0.1, 0.4, 0.0, 0.0),
    Structure.ONE: (0.1, 0.1, 0.2, 0.0, 0.6),
    Structure.RELATION: (0.9, 0.0, 0.1, 0.0, 0.0),
    Structure.ORDER: (0.5, 0.0, 0.0, 0.0, 0.5),
    Structure.GAP: (1.0, 0.0, 0.0, 0.0, 0.0),
    Structure.COUNT: (1.0, 0.0, 0.0, 0.0, 0.0),
    Structure.LEADER: (1.0, 0.0, 0.0, 0.0, 0.0),
    Structure.WAVES: (1.0, 0.0, 0.0, 0.0, 0.0),
}

UNSEEN: dict[Layout, tuple[Structure | Expression, ...]] = {
    "dense": (Expression.SPIRAL, Expression.PARITY),
    "sequence": (Structure.GAP, Structure.LEADER),
    "conv1d": (Structure.WAVES, Structure.COUNT),
    "conv2d": (Structure.WAVES, Structure.GAP),
}
"""The held-out kinds: only the family `grammar-unseen` draws them. Do not change this after a training run."""
