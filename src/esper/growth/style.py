"""The style of a user's host around each slot: which activation and which norm its layers use there.

Found by one forward pass that notes layers by their class and by the functions that they call (`F.relu`,
`F.layer_norm`), because many hosts have no module for them. What counts is what is used most in the slot's own module,
or in the nearest module around it that uses any.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.growth.blueprints import SlotShape, Style
from esper.growth.candidates import host_modules, is_own
from esper.growth.probe import try_batch, untouched, with_batch

_CALLED: dict[Callable[..., Any], str] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), "ReLU"),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), "LeakyReLU"),
    **dict.fromkeys((F.elu, F.elu_), "ELU"),
    **dict.fromkeys((F.selu, F.selu_, torch.selu, torch.selu_), "SELU"),
    **dict.fromkeys((F.celu, F.celu_, torch.celu, torch.celu_), "CELU"),
    F.relu6: "ReLU6",
    F.gelu: "GELU",
    F.silu: "SiLU",
    F.mish: "Mish",
    F.hardswish: "Hardswish",
    F.softplus: "Softplus",
}
"""No tanh: as a function it is a part of gates and of approximations more often than an activation."""
_NORMING: dict[Callable[..., Any], str] = {
    F.batch_norm: "BatchNorm",
    F.group_norm: "GroupNorm",
    F.layer_norm: "LayerNorm",
    F.rms_norm: "RMSNorm",
}


@dataclass(frozen=True, slots=True)
class Used:
    """One use of an activation or a norm, and the module in which it was made."""

    owner: nn.Module | None
    style: Style
    positions: int = 1
    """Of a batch norm: how many values it has of each channel of an example."""


def find_styles(model: nn.Module, example: Any, shapes: Mapping[str, SlotShape]) -> dict[str, Style]:
    """By slot. Seeds of Esper's own hosts have their own style: policies were trained with those."""
    if is_own(model):
        return dict.fromkeys(shapes, Style())
    used = _uses(model, example)
    return {path: _near(model, path, math.prod(shape.sizes), used) for path, shape in shapes.items()}


def _near(model: nn.Module, path: str, positions: int, used: Sequence[Used]) -> Style:
    activations = _nearest(model, path, [use for use in used if use.style.activation])
    norms = _nearest(model, path, [use for use in used if use.style.norm])
    activation, norm = _most(activations), _most(norms)
    if norm.norm == "BatchNorm" and min(u.positions for u in norms if u.style.norm == "BatchNorm") > positions:
        norm = Style()  # a batch that is large enough for the host's could be too small for the seed's
    return Style(activation.activation, norm.norm, norm.groups)


def _nearest(model: nn.Module, path: str, used: Sequence[Used]) -> list[Used]:
    """Those in the slot's module, or else in the nearest module around it that has any."""
    names = path.split(".")
    for depth in range(len(names), -1, -1) if used else ():
        inside = set(host_modules(model.get_submodule(".".join(names[:depth]))))
        if found := [use for use in used if use.owner in inside]:
            return found
    return []


def _most(used: Sequence[Used]) -> Style:
    """What is used most often; of several, the one that comes first."""
    return Counter(use.style for use in used).most_common(1)[0][0] if used else Style()


def _uses(model: nn.Module, example: Any) -> list[Used]:
    """In the order of the forward pass."""
    found: list[Used] = []
    running: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)
        if (style := _of_class(module)) is not None:
            found.append(Used(module, style))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(_Noting(partial(_note, running, found, _frozen(model))))
        try_batch(model, with_batch(example, 2))
    return found


def _frozen(model: nn.Module) -> set[nn.Module]:
    """Modules that stay in evaluation mode during training. Such a batch norm takes batches that a seed's could not."""
    with untouched(model):
        model.train()
        return {module for module in model.modules() if not module.training}


def _note(
    running: Sequence[nn.Module],
    found: list[Used],
    frozen: set[nn.Module],
    function: Any,
    args: Any,
    kwargs: Mapping[str, Any],
) -> None:
    owner = running[-1] if running else None
    if owner is None or _of_class(owner) is not None:
        return  # how a layer that says what it is computes it does not matter
    if function in _CALLED:
        found.append(Used(owner, Style(_CALLED[function])))
    elif function in _NORMING:
        kind, names = _NORMING[function], inspect.signature(function).parameters
        if kind == "BatchNorm" and (owner in frozen or not isinstance(owner, nn.modules.batchnorm._BatchNorm)):
            return  # what a function normalises with in training cannot be seen here: it may be constants
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if kind == "GroupNorm":
            found.append(Used(owner, Style(norm=kind, groups=int(given["num_groups"]))))
        elif len(given.get("normalized_shape", (0,))) == 1:  # over more than the channels, it is as a seed's own norm
            found.append(Used(owner, Style(norm=kind), math.prod(given["input"].shape[2:])))


def _of_class(module: nn.Module) -> Style | None:
    """What hand-written layers are called, as in transformers (NewGELUActivation, LlamaRMSNorm)."""
    name = type(module).__name__
    if "RMSNorm" in name:
        return Style(norm="RMSNorm")
    if "GELU" in name:
        return Style("GELU")
    if isinstance(module, nn.ReLU6):  # it calls F.hardtanh
        return Style("ReLU6")
    return Style("Tanh") if isinstance(module, nn.Tanh) else None


class _Noting(TorchFunctionMode):
    """Shows every call of a function of torch's before it is made."""

    def __init__(self, note: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
