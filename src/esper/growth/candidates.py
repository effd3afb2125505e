"""Where a model could grow: each of its modules, and what passes at its output, or why that is no slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.growth.blueprints import SlotShape
from esper.growth.graft import SEEDS, first_input, first_tensor
from esper.growth.layout import find_layout
from esper.growth.probe import AttachError, Call, Probe


class HasPath(Protocol):
    """Something that has the path of a module."""

    @property
    def path(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """The modules of a model in the order in which they finish."""

    shapes: dict[str, SlotShape]
    refused: dict[str, str]
    """By path: why this module is no slot."""
    outer: dict[str, str]
    """Path of the last layer of a Sequential → path of the Sequential, which gives the same tensor: one place."""


def find_candidates(model: nn.Module, seen: Probe, layouts: Mapping[str, str]) -> Candidates:
    """Look at every module. Visibility is not known yet."""
    paths = {model.get_submodule(path): path for path in reversed(list(module_names(model))) if path}
    found = Candidates({}, {}, {})
    listed: dict[int, str] = {}
    called = [module for module in seen.passes[1] if module in paths]  # what is inside finishes first
    for module in (*called, *(module for module in paths if seen.counts[module] == 0)):
        path = paths[module]
        try:
            shape = slot_shape(model, path, seen, layouts)
        except AttachError as error:
            found.refused[path] = str(error)
            continue
        made = id(first_tensor(seen.passes[1][module].output))
        inner = listed.get(made, "")
        if isinstance(module, nn.Sequential) and inner.startswith(f"{path}."):
            same = [old for old, outer in found.outer.items() if outer == inner]
            found.outer.update(dict.fromkeys([inner, *same], path))
        found.shapes[path], listed[made] = shape, path
    return found


def module_names(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of all modules of the host, second names too. What grew in it earlier is no place for a slot."""
    yield path
    for name, child in module._modules.items():
        if child is not None and name != SEEDS:
            yield from module_names(child, f"{path}.{name}" if path else name)


def host_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Its parts by name, as the host has them."""
    return [(name, child) for name, child in module.named_children() if name != SEEDS]


def host_modules(module: nn.Module) -> Iterator[nn.Module]:
    """It and all modules inside of it, without what grew there."""
    yield module
    for _, child in host_children(module):
        yield from host_modules(child)


def outputs_of(model: nn.Module, seen: Probe) -> set[int]:
    """The tensors that the model itself gives, by identity."""
    output = seen.passes[1][model].output
    if isinstance(output, Mapping):  # of transformers, whether or not its type is registered with torch
        output = list(output.values())
    return {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}


def slot_shape(model: nn.Module, path: str, seen: Probe, layouts: Mapping[str, str]) -> SlotShape:
    module = model.get_submodule(path)
    calls = seen.counts[module]
    if calls == 0:
        raise AttachError(f"slot {path!r} is never called in a forward pass: choose a module inside or around it")
    if calls > 1:
        raise AttachError(
            f"slot {path!r} is called {calls} times in a forward pass; a slot needs exactly one call: choose "
            "a module inside or around it"
        )
    two, three = (slot_tensor(path, calls_made[module].output) for calls_made in seen.passes)
    if (two.shape[:1], three.shape[:1]) != ((2,), (3,)):
        raise AttachError(
            f"slot {path!r} gives shape {list(three.shape)} for a batch of 3: its first axis must be the batch "
            "(for torch.nn.Transformer layers, build them with batch_first=True)"
        )
    layout, channels_last = find_layout(path, module, three, seen.passes[1], layouts)
    if channels_last:
        return SlotShape(layout, three.shape[-1], tuple(three.shape[1:-1]), channels_last=layout == "conv2d")
    source = source_of(module, seen.passes[1][module]) if layout == "dense" and not is_own(model) else 0
    return SlotShape(layout, three.shape[1], tuple(three.shape[2:]), source=source)


def is_own(host: nn.Module) -> bool:
    """Whether a host is one of Esper's own. Their seeds are as they were when policies were trained with them."""
    return type(host).__module__.partition(".")[0] == "esper"


def source_of(module: nn.Module, call: Call) -> int:
    """How many features a linear layer of vectors reads; 0 for other modules.

    Subclasses may leave out some of their inputs on purpose (masked layers), which a seed beside them would read.
    """
    read = first_input(call.args, call.kwargs) if type(module) is nn.Linear else None
    return read.shape[1] if isinstance(read, Tensor) and read.dim() == 2 else 0


def slot_tensor(path: str, output: Any) -> Tensor:
    first = first_tensor(output)
    if not isinstance(first, Tensor):
        raise AttachError(
            f"slot {path!r} gives a {type(output).__name__}: a slot needs a tensor, or a tuple that starts with one"
        )
    if first.is_nested:
        raise AttachError(f"slot {path!r} gives a nested tensor: a seed needs a strided one")
    if not first.is_floating_point():
        raise AttachError(f"slot {path!r} gives {first.dtype} values: a seed needs floating-point activations")
    return first
