"""From the metrics of one update to readings: a number, its limit in this phase, and whether it is beyond it.

Pure functions of metrics and limits, except `ReturnLevel` and the drift, which remember. A metric that is missing or
NaN gives no reading: NaN is the business of `non_finite`. Metric names are those of the agent's glossary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from statistics import fmean, variance
from typing import Protocol

from esper.actions import HEAD_NAMES

MARGIN = 1.25
"""An anomaly is over when its number is back behind the limit by this factor: a limit that is grazed is one alarm."""
RETURN_DROP = 4.0
"""Spreads (mean absolute deviations) that the level of returns must fall below its best."""
RETURN_LEAST_DROP = 0.05
"""And at least this share of the best: returns that hardly vary have no spread to speak of."""
RETURN_MEMORY, RETURN_WINDOW = 0.8, 20
RETURN_WARM_UP = 5
"""Updates before a level of returns means anything."""
OBJECTIVE = ("episode/score", "return_mean")
"""What a run is for: the first of these that is there. The score where the loop knows it: returns can be gamed."""
IMPROVEMENT_WINDOW = 5
"""Updates at the beginning and at the end of a run so far whose objectives are compared."""
IMPROVEMENT_ERRORS = 2.0
"""Standard errors that the difference must have."""
LEAST_LIVE = 0.01
"""A head that took effect on a smaller share of steps has no entropy or gradient to judge: it is starved."""


class Phase(IntEnum):
    """How far a run is; what is normal depends on it."""

    WARM_UP = 0
    """The critic knows nothing yet and the policy must still explore."""
    EARLY = 1
    LATE = 2

    @staticmethod
    def of(progress: float) -> Phase:
        """From the share of the run that is done."""
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress is a share between 0 and 1, not {progress}")
        return Phase.WARM_UP if progress < 0.1 else Phase.EARLY if progress < 0.4 else Phase.LATE


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a number is an anomaly.

    The first part has no defaults on purpose: these numbers are the agent's own (`esper.agent.diagnostics`), and who
    builds the detector passes them in, so that they have one source. Per-phase limits are (warm-up, early, late).
    """

    ratio_high: float
    ratio_low: float
    entropy_low: float
    entropy_collapsed: float
    kl_spike: float
    kl_extreme: float
    kl_stalled: float
    gradient_vanishing: float
    """Derived from the clip norm, as is the next."""
    gradient_exploding: float
    gradient_drift: float
    lstm_low: float
    lstm_high: float

    ratio_share: float = 0.05
    """Share of a minibatch whose ratios must be outside the range: single steps stray in healthy updates."""
    clip_stalled: float = 1e-4
    """Least share of clipped ratios that shows that anything moves."""
    explained_variance: tuple[float, float, float] = (-0.5, -0.2, 0.0)
    """Below it the critic is worse than none."""
    explained_variance_stuck: float = 0.05
    """A critic that late in a run stays below this has learnt nothing."""
    late_entropy: float = 0.5
    """Late in a run a policy may be surer of itself: the collapse limit is multiplied by this."""
    early_kl: float = 2.0
    """During warm-up steps may be larger: the KL limits are multiplied by this."""

    def entropy(self, phase: Phase) -> float:
        return (self.entropy_low, self.entropy_collapsed, self.late_entropy * self.entropy_collapsed)[phase]


@dataclass(frozen=True, slots=True)
class Reading:
    """One number against one limit."""

    name: str
    """Of the symptom."""
    metric: str
    seen: float
    limit: float
    bad: bool
    clear: bool
    """Behind the limit by a margin. Between `bad` and `clear` nothing changes."""

    @property
    def key(self) -> str:
        return f"{self.name} {self.metric}"


class Drift(Protocol):
    """A moving average that knows how far a number is from it (`esper.agent.diagnostics.GradientDrift`)."""

    average: float | None

    def update(self, norm: float) -> float: ...


def above(name: str, metric: str, seen: float, limit: float) -> Iterator[Reading]:
    """Bad above a positive limit."""
    if not math.isnan(seen):
        yield Reading(name, metric, seen, limit, seen > limit, seen <= limit / MARGIN)


def below(name: str, metric: str, seen: float, limit: float) -> Iterator[Reading]:
    """Bad below a positive limit."""
    if not math.isnan(seen):
        yield Reading(name, metric, seen, limit, seen < limit, seen >= limit * MARGIN)


def numbers(metrics: Mapping[str, float]) -> Iterator[Reading]:
    """NaN and infinity anywhere: one reading for all of them, so that one fault is one alarm."""
    wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
    metric = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    seen = metrics[wrong[0]] if wrong else 0.0
    yield Reading("non_finite", metric, seen, math.inf, bool(wrong), not wrong)
    if "skipped" in metrics:
        yield from above("skipped_steps", "skipped", metrics["skipped"], 0.0)
    if "lstm/finite" in metrics:
        finite = metrics["lstm/finite"]
        yield Reading("lstm_not_finite", "lstm/finite", finite, 1.0, finite != 1.0, finite == 1.0)


def policy(metrics: Mapping[str, float], limits: Limits, phase: Phase) -> Iterator[Reading]:
    """Ratios and KL, too large and too small."""
    exploded = explosion_share(metrics) > limits.ratio_share
    for reading in _ratios(metrics, limits):
        yield reading if exploded else replace(reading, bad=False, clear=True)
    widest = "kl_max" if "kl_max" in metrics else "kl"
    if widest in metrics:
        looser = limits.early_kl if phase is Phase.WARM_UP else 1.0
        extreme = metrics[widest] > limits.kl_extreme * looser
        yield from above("kl_extreme", widest, metrics[widest], limits.kl_extreme * looser)
        if not extreme:  # one step is one alarm
            yield from above("kl_spike", widest, metrics[widest], limits.kl_spike * looser)
    # KL and clipping are measured before each step: an update of one minibatch always shows 0.
    if metrics.get("minibatches", 2.0) < 2.0:
        return
    if "kl" in metrics:
        yield from below("kl_stalled", "kl", metrics["kl"], limits.kl_stalled)
    if "clip_fraction" in metrics and phase is not Phase.WARM_UP:
        yield from below("clip_stalled", "clip_fraction", metrics["clip_fraction"], limits.clip_stalled)


def _ratios(metrics: Mapping[str, float], limits: Limits) -> Iterator[Reading]:
    if "ratio_max" in metrics:
        yield from above("ratio_explosion", "ratio_max", metrics["ratio_max"], limits.ratio_high)
    if "ratio_min" in metrics:
        yield from below("ratio_explosion", "ratio_min", metrics["ratio_min"], limits.ratio_low)


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


def entropies(
    metrics: Mapping[str, float], limits: Limits, phase: Phase, seen_alive: set[str], improved: bool
) -> Iterator[Reading]:
    """Each head where it has a choice. A head that never showed any entropy (one slot, one blueprint) never had one.

    A head that is sure of itself in a run that has improved has decided; without an improvement it has collapsed. The
    op head, which decides whether the others are ever tried, may decide late in a run only; so a head that it hardly
    ever uses is starved until then.
    """
    for head in HEAD_NAMES:
        entropy = metrics.get(f"{head}/entropy", 0.0)
        if entropy > 0.0:
            seen_alive.add(head)
        if head not in seen_alive:
            continue
        live, excused = metrics.get(f"{head}/live_fraction", 1.0), improved and phase is Phase.LATE
        for reading in below("head_starved", f"{head}/live_fraction", live, LEAST_LIVE):
            yield replace(reading, bad=False, clear=True) if excused else reading
        if live >= LEAST_LIVE:
            excused = improved and (phase is Phase.LATE if head == "op" else phase is not Phase.WARM_UP)
            for reading in below("entropy_collapse", f"{head}/entropy", entropy, limits.entropy(phase)):
                yield replace(reading, bad=False, clear=True) if excused else reading


@dataclass(slots=True)
class Improvement:
    """Whether the objective is clearly better than in the first updates of the run."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def note(self, metrics: Mapping[str, float]) -> None:
        seen = next((metrics[name] for name in OBJECTIVE if name in metrics), math.nan)
        if not math.isfinite(seen):
            return
        if len(self.first) < IMPROVEMENT_WINDOW:
            self.first.append(seen)
        else:
            self.last = [*self.last, seen][-IMPROVEMENT_WINDOW:]

    @property
    def shown(self) -> bool:
        if len(self.last) < IMPROVEMENT_WINDOW:
            return False
        error = math.sqrt((variance(self.first) + variance(self.last)) / IMPROVEMENT_WINDOW)
        return fmean(self.last) - fmean(self.first) > IMPROVEMENT_ERRORS * error


def value(metrics: Mapping[str, float], limits: Limits, phase: Phase) -> Iterator[Reading]:
    """The critic: worse than a constant, or never better than one."""
    seen = metrics.get("explained_variance", math.nan)
    if math.isnan(seen):
        return
    limit = limits.explained_variance[phase]
    yield Reading("value_collapse", "explained_variance", seen, limit, seen < limit, seen >= limit + 0.05)
    if phase is Phase.LATE:
        limit = limits.explained_variance_stuck
        yield Reading("value_stuck", "explained_variance", seen, limit, seen < limit, seen >= limit * MARGIN)


def gradients(metrics: Mapping[str, float], limits: Limits, drift: Drift | None, phase: Phase) -> Iterator[Reading]:
    """Norms before clipping: of the whole, and of every part that took effect."""
    norm = metrics.get("gradient_norm", math.nan)  # the mean over minibatches: single ones stray by a factor of five
    yield from above("gradient_exploding", "gradient_norm", norm, limits.gradient_exploding)
    parts = [f"{head}/gradient_norm" for head in HEAD_NAMES if metrics.get(f"{head}/live_fraction", 0.0) >= LEAST_LIVE]
    for part in ("gradient_norm", "value_gradient_norm", "trunk_gradient_norm", *parts):
        if part in metrics:
            yield from below("gradient_vanishing", part, metrics[part], limits.gradient_vanishing)
    if drift is not None and math.isfinite(norm):
        strayed = drift.update(norm)
        # Upwards only: gradients become smaller as a policy makes up its mind, and have an alarm if they vanish.
        if phase is not Phase.WARM_UP:
            yield from above("gradient_drift", "gradient_norm", strayed, limits.gradient_drift)


def memory(metrics: Mapping[str, float], limits: Limits) -> Iterator[Reading]:
    """The recurrent state. Exactly 0 is the state before the first step of an episode: nothing to judge."""
    for metric in ("lstm/hidden_rms", "lstm/cell_rms"):
        size = metrics.get(metric, 0.0)
        if size != 0.0:
            yield from above("lstm_saturated", metric, size, limits.lstm_high)
            yield from below("lstm_dead", metric, size, limits.lstm_low)


@dataclass(slots=True)
class ReturnLevel:
    """The level of returns (a moving average) against the best level so far, in units of their usual spread."""

    level: float | None = None
    spread: float = 0.0
    """Mean absolute deviation from the level, over the last updates that were not a fall."""
    best: float | None = None
    count: int = 0

    def read(self, metrics: Mapping[str, float]) -> Iterator[Reading]:
        seen = metrics.get("return_mean", math.nan)
        if not math.isfinite(seen):
            return
        self.count += 1
        before = seen if self.level is None else self.level
        self.level = before + (1.0 - RETURN_MEMORY) * (seen - before)
        # A fall must not widen what is allowed to it.
        if self.best is None or seen >= self._limit(self.best):
            self.spread += (abs(seen - before) - self.spread) / min(self.count, RETURN_WINDOW)
        if self.count <= RETURN_WARM_UP:
            return
        if self.best is not None:
            limit = self._limit(self.best)
            clear = self.level >= (limit + self.best) / 2.0
            yield Reading("return_collapse", "return_mean", self.level, limit, self.level < limit, clear)
        self.best = self.level if self.best is None else max(self.best, self.level)

    def _limit(self, best: float) -> float:
        return best - max(RETURN_DROP * self.spread, RETURN_LEAST_DROP * abs(best))
