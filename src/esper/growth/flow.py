"""Which positions of a network's tensors follow which positions of its inputs, found by changing the inputs.

An input's axis is cut in two, at several places. If what lies after a cut follows a change before it, information flows
*forwards* across the cut; if what lies before it follows a change after it, *backwards*. A network that only ever lets
it flow forwards is causal.

Passes are made with noise on the weights, because a fresh network may hide what it does behind a layer of zeros, and
with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.growth.graft import MASKS, first_tensor, with_first
from esper.growth.probe import arguments, call, input_tensors

UNCHANGED = 1e-6
"""Differences below this share of the largest value are rounding."""
LEAST_NOISE = 0.02
"""Standard deviation of the noise on weights that are all zero."""

Mixer = Callable[[Tensor], Tensor]
END = "the outputs"
"""The name under which a pass keeps what the network returned."""


@dataclass(frozen=True, slots=True)
class InputAxis:
    """One axis of one input, and where it is cut."""

    length: int

    @property
    def cuts(self) -> list[int]:
        """Two in the middle, because a window may end at one of them, and one on each side."""
        wanted = (self.length // 4, self.length // 2, self.length // 2 + 1, 3 * self.length // 4)
        return sorted({min(self.length - 1, max(1, cut)) for cut in wanted})

    def sides(self, positions: int, cut: int) -> tuple[int, int]:
        """Of so many positions: how many surely lie before the cut, and where those begin that surely lie after."""
        more = positions - self.length
        if 0 <= 2 * more < self.length:  # one for one, with padding or further tokens at either end
            return cut, cut + more
        if 0 < -2 * more < self.length:  # the first ones are missing, as after convolutions without padding
            return max(0, cut + more), max(0, cut + more)
        return -(-positions * cut // self.length), -(-positions * cut // self.length)


@dataclass(frozen=True, slots=True)
class Across:
    """What flows across each cut, in one tensor."""

    forwards: tuple[bool, ...]
    backwards: tuple[bool, ...]
    far: tuple[bool, bool]
    """From the first quarter to the last one, and back."""
    one_for_one: bool
    """The tensor has as many positions as the input."""

    @property
    def one_way(self) -> bool:
        """Forwards and not backwards."""
        return self._only(self.forwards, self.backwards, self.far)

    @property
    def other_way(self) -> bool:
        """Backwards and not forwards, where there is a position for each of the input."""
        return self.one_for_one and self._only(self.backwards, self.forwards, self.far[::-1])

    def _only(self, along: Sequence[bool], against: Sequence[bool], far: tuple[bool, bool]) -> bool:
        """At half of the cuts, or from end to end: blocks and prefixes may look both ways within themselves, and
        padding in the example looks like a future that nothing reads. At all of them where it is not one for one: a
        stride may look so at some."""
        found = [there and not back for there, back in zip(along, against, strict=True)]
        if not self.one_for_one:
            return all(found)
        return 2 * sum(found) >= len(found) or (far[0] and not far[1])

    @property
    def nothing(self) -> bool:
        return not any(self.forwards) and not any(self.backwards)


Followed = dict[tuple[int, int], Tensor]
"""Of one name in one pass: by (number of the tensor, axis), [positions] bool: what is not as in the plain pass."""


class Flow:
    """What follows the changes of one axis of one input, in the network's tensors."""

    def __init__(
        self, axis: InputAxis, late: Sequence[dict[str, Followed]], early: Sequence[dict[str, Followed]]
    ) -> None:
        self._axis, self._late, self._early = axis, late, early
        common = set(late[0]).intersection(*late, *early)
        self.inside = [name for name in late[0] if name != END and name in common]
        """Modules that were called in every pass."""

    def reaches(self, name: str) -> bool:
        """Whether the tensor of this name follows the input at all."""
        return any(bool(vector.any()) for p in (*self._late, *self._early) for vector in p.get(name, {}).values())

    def across(self, name: str) -> list[Across]:
        """For every axis that may be the positions."""
        everywhere = set(self._late[0][name]).intersection(*(p[name] for p in (*self._late, *self._early)))
        return [self._across(name, key) for key in sorted(everywhere) if key[1] > 0]

    def _across(self, name: str, key: tuple[int, int]) -> Across:
        positions = len(self._late[0][name][key])
        forwards, backwards = [], []
        for late, early, cut in zip(self._late, self._early, self._axis.cuts, strict=True):
            before, after = self._axis.sides(positions, cut)
            backwards.append(bool(late[name][key][:before].any()))
            forwards.append(bool(early[name][key][after:].any()))
        cuts = self._axis.cuts
        last = bool(self._early[0][name][key][self._axis.sides(positions, cuts[-1])[1] :].any())
        first = bool(self._late[-1][name][key][: self._axis.sides(positions, cuts[0])[0]].any())
        return Across(tuple(forwards), tuple(backwards), (last, first), positions == self._axis.length)


class Passes:
    """Passes of a network over changed examples."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model, self._example = model, _all_visible(example)
        self._noise = LEAST_NOISE
        if not all(bool(leaf.isfinite().all()) for leaf in self._run(self._example, {}).get(END, ())):
            self._noise = 0.0  # a root or a logarithm of a weight, say

    def flows(self, mixers: Mapping[str, Mixer] | None = None, only: int | None = None) -> Iterator[Flow | Exception]:
        """For each axis of each input (or for one of them, by number).

        An exception stands for an input that must keep its values, such as an index. `mixers` change the outputs of
        some modules, by name: what would a seed there let through?
        """
        plain = self._run(self._example, mixers or {})
        for number, (late, early, axis) in enumerate(_changes(self._example)):
            if only not in (None, number):
                continue
            try:
                yield Flow(
                    axis, *([self._followed(plain, x, axis, mixers or {}) for x in part] for part in (late, early))
                )
            except Exception as error:
                yield error

    def outputs(self, example: Any) -> Sequence[Tensor]:
        """What the network gives for another example of the same form."""
        return self._run(example, {}).get(END, ())

    def _followed(
        self, plain: _Pass, example: Any, axis: InputAxis, mixers: Mapping[str, Mixer]
    ) -> dict[str, Followed]:
        """What is not as in the plain pass. Of modules inside only axes as long as the input's: there are many."""
        found: dict[str, Followed] = {}

        def compare(name: str, number: int, tensor: Tensor) -> None:
            before = plain[name][number] if number < len(plain.get(name, ())) else None
            if before is None or before.shape != tensor.shape:
                return  # a pass that takes another way through the network
            gap = differs(before, tensor)
            axes = [a for a in range(1, tensor.dim()) if tensor.shape[a] > 1 and name == END]
            axes += [a for a in range(1, tensor.dim()) if tensor.shape[a] == axis.length and name != END]
            vectors = {(number, a): gap.movedim(a, 0).flatten(1).any(1) for a in axes}
            found.setdefault(name, {}).update({(number, 0): gap.any().reshape(1), **vectors})

        self._run(example, mixers, compare)
        return found

    def _run(self, example: Any, mixers: Mapping[str, Mixer], see: _See | None = None) -> _Pass:
        """What every module gave: kept, or shown to `see`."""
        kept: dict[str, list[Tensor]] = {}

        def note(name: str, number: int, tensor: Tensor) -> None:
            if see is not None:
                see(name, number, tensor.detach())
            else:
                kept.setdefault(name, []).append(tensor.detach().clone())  # hosts change tensors in place

        handles = [
            module.register_forward_hook(_hook(name, note, mixers.get(name)))
            for name, module in self._model.named_modules()
            if name
        ]
        try:
            with _noisy(self._model, self._noise):
                torch.manual_seed(0)
                outputs = call(self._model, example)
        finally:
            for handle in handles:
                handle.remove()
        for number, leaf in enumerate(leaf for leaf in tree_leaves(outputs) if _is_values(leaf)):
            note(END, number, _by_example(leaf, example))
        return kept


_Pass = Mapping[str, Sequence[Tensor]]
_See = Callable[[str, int, Tensor], None]


@contextmanager
def _noisy(model: nn.Module, least: float) -> Iterator[None]:
    """Within, every trainable weight has the same noise on it. Frozen ones may be masks, which noise would destroy."""
    torch.manual_seed(0)
    own = [(p, p.data) for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.numel() > 0]
    try:
        if least > 0.0:
            for parameter, value in own:
                spread = max(least, 0.5 * float(value.float().square().mean().sqrt()))
                parameter.data = value + spread * torch.randn_like(value)
        yield
    finally:
        for parameter, value in own:
            parameter.data = value


def differs(before: Tensor, after: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding; what is infinite or no number in both does not."""
    same = (before == after) | (before.isnan() & after.isnan())
    largest = torch.where(before.isfinite(), before.abs(), 0.0).max()
    return ~same & ~((after - before).abs() <= UNCHANGED * largest)


def _hook(name: str, note: _See, mixer: Mixer | None) -> Callable[[nn.Module, Any, Any], Any]:
    calls = count()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        if not _is_values(tensor):
            return None
        note(name, next(calls), tensor)
        if mixer is None:
            return None
        return with_first(output, mixer(tensor))

    return hook


def _all_visible(example: Any) -> Any:
    """The example with masks that hide nothing: padding looks like a future that nothing reads."""
    args, kwargs = arguments(example)
    shown = {
        name: torch.full_like(value, "padding" not in name)
        for name, value in kwargs.items()
        if name in MASKS and isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    }
    return {**kwargs, **shown} if kwargs else args


def _is_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and not leaf.is_nested


def _by_example(leaf: Tensor, example: Any) -> Tensor:
    """Outputs [batch · time, …] as [batch, time, …]: many models flatten them for the loss."""
    batch, rows = input_tensors(example)[0].shape[0], leaf.shape[0]
    return leaf.reshape(batch, -1, *leaf.shape[1:]) if rows > batch and rows % batch == 0 else leaf


def _changes(example: Any) -> Iterator[tuple[list[Any], list[Any], InputAxis]]:
    """For every axis of every input: the example with its later and with its earlier part changed, at each cut."""
    args, kwargs = arguments(example)
    given: dict[Any, Any] = {**kwargs} if kwargs else {**dict(enumerate(args))}
    for key, value in given.items():
        if not isinstance(value, Tensor) or value.is_complex() or key in MASKS:
            continue
        for number in range(1, value.dim()):
            if value.shape[number] == 1:
                continue
            axis = InputAxis(value.shape[number])
            parts = [[slice(cut, None) for cut in axis.cuts], [slice(None, cut) for cut in axis.cuts]]
            late, early = ([{**given, key: changed(value, number, part)} for part in some] for some in parts)
            if kwargs:
                yield late, early, axis
            else:
                yield [tuple(x.values()) for x in late], [tuple(x.values()) for x in early], axis


def changed(value: Tensor, axis: int, part: slice) -> Tensor:
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
