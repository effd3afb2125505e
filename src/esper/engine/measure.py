"""What a network is worth, and what each seed is worth in it, on the validation set.

Every contrast is paired: the same examples with and without a seed. A network variant re-runs the host from its first
changed slot only. Results stay on the device until `gather` fetches those of all learners in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from esper.growth.attach import arguments
from esper.growth.model import GrowingModel
from esper.growth.slot import Mode, Slot
from esper.lifecycle import Contrast
from esper.tasks.feed import Batch

Loss = Callable[..., Tensor]
"""(outputs, targets) → scalar mean."""
Score = Callable[..., Tensor]
"""(outputs, targets) → score per example [batch], in percent; higher is better."""

_Report = TypeVar("_Report")


@dataclass(frozen=True, slots=True)
class Pending(Generic[_Report]):
    """Numbers that are still on the device, and how to read them."""

    numbers: Tensor  # [k], float
    read: Callable[[list[float]], _Report]


def gather(pending: Sequence[Pending[_Report]]) -> list[_Report]:
    """Fetch the numbers of all reports with one device-to-host transfer."""
    if not pending:
        return []
    flat = torch.cat([p.numbers.to(torch.float64) for p in pending]).tolist()
    reports, start = [], 0
    for p in pending:
        reports.append(p.read(flat[start : start + len(p.numbers)]))
        start += len(p.numbers)
    return reports


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One network on one set of examples."""

    loss: float
    accuracy: float
    """Mean score per example, in percent."""
    contributions: dict[int, Contrast] = field(default_factory=dict)
    """By slot: the network as it is against the network without that seed."""
    shadow_benefits: dict[int, Contrast] = field(default_factory=dict)
    """By slot: the network with that incubating seed at full strength against the network as it is."""


def evaluate(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, *, contrasts: Sequence[Slot] = ()
) -> Pending[Evaluation]:
    """Measure the network, and the slots in `contrasts`: incubating ones by shadow, others by leaving them out."""
    variants = {slot: Mode.SHADOW if slot.life.alpha == 0.0 else Mode.OFF for slot in contrasts}
    training = model.training
    model.eval()
    try:
        # Not inference_mode: replays rely on version counters, which its tensors lack.
        with torch.no_grad(), model.recording():
            sums, count = _sums(model, batches, loss, score, variants)
    finally:
        model.train(training)

    def read(numbers: list[float]) -> Evaluation:
        base_loss, base_score = numbers[0] / count, numbers[1] / count
        found: dict[Mode, dict[int, Contrast]] = {Mode.OFF: {}, Mode.SHADOW: {}}
        for i, (slot, mode) in enumerate(variants.items()):
            other_loss, difference, squares = (value / count for value in numbers[2 + 3 * i : 5 + 3 * i])
            sign = 1.0 if mode is Mode.SHADOW else -1.0  # a contrast is always "with the seed minus without"
            error = (max(0.0, squares - difference**2) / max(1, count - 1)) ** 0.5
            found[mode][slot.index] = Contrast(sign * difference, sign * (base_loss - other_loss), error)
        return Evaluation(base_loss, base_score, found[Mode.OFF], found[Mode.SHADOW])

    return Pending(sums, read)


def _sums(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, variants: dict[Slot, Mode]
) -> tuple[Tensor, int]:
    """[loss, score] summed over examples, then per variant [loss, score difference, its square]; and the count."""
    total: Tensor | None = None
    count = 0
    for inputs, targets in batches:
        args, kwargs = arguments(inputs)
        outputs = model(*args, **kwargs)
        base = _scores(score, outputs, targets)
        size = len(targets)
        parts = [loss(outputs, targets) * size, base.sum()]
        for slot, mode in variants.items():
            outputs = model.replay({slot: mode}, *args, **kwargs)
            difference = _scores(score, outputs, targets) - base
            parts += [loss(outputs, targets) * size, difference.sum(), difference.square().sum()]
        sums = torch.stack([part.double() for part in parts])
        total = sums if total is None else total + sums
        count += size
    if total is None:
        raise ValueError("there are no examples to evaluate on")
    return total, count


def _scores(score: Score, outputs: object, targets: Tensor) -> Tensor:
    values = score(outputs, targets)
    if values.dim() == 0:  # a metric that only knows the batch: every example gets the mean
        return values.double().expand(len(targets))
    if values.shape != (len(targets),):
        raise ValueError(
            f"the metric must give one number per example ({len(targets)}) or one per batch, not {list(values.shape)}"
        )
    return values.double()
