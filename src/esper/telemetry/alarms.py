"""The table of alarm rules; a new alarm is one entry of ALARM_RULES. `health.py` applies them to every update of a run.

Too small is as wrong as too large: a KL of 1e-9 once passed for health. Metric names are those of
`esper.agent.metrics`; a metric that is missing or NaN is not judged, except by `non_finite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from esper.actions import HEAD_NAMES
from esper.telemetry.records import Severity

CLEAR_MARGIN = 1.25
"""An update is clear when its number is back behind the limit by this factor: a limit that is grazed is one alarm."""
RATIO_HIGH, RATIO_LOW = 5.0, 0.1
"""A probability ratio outside this range is an explosion; the update lists such steps."""
RATIO_SHARE = 0.05
"""Share of a minibatch whose ratios must be outside: single steps stray in healthy updates."""
ENTROPY_COLLAPSED = 0.1
"""Normalised entropy of a head where it is live."""
VANISHING, EXPLODING = 1e-6, 100.0
"""Gradient norms below or above these multiples of the clip norm."""
KL_EXTREME = (1.0, 0.5, 0.5)
STARVED_SHARE = 0.01
"""A head that took effect on a smaller share of steps has no entropy or gradient to judge: it is starved."""


class RunPhase(IntEnum):
    """How far a run is; what is normal depends on it. Per-phase limits are (warm-up, early, late)."""

    WARM_UP = 0
    """The critic has learnt nothing yet and the policy must still explore."""
    EARLY = 1
    LATE = 2

    @staticmethod
    def of(progress: float) -> RunPhase:
        """From the share of the run that is done."""
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress is a share between 0 and 1, not {progress}")
        return RunPhase.WARM_UP if progress < 0.1 else RunPhase.EARLY if progress < 0.4 else RunPhase.LATE


@dataclass(frozen=True, slots=True)
class Reading:
    """One number against one limit."""

    metric: str
    seen: float
    limit: float
    bad: bool
    clear: bool
    """Behind the limit by a margin. Between `bad` and `clear` nothing changes."""


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """What a rule may look at."""

    metrics: Mapping[str, float]
    phase: RunPhase
    clip_norm: float
    improved: bool
    had_choice: set[str]
    """Heads that ever showed an entropy. One slot or one blueprint leaves its head no choice, and nothing to lose."""
    drift: float
    """Of the gradient norm; NaN where there is none."""
    returns: Reading | None

    def live(self, metric: str, missing: float) -> bool:
        """Whether the head of this metric took effect on enough steps to be judged."""
        return self.metrics.get(f"{_head(metric)}/live_fraction", missing) >= STARVED_SHARE


Condition = Callable[[CheckedUpdate, str], bool]
"""Of an update and the metric in question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """One kind of anomaly: which numbers, from where on, for how long, what it means and what to try."""

    metrics: tuple[str, ...] = ()
    """`HEAD/…` stands for each head."""
    above: float | tuple[float | None, ...] | None = None
    """Bad above this limit, or these by phase, where None is not judged. Either this or the next."""
    below: float | tuple[float | None, ...] | None = None
    margin: float | None = None
    """Clear when so far behind the limit; otherwise by CLEAR_MARGIN, for limits that are positive."""
    in_clip_norms: bool = False
    """The limit is a multiple of the clip norm."""
    seen: Callable[[CheckedUpdate, str], float] = lambda update, metric: update.metrics.get(metric, math.nan)
    judged: Condition = lambda update, metric: True
    excused: Condition = lambda update, metric: False
    """Counts as clear, whatever the number is."""
    read: Callable[[CheckedUpdate], Iterable[Reading]] | None = None
    """Instead of all above, for what is no comparison of a number with a limit."""
    severity: Severity = "warning"
    updates: int = 1
    """In a row that must show it: one is enough where one update can do the damage."""
    meaning: str
    remedy: str

    def readings(self, update: CheckedUpdate) -> Iterator[Reading]:
        if self.read is not None:
            yield from self.read(update)
            return
        limits = self.below if self.above is None else self.above
        limit = limits[update.phase] if isinstance(limits, tuple) else limits
        if limit is None:
            return
        limit *= update.clip_norm if self.in_clip_norms else 1.0
        for metric in self._names():
            seen = self.seen(update, metric)
            if not math.isnan(seen) and self.judged(update, metric):
                reading = compare_with_limit(metric, seen, limit, self.above is not None, self.margin)
                yield replace(reading, bad=False, clear=True) if self.excused(update, metric) else reading

    def _names(self) -> list[str]:
        heads = [(HEAD_NAMES if metric.startswith("HEAD/") else ("",)) for metric in self.metrics]
        return [m.replace("HEAD", head) for m, names in zip(self.metrics, heads, strict=True) for head in names]


def compare_with_limit(metric: str, seen: float, limit: float, above: bool, margin: float | None = None) -> Reading:
    """Bad beyond the limit, clear when behind it by the margin."""
    if above:
        return Reading(
            metric, seen, limit, seen > limit, seen <= (limit / CLEAR_MARGIN if margin is None else limit - margin)
        )
    return Reading(
        metric, seen, limit, seen < limit, seen >= (limit * CLEAR_MARGIN if margin is None else limit + margin)
    )


def _head(metric: str) -> str:
    return metric.partition("/")[0]


def _not_finite(update: CheckedUpdate) -> Iterator[Reading]:
    """NaN and infinity anywhere: one reading for all of them, so that one fault is one alarm."""
    wrong = [name for name, value in update.metrics.items() if not math.isfinite(value)]
    metric = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    yield Reading(metric, update.metrics[wrong[0]] if wrong else 0.0, math.inf, bool(wrong), not wrong)


def _ratios(update: CheckedUpdate) -> Iterator[Reading]:
    exploded = explosion_share(update.metrics) > RATIO_SHARE
    for metric, limit, above in (("ratio_max", RATIO_HIGH, True), ("ratio_min", RATIO_LOW, False)):
        if not math.isnan(update.metrics.get(metric, math.nan)):
            reading = compare_with_limit(metric, update.metrics[metric], limit, above)
            yield reading if exploded else replace(reading, bad=False, clear=True)


def explosion_share(metrics: Mapping[str, float]) -> float:
    """Share of the (step, head) pairs of the worst minibatch whose ratio exploded; 1 where they were not counted.

    One step in hundreds strays in a healthy update (measured: a ratio of 0.07 at a KL of 0.004): clipping is for it.
    """
    if "ratio_explosions" not in metrics:
        return 1.0
    live = sum(metrics.get(f"{head}/live_fraction", 0.0) for head in HEAD_NAMES) or 1.0
    minibatches_of_a_pass = metrics.get("minibatches", 1.0) / max(1.0, metrics.get("epochs", 1.0))
    pairs = metrics.get("steps", 1.0) * live / max(1.0, minibatches_of_a_pass)
    return metrics["ratio_explosions"] / max(1.0, pairs)


def _several_minibatches(update: CheckedUpdate, metric: str) -> bool:
    """KL and clipping are measured before each step: an update of one minibatch always shows 0."""
    return update.metrics.get("minibatches", 2.0) >= 2.0


def _after_a_step(update: CheckedUpdate, metric: str) -> bool:
    """A recurrent state of exactly 0 is the one before the first step of an episode: nothing to judge."""
    return update.metrics[metric] != 0.0


def _decided(update: CheckedUpdate, metric: str) -> bool:
    """A head that is sure of itself in a run that has improved has decided; without an improvement it has collapsed.
    The op head, on which it depends whether the others are ever tried, may decide late in a run only."""
    return update.improved and update.phase >= (RunPhase.LATE if _head(metric) == "op" else RunPhase.EARLY)


ALARM_RULES = {
    "non_finite": AlarmRule(
        read=_not_finite,
        severity="error",
        meaning="a number of the update is NaN or infinite; if weights are, nothing learnt after this is real",
        remedy="look at `skipped` and the per-head gradient norms, lower the learning rate, resume from before this "
        "update",
    ),
    "skipped_steps": AlarmRule(
        metrics=("skipped",),
        above=0.0,
        severity="error",
        meaning="the gradient of some minibatches was not finite, and their steps were not taken",
        remedy="lower the learning rate; check rewards and observations for infinities",
    ),
    "lstm_not_finite": AlarmRule(
        metrics=("lstm/finite",),
        below=1.0,
        margin=0.0,
        severity="error",
        meaning="the recurrent state holds NaN or infinity: every later decision of those environments is made of it",
        remedy="resume from before this update; check the observations for infinities",
    ),
    "ratio_explosion": AlarmRule(
        read=_ratios,
        meaning="an action became many times more (or less) likely within one update: steps are too large, or the "
        "replay does not match the rollout",
        remedy="lower the learning rate or the number of epochs; `first_ratio_gap` tells a mismatch from a large step",
    ),
    "kl_extreme": AlarmRule(
        metrics=("kl_max",),
        above=KL_EXTREME,
        severity="error",
        meaning="one update replaced the policy: what was learnt before is probably lost",
        remedy="resume from before this update with a lower learning rate",
    ),
    "kl_spike": AlarmRule(
        metrics=("kl_max",),
        above=(0.2, 0.1, 0.1),
        judged=lambda update, metric: update.metrics[metric] <= KL_EXTREME[update.phase],  # one step is one alarm
        meaning="one update moved the policy far from the one that gathered its data",
        remedy="lower the learning rate or the number of epochs, or set target_kl",
    ),
    "kl_stalled": AlarmRule(
        metrics=("kl",),
        below=1e-7,
        judged=_several_minibatches,
        severity="error",
        updates=3,
        meaning="updates do not change the policy at all: gradients do not reach it, weights are frozen, or every step "
        "is skipped. Small is not healthy",
        remedy="look at the gradient norm per head, at `optimizer_steps` and at the learning rate",
    ),
    "clip_stalled": AlarmRule(
        metrics=("clip_fraction",),
        below=(None, 1e-4, 1e-4),
        judged=_several_minibatches,
        updates=10,
        meaning="no ratio ever reaches the clip range: steps are so small that the data of a rollout is not used up",
        remedy="raise the learning rate or the number of epochs",
    ),
    "head_starved": AlarmRule(
        metrics=("HEAD/live_fraction",),
        below=STARVED_SHARE,
        judged=lambda update, metric: _head(metric) in update.had_choice,
        excused=lambda update, metric: update.improved and update.phase is RunPhase.LATE,
        updates=5,
        meaning="a head takes effect on so few steps that next to nothing is learnt about it: the policy has all but "
        "stopped choosing the operations that use it",
        remedy="raise entropy_coefficient (or the weight of op in head_entropy_weights), or set --floor, the least "
        "probability of a legal choice",
    ),
    "entropy_collapse": AlarmRule(
        metrics=("HEAD/entropy",),
        below=(0.3, ENTROPY_COLLAPSED, 0.5 * ENTROPY_COLLAPSED),  # late in a run a policy may be surer of itself
        judged=lambda update, metric: _head(metric) in update.had_choice and update.live(metric, missing=1.0),
        excused=_decided,
        updates=3,
        meaning="a head of the policy has all but stopped exploring although the run is no better than it began, and "
        "its entropy bonus has no gradient left there",
        remedy="raise entropy_coefficient (or that head's weight in head_entropy_weights), or set --floor, the least "
        "probability of a legal choice",
    ),
    "value_collapse": AlarmRule(
        metrics=("explained_variance",),
        below=(-0.5, -0.2, 0.0),
        margin=0.05,
        updates=5,
        meaning="the critic predicts returns worse than a constant would: advantages are mostly its own error",
        remedy="look at the scale of the returns (`return_std`), raise the value coefficient, or lower the learning "
        "rate",
    ),
    "value_stuck": AlarmRule(
        metrics=("explained_variance",),
        below=(None, None, 0.05),
        updates=15,
        meaning="the critic explains nothing of the returns after a good part of the run",
        remedy="look at `value_gradient_norm`; raise the value coefficient or the number of epochs; returns may be "
        "pure noise",
    ),
    "gradient_exploding": AlarmRule(
        metrics=("gradient_norm",),  # the mean over minibatches: single ones stray by a factor of five
        above=EXPLODING,
        in_clip_norms=True,
        meaning="the gradient is far above the clip norm, so that its direction is that of a few steps",
        remedy="look at the scale of rewards and returns; lower the learning rate",
    ),
    "gradient_vanishing": AlarmRule(
        metrics=("gradient_norm", "value_gradient_norm", "trunk_gradient_norm", "HEAD/gradient_norm"),
        below=VANISHING,
        in_clip_norms=True,
        judged=lambda update, metric: "/" not in metric or update.live(metric, missing=0.0),
        severity="error",
        updates=2,
        meaning="a part of the network gets no gradient: it is cut off, saturated, or its loss is constant",
        remedy="look at which part it is; check masks, detached tensors and the loss's coefficient",
    ),
    "gradient_drift": AlarmRule(
        # Upwards only: gradients become smaller as a policy decides, and have an alarm if they vanish.
        metrics=("gradient_norm",),
        above=(None, 0.5, 0.5),
        seen=lambda update, metric: update.drift,
        updates=5,
        meaning="the gradient norm is above its usual level for several updates: the problem that the agent solves has "
        "changed",
        remedy="compare `return_std`, `value_loss` and the entropies before and after",
    ),
    "lstm_saturated": AlarmRule(
        metrics=("lstm/hidden_rms", "lstm/cell_rms"),
        above=10.0,
        judged=_after_a_step,
        updates=2,
        meaning="the recurrent state has grown so large that its gates are stuck",
        remedy="check that observations are bounded; lower the learning rate",
    ),
    "lstm_dead": AlarmRule(
        metrics=("lstm/hidden_rms", "lstm/cell_rms"),
        below=1e-6,
        judged=_after_a_step,
        updates=2,
        meaning="the recurrent state is all but zero: the policy has no memory",
        remedy="look at `trunk_gradient_norm`; check that states are not reset at every step",
    ),
    "return_collapse": AlarmRule(
        read=lambda update: () if update.returns is None else (update.returns,),
        updates=3,
        meaning="returns have fallen far below the best level of this run, by more than their usual spread",
        remedy="look at the anomalies just before; resume from the best checkpoint with a lower learning rate",
    ),
}
"""By name. Those of one update are reported in this order."""


def rules_with(gradient_limits: tuple[float, float]) -> dict[str, AlarmRule]:
    """ALARM_RULES with other limits of vanishing and exploding gradients, in clip norms (R120)."""
    vanishing, exploding = gradient_limits
    return {
        **ALARM_RULES,
        "gradient_vanishing": replace(ALARM_RULES["gradient_vanishing"], below=vanishing),
        "gradient_exploding": replace(ALARM_RULES["gradient_exploding"], above=exploding),
    }
