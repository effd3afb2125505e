"""How good a network is, in points, for the shaping: by its accuracy, or by its loss on a task's own scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.engine.measure import Evaluation
from esper.env.reward.config import PROXY_CONFIDENCE, Family
from esper.env.situation import SlotView
from esper.lifecycle import Contrast

FULL_SCALE = 100.0
"""Points between a task's baseline and its target."""
LOSS_CLIP_STDS = 5.0
"""Losses count no further than this many stds above the baseline: one explosion must not swamp an episode."""
STD_SHARE = 0.1
"""Default std as a share of the way from baseline to target."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Turns a task's losses into points: 0 at the baseline, 100 at the target (R124)."""

    baseline: float
    """Loss of a network that has learnt nothing."""
    target: float
    """Loss of a very good network; what is better still counts the same."""
    std: float
    """Usual size of a change; bounds what one bad epoch can do."""

    def __post_init__(self) -> None:
        if not self.baseline > self.target:
            raise ValueError(f"the baseline loss {self.baseline} must be above the target loss {self.target}")
        if not self.std > 0.0:
            raise ValueError(f"the std of losses must be positive, not {self.std}")

    @classmethod
    def of(cls, baseline: float, target: float = 0.0, std: float | None = None) -> LossScale:
        """For any task; without a std, a tenth of the way from baseline to target."""
        return cls(baseline, target, STD_SHARE * (baseline - target) if std is None else std)

    @classmethod
    def for_classes(cls, classes: int) -> LossScale:
        """For cross-entropy: guessing costs ln(classes), certainty nothing."""
        if classes < 2:
            raise ValueError(f"a classification needs at least 2 classes, not {classes}")
        return cls.of(math.log(classes))

    def level(self, loss: float) -> float:
        worst = self.baseline + LOSS_CLIP_STDS * self.std
        return self.saved(self.baseline - max(self.target, min(worst, loss)))

    def saved(self, loss: float) -> float:
        """Points for a difference of losses."""
        return FULL_SCALE * loss / (self.baseline - self.target)


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads measurements in the points of one family. What was not measured, or is not a number, is None."""

    family: Family
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        if self.family == "loss" and self.loss_scale is None:
            raise ValueError("the loss family needs a LossScale for the task, e.g. LossScale.for_classes(10)")

    @property
    def _scale(self) -> LossScale | None:
        return self.loss_scale if self.family == "loss" else None

    def level(self, measured: Evaluation) -> float | None:
        if self._scale is None:
            return _finite(measured.accuracy)
        return None if math.isnan(measured.loss) else self._scale.level(measured.loss)  # infinite is as bad as it gets

    def value(self, contrast: Contrast | None) -> float | None:
        if contrast is None:
            return None
        return _finite(contrast.accuracy if self._scale is None else self._scale.saved(contrast.loss))

    def worth(self, slot: SlotView) -> float:
        """Best estimate of what a seed adds: measured, else promised by its shadow, else nothing (R138)."""
        contribution = self.value(slot.contribution)
        if contribution is not None:
            return contribution
        return PROXY_CONFIDENCE * max(0.0, self.value(slot.shadow_benefit) or 0.0)


def _finite(points: float) -> float | None:
    return points if math.isfinite(points) else None
