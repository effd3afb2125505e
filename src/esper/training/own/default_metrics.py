"""Scores in percent per example that are taken when nobody gives a metric. Higher is better; 100 is perfect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.engine.measure import Score
from esper.growth.probe import described
from esper.tasks.feed import IGNORED


class ObjectiveError(ValueError):
    """Outputs and targets that cannot be compared, or a metric that gives no score. The message says what to do."""


def classes_right(axis: int, ignored: int = IGNORED) -> Score:
    """Per example: the share of positions whose class is right. Targets may be probabilities of the classes."""

    def score(outputs: Any, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            logits = checked_values(outputs, targets)
            targets = targets.argmax(axis)
        else:
            logits = checked_classes(outputs, targets, axis)
        known = targets != ignored
        right = (logits.argmax(axis) == targets) & known
        counts = _per_example(known).sum(1)
        return 100.0 * _filled(_per_example(right).sum(1) / counts.clamp_min(1), counts > 0)

    return score


def likelihood(*, shifted: bool = False, ignored: int = IGNORED) -> Score:
    """Per example 100·exp(−loss): the geometric mean of the probabilities of its symbols.

    Outputs are [batch, time, vocabulary]. With `shifted`, the output of one position is about the symbol of the next.
    """

    def score(outputs: Any, targets: Tensor) -> Tensor:
        logits = checked_classes(outputs, targets, -1)
        if shifted:
            logits, targets = logits[:, :-1], targets[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=ignored, reduction="none"
        )
        counts = (targets != ignored).sum(1)
        return 100.0 * _filled(torch.exp(-losses.view(targets.shape).sum(1) / counts.clamp_min(1)), counts > 0)

    return score


def labels_right(threshold: float, target_threshold: float) -> Score:
    """Per example: the share of its labels for which output and target are on the same side."""

    def score(outputs: Any, targets: Tensor) -> Tensor:
        values = checked_values(outputs, targets)
        return 100.0 * _per_example((values > threshold) == (targets > target_threshold)).float().mean(1)

    return score


def variance_explained(variance: Tensor, prediction: Callable[[Tensor], Tensor] | None = None) -> Score:
    """Per example: 100 less the squared error in percent of the targets' variance. The mean is R²."""

    def score(outputs: Any, targets: Tensor) -> Tensor:
        values = checked_values(outputs, targets).detach()
        values = values if prediction is None else prediction(values)
        squares = _per_example((values - targets).double().square()).mean(1)
        return 100.0 * (1.0 - squares / variance)

    return score


def _per_example(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


def _filled(scores: Tensor, known: Tensor) -> Tensor:
    """An example whose targets are all left out gets the mean of the others of its batch: it does not count."""
    return torch.where(known, scores, (scores * known).sum() / known.sum())


# -- shapes -------------------------------------------------------------------------------------------------------


def check_countable(classes: int, ignored: int, *targets: Tensor) -> None:
    """Refuse numbers without an output: a loss of the person's own reads them in another way than as classes."""
    known = torch.cat([part[part != ignored] for part in targets])
    if len(known) and (int(known.min()) < 0 or int(known.max()) >= classes):
        raise ObjectiveError(
            f"the targets are integers from {int(known.min())} to {int(known.max())}, and the model has {classes} "
            "outputs for each, so it cannot be counted how many classes are right: pass metric=, a function of "
            "(outputs, targets)"
        )


def class_axis(outputs: Any, targets: Tensor) -> int:
    """Where the outputs have one number per class: 1 as in torch, or -1. What fits both is refused, not guessed."""
    outputs = checked_outputs(outputs)
    first, last = fits(outputs, targets, 1), fits(outputs, targets, -1)
    if first and last and outputs.dim() > 2:
        raise ObjectiveError(
            f"the model gives {described(outputs)} for targets {described(targets)}: the classes may be on axis 1 or "
            "the last; pass loss=torch.nn.CrossEntropyLoss() for axis 1, or loss= and metric= of your own"
        )
    return 1 if first or (outputs.dim() > 3 and not last) else -1


def fits(outputs: Tensor, targets: Tensor, axis: int) -> bool:
    """The outputs have one number per class, along `axis`, for each target."""
    return outputs.dim() > 1 and _without(outputs, axis) == list(targets.shape)


def _without(outputs: Tensor, axis: int) -> list[int]:
    shape = list(outputs.shape)
    del shape[axis if len(shape) > 1 else 0]
    return shape


def checked_classes(outputs: Any, targets: Tensor, axis: int) -> Tensor:
    """The logits, with one number per class along `axis` for each target."""
    logits = checked_outputs(outputs)
    if not fits(logits, targets, axis) or targets.is_floating_point():
        raise ObjectiveError(
            f"the model gives {described(logits)}, so the targets must be class numbers of shape "
            f"{_without(logits, axis)}, not {described(targets)}: {_if_numbers(logits, targets)}reshape them, or pass "
            "loss= and metric="
        )
    return logits


def checked_values(outputs: Any, targets: Tensor) -> Tensor:
    """The values, in the shape of the targets."""
    values = checked_outputs(outputs)
    if values.shape != targets.shape:
        raise ObjectiveError(
            f"the model gives {described(values)} and the targets are {described(targets)}: reshape the targets to "
            f"the outputs' shape{_if_column(values, targets)} (or the outputs), or pass loss= and metric="
            f"{_if_classes(values, targets)}"
        )
    return values


def _if_numbers(logits: Tensor, targets: Tensor) -> str:
    """About whole numbers in the shape of the outputs: a regression, more likely than classes."""
    fit = targets.shape == logits.shape and not targets.is_floating_point()
    return "for a regression pass real numbers, y.float(); for classes " if fit else ""


def _if_column(values: Tensor, targets: Tensor) -> str:
    alike = values.dim() == 2 and values.shape[1] == 1 and targets.shape == values.shape[:1]
    return ", y[:, None] or series.to_frame()," if alike else ""


def _if_classes(values: Tensor, targets: Tensor) -> str:
    """About real targets that look like class numbers: one whole number for as many outputs as it may name."""
    if values.dim() != 2 or values.shape[1] < 2 or targets.shape != values.shape[:1]:
        return ""
    whole = bool(((targets >= 0) & (targets < values.shape[1]) & (targets == targets.round())).all())
    return "; if they are class numbers, pass them as integers, y.long()" if whole else ""


def checked_outputs(outputs: Any) -> Tensor:
    values = logits_of(outputs)
    if not isinstance(values, Tensor) or values.dim() == 0:
        raise ObjectiveError(
            f"the model gives {described(values)}: pass both loss= and metric=, functions of (outputs, targets)"
        )
    return values


def logits_of(outputs: Any) -> Any:
    """The tensor of a model that gives an object with `logits`, as those of Hugging Face do."""
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs
