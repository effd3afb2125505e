"""Loss and metric of a run: the person's own, or what fits the loss, the model's outputs and the targets.

Nothing is guessed: what could be meant in two ways is refused with the argument that settles it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.engine.measure import Loss, Score
from esper.errors import first_line
from esper.growth.probe import AttachError, described, tried_batch, try_batch
from esper.growth.randomness import preserved_rng
from esper.tasks.batches import LABELS, Batch
from esper.tasks.feed import IGNORED, Feed, LoaderFeed, TensorFeed, check_classes
from esper.tasks.registry import cross_entropy
from esper.training.own.cures import check_loss, copies, cure, if_one_hot, tried_loss
from esper.training.own.default_metrics import (
    ObjectiveError,
    check_countable,
    checked_classes,
    checked_values,
    class_axis,
    classes_right,
    fits,
    labels_right,
    likelihood,
    logits_of,
    variance_explained,
)
from esper.training.own.metric import Scale, check_metric, fit_metric, is_torch_loss, metric_name
from esper.training.own.unusual import gives_probabilities

Constant = Literal["class", "mean"]
"""The most frequent class, or the mean of the targets."""
_Result = TypeVar("_Result")
ROUNDING = 1e-14
"""Variance, relative to the mean square, that is rounding alone."""


Kind = Literal["classes", "signs", "margins", "probabilities", "counts", "values", "other"]
"""What a loss of torch compares; `other` has no notion of right."""
_KINDS: dict[Kind, tuple[Any, ...]] = {
    # Scores of classes with class numbers.
    "classes": (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, F.cross_entropy, F.nll_loss, F.multi_margin_loss),
    # Logits with labels 0 and 1.
    "signs": (
        *(nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss),
        *(F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss),
    ),
    # Logits with labels -1 and 1.
    "margins": (nn.SoftMarginLoss, F.soft_margin_loss),
    # Probabilities with labels 0 and 1.
    "probabilities": (nn.BCELoss, F.binary_cross_entropy),
    # Rates, or their logarithms, with counts.
    "counts": (nn.PoissonNLLLoss, F.poisson_nll_loss),
    "values": (
        *(nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss),
        *(F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss),
    ),
}


def kind_of(loss: Any) -> Kind | None:
    """None for no loss, and for one of the person's own."""
    function = loss.func if isinstance(loss, partial) else loss
    for kind, known in _KINDS.items():
        if any(function is one or (isinstance(one, type) and isinstance(function, one)) for one in known):
            return kind
    return "other" if is_torch_loss(function) else None


def integers_are_classes(loss: Any) -> bool:
    """Unless the loss says otherwise, integer targets are class numbers."""
    return loss is None or kind_of(loss) == "classes"


@dataclass(frozen=True, slots=True)
class Objective:
    """How a model is trained and judged."""

    loss: Loss
    score: Score
    classes: int | None
    """How many classes the targets may name, if they name classes."""
    ignored: int
    """The class number that is left out."""
    constant: Constant | None = None
    """Which prediction that never changes a default metric can be compared with."""
    metric: str = "accuracy"
    """What the score is, in a word or two, for tables."""
    remark: str = ""
    """What is unusual about outputs and loss."""


class _Judge(NamedTuple):
    """A default metric."""

    score: Score
    constant: Constant | None = None
    name: str = "accuracy"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known before the training."""

    feed: Feed
    train_targets: Tensor
    """Some of them."""
    inputs: Any
    targets: Tensor
    outputs: Any
    """Of the untrained model, for the first validation batch."""
    loss: Any
    """As it was given, on the device."""
    kind: Kind | None

    @property
    def logits(self) -> Any:
        return logits_of(self.outputs)

    @property
    def model_has_loss(self) -> bool:
        """A model of Hugging Face that was given labels. It shifts them if they must be shifted."""
        found = getattr(self.outputs, "loss", None)
        return isinstance(self.inputs, dict) and LABELS in self.inputs and isinstance(found, Tensor)

    @property
    def yes_or_no(self) -> bool:
        """All targets are 0 or 1, or all are -1 or 1."""
        return bool(((self.targets == 0) | (self.targets == 1)).all() or (self.targets.abs() == 1).all())


def fit_objective(
    model: nn.Module,
    feed: Feed,
    batch: Batch,
    targets: Tensor,
    loss: Any,
    metric: Any,
    scale: Scale | None,
    copied: bool,
) -> Objective:
    """Loss and score, tried on `batch`, of the validation set. `targets` are for training; `copied`: the model is."""
    check_metric(metric, scale)
    seen = _Seen(feed, targets, *batch, try_batch(model, batch[0]), _on_device(loss, batch[1]), kind_of(loss))
    _check_targets(seen)
    ignored = _ignored(loss)
    classes = _class_count(seen) if integers_are_classes(loss) and not targets.is_floating_point() else None
    if classes is not None:
        _check_all_classes(seen, classes, ignored)
    chosen = _loss(seen)
    with tried_batch(model, batch[0]):  # once more: the loss may read what the model notes on itself
        _tried("loss", partial(tried_loss, chosen, seen.outputs, seen.targets, copied=copied), seen)
    if metric is None:
        judge = _default_score(seen, ignored)
        _tried("metric", lambda: judge.score(seen.outputs, seen.targets), seen)
    else:
        count = _class_count(seen) or (2 if seen.yes_or_no else None)
        tries = _tries(model, seen)
        score = _tried("metric", lambda: fit_metric(metric, scale, tries, count), seen)
        judge = _Judge(score, None, metric_name(metric))
    return Objective(chosen, judge.score, classes, ignored, judge.constant, judge.name, _unusual(seen))


def _unusual(seen: _Seen) -> str:
    function = seen.loss.func if isinstance(seen.loss, partial) else seen.loss
    softmax = function is F.cross_entropy or isinstance(function, nn.CrossEntropyLoss)
    if softmax and isinstance(seen.logits, Tensor):
        return gives_probabilities(seen.logits, 1)
    if function is None and not seen.model_has_loss and not seen.train_targets.is_floating_point():
        return gives_probabilities(seen.logits, class_axis(seen.logits, seen.targets))
    return ""


def check_test(model: nn.Module, batches: Callable[[], Iterable[Batch]], objective: Objective) -> None:
    """Refuse test data that do not fit, by their first batch: they are needed when the training is over."""
    with preserved_rng(next(model.parameters()).device), torch.no_grad():
        inputs, targets = next(iter(batches()))
        try:
            with tried_batch(model, inputs) as outputs:
                objective.loss(outputs, targets)
        except (AttachError, ObjectiveError, RuntimeError) as error:
            raise ValueError(f"the test data do not fit: {first_line(error)}") from error


def _check_targets(seen: _Seen) -> None:
    """Refuse targets that are all the same, unless a loss of the person's own may have another use for them."""
    if isinstance(seen.feed, TensorFeed) and (seen.loss is None or seen.kind is not None):
        targets = seen.feed.train.y
        if len(targets) > 1 and bool((targets == targets[:1]).all()):
            raise ValueError(f"all {seen.feed.train_name} targets are the same: there is nothing to learn from them")


# -- loss ---------------------------------------------------------------------------------------------------------


def _on_device(loss: Any, targets: Tensor) -> Any:
    check_loss(loss)
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss).to(targets.device)  # it may have weights of classes


def _ignored(loss: Any) -> int:
    named = loss.keywords.get("ignore_index") if isinstance(loss, partial) else getattr(loss, "ignore_index", None)
    return named if isinstance(named, int) else IGNORED


def _loss(seen: _Seen) -> Loss:
    given = seen.loss  # what is returned must not keep the outputs that were seen
    if given is None:
        return _default_loss(seen)
    if seen.kind is None:
        return given  # type: ignore[no-any-return]
    if seen.kind in ("classes", "other"):
        return lambda outputs, targets: given(logits_of(outputs), targets)

    def compared(outputs: Any, targets: Tensor) -> Tensor:
        values = checked_values(outputs, targets)  # else torch may compare every example with every other
        return given(values, targets.to(values.dtype))  # type: ignore[no-any-return]

    return compared


def _default_loss(seen: _Seen) -> Loss:
    if seen.model_has_loss:
        return lambda outputs, targets: outputs.loss
    if seen.train_targets.is_floating_point():
        return squared_error
    axis = class_axis(seen.logits, seen.targets)
    if seen.targets.dim() > 1 and copies(seen.inputs, seen.targets):
        raise ObjectiveError(
            "the targets are the inputs themselves, so the model would learn to copy: shift the targets by one position"
        )
    return partial(class_loss, axis=axis)


def class_loss(outputs: Any, targets: Tensor, axis: int) -> Tensor:
    logits = checked_classes(outputs, targets, axis)
    return F.cross_entropy(logits, targets) if axis == 1 else cross_entropy(logits, targets)


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    values = checked_values(outputs, targets)
    return F.mse_loss(values, targets.to(values.dtype))


# -- metric -------------------------------------------------------------------------------------------------------


def _default_score(seen: _Seen, ignored: int) -> _Judge:
    match seen.kind:
        case "classes":
            return _Judge(classes_right(1, ignored), None if seen.targets.is_floating_point() else "class")
        case "signs":
            return _Judge(labels_right(0.0, 0.5))
        case "margins":
            return _Judge(labels_right(0.0, 0.0))
        case "probabilities":
            return _Judge(labels_right(0.5, 0.5))
        case "values":
            return _Judge(variance_explained(_variance(seen)), "mean", "R²")
        case "counts":
            settings = seen.loss.keywords if isinstance(seen.loss, partial) else vars(seen.loss)
            rate = torch.exp if settings.get("log_input", True) else None
            return _Judge(variance_explained(_variance(seen), rate), None, "R²")
        case "other":
            raise ObjectiveError("this loss does not say what is right: pass metric=, a function of (outputs, targets)")
    if seen.loss is None and seen.model_has_loss:
        return _score_like_models_loss(seen)
    if seen.train_targets.is_floating_point():
        if seen.yes_or_no:
            raise ObjectiveError(
                "the targets are yes or no, and nothing says whether outputs are logits or probabilities: pass a loss "
                "of torch, such as loss=torch.nn.BCEWithLogitsLoss(), or metric=, a function of (outputs, targets)"
                + if_one_hot(seen.targets)
            )
        return _Judge(variance_explained(_variance(seen)), "mean", "R²")
    return _class_score(class_axis(seen.logits, seen.targets), seen, ignored)


def _class_score(axis: int, seen: _Seen, ignored: int) -> _Judge:
    """Language models are judged by loss: the share of symbols that they get right moves little while they learn."""
    check_countable(int(seen.logits.shape[axis]), ignored, seen.targets, seen.train_targets)
    if axis == -1 and seen.logits.dim() == 3:
        return _Judge(likelihood(ignored=ignored), None, "likelihood")
    return _Judge(classes_right(axis, ignored), "class")


def _score_like_models_loss(seen: _Seen) -> _Judge:
    """What the model's own loss compares is found out by computing it from logits and labels in each way."""
    logits, labels, loss = seen.logits, seen.targets, float(seen.outputs.loss)
    rounding = max(1e-5, 4 * torch.finfo(seen.outputs.loss.dtype).eps) * max(1.0, abs(loss))
    candidates: list[tuple[float, _Judge]] = []
    if not isinstance(logits, Tensor):
        pass
    elif not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
        plain = _Judge(likelihood(), None, "likelihood")
        judge = _Judge(classes_right(-1), "class") if logits.dim() == 2 else plain
        candidates.append((float(cross_entropy(logits.float(), labels)), judge))
        if logits.dim() == 3 and labels.shape[1] > 1:
            after = float(cross_entropy(logits[:, :-1].float(), labels[:, 1:]))
            candidates.append((after, _Judge(likelihood(shifted=True), None, "likelihood")))
    elif labels.is_floating_point() and logits.numel() == labels.numel():
        values = logits.float().view_as(labels)
        explained = _Judge(_reshaped(variance_explained(_variance(seen))), None, "R²")
        candidates.append((float(F.mse_loss(values, labels)), explained))
        right = _Judge(_reshaped(labels_right(0.0, 0.5)))
        candidates.append((float(F.binary_cross_entropy_with_logits(values, labels)), right))
    fitting = [judge for value, judge in candidates if abs(value - loss) <= rounding]
    if len(fitting) != 1:
        raise ObjectiveError(
            "it cannot be seen how the model's own loss compares logits and labels: pass metric=, a function of "
            "(outputs, labels)"
        )
    return fitting[0]


def _reshaped(score: Score) -> Score:
    """Models of Hugging Face give a column [batch, 1] for values [batch]."""
    return lambda outputs, targets: score(logits_of(outputs).view_as(targets), targets)


def _variance(seen: _Seen) -> Tensor:
    """Of each column of all validation targets, averaged: what a score of 100 explains, and 0 does not."""
    count, total, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for _, part in seen.feed.validation():
        rows = _columns(part.detach().double(), fixed=isinstance(seen.feed, TensorFeed))
        count += len(rows)
        total, squares = total.to(rows.device) + rows.sum(0), squares.to(rows.device) + rows.square().sum(0)
    variance = (squares / count - (total / count).square()).mean()
    if count > 1 and float(variance) <= ROUNDING * float((squares / count).mean()):
        raise ObjectiveError("all targets are the same: the default metric, R², needs their variance")
    return variance.clamp_min(1e-12)


def _columns(targets: Tensor, *, fixed: bool) -> Tensor:
    """[rows, columns]: a column for each value of an example; of images and sequences of any size, for each channel."""
    if fixed or targets.dim() <= 2:
        return targets.reshape(len(targets), -1)
    by_channel = targets if targets.dim() == 3 else targets.movedim(1, -1)
    return by_channel.reshape(-1, by_channel.shape[-1])


# -- tried once before the training -------------------------------------------------------------------------------


def _tries(model: nn.Module, seen: _Seen) -> Iterator[tuple[Any, Tensor]]:
    """Outputs and targets of the validation set, batch by batch, as far as they are read."""
    yield seen.outputs, seen.targets
    for batch in islice(seen.feed.validation(), 1, None):
        yield try_batch(model, batch[0]), batch[1]


def _class_count(seen: _Seen) -> int | None:
    """Between how many classes the model chooses for each target, if it does."""
    logits, targets = seen.logits, seen.targets
    if isinstance(logits, Tensor) and logits.dim() > 1:
        if seen.kind == "classes":
            return int(logits.shape[1])
        if not targets.is_floating_point() and logits.dim() == targets.dim() + 1:
            axis = -1 if seen.model_has_loss or seen.loss is not None else class_axis(logits, targets)
            if fits(logits, targets, axis) or (seen.loss is not None and fits(logits, targets, axis := 1)):
                return int(logits.shape[axis])
    return None


def _check_all_classes(seen: _Seen, classes: int, ignored: int) -> None:
    if isinstance(seen.feed, TensorFeed):
        check_classes(seen.feed.train.y, classes, seen.feed.train_name, ignored)
        check_classes(seen.feed.val.y, classes, "val", ignored)
    elif isinstance(seen.feed, LoaderFeed):
        check_classes(seen.targets, classes, "val", ignored)
        seen.feed.classes, seen.feed.ignored = classes, ignored  # the others as they come


def _tried(what: str, function: Callable[[], _Result], seen: _Seen) -> _Result:
    try:
        with torch.no_grad():
            return function()
    except ObjectiveError:
        raise
    except Exception as error:
        detail = first_line(error)
        known = cure(seen.loss, seen.kind, seen.logits, seen.targets) if what == "loss" else ""
        raise ValueError(
            f"the {what} fails for the model's outputs ({described(seen.outputs)}) and targets "
            f"({described(seen.targets)}): {detail}{known}"
        ) from error
