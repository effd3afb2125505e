"""A person's own metric as a score in percent: what it may be, its scale, and scores of a whole set.

Everything that decides about growth reads percent. A metric in 0..1 is recognised where that is certain, and
`metric_scale` is required where it is not: taken for percent, it would make every gain a hundredth of what it is.

A score of a whole set is a function of all outputs and targets, or an object with `update`, `compute` and `reset`. To
estimate standard errors, it is computed again without each of a few blocks of examples (`esper.engine.measure`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.engine.measure import Score, SetScore
from esper.errors import refused
from esper.growth.probe import described
from esper.training.own.default_metrics import ObjectiveError, logits_of


class StatefulMetric(Protocol):
    """A metric in the way of torchmetrics."""

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


Metric = Callable[..., Any] | StatefulMetric
"""(outputs, targets) → one number per example [batch], or one number for the whole set; or an object with a state."""
Scale = Literal["fraction", "percent"]
"""What is perfect: 1, or 100."""

FEW_CLASSES = 20
"""With so few, an untrained model is right in more than one example of a hundred."""
LONGEST_NAME = 16
"""Characters of a heading."""
ROUNDING = 1e-4
"""How far a fraction may be above 1 in single precision."""


def fit_metric(metric: Any, scale: Scale | None, tries: Iterable[tuple[Any, Tensor]], classes: int | None) -> Score:
    """The metric as a score in percent. It is tried on outputs of the untrained model until its scale is known."""
    if scale is None and getattr(metric, "plot_upper_bound", None) == 1.0:  # torchmetrics declares it
        scale = "fraction"
    whole_set: bool | None = None
    for outputs, targets in tries:
        values = _values(metric, outputs, targets)
        whole_set = values.dim() == 0 if whole_set is None else whole_set
        scale = scale or _recognised(values, classes)
        if scale is not None:
            _in_percent(values, scale)  # a fraction above 1 is refused now
            return own_score(metric, scale, whole_set=whole_set)
    raise ObjectiveError(
        'it cannot be seen whether the metric is in 0..1 or in percent: pass metric_scale="fraction" (1 is perfect) or '
        '"percent" (100 is perfect)'
    )


def own_score(metric: Any, scale: Scale, *, whole_set: bool) -> Score:
    """The metric as a score in percent."""
    if has_state(metric):
        return StatefulScore(metric, scale)
    if whole_set:
        return FunctionScore(metric, scale)
    return lambda outputs, targets: _in_percent(torch.as_tensor(metric(outputs, targets), device=targets.device), scale)


def check_metric(metric: Any, scale: Any) -> None:
    """Refuse what cannot be a score, before anything is computed."""
    if scale is not None and scale not in get_args(Scale):
        raise ValueError(f'metric_scale must be "fraction" (1 is perfect) or "percent" (100 is perfect), not {scale!r}')
    if metric is None:
        if scale is not None:
            raise ValueError("metric_scale was given without a metric: the default metrics are in percent")
        return
    if isinstance(metric, type):
        raise ValueError(f"the metric is a class: give an object of it, {metric.__name__}(…)")
    if not callable(metric) and not has_state(metric):
        raise ValueError(
            "the metric must be a function of (outputs, targets), or an object with update(), compute() and reset(), "
            f"not {metric!r:.60}"
        )
    if _lower_is_better(metric):
        raise ValueError(
            f"the metric {_name(metric)} is an error, and lower is better: give a score for which higher is better, "
            "such as accuracy, F1 or R²"
        )


def has_state(metric: Any) -> bool:
    return all(callable(getattr(metric, verb, None)) for verb in ("update", "compute", "reset"))


def _name(metric: Any) -> str:
    function = metric.func if isinstance(metric, partial) else metric
    return str(getattr(function, "__name__", type(function).__name__))


def metric_name(metric: Any) -> str:
    """For a heading; a function without a name of its own, or a long one, is the metric."""
    name = _name(metric)
    return name if name.isidentifier() and len(name) <= LONGEST_NAME else "metric"


def _lower_is_better(metric: Any) -> bool:
    name = _name(metric)
    declared = getattr(metric, "higher_is_better", None) is False  # by torchmetrics
    of_torch = is_torch_loss(metric.func if isinstance(metric, partial) else metric)
    return declared or name.lower().endswith(("error", "loss")) or (of_torch and "entropy" in name)


def is_torch_loss(function: Any) -> bool:
    """Whether it is a loss module, or a function of torch.nn.functional."""
    name = getattr(function, "__name__", "")
    return isinstance(function, nn.modules.loss._Loss) or getattr(F, name, F) is function


def _values(metric: Any, outputs: Any, targets: Tensor) -> Tensor:
    """[batch] or []: what the metric gives for one batch."""
    if has_state(metric):
        state = _fresh(metric)
        _update(state, logits_of(outputs), targets)
        return torch.tensor(_one_number(state.compute()), dtype=torch.float64)
    found = metric(outputs, targets)
    if isinstance(found, Tensor | np.ndarray) and found.shape == (len(targets),):
        return torch.as_tensor(found).detach()
    return torch.tensor(_one_number(found, len(targets)), dtype=torch.float64)


def _one_number(found: Any, examples: int | None = None) -> float:
    """A float from what a metric gives: a number, or a tensor or array without axes."""
    if isinstance(found, int | float):
        return float(found)
    if isinstance(found, Tensor | np.ndarray | np.generic) and found.shape == ():
        return float(found.item())
    each = "" if examples is None else f" a tensor with one number per example ({examples}), or"
    raise ObjectiveError(f"the metric must give{each} one number, not {described(found)}")


def _in_percent(values: Tensor, scale: Scale) -> Tensor:
    if scale == "percent":
        return values
    most = float(values.max())
    if most > 1.0 + ROUNDING:
        raise ObjectiveError(
            f'the metric was taken for a fraction, at most 1, and gives {most:.4g}: pass metric_scale="percent" if 100 '
            "is perfect"
        )
    return 100.0 * values


def _recognised(values: Tensor, classes: int | None) -> Scale | None:
    """The scale, where these values of an untrained model leave no doubt."""
    known = values[torch.isfinite(values)]
    if known.numel() == 0:
        return None
    least, most = float(known.min()), float(known.max())
    if most > 100.0 + ROUNDING:
        raise ObjectiveError(
            f"the metric gives {most:.4g}: it must be a score in percent, at most 100, or a fraction of 1"
        )
    if most > 1.0:
        return "percent"
    few = classes is not None and classes <= FEW_CLASSES  # so that no percentage starts that low
    if values.dim() > 0 and most == 1.0:  # an example that is right; in percent it would be 100
        return "fraction" if least >= 0.0 else None
    return "fraction" if most > 0.0 and least >= 0.0 and few else None


# -- scores of a whole set ------------------------------------------------------------------------------------------


class FunctionScore(SetScore):
    """A function of all outputs and targets. They are kept until the end of the set."""

    def __init__(self, function: Callable[[Any, Tensor], Any], scale: Scale) -> None:
        self._function, self._scale = function, scale
        self._parts: list[tuple[Any, Tensor, Tensor]] = []

    def start(self, blocks: int) -> SetScore:
        return FunctionScore(self._function, self._scale)

    def update(self, outputs: Any, targets: Tensor, block: Tensor) -> None:
        logits = logits_of(outputs)  # of an object, these alone: caches of a whole set would fill the memory
        self._parts.append((outputs if logits is outputs else _Logits(logits), targets, block))

    def compute(self, blocks: int) -> list[float]:
        outputs, targets, block = (_mapped(_joined, column) for column in zip(*self._parts, strict=True))

        def score(left_out: int) -> Any:
            rows = block != left_out
            return self._function(_mapped(partial(_rows, rows), [outputs]), targets[rows])

        return _whole_and_blocks(lambda: self._function(outputs, targets), score, len(targets), blocks, self._scale)


class StatefulScore(SetScore):
    """An object with update, compute and reset. It is never changed itself.

    Each network has copies of it: one for all examples, and one without each block.
    """

    def __init__(self, metric: Any, scale: Scale, copies: int = 0) -> None:
        self._metric, self._scale = metric, scale
        self._states = [_fresh(metric) for _ in range(copies)]
        self._failed: set[int] = set()
        self._count = 0

    def start(self, blocks: int) -> SetScore:
        return StatefulScore(self._metric, self._scale, 1 + blocks)

    def update(self, outputs: Any, targets: Tensor, block: Tensor) -> None:
        outputs = logits_of(outputs)
        self._count += len(targets)
        whole, *without = self._states
        with _explained(self._count):
            _update(whole, outputs, targets)
        for b, state in enumerate(without):
            rows = block != b
            try:
                if bool(rows.any()):
                    _update(state, _mapped(partial(_rows, rows), [outputs]), targets[rows])
            except Exception:  # a person's code, which may refuse a part of what it takes as a whole
                self._failed.add(b)

    def compute(self, blocks: int) -> list[float]:
        whole, *without = self._states

        def score(left_out: int) -> Any:
            return math.nan if left_out in self._failed else without[left_out].compute()

        return _whole_and_blocks(whole.compute, score, self._count, blocks, self._scale)


def _whole_and_blocks(
    whole: Callable[[], Any], without: Callable[[int], Any], examples: int, blocks: int, scale: Scale
) -> list[float]:
    """In percent: of all examples, then without each block. If only that fails, the standard error is unknown (NaN)."""

    def percent(found: Any) -> float:
        return float(_in_percent(torch.tensor(_one_number(found), dtype=torch.float64), scale))

    with _explained(examples):
        scores = [percent(whole())]
    if not math.isfinite(scores[0]):
        raise ObjectiveError(
            f"the metric gives {scores[0]} for the {examples} examples of the set: it must be a number"
        )
    for b in range(blocks):
        try:
            scores.append(percent(without(b)))
        except Exception:  # a person's code, which may refuse a part of what it takes as a whole
            scores.append(math.nan)
    return scores


def _explained(examples: int) -> AbstractContextManager[None]:
    """Within, a failure of the metric becomes one line."""
    return refused(ObjectiveError, f"the metric fails for all {examples} examples of the set", Exception)


def _fresh(metric: Any) -> Any:
    """A copy without anything counted."""
    copied = copy.deepcopy(metric)
    copied.reset()
    return copied


def _update(state: Any, outputs: Any, targets: Tensor) -> None:
    if isinstance(state, nn.Module):  # a metric of torchmetrics counts on the device where it is
        state.to(targets.device)
    state.update(outputs, targets)


class _Logits:
    """What is kept of objects with `logits` when the outputs of all batches are joined."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"of the model's outputs only the logits are joined over batches, not {name!r}: compute it from them, or "
            "return one number per example"
        )


PER_EXAMPLE = "let it return one number per example, or give an object with update(), compute() and reset()"


def _mapped(function: Callable[[list[Tensor]], Tensor], parts: Sequence[Any]) -> Any:
    """Outputs of one structure as one: `function` of the tensors at each place."""
    first = parts[0]
    if isinstance(first, Tensor):
        return function(list(parts))
    if isinstance(first, _Logits):
        return _Logits(function([part.logits for part in parts]))
    if isinstance(first, dict):
        return {key: _mapped(function, [part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        columns = [_mapped(function, column) for column in zip(*parts, strict=True)]
        return (
            type(first)(*columns) if getattr(first, "_fields", ()) else tuple(columns)
        )  # a named tuple keeps its names
    raise ObjectiveError(
        f"a metric of one number is computed on all outputs together, and a {type(first).__name__} cannot be joined: "
        + PER_EXAMPLE
    )


def _rows(rows: Tensor, tensors: list[Tensor]) -> Tensor:
    return tensors[0][rows]


def _joined(tensors: list[Tensor]) -> Tensor:
    """The outputs of all batches as those of one."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise ObjectiveError(
            "a metric of one number is computed on all outputs together, and those of different batches differ in "
            f"size: {PER_EXAMPLE}"
        )
    return torch.cat(tensors)
