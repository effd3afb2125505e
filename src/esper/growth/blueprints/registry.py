"""Blueprints: what a seed can be. A new one is one decorated class in one file; nothing else needs a change.

A blueprint class is built as `cls(channels, layout, **options)` and must map a tensor to one of the same shape,
changing nothing at birth (a zero-initialised last layer, or a closed gate). It uses only torch, so that its source can
travel with an exported model: in its body the names `torch`, `nn`, `F`, `math`, and classes and functions like itself.

A seed must not let through what its host does not (`Visibility`). A class that looks at other positions takes a further
argument `causal`, and then looks at no later one; what a class really reads is tried out, so one without it, or with a
fault, is never offered where it would leak. One that takes `style` gets the host's norm and activation (`Style.data`),
or nothing where they are its own. For sequences such a class also takes padding masks: it says
`reads_mask = True`, and its forward is `forward(h, mask=None)` (see `sequence.py`). One that takes `source` can stand
beside a linear layer instead of after it, see `dense.py`: its forward is then `forward(h, x)`.

A name says what kind of computation a seed is; layouts that compute it differently register a class each under that one
name (`norm` is a GroupNorm in a conv slot, a LayerNorm in a sequence), so that a controller has one word for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from esper.errors import did_you_mean, first_line

Layout = Literal["conv1d", "conv2d", "sequence", "dense"]
LAYOUTS: dict[Layout, str] = {
    "conv1d": "[batch, channels, length]",
    "conv2d": "[batch, channels, height, width]",
    "sequence": "[batch, time, channels]",
    "dense": "[batch, channels]",
}

Visibility = Literal["both", "causal", "position"]
VISIBILITIES: dict[Visibility, str] = {
    "position": "each position reads itself alone",
    "causal": "each position reads itself and earlier ones",
    "both": "each position may read every other",
}
"""What a seed may read, from the least to the most."""


@dataclass(frozen=True, slots=True)
class Style:
    """Activation and norm of the host around a slot, by their names in `blueprints/parts.py`; empty is a seed's own."""

    activation: str = ""
    norm: str = ""
    groups: int = 1
    """Of a group norm."""

    def data(self) -> dict[str, Any]:
        """What is not a seed's own, as plain data."""
        own = Style()
        return {name: value for name, value in asdict(self).items() if value != getattr(own, name)}

    def __str__(self) -> str:
        groups = f" {self.groups}" if self.groups > 1 else ""
        return ", ".join(part for part in (self.activation, self.norm + groups) if part)


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What passes through a slot: its layout, its channels, and the sizes of its other axes (without batch)."""

    layout: Layout
    channels: int
    sizes: tuple[int, ...] = ()
    visibility: Visibility = "both"
    channels_last: bool = False
    """A feature map whose channels are its last axis, [batch, height, width, channels]."""
    style: Style = Style()
    """Of a user's host, see `growth/style.py`; seeds of Esper's own hosts have their own."""
    source: int = 0
    """Features that the slot's module reads, where a seed may stand beside it (`candidates.source_of`); else 0."""

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """What a seed is called with: `example`, and what the slot's module reads where that is known."""
        return (self.example(batch), *([torch.randn(batch, self.source)] if self.source else []))

    def example(self, batch: int) -> Tensor:
        """A random activation of this shape, from the global generator."""
        if self.layout == "sequence" or self.channels_last:
            return torch.randn(batch, *self.sizes, self.channels)
        return torch.randn(batch, self.channels, *self.sizes)

    def __str__(self) -> str:
        last = ", channels last" if self.channels_last else ""
        return f"{self.layout} {'×'.join(map(str, (self.channels, *self.sizes)))}{last}"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One kind of seed, for the layouts that one class serves."""

    name: str
    layouts: frozenset[Layout]
    module: type[nn.Module]
    options: dict[str, Any] = field(hash=False)
    summary: str = ""
    """The first line of the class's docstring, with the options: what users are shown."""

    def fits(self, shape: SlotShape) -> bool:
        if shape.layout not in self.layouts:
            return False
        if shape.visibility == "both":
            return True
        seen, allowed = (
            list(VISIBILITIES).index(v) for v in (reach(self, shape.layout, shape.style), shape.visibility)
        )
        return seen <= allowed

    def arguments(self, shape: SlotShape) -> dict[str, Any]:
        """The keyword arguments that rebuild this seed: plain data, part of every saved topology."""
        given: dict[str, Any] = {"channels": shape.channels, "layout": shape.layout, **self.options}
        taken = inspect.signature(self.module).parameters
        if "causal" in taken:
            given["causal"] = shape.visibility != "both"
        if "style" in taken and (style := shape.style.data()):
            given["style"] = style
        if "source" in taken and shape.source:
            given["source"] = shape.source
        return given

    def build(self, shape: SlotShape) -> nn.Module:
        if shape.layout not in self.layouts:
            others = ", ".join(sorted(self.layouts))
            raise ValueError(f"blueprint {self.name!r} does not fit a {shape.layout} slot: it is for {others}")
        return self.module(**self.arguments(shape))


BUILT_IN = (
    "norm",
    "squeeze_excite",
    "depthwise",
    "pointwise",
    "conv",
    "wide",
    "bottleneck",
    "attention",
    "lora",
    "lora_large",
    "mlp_small",
    "mlp",
)
"""The built-in blueprints by id. A policy's blueprint head counts by id, and checkpoints keep the names in this order:
append, never reorder or remove. Blueprints of users get the ids after these, in the order of their registration."""

_REGISTRY: dict[str, dict[Layout, Blueprint]] = {}
"""By name, ordered by id, then by layout."""
_Module = TypeVar("_Module", bound=type[nn.Module])


def blueprint(name: str, *layouts: Layout, **options: Any) -> Callable[[_Module], _Module]:
    """Register a module class under `name` for the given layouts. May be stacked for variants with other options.

    It is built and run once, on something small, so that what cannot work is refused here.
    """
    unknown = [layout for layout in layouts if layout not in LAYOUTS]
    if unknown or not layouts:
        raise ValueError(f"blueprint {name!r} needs layouts out of {', '.join(LAYOUTS)}; got {unknown or 'none'}")

    def register(module: _Module) -> _Module:
        # First look, then write: a refused registration must leave nothing behind.
        for layout in layouts:
            if taken := _REGISTRY.get(name, {}).get(layout):
                raise ValueError(f"blueprint {name!r} is registered already for {layout}, as {taken.module.__name__}")
        summary = (module.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        if options:
            summary += f" ({', '.join(f'{key} {value}' for key, value in options.items())})"
        entry = Blueprint(name, frozenset(layouts), module, options, summary)
        for layout in layouts:
            _try(entry, SlotShape(layout, _TRIED.channels, _TRIED.sizes[: _AXES[layout]]))
        if "dense" in layouts and "source" in inspect.signature(module).parameters:
            _try(entry, SlotShape("dense", _TRIED.channels, source=_TRIED.channels + 1))
        if (
            "sequence" in layouts
            and not getattr(module, "reads_mask", False)
            and reach(entry, "sequence") != "position"
        ):
            raise ValueError(
                f"blueprint {name!r} looks at other positions of a sequence, so it must respect padding masks: give it "
                "reads_mask = True and forward(self, h, mask=None)"
            )
        _REGISTRY.setdefault(name, {}).update(dict.fromkeys(layouts, entry))
        _order_by_id()
        return module

    return register


def _order_by_id() -> None:
    """The sort is stable: what is not built in stays in the order of registration."""
    known = {name: number for number, name in enumerate(BUILT_IN)}
    by_id = sorted(_REGISTRY.items(), key=lambda kept: known.get(kept[0], len(BUILT_IN)))
    _REGISTRY.clear()
    _REGISTRY.update(by_id)


_TRIED = SlotShape("conv2d", 8, (4, 4))
_OWN = Style()
_AXES: dict[Layout, int] = {"conv1d": 1, "conv2d": 2, "sequence": 1, "dense": 0}


def _try(entry: Blueprint, shape: SlotShape) -> None:
    """Build it once and let something small through: what fails here would fail in the middle of a run."""
    kind = f"blueprint {entry.name!r} ({entry.module.__name__})"
    wanted = ", ".join(["channels", "layout", *entry.options])
    if not (isinstance(entry.module, type) and issubclass(entry.module, nn.Module)):
        raise ValueError(f"{kind} must be a class of nn.Module with __init__(self, {wanted})")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        (h, *source), part = shape.inputs(2), f"cannot be built as __init__(self, {wanted})"
        try:
            module = entry.build(shape)
            part = f"fails for an activation of {list(h.shape)} ({shape.layout})"
            out = module(h, *source)
        except NameError:  # a class that uses its own name, or one further down its file, cannot be tried yet
            return
        except Exception as error:
            raise ValueError(f"{kind} {part}: {first_line(error)}") from error
    if bool(getattr(module, "reads_input", False)) is not bool(source):
        raise ValueError(f"{kind} must set reads_input = True where source is not 0, and only there")
    if not isinstance(out, Tensor) or out.shape != h.shape:
        gave = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"{kind} must give a tensor of the shape that it gets: {list(h.shape)} became {gave}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(f"{kind} has no parameter to train")


@cache
def reach(entry: Blueprint, layout: Layout, style: Style = _OWN) -> Visibility:
    """What a seed in its causal form reads, found by trying: with random weights, which outputs follow which inputs?"""
    if layout == "dense":
        return "position"
    sizes = {1: (64,), 2: (16, 16)}[_AXES[layout]]  # larger than what a seed can look past
    shape = SlotShape(layout, _TRIED.channels, sizes, "causal", style=style)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(0)
        try:
            module = entry.build(shape).eval()
        except NameError:  # see `_try`
            return "both"
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
        split = 32 if _AXES[layout] == 1 else 120  # in the middle; of a map, in the middle of a row
        h = _by_position(shape.example(1), layout)  # [1, channels, positions]
        change = torch.randn_like(h)
        late, early = change.clone(), change.clone()
        late[:, :, :split] = early[:, :, split:] = 0.0
        inputs = [x.mT if layout == "sequence" else x.reshape(1, -1, *shape.sizes) for x in (h, h + late, h + early)]
        out, after_late, after_early = (_by_position(module(x), layout) for x in inputs)
    if not torch.equal(out[:, :, :split], after_late[:, :, :split]):
        return "both"
    if torch.equal(out[:, :, split:], after_early[:, :, split:]):
        return "position"
    return "causal" if _AXES[layout] == 1 else "both"  # a map has no one direction


def _by_position(h: Tensor, layout: Layout) -> Tensor:
    return h.mT if layout == "sequence" else h.flatten(2)


def blueprint_names() -> tuple[str, ...]:
    """All names by id: a policy's blueprint head counts in this order."""
    return tuple(_REGISTRY)


def get_blueprint(name: str, layout: Layout | None = None) -> Blueprint:
    """The blueprint of this name for slots of this layout; without a layout, the first registered under the name."""
    if name not in _REGISTRY:
        hint = did_you_mean(name, _REGISTRY, "register your own before it is named")
        raise ValueError(f"unknown blueprint {name!r}: choose one of {', '.join(_REGISTRY)}; {hint}")
    by_layout = _REGISTRY[name]
    if layout is None:
        return next(iter(by_layout.values()))
    if layout not in by_layout:
        raise ValueError(f"blueprint {name!r} does not fit a {layout} slot: it is for {', '.join(by_layout)}")
    return by_layout[layout]


def fitting(shape: SlotShape) -> list[Blueprint]:
    """The blueprints that can grow in a slot of this shape, in the order of `blueprint_names`."""
    entries = [by_layout[shape.layout] for by_layout in _REGISTRY.values() if shape.layout in by_layout]
    return [entry for entry in entries if entry.fits(shape)]
