"""The built-in blueprints and their registry.

The imports below are in a fixed order on purpose: importing registers, and a policy's blueprint head counts in the
order of registration.
"""

from esper.growth.blueprints.registry import (
    LAYOUTS,
    Blueprint,
    Layout,
    SlotShape,
    blueprint,
    blueprint_names,
    fitting,
    get_blueprint,
)

from esper.growth.blueprints import conv  # isort: skip
from esper.growth.blueprints import dense  # isort: skip
from esper.growth.blueprints import sequence  # isort: skip
from esper.growth.blueprints.gate import Gated  # isort: skip

__all__ = [
    "LAYOUTS",
    "Blueprint",
    "Gated",
    "Layout",
    "SlotShape",
    "blueprint",
    "blueprint_names",
    "conv",
    "dense",
    "fitting",
    "get_blueprint",
    "sequence",
]
