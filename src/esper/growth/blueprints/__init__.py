"""The built-in blueprints and their registry. Importing a module registers its blueprints; their ids are in the
registry's table (`BUILT_IN`), so the order of the imports does not matter."""

from esper.growth.blueprints import conv, dense, parts, sequence
from esper.growth.blueprints.gate import ChannelsLast, Gated, enclosed
from esper.growth.blueprints.registry import (
    LAYOUTS,
    VISIBILITIES,
    Blueprint,
    Layout,
    SlotShape,
    Style,
    Visibility,
    blueprint,
    blueprint_names,
    fitting,
    get_blueprint,
)

__all__ = [
    "LAYOUTS",
    "VISIBILITIES",
    "Blueprint",
    "ChannelsLast",
    "Gated",
    "Layout",
    "SlotShape",
    "Style",
    "Visibility",
    "blueprint",
    "blueprint_names",
    "conv",
    "dense",
    "enclosed",
    "fitting",
    "get_blueprint",
    "parts",
    "sequence",
]
