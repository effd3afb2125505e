"""What the axes of a slot's output mean, read off the layers around it; where they do not say, `layouts=` must.

A convolution or a batch norm has its channels in axis 1, a linear layer or a layer norm in the last one. The layers
that made the slot's very tensor or that take it say most, then those inside of the slot's module, then its neighbours
in the order of the forward pass. Sizes alone decide nothing: where two readings fit, `layouts=` is required.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from esper.growth.blueprints import LAYOUTS, Layout
from esper.growth.graft import first_tensor
from esper.growth.probe import AttachError, Call

NAMED: dict[str, tuple[Layout, int, bool]] = {
    "dense": ("dense", 2, False),
    "conv1d": ("conv1d", 3, False),
    "sequence": ("sequence", 3, True),
    "conv2d": ("conv2d", 4, False),
    "channels_last": ("conv2d", 4, True),
}
"""What a user may call a layout: the layout, how many axes it has, and whether the last one is the channels."""
MEANINGS: dict[str, str] = dict(LAYOUTS.items()) | {"channels_last": "[batch, height, width, channels]"}

_Where = Literal["first", "last"]
_FIRST: dict[int, tuple[type[nn.Module], ...]] = {
    3: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
    4: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm),
}
_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
"""By their very type: subclasses may move axes first, as the channels-first LayerNorm of ConvNeXt does."""
_LAST_OF_A_SEQUENCE = (nn.RNNBase, nn.MultiheadAttention)


def find_layout(
    path: str, module: nn.Module, output: Tensor, calls: dict[nn.Module, Call], layouts: Mapping[str, str]
) -> tuple[Layout, bool]:
    """The layout of a slot, and whether its last axis is the channels. `layouts` are the user's own words for it."""
    for pattern, name in layouts.items():
        if fnmatch.fnmatchcase(path, pattern):
            return _named(path, name, output)
    if output.dim() == 2:
        return "dense", False
    if output.dim() not in _FIRST:
        raise AttachError(f"slot {path!r} gives {output.dim()} axes; slots of 2, 3 or 4 axes can grow")
    first, last = ("conv1d", "sequence") if output.dim() == 3 else ("conv2d", "channels_last")
    found = _nearest(_evidence(module, output, calls))
    if len(found) != 1:
        how = "disagree about" if found else "do not say"
        raise AttachError(
            f"slot {path!r} gives {list(output.shape)}, and the layers around it {how} which axis is the channels: "
            f"pass layouts={{{path!r}: {first!r}}} for {MEANINGS[first]} or {last!r} for {MEANINGS[last]}"
        )
    layout, _, channels_last = NAMED[first if found == {"first"} else last]
    return layout, channels_last


def _named(path: str, name: str, output: Tensor) -> tuple[Layout, bool]:
    if name not in NAMED:
        raise AttachError(f"unknown layout {name!r} for slot {path!r}: choose one of {', '.join(NAMED)}")
    layout, axes, channels_last = NAMED[name]
    if axes != output.dim():
        raise AttachError(f"slot {path!r} has {output.dim()} axes; {name} is {MEANINGS[name]}")
    return layout, channels_last


def _nearest(levels: Iterable[Iterable[_Where | None]]) -> set[_Where]:
    """The nearest evidence, of layers that give any."""
    for level in levels:
        if found := {where for where in level if where is not None}:
            return found
    return set()


def _evidence(slot: nn.Module, output: Tensor, calls: dict[nn.Module, Call]) -> Iterator[list[_Where | None]]:
    """Where single layers of tensors of this very shape have their channels, the most reliable ones first."""
    makers = [_channels_of(m, output) for m, call in calls.items() if first_tensor(call.output) is output]
    takers = [_channels_of(m, output) for m, call in calls.items() if any(value is output for value in call.args)]
    yield makers + takers
    inside = set(slot.modules())
    yield [_channels_of(m, output) for m, call in calls.items() if m in inside and _shape(call.output) == output.shape]
    order = list(calls)
    place = order.index(slot)
    before = [m for m in reversed(order[:place]) if m not in inside and _shape(calls[m].output) == output.shape]
    after = [m for m in order[place + 1 :] if any(_shape(value) == output.shape for value in calls[m].args)]
    yield [next((found for m in near if (found := _channels_of(m, output))), None) for near in (before, after)]


def _channels_of(layer: nn.Module, tensor: Tensor) -> _Where | None:
    """Where this layer has its channels, if it works on tensors like this one."""
    if isinstance(layer, _FIRST[tensor.dim()]):
        return "first" if tensor.shape[1] in _widths(layer) else None
    kind = type(layer).__mro__[is_parametrized(layer)]  # a parametrised layer is a subclass made for it
    if kind in _LAST or (tensor.dim() == 3 and isinstance(layer, _LAST_OF_A_SEQUENCE)):
        return "last" if tensor.shape[-1] in _widths(layer) else None
    if isinstance(layer, _LAST) and tensor.shape[1] != tensor.shape[-1]:  # a norm of the user's own: by its size
        return "first" if tensor.shape[1] in _widths(layer) else "last" if tensor.shape[-1] in _widths(layer) else None
    return None


_WIDTHS = (
    *("in_channels", "out_channels", "num_features", "num_channels", "in_features", "out_features"),
    *("embedding_dim", "hidden_size", "input_size", "embed_dim"),
)


def _widths(layer: nn.Module) -> set[int]:
    """Every number of channels that the layer takes or gives."""
    widths = {int(getattr(layer, name)) for name in _WIDTHS if isinstance(getattr(layer, name, None), int)}
    if isinstance(layer, nn.RNNBase):
        widths.add(layer.hidden_size * (2 if layer.bidirectional else 1))
    return widths | set(getattr(layer, "normalized_shape", ())[-1:])


def _shape(output: Any) -> Any:
    tensor = first_tensor(output)
    return tensor.shape if isinstance(tensor, Tensor) and not tensor.is_nested else None
