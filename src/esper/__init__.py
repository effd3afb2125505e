"""Esper: neural networks that grow while they train.

grown = esper.grow(model, (x, y), (x_val, y_val), slots=["layer1", "layer2"])
grown.model      # a plain nn.Module, bigger only where it paid
grown.save("out")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.errors import GrowthWarning
    from esper.growth.attach import attach, inspect
    from esper.growth.blueprints import blueprint
    from esper.growth.export import load
    from esper.growth.model import GrowingModel
    from esper.growth.seeds import load_seeds, save_seeds
    from esper.growth.slot_list import slots
    from esper.training.own.grow import grow
    from esper.training.own.grown import Grown
    from esper.training.own.growth import Growth

__version__ = "0.2.0"
__all__ = [
    "GrowingModel",
    "Grown",
    "Growth",
    "GrowthWarning",
    "attach",
    "blueprint",
    "grow",
    "inspect",
    "load",
    "load_seeds",
    "save_seeds",
    "slots",
]

_HOME = {
    "GrowingModel": "esper.growth.model",
    "Grown": "esper.training.own.grown",
    "Growth": "esper.training.own.growth",
    "GrowthWarning": "esper.errors",
    "attach": "esper.growth.attach",
    "blueprint": "esper.growth.blueprints",
    "grow": "esper.training.own.grow",
    "inspect": "esper.growth.attach",
    "load": "esper.growth.export",
    "load_seeds": "esper.growth.seeds",
    "save_seeds": "esper.growth.seeds",
    "slots": "esper.growth.slot_list",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is asked for: `esper --help` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """What a shell completes."""
    return sorted((*__all__, "__version__"))
