"""Scores of a whole set: a function of all outputs and targets, or an object with `update`, `compute` and `reset`.

Each network that is measured has a state of its own. To estimate standard errors, the score is computed again without
each of a few blocks of examples (`esper.engine.measure`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.measure import SetScore, Tally
from esper.errors import first_line

ToPercent = Callable[[float], float]


class ScoreError(ValueError):
    """A metric that gives no score. The message says why."""


class FunctionScore(SetScore):
    """A function of all outputs and targets. They are kept until the end of the set."""

    def __init__(self, function: Callable[[Any, Tensor], Any], to_percent: ToPercent) -> None:
        self.function, self.to_percent = function, to_percent

    def start(self, blocks: int) -> Tally:
        return _Joined(self)


class _Joined(Tally):
    def __init__(self, score: FunctionScore) -> None:
        self._score = score
        self._outputs: list[Any] = []
        self._targets: list[Tensor] = []
        self._blocks: list[Tensor] = []

    def update(self, outputs: Any, targets: Tensor, block: Tensor) -> None:
        self._outputs.append(_kept(outputs))
        self._targets.append(targets)
        self._blocks.append(block)

    def compute(self, blocks: int) -> list[float]:
        outputs, targets, block = _joined(self._outputs), _joined(self._targets), torch.cat(self._blocks)
        function, to_percent = self._score.function, self._score.to_percent

        def without(left_out: int) -> float:
            rows = block != left_out
            return to_percent(one_number(function(_selected(outputs, rows), targets[rows])))

        with _explained(len(targets)):
            whole = to_percent(one_number(function(outputs, targets)))
        return [_checked(whole, len(targets)), *(_or_nan(without, b) for b in range(blocks))]


class StatefulScore(SetScore):
    """An object with update, compute and reset. It is copied for each network, and never touched itself."""

    def __init__(self, metric: Any, to_percent: ToPercent) -> None:
        self.metric, self.to_percent = metric, to_percent

    def start(self, blocks: int) -> Tally:
        return _States(self, blocks)


class _States(Tally):
    """One state for all examples, and one without each block."""

    def __init__(self, score: StatefulScore, blocks: int) -> None:
        self._score = score
        self._whole = fresh(score.metric)
        self._without = [fresh(score.metric) for _ in range(blocks)]
        self._failed: set[int] = set()
        self._count = 0

    def update(self, outputs: Any, targets: Tensor, block: Tensor) -> None:
        outputs = logits_of(outputs)
        self._count += len(targets)
        with _explained(self._count):
            update(self._whole, outputs, targets)
        for b, state in enumerate(self._without):
            rows = block != b
            try:
                if bool(rows.any()):
                    update(state, _selected(outputs, rows), targets[rows])
            except Exception:  # a person's code, which may refuse a part of what it takes as a whole
                self._failed.add(b)

    def compute(self, blocks: int) -> list[float]:
        to_percent = self._score.to_percent

        def without(b: int) -> float:
            return math.nan if b in self._failed else to_percent(one_number(self._without[b].compute()))

        with _explained(self._count):
            whole = to_percent(one_number(self._whole.compute()))
        return [_checked(whole, self._count), *(_or_nan(without, b) for b in range(blocks))]


def fresh(metric: Any) -> Any:
    """A copy without anything counted."""
    copied = copy.deepcopy(metric)
    copied.reset()
    return copied


def update(state: Any, outputs: Any, targets: Tensor) -> None:
    if isinstance(state, nn.Module):  # a metric of torchmetrics counts on the device where it is
        state.to(targets.device)
    state.update(outputs, targets)


@contextmanager
def _explained(examples: int) -> Iterator[None]:
    """Within, a failure of the metric becomes one line."""
    try:
        yield
    except ScoreError:
        raise
    except Exception as error:
        detail = first_line(error)
        raise ScoreError(f"the metric fails for all {examples} examples of the set: {detail}") from error


def _checked(score: float, examples: int) -> float:
    if not math.isfinite(score):
        raise ScoreError(f"the metric gives {score} for the {examples} examples of the set: it must be a number")
    return score


def _or_nan(score: Callable[[int], float], block: int) -> float:
    """The score without a block: that it fails leaves the standard error unknown."""
    try:
        return score(block)
    except Exception:  # a person's code, which may refuse a part of what it takes as a whole
        return math.nan


def one_number(found: Any, examples: int | None = None) -> float:
    """A float from what a metric gives: a number, or a tensor or array without axes."""
    if isinstance(found, int | float):
        return float(found)
    if isinstance(found, Tensor | np.ndarray | np.generic) and found.shape == ():
        return float(found.item())
    what = f"a {type(found).__name__}"
    if isinstance(found, Tensor | np.ndarray):
        what = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
    each = "" if examples is None else f" a tensor with one number per example ({examples}), or"
    raise ScoreError(f"the metric must give{each} one number, not {what}")


# -- outputs, whatever they are made of -----------------------------------------------------------------------------


def logits_of(outputs: Any) -> Any:
    """The tensor of a model that gives an object with `logits`, as those of Hugging Face do."""
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


class _Logits:
    """What is kept of objects with `logits` when the outputs of all batches are joined."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"of the model's outputs only the logits are joined over batches, not {name!r}: compute it from them, or "
            "return one number per example"
        )


def _kept(outputs: Any) -> Any:
    """Of an object with logits, these alone: caches and hidden states of a whole set would fill the memory."""
    logits = logits_of(outputs)
    return _Logits(logits) if isinstance(logits, Tensor) and logits is not outputs else outputs


def _joined(parts: Sequence[Any]) -> Any:
    """The outputs of all batches as those of one."""
    first = parts[0]
    if isinstance(first, Tensor):
        if len({part.shape[1:] for part in parts}) > 1:
            raise ScoreError(
                "a metric of one number is computed on all outputs together, and those of different batches differ in "
                "size: let it return one number per example, or give an object with update(), compute() and reset()"
            )
        return torch.cat(list(parts))
    if isinstance(first, _Logits):
        return _Logits(_joined([part.logits for part in parts]))
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(column) for column in zip(*parts, strict=True))
    raise ScoreError(
        f"a metric of one number is computed on all outputs together, and a {type(first).__name__} cannot be joined: "
        "let it return one number per example, or give an object with update(), compute() and reset()"
    )


def _selected(outputs: Any, rows: Tensor) -> Any:
    if isinstance(outputs, Tensor):
        return outputs[rows]
    if isinstance(outputs, _Logits):
        return _Logits(outputs.logits[rows])
    if isinstance(outputs, dict):
        return {key: _selected(value, rows) for key, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(_selected(value, rows) for value in outputs)
    return outputs
