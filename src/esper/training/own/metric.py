"""A person's own metric as a score in percent: what it may be, and its scale.

Everything that decides about growth reads percent. A metric in 0..1 is recognised where that is certain, and asked
about where it is not: taken for percent, it would make every gain a hundredth of what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.engine.measure import Score
from esper.training.own.set_scores import FunctionScore, ScoreError, StatefulScore, fresh, logits_of, one_number, update


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
    raise ScoreError(
        'it cannot be seen whether the metric is in 0..1 or in percent: pass metric_scale="fraction" (1 is perfect) or '
        '"percent" (100 is perfect)'
    )


def own_score(metric: Any, scale: Scale, *, whole_set: bool) -> Score:
    """The metric as a score in percent."""

    def percent(value: float) -> float:
        return float(_in_percent(torch.tensor(value, dtype=torch.float64), scale))

    if has_state(metric):
        return StatefulScore(metric, percent)
    if whole_set:
        return FunctionScore(metric, percent)
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


def _lower_is_better(metric: Any) -> bool:
    function = metric.func if isinstance(metric, partial) else metric
    name = _name(metric)
    of_torch = isinstance(function, nn.modules.loss._Loss) or function is getattr(F, name, None)
    declared = getattr(metric, "higher_is_better", None) is False  # by torchmetrics
    return declared or name.lower().endswith(("error", "loss")) or (of_torch and "entropy" in name)


def _values(metric: Any, outputs: Any, targets: Tensor) -> Tensor:
    """[batch] or []: what the metric gives for one batch."""
    if has_state(metric):
        state = fresh(metric)
        update(state, logits_of(outputs), targets)
        return torch.tensor(one_number(state.compute()), dtype=torch.float64)
    found = metric(outputs, targets)
    if isinstance(found, Tensor | np.ndarray) and found.shape == (len(targets),):
        return torch.as_tensor(found).detach()
    return torch.tensor(one_number(found, len(targets)), dtype=torch.float64)


def _in_percent(values: Tensor, scale: Scale) -> Tensor:
    if scale == "percent":
        return values
    most = float(values.max())
    if most > 1.0 + ROUNDING:
        raise ScoreError(
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
        raise ScoreError(f"the metric gives {most:.4g}: it must be a score in percent, at most 100, or a fraction of 1")
    if most > 1.0:
        return "percent"
    few = classes is not None and classes <= FEW_CLASSES  # so that no percentage starts that low
    if values.dim() > 0 and most == 1.0:  # an example that is right; in percent it would be 100
        return "fraction" if least >= 0.0 else None
    return "fraction" if most > 0.0 and least >= 0.0 and few else None
