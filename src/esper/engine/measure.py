"""What a network is worth, and what each seed is worth in it, on the validation set.

Every contrast is paired: the same examples with and without a seed. A network variant re-runs the host from its first
changed slot only. Results stay on the device until `gather` fetches those of all learners in one transfer; scores of a
whole set (`SetScore`) are the exception, because they are computed by code that is not Esper's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from esper.growth.model import GrowingModel
from esper.growth.probe import arguments
from esper.growth.slot import Slot, SlotMode, preserved_attributes
from esper.lifecycle import Contrast
from esper.tasks.feed import Batch

Loss = Callable[..., Tensor]
"""(outputs, targets) → scalar mean."""
Score = Callable[..., Tensor]
"""(outputs, targets) → score per example [batch], in percent; higher is better."""

BLOCKS = 10
"""Parts of a set that are left out in turn to estimate the standard error of a score of the whole set."""

Variant = dict[Slot, SlotMode]
"""The network with some slots in another mode."""

_Report = TypeVar("_Report")


@dataclass(frozen=True, slots=True)
class Pending(Generic[_Report]):
    """Numbers that are still on the device, and how to read them."""

    numbers: Tensor  # [k], float
    read: Callable[[list[float]], _Report]


def gather(pending: Sequence[Pending[_Report]]) -> list[_Report]:
    """Fetch the numbers of all reports with one transfer from each device."""
    numbers: dict[int, list[float]] = {}
    for device in dict.fromkeys(p.numbers.device for p in pending):
        rows = [i for i, p in enumerate(pending) if p.numbers.device == device]
        fetched = torch.cat([pending[i].numbers.to(torch.float64) for i in rows]).cpu()
        parts = torch.split(fetched, [len(pending[i].numbers) for i in rows])
        numbers |= {i: part.tolist() for i, part in zip(rows, parts, strict=True)}
    return [p.read(numbers[i]) for i, p in enumerate(pending)]


class SetScore(ABC):
    """A score of all outputs and targets together, such as F1: a mean over batches would be another number."""

    @abstractmethod
    def start(self, blocks: int) -> SetScore:
        """The same score with nothing counted, for one network. `blocks` is 0 when no standard error is needed."""

    @abstractmethod
    def update(self, outputs: Any, targets: Tensor, block: Tensor) -> None:
        """Count a batch. `block` [batch] is the part of the set to which each example belongs."""

    @abstractmethod
    def compute(self, blocks: int) -> list[float]:
        """In percent: of all examples, then without each of the first `blocks` blocks; NaN where there is none."""

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        raise ValueError("a metric of the whole set has no score per example")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One network on one set of examples."""

    loss: float
    accuracy: float
    """The score in percent: the mean over examples, or that of the whole set."""
    contributions: dict[int, Contrast] = field(default_factory=dict)
    """By slot: the network as it is against the network without that seed."""
    shadow_benefits: dict[int, Contrast] = field(default_factory=dict)
    """By slot: the network with that incubating seed at full strength against the network as it is."""


def evaluate(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: Score, *, contrasts: Sequence[Slot] = ()
) -> Pending[Evaluation]:
    """Measure the network, and the slots in `contrasts`: incubating ones by shadow, others by leaving them out."""
    pairs = Contrasts(contrasts)
    if isinstance(score, SetScore):
        return _evaluate_set(model, batches, loss, score, pairs)
    total, count = summed(model, batches, loss, score, pairs.variants, pairs.numbers)
    return Pending(total, partial(pairs.read, count=count))


class Contrasts:
    """The network against the network with one slot changed, for each of some slots."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._changes = {slot: SlotMode.SHADOW if slot.strength == 0.0 else SlotMode.OFF for slot in slots}
        self.variants: list[Variant] = [{slot: mode} for slot, mode in self._changes.items()]
        self.size = 2 + 3 * len(slots)
        """How many numbers an evaluation is made of."""

    def numbers(self, losses: Tensor, scores: Tensor) -> Tensor:
        differences = scores[1:] - scores[0]
        return torch.cat([losses, scores[:1].sum(1), differences.sum(1), differences.square().sum(1)])

    def read(self, numbers: list[float], count: int) -> Evaluation:
        """Numbers summed over `count` examples."""
        means, n = [number / count for number in numbers], len(self._changes)
        losses, (accuracy, *differences) = means[: 1 + n], means[1 + n : 2 + 2 * n]
        errors = [standard_error(differences[i], means[2 + 2 * n + i], count) for i in range(n)]
        return self.report(losses, accuracy, differences, errors)

    def report(
        self, losses: Sequence[float], accuracy: float, differences: Sequence[float], errors: Sequence[float]
    ) -> Evaluation:
        """From the losses of the network and its variants, and how much each variant scores above the network."""
        found: dict[SlotMode, dict[int, Contrast]] = {SlotMode.OFF: {}, SlotMode.SHADOW: {}}
        for i, (slot, mode) in enumerate(self._changes.items()):
            sign = 1.0 if mode is SlotMode.SHADOW else -1.0  # a contrast is always "with the seed minus without"
            found[mode][slot.index] = Contrast(sign * differences[i], sign * (losses[0] - losses[1 + i]), errors[i])
        return Evaluation(losses[0], accuracy, found[SlotMode.OFF], found[SlotMode.SHADOW])


def summed(
    model: GrowingModel,
    batches: Iterable[Batch],
    loss: Loss,
    score: Score,
    variants: Sequence[Variant],
    numbers_of: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, int]:
    """The sum over batches of numbers, and how many examples there were; memory is that of one batch.

    `numbers_of` gets the network as it is and then each variant: the losses summed over the batch [1 + variants], and
    the scores [1 + variants, batch]; both in double precision.
    """
    total: Tensor | None = None
    count = 0
    with measuring(model):
        for batch in batches:
            numbers = numbers_of(*measure_batch(model, batch, loss, score, variants))
            total = numbers if total is None else total + numbers
            count += len(batch[1])
    if total is None:
        raise ValueError("there are no examples to evaluate on")
    return total, count


@contextmanager
def measuring(model: GrowingModel) -> Iterator[None]:
    """Within, the model is in evaluation mode, keeps no gradients, and a pass can be followed by replays."""
    training = model.training
    model.eval()
    try:
        # Not inference_mode: replays rely on version counters, which its tensors lack.
        with torch.no_grad(), model.recording():
            yield
    finally:
        model.train(training)


def measure_batch(
    model: GrowingModel, batch: Batch, loss: Loss, score: Score, variants: Sequence[Variant]
) -> tuple[Tensor, Tensor]:
    """Losses summed over the batch [1 + variants] and scores [1 + variants, batch], in double precision."""
    targets = batch[1]
    losses, scores = [], []
    with closing(_outputs(model, batch, variants)) as passes:
        for outputs in passes:
            losses.append(loss(outputs, targets))
            scores.append(_scores(score, outputs, targets))
    return torch.stack(losses).double() * len(targets), torch.stack(scores).double()


def _outputs(model: GrowingModel, batch: Batch, variants: Sequence[Variant]) -> Generator[Any, None, None]:
    """Of the network as it is, then of each variant."""
    args, kwargs = arguments(batch[0])
    yield model(*args, **kwargs)
    for changes in variants:
        with preserved_attributes(model.host):  # loss and score may read what the pass notes
            yield model.replay(changes, *args, **kwargs)


def _evaluate_set(
    model: GrowingModel, batches: Iterable[Batch], loss: Loss, score: SetScore, contrasts: Contrasts
) -> Pending[Evaluation]:
    blocks = BLOCKS if contrasts.variants else 0
    losses, scores = scores_of_set(model, batches, loss, score, contrasts.variants, blocks)
    gains = [[a - b for a, b in zip(variant, scores[0], strict=True)] for variant in scores[1:]]
    whole, errors = [gain[0] for gain in gains], [jackknife_error(gain[1:]) for gain in gains]
    return Pending(losses, lambda numbers: contrasts.report(numbers, scores[0][0], whole, errors))


def scores_of_set(
    model: GrowingModel,
    batches: Iterable[Batch],
    loss: Loss,
    score: SetScore,
    variants: Sequence[Variant],
    blocks: int,
) -> tuple[Tensor, list[list[float]]]:
    """Mean losses [1 + variants], and scores [1 + variants][1 + blocks] of the set and without each of some blocks.

    Each network has a count of its own. Of a set with fewer examples than blocks, each example is a block.
    """
    counts = [score.start(blocks) for _ in range(1 + len(variants))]
    total = torch.zeros(len(counts), dtype=torch.float64, device=model.device)
    count = 0
    with measuring(model):
        for batch in batches:
            targets = batch[1]
            # Every tenth example, not a tenth in a row: data are often sorted by class.
            block = torch.arange(count, count + len(targets), device=targets.device) % BLOCKS
            with closing(_outputs(model, batch, variants)) as passes:
                for i, outputs in enumerate(passes):
                    total[i] += loss(outputs, targets).double() * len(targets)
                    if bool(torch.isfinite(total[i])):  # else the network is broken, and metrics may refuse NaN
                        counts[i].update(outputs, targets, block)
            count += len(targets)
    if count == 0:
        raise ValueError("there are no examples to evaluate on")
    blocks = min(blocks, count) if count > 1 else 0
    scores = [
        one.compute(blocks) if ok else [math.nan] * (1 + blocks)
        for one, ok in zip(counts, torch.isfinite(total).tolist(), strict=True)
    ]
    return total / count, scores


def jackknife_error(without: Sequence[float]) -> float:
    """The standard error of a statistic, from its values without each block; infinite if it cannot be estimated."""
    n = len(without)
    if n < 2 or not all(map(math.isfinite, without)):
        return math.inf
    mean = sum(without) / n
    return float(((n - 1) / n * sum((value - mean) ** 2 for value in without)) ** 0.5)


def standard_error(mean: float, mean_square: float, count: int) -> float:
    """Of the mean of `count` numbers."""
    return float((max(0.0, mean_square - mean**2) / max(1, count - 1)) ** 0.5)


def _scores(score: Score, outputs: object, targets: Tensor) -> Tensor:
    values = score(outputs, targets)
    if values.dim() == 0 and len(targets) == 1:  # from `squeeze`
        return values.reshape(1)
    if values.shape != (len(targets),):
        raise ValueError(f"the metric must give one number per example ({len(targets)}), not {list(values.shape)}")
    return values
