"""What each position of a slot may read, found by trying, so that a seed lets through only what its host does.

The later part of the example is changed, then the earlier part: which positions of the slot, and of the output at the
end, follow? If nothing later ever reaches an earlier position, in the slot and at the end, the slot is *causal*, and a
seed that looked both ways would show the network what it is to predict.

    earlier positions of the slot follow the later part                      both
    they do not, and neither do the outputs at the end                       causal
    the output has no positions (a class, say), and the slot mixes
      positions in one direction, one for one with the input                 causal
    the output has no positions, and the slot mixes none, or coarsely        both: there is no future to leak

It is tried with noise on the weights, because a fresh network may hide what it does behind a layer of zeros.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from esper.growth.blueprints import VISIBILITIES, SlotShape, Visibility
from esper.growth.graft import MASKS, argument_names
from esper.growth.probe import AttachError, Probe, arguments, untouched, with_batch

UNCHANGED = 1e-6
"""Differences below this share of the largest value are rounding."""
LEAST_NOISE = 0.02
"""Standard deviation of the noise on weights that are all zero."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What modules call the key-value cache of generation."""


def find_visibility(
    model: nn.Module,
    example: Any,
    shapes: Mapping[str, SlotShape],
    seen: Probe,
    asked: str | Mapping[str, str] | None,
) -> dict[str, Visibility]:
    """By slot. `asked` is the user's own word, for all slots or by path or pattern."""
    found: dict[str, Visibility] = {}
    for path, shape in shapes.items():
        word = _asked(path, asked)
        if shape.layout == "dense":
            found[path] = "both"  # it has no positions
        elif word is not None:
            found[path] = "position" if word == "causal" and shape.layout == "conv2d" else word
    unknown = {path: shape for path, shape in shapes.items() if path not in found}
    if unknown:
        found |= _tried(model, example, unknown)
        for path in unknown:
            if shapes[path].layout == "sequence" and not _shows_all(model, path, seen):
                found[path] = "position"
    return found


def _asked(path: str, asked: str | Mapping[str, str] | None) -> Visibility | None:
    named = {"*": asked} if isinstance(asked, str) else asked or {}
    for pattern, word in named.items():
        if word not in VISIBILITIES:
            raise AttachError(f"unknown visibility {word!r}: choose one of {', '.join(VISIBILITIES)}")
        if fnmatch.fnmatchcase(path, pattern):
            return word
    return None


def _shows_all(model: nn.Module, path: str, seen: Probe) -> bool:
    """Whether the slot's module is given what a seed must respect: the host's padding masks and key-value cache.

    A seed reads these off the inputs of its module, for an exported model has nothing else. Where the host has one and
    the module does not get it, only seeds that look at no other position are right.
    """
    module = model.get_submodule(path)
    given = {*argument_names(module), *seen.passes[1][module].kwargs}
    masked = any(isinstance(seen.passes[1][model].inputs(model).get(name), Tensor) for name in MASKS)
    cached = getattr(getattr(model, "config", None), "use_cache", None) is not None
    return (not masked or not given.isdisjoint(MASKS)) and (not cached or not given.isdisjoint(CACHES))


# -- trying it out ------------------------------------------------------------------------------------------------


def _tried(model: nn.Module, example: Any, shapes: Mapping[str, SlotShape]) -> dict[str, Visibility]:
    found: dict[str, Visibility] = dict.fromkeys(shapes, "both")
    problem, tried = "no input has several positions", 0
    with untouched(model), torch.no_grad():
        run = _Runs(model, shapes)
        example = with_batch(example, 2)
        plain = run(example)
        for late, early, axis in _changes(example):
            try:
                passes = _Passes(plain, [run(x) for x in late], run(early), axis)
            except Exception as error:  # an input that must keep its values, such as an index of some kind
                problem = str(error).strip().partition("\n")[0][:200]
                continue
            tried += 1
            for path, shape in shapes.items():
                if found[path] == "both":
                    found[path] = passes.judge(path, shape)
    if not tried:
        raise AttachError(
            f"it cannot be seen which positions of {', '.join(shapes)} read which ({problem}): pass "
            "visibility='causal' if no position may read a later one, else visibility='both'"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of an input, and where it is cut in two: twice, because a window may end at one of these places."""

    length: int

    @property
    def cuts(self) -> list[int]:
        return sorted({max(1, self.length // 2), min(self.length - 1, self.length // 2 + 1)})


@dataclass(frozen=True, slots=True)
class _Passes:
    """What the slots and the end gave: for the example, with its later part changed, and with its earlier part."""

    plain: dict[str, Tensor]
    late: list[dict[str, Tensor]]
    """For each cut."""
    early: dict[str, Tensor]
    """For the first cut."""
    axis: _Axis

    def judge(self, path: str, shape: SlotShape) -> Visibility:
        if not any(self._one_way(path, axis) for axis in range(1, 1 + len(shape.sizes))):
            return "both"
        at_end = any(self._one_way("", axis) for axis in range(1, self.plain[""].dim()))
        if shape.layout == "conv2d":
            return "position" if at_end else "both"  # a map has no causal form but seeds that read one position
        if at_end:
            return "causal"
        later = _follows(self.plain[path], self.early[path], 1)[self._boundary(shape.sizes[0], self.axis.cuts[0]) :]
        return "causal" if bool(later.any()) and shape.sizes[0] == self.axis.length else "both"

    def _one_way(self, where: str, axis: int) -> bool:
        """Whether later positions of the axis follow a change of the later part, and earlier ones never do."""
        for after, cut in zip(self.late, self.axis.cuts, strict=True):
            follows = _follows(self.plain[where], after[where], axis)
            boundary = self._boundary(len(follows), cut)
            if boundary == 0 or bool(follows[:boundary].any()) or not bool(follows[boundary:].any()):
                return False
        return True

    def _boundary(self, positions: int, cut: int) -> int:
        """The first of so many positions that may belong to the later part of the input."""
        return positions * cut // self.axis.length


def _follows(plain: Tensor, changed: Tensor, axis: int) -> Tensor:
    """[positions]: which positions of the axis are not what they were."""
    gap = (changed - plain).abs().movedim(axis, 0).flatten(1).amax(1)
    return ~(gap <= UNCHANGED * plain.abs().max())  # NaN counts as changed


class _Runs:
    """Passes with the same noise on the weights and the same random numbers."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, SlotShape]) -> None:
        self.model, self.shapes = model, shapes
        torch.manual_seed(0)
        self.weights = {
            name: p + torch.randn_like(p) * max(LEAST_NOISE, 0.5 * float(p.float().square().mean().sqrt()))
            for name, p in model.named_parameters()
            if p.is_floating_point() and p.numel() > 0
        }

    def __call__(self, example: Any) -> dict[str, Tensor]:
        """What each slot gave, as [batch, positions…, channels], and by "" the output at the end."""
        kept: dict[str, Tensor] = {}
        handles = [
            self.model.get_submodule(path).register_forward_hook(
                lambda module, args, output, path=path: kept.update({path: output})
            )
            for path in self.shapes
        ]
        args, kwargs = arguments(example)
        torch.manual_seed(0)
        try:
            outputs = functional_call(self.model, self.weights, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
        for path, shape in self.shapes.items():
            h: Any = kept[path]
            h = (h if isinstance(h, Tensor) else h[0]).double()
            kept[path] = h if shape.layout == "sequence" or shape.channels_last else h.movedim(1, -1)
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        kept[""] = next((leaf for leaf in leaves if leaf.is_floating_point()), torch.zeros(1)).double()
        return kept


def _changes(example: Any) -> Iterator[tuple[list[Any], Any, _Axis]]:
    """For every axis of every input: the example with its later part changed, for each cut, and with its earlier."""
    args, kwargs = arguments(example)
    given: dict[Any, Any] = {**kwargs} if kwargs else {**dict(enumerate(args))}
    for key, value in given.items():
        if not isinstance(value, Tensor) or value.is_complex() or key in MASKS:
            continue
        for number in range(1, value.dim()):
            if value.shape[number] == 1:
                continue
            axis = _Axis(value.shape[number])
            parts = [*(slice(cut, None) for cut in axis.cuts), slice(None, axis.cuts[0])]
            changed = [{**given, key: _changed(value, number, part)} for part in parts]
            *late, early = changed if kwargs else [tuple(one.values()) for one in changed]
            yield late, early, axis


def _changed(value: Tensor, axis: int, part: slice) -> Tensor:
    """Other values in a part of an axis; symbols become other symbols of the example."""
    where = (slice(None),) * axis + (part,)
    old, new = value[where], value.clone()
    if value.is_floating_point():
        spread = float(value.float().std()) if value.numel() > 1 else 0.0
        new[where] = old + (spread or 1.0) * torch.randn_like(old)
    elif value.dtype == torch.bool:
        new[where] = ~old
    else:
        least, most = (int(bound) for bound in torch.aminmax(value))
        other = most if most > least else least + 1 if least == 0 else least - 1
        new[where] = torch.where(old == least, other, least)
    return new
