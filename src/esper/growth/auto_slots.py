"""`slots="auto"`: which modules of a model get a slot, by a rule that reads nothing but the modules.

    blocks           modules with layers inside, of a class that the model has at least twice (the outermost of them):
                     each block of a transformer or of a residual MLP
    hidden layers    where there are no blocks: each layer with weights, after its norm and activation; a linear layer
                     of vectors itself, because seeds may stand beside it (`candidates.source_of`)
    maps             of both kinds, only the last before the number of channels or the resolution changes: stage ends
    never            outputs and what makes them, embeddings, layers inside of a block, modules that are called twice

More than `MOST_SLOTS` are thinned out evenly; the last one stays. Nothing is random, and nothing depends on values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from esper.growth.blueprints import SlotShape, Visibility, fitting
from esper.growth.candidates import Candidates, find_candidates, host_children, host_modules, outputs_of
from esper.growth.graft import first_tensor
from esper.growth.probe import AttachError, Probe
from esper.growth.visibility import visible_slots

AUTO = "auto"
MOST_SLOTS = 12
"""Slots at most. The controllers that come with Esper were tried with up to so many."""


def auto_slots(
    model: nn.Module,
    example: Any,
    seen: Probe,
    layouts: Mapping[str, str],
    visibility: str | Mapping[str, str] | None,
) -> tuple[dict[str, SlotShape], dict[str, Visibility]]:
    """Shapes and visibilities of the chosen slots, in the order of the forward pass."""
    places = find_candidates(model, seen, layouts)
    shapes = {path: places.shapes[path] for path in pick(model, seen, places)}
    found, refused = visible_slots(model, example, shapes, seen, visibility) if shapes else ({}, {})
    if not found:
        why = next(iter({**refused, **places.refused}.values()), "")
        raise AttachError(
            f"slots={AUTO!r} finds no place in {type(model).__name__}: no repeated blocks, and no hidden layer before "
            f"its outputs, can be a slot{f' ({why})' if why else ''}; name modules, slots=[…], of those that "
            "esper.slots(model, example) lists"
        )
    return {path: shapes[path] for path in found}, found


def pick(model: nn.Module, seen: Probe, places: Candidates) -> list[str]:
    """The paths that the rule chooses; visibility may still rule some out."""
    elements, shapes = list(_elements(model, seen, places)), places.shapes
    kinds = Counter(element.kind for element in elements if element.is_block)
    blocks = [element for element in elements if element.is_block and kinds[element.kind] > 1]
    ends = [block.path for block in blocks] if blocks else _hidden_layers(elements, shapes)
    outputs = outputs_of(model, seen)
    ends = [
        path
        for path in ends
        if path and id(first_tensor(seen.passes[1][model.get_submodule(path)].output)) not in outputs
        if fitting(shapes[path])
    ]
    # The end of a stage has the stage's name, layer1 for layer1.2; a block among blocks has its own.
    named = [places.outer.get(path, path) if _is_map(shapes[path]) else path for path in _stage_ends(ends, shapes)]
    return _thinned(named)


@dataclass(frozen=True, slots=True)
class _Element:
    """One link of the chain that a model is: a block, or a single layer."""

    path: str
    """Empty where it cannot be a slot."""
    kind: type[nn.Module]
    is_block: bool
    has_weights: bool


def _elements(model: nn.Module, seen: Probe, places: Candidates) -> Iterator[_Element]:
    """In the order in which they finish."""
    order = {module: place for place, module in enumerate(seen.passes[1])}
    classes = Counter(type(module) for module in set(host_modules(model)) if module in order)
    outputs = outputs_of(model, seen)
    found: dict[nn.Module, _Element] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in host_children(module):
            inner = f"{path}.{name}" if path else name
            calls = seen.counts[child]
            single = not any(seen.counts[part] for part in islice(host_modules(child), 1, None))
            if calls == 0:  # a list of modules
                walk(child, inner)
            elif calls == 1 and (single or _is_block(child, seen, classes, outputs)):
                usable = inner if inner in places.shapes else ""
                found[child] = _Element(usable, type(child), not single, _has_weights(child))
            elif calls == 1:
                walk(child, inner)

    walk(model, "")
    for module in sorted(found, key=order.__getitem__):
        yield found[module]


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_block(module: nn.Module, seen: Probe, classes: Counter[type], outputs: set[int]) -> bool:
    """A module that is one link, whatever is inside: one of several alike, or one that gives what it takes."""
    call = seen.passes[1][module]
    output = first_tensor(call.output)
    if isinstance(module, _CONTAINERS) or not isinstance(output, Tensor) or id(output) in outputs:
        return False
    if not _has_weights(module):
        return False
    if classes[type(module)] > 1:
        return True
    first = next((value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)), None)
    return first is not None and first.shape == output.shape and not _has_blocks(module, seen, classes)


def _has_blocks(module: nn.Module, seen: Probe, classes: Counter[type]) -> bool:
    """Whether modules that are several of a kind, with layers inside, are in it, as in nn.TransformerEncoder."""
    return any(
        classes[type(part)] > 1
        and not isinstance(part, _CONTAINERS)
        and any(seen.counts[child] for _, child in host_children(part))
        for part in islice(host_modules(module), 1, None)
        if seen.counts[part]
    )


def _has_weights(module: nn.Module) -> bool:
    """Matrices or filters, not only the vectors of a norm; a table of embeddings is no layer."""
    return any(
        parameter.dim() > 1
        for part in host_modules(module)
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag)
        for parameter in part.parameters(recurse=False)
    )


def _hidden_layers(elements: Sequence[_Element], shapes: Mapping[str, SlotShape]) -> list[str]:
    """The end of each layer, norm and activation included; without the last layer, which makes the output.

    A linear layer of vectors ends with itself: the seeds of its slot act before its norm and activation.
    """
    ends: list[str] = []
    extends = False
    for element in elements:
        shape = shapes.get(element.path)
        if element.has_weights:
            ends.append(element.path)
            extends = bool(element.path) and not element.is_block and not shapes[element.path].source
        elif extends and shape == shapes[ends[-1]] and not issubclass(element.kind, _DropoutNd):
            ends[-1] = element.path
        else:  # a pooling, a flattening: what comes after it belongs to no layer
            extends = False
    return [path for path in ends[:-1] if path]


def _stage_ends(paths: Sequence[str], shapes: Mapping[str, SlotShape]) -> list[str]:
    """Of maps, the last of each run of one shape; of everything else, all."""
    repeated = {
        path for path, following in pairwise(paths) if shapes[path] == shapes[following] and _is_map(shapes[path])
    }
    return [path for path in paths if path not in repeated]


def _is_map(shape: SlotShape) -> bool:
    return shape.layout in ("conv1d", "conv2d")


def _thinned(paths: Sequence[str]) -> list[str]:
    if len(paths) <= MOST_SLOTS:
        return list(paths)
    return [paths[(number + 1) * len(paths) // MOST_SLOTS - 1] for number in range(MOST_SLOTS)]
