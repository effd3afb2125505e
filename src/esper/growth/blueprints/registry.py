"""Blueprints: what a seed can be. A new one is one decorated class in one file; nothing else must know about it.

A blueprint class is built as `cls(channels, layout, **options)` and must map a tensor to one of the same shape, changing
nothing at birth (a zero-initialised last layer, or a closed gate). It uses only torch, so that its source can travel
with an exported model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

Layout = Literal["conv1d", "conv2d", "sequence", "dense"]
LAYOUTS: dict[Layout, str] = {
    "conv1d": "[batch, channels, length]",
    "conv2d": "[batch, channels, height, width]",
    "sequence": "[batch, time, channels], causal",
    "dense": "[batch, channels]",
}


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What passes through a slot: its layout, its channels, and the sizes of its other axes (without batch)."""

    layout: Layout
    channels: int
    sizes: tuple[int, ...] = ()

    def example(self, batch: int) -> Tensor:
        """A random activation of this shape, from the global generator."""
        if self.layout == "sequence":
            return torch.randn(batch, *self.sizes, self.channels)
        return torch.randn(batch, self.channels, *self.sizes)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One kind of seed."""

    name: str
    layouts: frozenset[Layout]
    module: type[nn.Module]
    options: dict[str, Any] = field(hash=False)
    summary: str = ""

    def fits(self, shape: SlotShape) -> bool:
        return shape.layout in self.layouts

    def arguments(self, shape: SlotShape) -> dict[str, Any]:
        """The keyword arguments that rebuild this seed: plain data, part of every saved topology."""
        return {"channels": shape.channels, "layout": shape.layout, **self.options}

    def build(self, shape: SlotShape) -> nn.Module:
        if not self.fits(shape):
            raise ValueError(f"blueprint {self.name!r} does not fit a {shape.layout} slot")
        return self.module(**self.arguments(shape))


_REGISTRY: dict[str, Blueprint] = {}
_Module = TypeVar("_Module", bound=type[nn.Module])


def blueprint(name: str, *layouts: Layout, **options: Any) -> Callable[[_Module], _Module]:
    """Register a module class under `name` for the given layouts. May be stacked for variants with other options."""
    unknown = [layout for layout in layouts if layout not in LAYOUTS]
    if unknown or not layouts:
        raise ValueError(f"blueprint {name!r} needs layouts out of {', '.join(LAYOUTS)}; got {unknown or 'none'}")

    def register(module: _Module) -> _Module:
        if name in _REGISTRY:
            raise ValueError(f"blueprint {name!r} is registered already, as {_REGISTRY[name].module.__name__}")
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        _REGISTRY[name] = Blueprint(name, frozenset(layouts), module, options, summary)
        return module

    return register


def blueprint_names() -> tuple[str, ...]:
    """All blueprints, in the order of registration; a policy's blueprint head counts in this order."""
    return tuple(_REGISTRY)


def get_blueprint(name: str) -> Blueprint:
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ValueError(f"unknown blueprint {name!r}: choose one of {', '.join(_REGISTRY)}") from None


def fitting(shape: SlotShape) -> list[Blueprint]:
    """The blueprints that can grow in a slot of this shape."""
    return [candidate for candidate in _REGISTRY.values() if candidate.fits(shape)]
