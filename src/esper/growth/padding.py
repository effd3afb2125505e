"""Inputs of a model that say which positions are padding, whatever they are called and however they are given.

Truth values, one for each position of another input, are taken for a mask. Zeros and ones may be something else (the
types of tokens, say), and so may one whole number for each example: these are a mask and lengths if the outputs do not
follow the positions that they hide, and do follow them where nothing is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.flow import Passes, changed, differs
from esper.growth.probe import arguments, untouched, with_batch

LEAST_POSITIONS = 4
"""Of an input whose end is taken away."""
ROUNDING = 1e-5
"""Of outputs that are computed from inputs of different length, in parts of the largest."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """Values of an input that may hide positions, and what shows whether they do."""

    hiding: Tensor
    showing: Tensor
    """Values that hide nothing."""
    length: int
    changes: slice
    """Positions that are changed, all of them hidden by `hiding`."""
    reads: slice
    """Positions that are never hidden."""


def padding_inputs(model: nn.Module, example: Any) -> dict[Any, Tensor | None]:
    """By name or place: each input that says what is padding, with values that hide nothing, where these are known."""
    example = with_batch(example, 2)
    args, kwargs = arguments(example)
    given: dict[Any, Any] = {**kwargs} if kwargs else {**dict(enumerate(args))}
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.dim() > 0}
    lengths = {key: _lengths(key, tensors) for key in tensors}
    found: dict[Any, Tensor | None] = {}
    for key, value in tensors.items():
        trials = [*_masks(value, lengths[key]), *_counts(value, lengths[key])]
        if not trials:
            continue
        with untouched(model):
            passes = Passes(model, example)
            proven = next((trial for trial in trials if _hides(passes, given, key, trial)), None)
        if proven is not None or value.dtype == torch.bool:
            found[key] = None if proven is None else proven.showing
    return found


def pads_itself(model: nn.Module, example: Any) -> bool:
    """Whether the model finds padding in its input: what ends with one symbol, or with zeros, is the same without that
    end, and what ends otherwise is not."""
    example = with_batch(example, 2)
    args, kwargs = arguments(example)
    given: dict[Any, Any] = {**kwargs} if kwargs else {**dict(enumerate(args))}
    series = [key for key, value in given.items() if isinstance(value, Tensor) and value.dim() in (2, 3)]
    if len(series) != 1 or (value := given[series[0]]).shape[1] < LEAST_POSITIONS or value.dtype == torch.bool:
        return False
    if value.is_floating_point() != (value.dim() == 3):  # features, or what is no series of symbols
        return False
    with untouched(model):
        passes = Passes(model, example)
        return any(_ignores(passes, given, series[0], symbol) for symbol in _symbols(model, value))


def _symbols(model: nn.Module, value: Tensor) -> set[int]:
    """What may stand for padding: 0, the last symbol of an example, or what a table of embeddings names."""
    if value.is_floating_point():
        return {0}
    named = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    return {0, *value[:, -1].tolist(), *named}


def _ignores(passes: Passes, given: dict[Any, Any], key: Any, symbol: int) -> bool:
    value = given[key]
    half = value.shape[1] // 2
    real = value[value != symbol]
    if len(real) == 0:
        return False
    start = torch.where(value[:, :half] == symbol, real[0], value[:, :half])
    ends = [torch.full_like(value[:, half:], end) for end in (symbol, real[0])]

    def outputs(tensor: Tensor) -> list[Tensor]:
        found = passes.outputs(_as_inputs({**given, key: tensor}))
        axes = [_axis(one, tensor.shape[1]) for one in found]
        return [one if axis is None else one.narrow(axis, 0, half) for one, axis in zip(found, axes, strict=True)]

    try:
        alone, padded, longer = (outputs(torch.cat([start, *end], 1)) for end in ([], *([one] for one in ends)))
        found, other = _gap(alone, padded), _gap(alone, longer)
        return found <= ROUNDING < other and found <= 0.01 * other
    except Exception:  # the person's code, which may take one length alone
        return False


def _gap(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference of outputs, in parts of the largest value; infinite where one is no number."""
    gaps = [float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(some, others, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def hides(model: nn.Module, example: Any, name: str) -> bool:
    """Whether an `attention_mask`, say, that is given by this name, hides what is 0, from everything that is visible.

    Also where it cannot be tried.
    """
    given = arguments(example := with_batch(example, 2))[1]
    mask = given.get(name)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 2:
        return True
    half = (mask.shape[1] + 1) // 2
    mask = torch.cat([torch.ones_like(mask[:, :half]), torch.zeros_like(mask[:, half:])], 1)
    trial = _Trial(mask, mask, mask.shape[1], slice(half, None), slice(0, half))
    with untouched(model):
        return not _follows(Passes(model, example), {**given, name: mask}, name, trial)


def _lengths(key: Any, tensors: Mapping[Any, Tensor]) -> list[int]:
    """How many positions the other inputs may have."""
    sizes = [size for name, other in tensors.items() if name != key for size in other.shape[1:]]
    return [size for size in dict.fromkeys(sizes) if size > 1]


def _masks(value: Tensor, lengths: list[int]) -> Iterator[_Trial]:
    """[batch, positions], either sense; hiding what is late or early, because a causal host reads nothing late."""
    if value.dim() != 2 or value.shape[0] != 2 or value.shape[1] not in lengths:
        return
    if value.dtype != torch.bool and not bool(((value == 0) | (value == 1)).all()):
        return
    length = value.shape[1]
    half, few = length // 2, max(1, length // 4)  # the ends alone are changed: a convolution reads beyond an edge
    for showing in (torch.ones_like(value), torch.zeros_like(value)):
        late, early = showing.clone(), showing.clone()
        late[:, half:] = early[:, :half] = 1 - int(showing[0, 0])
        yield _Trial(late, showing, length, slice(length - few, None), slice(0, half))
        yield _Trial(early, showing, length, slice(0, few), slice(half, None))


def _counts(value: Tensor, lengths: list[int]) -> Iterator[_Trial]:
    """[batch] or [batch, 1]: how many positions of each example are real.

    No trial has a value above those of the example: of another index, a table of embeddings may have no entry.
    """
    if (
        value.shape not in ((2,), (2, 1))
        or value.is_floating_point()
        or value.is_complex()
        or value.dtype == torch.bool
    ):
        return
    most = int(value.max())
    if int(value.min()) < 1 or most < 2:
        return
    for length in lengths:
        if most <= length:
            few = max(1, (most - most // 2) // 2)
            showing = torch.full_like(value, most)
            yield _Trial(showing // 2, showing, length, slice(most - few, most), slice(0, most // 2))


def _hides(passes: Passes, given: Mapping[Any, Any], key: Any, trial: _Trial) -> bool:
    try:
        return not _follows(passes, {**given, key: trial.hiding}, key, trial) and _follows(
            passes, {**given, key: trial.showing}, key, trial
        )
    except Exception:  # the person's code, which may take no such values
        return False


def _follows(passes: Passes, given: dict[Any, Any], key: Any, trial: _Trial) -> bool:
    """Whether what the model gives for the positions that are read (or as a whole) follows those that are changed."""
    moved = dict(given)
    for name, value in given.items():
        axis = _axis(value, trial.length) if isinstance(value, Tensor) and name != key else None
        if axis is not None:
            moved[name] = changed(value, axis, trial.changes)
    for before, after in zip(passes.outputs(_as_inputs(given)), passes.outputs(_as_inputs(moved)), strict=True):
        axis = _axis(before, trial.length)
        where = (slice(None),) * (axis or 0) + (trial.reads if axis else slice(None),)
        if not bool(before[where].isfinite().all()) or bool(differs(before, after)[where].any()):
            return True
    return False


def _as_inputs(given: dict[Any, Any]) -> Any:
    """Arguments by place are a tuple again."""
    return tuple(given.values()) if 0 in given else given


def _axis(value: Tensor, length: int) -> int | None:
    """That of the positions."""
    return next((axis for axis in range(1, value.dim()) if value.shape[axis] == length), None)
