"""A seed: one blueprint built for one slot, with the gate that its blend may need. It has no stage."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.growth.blueprints import SlotShape, enclosed, get_blueprint
from esper.growth.tensors import count_parameters


class Seed(nn.Module):
    """What grows in a slot: maps h to a tensor of the same shape, and to h itself at birth."""

    body: nn.Module
    """The blueprint's module, and what its blend and its slot need around it. This is what an exported model keeps."""

    def __init__(self, blueprint: str, shape: SlotShape, blend: str = "linear") -> None:
        super().__init__()
        if blend not in BLENDS:
            raise ValueError(f"unknown blend {blend!r}: choose one of {', '.join(BLENDS)}")
        self.blueprint = blueprint
        self.shape = shape
        self.blend = blend
        self.body = enclosed(get_blueprint(blueprint, shape.layout).build(shape), shape, blend)
        self.reads_mask = bool(getattr(self.body, "reads_mask", False))
        self.reads_input = bool(getattr(self.body, "reads_input", False))
        self.size = count_parameters(self)
        """Parameters, constants included."""

    def forward(self, h: Tensor, other: Tensor | None = None) -> Tensor:
        """`other` is a mask, or what the slot's module read, for a seed that reads such a thing."""
        out: Tensor = self.body(h) if other is None else self.body(h, other)
        return out

    def extra_repr(self) -> str:
        return f"{self.blueprint}, {self.shape.layout}, channels={self.shape.channels}, blend={self.blend}"


@cache
def parameter_count(name: str, shape: SlotShape, blend: str = "linear") -> int:
    """The exact size of such a seed, constants included, without building it: no memory, no random numbers."""
    # A blueprint of a user's may draw on the CPU whatever the default device is; the fork keeps even that from showing.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return Seed(name, shape, blend).size
