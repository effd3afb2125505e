"""The built-in blueprints and their registry.

The imports below are in a fixed order on purpose: importing registers, and a policy's blueprint head counts in the
order of registration.
"""

from esper.growth.blueprints.registry import (
    LAYOUTS,
    VISIBILITIES,
    Blueprint,
    Layout,
    SlotShape,
    Visibility,
    blueprint,
    blueprint_names,
    fitting,
    get_blueprint,
)

from esper.growth.blueprints import conv  # isort: skip
from esper.growth.blueprints import dense  # isort: skip
from esper.growth.blueprints import sequence  # isort: skip
from esper.growth.blueprints.gate import ChannelsLast, Gated, enclosed  # isort: skip

__all__ = [
    "LAYOUTS",
    "VISIBILITIES",
    "Blueprint",
    "ChannelsLast",
    "Gated",
    "Layout",
    "SlotShape",
    "Visibility",
    "blueprint",
    "blueprint_names",
    "conv",
    "dense",
    "enclosed",
    "fitting",
    "get_blueprint",
    "sequence",
]
