"""Esper: neural networks that grow themselves while they train.

    grown = esper.grow(model, (x, y), (x_val, y_val), slots=["layer1", "layer2"])
    grown.model      # a plain nn.Module, bigger only where it paid
    grown.save("out")
"""

from esper.growth.attach import attach
from esper.growth.blueprints import blueprint
from esper.growth.export import load
from esper.growth.inspection import inspect
from esper.growth.model import GrowingModel
from esper.training.growing import Grown, grow

__version__ = "0.1.0"
__all__ = ["GrowingModel", "Grown", "attach", "blueprint", "grow", "inspect", "load"]
