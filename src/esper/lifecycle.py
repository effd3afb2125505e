"""The life of a seed: stages, legal transitions, and the gates between them. Pure Python, no torch.

    DORMANT -> GERMINATED -> TRAINING -> BLENDING -> HOLDING -> FOSSILIZED
                   \\____________\\___________\\__________\\--> PRUNED -> EMBARGOED -> RESETTING -> DORMANT

A `SlotLife` is the whole story of one slot: it decides whether and when a stage changes, and remembers why. It does not
know about modules or tensors; `esper.growth` makes the network follow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Stage(IntEnum):
    """Where a slot is in the life of its seed."""

    DORMANT = 0
    """Empty, ready for a seed."""
    GERMINATED = 1
    """The seed exists; it starts to learn with the next epoch."""
    TRAINING = 2
    """The seed learns on a shadow pass that the host cannot feel."""
    BLENDING = 3
    """Alpha moves: up while the seed is mixed in, down while it is taken out."""
    HOLDING = 4
    """The seed works at full strength and can still be removed."""
    FOSSILIZED = 5
    """The seed is part of the network for good."""
    PRUNED = 6
    """The seed was removed."""
    EMBARGOED = 7
    """The slot rests, so that growing and pruning cannot cycle quickly."""
    RESETTING = 8
    """The last epoch before the slot is empty again."""


LIVE = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})
"""A seed that is neither kept nor removed yet."""

IN_FORWARD = frozenset({Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
"""The seed takes part in the host's output."""

TRANSITIONS: Mapping[Stage, frozenset[Stage]] = MappingProxyType(
    {
        Stage.DORMANT: frozenset({Stage.GERMINATED}),
        Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
        Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
        Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
        Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),  # BLENDING: to ramp out
        Stage.FOSSILIZED: frozenset(),
        Stage.PRUNED: frozenset({Stage.EMBARGOED}),
        Stage.EMBARGOED: frozenset({Stage.RESETTING}),
        Stage.RESETTING: frozenset({Stage.DORMANT}),
    }
)


class IllegalTransitionError(RuntimeError):
    """A stage change that the lifecycle does not allow."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One stage change of one seed, with its reason."""

    epoch: int
    slot: str
    seed: int
    source: Stage
    target: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class Contrast:
    """The network with a seed against the network without it, on the same validation examples."""

    accuracy: float
    """Percentage points gained by having the seed."""
    loss: float
    """Loss saved by having the seed (positive is good)."""
    error: float = 0.0
    """Standard error of `accuracy`, paired per example; infinite if it could not be estimated."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When a seed may move on. The defaults are for some tens of epochs; `docs/lifecycle.md` has the measurements."""

    training_epochs: int = 2
    """Least incubation before blending."""
    gradient_activity: float = 1e-6
    """Least root-mean-square gradient per parameter during incubation: a dead seed never blends."""
    shadow_benefit: float = 0.0
    """Least accuracy points that the seed must promise on its shadow pass before it may blend."""
    blending_epochs: int = 3
    """Length of the ramp from alpha 0 to 1."""
    contribution: float = 0.0
    """Least measured accuracy points for fossilizing; the seed must contribute more than this."""
    prune_age: int = 3
    """Epochs that a seed has before it may be pruned."""
    ramp_out_epochs: int = 2
    """Length of the ramp back to alpha 0 when a working seed is pruned."""
    embargo_epochs: int = 2
    """Rest of a slot after pruning."""

    def __post_init__(self) -> None:
        for name in ("training_epochs", "blending_epochs", "prune_age", "ramp_out_epochs", "embargo_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Criterion:
    """One named condition of a gate, with what was seen."""

    name: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class GateResult:
    """Whether a seed may enter `target`, criterion by criterion."""

    target: Stage
    criteria: tuple[Criterion, ...]

    @property
    def passed(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)

    def __str__(self) -> str:
        return ", ".join(f"{c.name} {c.seen}{'' if c.passed else ' (not enough)'}" for c in self.criteria)


def ramp(blend: str, fraction: float) -> float:
    """Alpha after `fraction` of the ramp; 0 at 0 and exactly 1 at 1 for every blend."""
    if fraction >= 1.0:
        return 1.0
    if blend != "sigmoid":
        return max(0.0, fraction)
    edge = 1.0 / (1.0 + math.exp(6.0))
    raw = 1.0 / (1.0 + math.exp(-12.0 * (fraction - 0.5)))
    return max(0.0, (raw - edge) / (1.0 - 2.0 * edge))


@dataclass(slots=True)
class SlotLife:
    """The state of one slot. Its methods are the only way to change a stage.

    Epoch order: the controller acts, `begin_epoch`, the network trains and is measured, `end_epoch`.
    """

    name: str
    rules: Rules = field(default_factory=Rules)
    stage: Stage = Stage.DORMANT
    seed: int = 0
    """Number of the current or last seed of this model; 0 is none yet."""
    blueprint: str | None = None
    blend: str | None = None
    alpha: float = 0.0
    age: int = 0
    """Epochs since germination."""
    dwell: int = 0
    """Epochs in this stage."""
    retiring: bool = False
    """Alpha is on its way down to a pruning."""
    gradient: float | None = None
    """Root-mean-square gradient of the seed's parameters over the last epoch."""
    shadow_benefit: Contrast | None = None
    contribution: Contrast | None = None
    measured_age: int = 0
    """Age of the seed when contribution or shadow benefit was last measured."""
    history: list[Transition] = field(default_factory=list)
    _ramp_from: float = 0.0
    _why_retiring: str = ""

    # -- what the controller may do ---------------------------------------------------------------------------

    def germinate(self, epoch: int, seed: int, blueprint: str, blend: str, reason: str) -> Transition:
        if self.stage is not Stage.DORMANT:
            raise IllegalTransitionError(f"slot {self.name} is {self.stage.name}: only an empty slot can germinate")
        self.seed, self.blueprint, self.blend = seed, blueprint, blend
        return self._enter(Stage.GERMINATED, epoch, reason)

    @property
    def prunable(self) -> bool:
        return self.stage in LIVE and self.age >= self.rules.prune_age and not self.retiring

    def prune(self, epoch: int, reason: str, *, at_once: bool = False) -> list[Transition]:
        """Remove the seed: over a ramp when the host relies on it, else now. `at_once` is for emergencies."""
        if not (self.prunable or (at_once and self.stage in LIVE)):
            raise IllegalTransitionError(f"slot {self.name}: {self.why_not_prunable()}")
        if self.alpha == 0.0 or at_once:
            return [self._remove(epoch, reason)]
        self.retiring, self._ramp_from, self._why_retiring = True, self.alpha, reason
        entered = [self._enter(Stage.BLENDING, epoch, f"ramping out: {reason}")] if self.stage is Stage.HOLDING else []
        self.dwell = 0
        self._ramp_out()
        return entered

    def why_not_prunable(self) -> str:
        if self.stage not in LIVE:
            return f"a {self.stage.name} slot has nothing to prune"
        if self.retiring:
            return "the seed is being ramped out already"
        return f"the seed is {self.age} epochs old and may be pruned from {self.rules.prune_age}"

    @property
    def fossilizable(self) -> bool:
        return self.stage is Stage.HOLDING and self.gate(Stage.FOSSILIZED).passed

    def fossilize(self, epoch: int, reason: str) -> Transition:
        if self.stage is not Stage.HOLDING:
            raise IllegalTransitionError(f"slot {self.name} is {self.stage.name}: only a HOLDING seed can fossilize")
        gate = self.gate(Stage.FOSSILIZED)
        if not gate.passed:
            raise IllegalTransitionError(f"slot {self.name} may not fossilize: {gate}")
        return self._enter(Stage.FOSSILIZED, epoch, reason)

    # -- what happens by itself -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> list[Transition]:
        if self.stage is Stage.GERMINATED:
            return [self._enter(Stage.TRAINING, epoch, "germinated: starts to learn behind the gate")]
        return []

    def measure(
        self,
        *,
        gradient: float | None = None,
        shadow_benefit: Contrast | None = None,
        contribution: Contrast | None = None,
    ) -> None:
        """Note what the engine measured in the epoch that ends now. What was not measured keeps its last value."""
        if gradient is not None:
            self.gradient = gradient
        if shadow_benefit is not None:
            self.shadow_benefit, self.measured_age = shadow_benefit, self.age + 1
        if contribution is not None:
            self.contribution, self.measured_age = contribution, self.age + 1

    def end_epoch(self, epoch: int) -> list[Transition]:
        """Count the epoch, move alpha, and take every advance whose gate passes."""
        if self.stage is Stage.DORMANT:
            return []
        self.age += 1
        self.dwell += 1
        if self.stage is Stage.TRAINING:
            gate = self.gate(Stage.BLENDING)
            if gate.passed:
                entered = self._enter(Stage.BLENDING, epoch, str(gate))
                self._ramp_up()
                return [entered]
        elif self.stage is Stage.BLENDING:
            return self._end_blending_epoch(epoch)
        elif self.stage is Stage.PRUNED:
            return [self._enter(Stage.EMBARGOED, epoch, "the slot rests")]
        elif self.stage is Stage.EMBARGOED and self.dwell >= self.rules.embargo_epochs:
            return [self._enter(Stage.RESETTING, epoch, "the embargo is over")]
        elif self.stage is Stage.RESETTING:
            self._forget()
            return [self._enter(Stage.DORMANT, epoch, "ready for another seed")]
        return []

    def _end_blending_epoch(self, epoch: int) -> list[Transition]:
        if self.retiring:
            if self.dwell >= self.rules.ramp_out_epochs:
                return [self._remove(epoch, self._why_retiring)]
            self._ramp_out()
            return []
        gate = self.gate(Stage.HOLDING)
        if gate.passed:
            return [self._enter(Stage.HOLDING, epoch, str(gate))]
        self._ramp_up()
        return []

    def gate(self, target: Stage) -> GateResult:
        """What stands between the seed and `target`, criterion by criterion."""
        if target is Stage.BLENDING:
            return GateResult(
                target,
                (
                    _at_least("incubated epochs", self.dwell, self.rules.training_epochs),
                    _at_least("gradient", self.gradient, self.rules.gradient_activity),
                    _at_least(
                        "shadow benefit",
                        None if self.shadow_benefit is None else self.shadow_benefit.accuracy,
                        self.rules.shadow_benefit,
                    ),
                ),
            )
        if target is Stage.HOLDING:
            return GateResult(target, (_at_least("alpha", self.alpha, 1.0),))
        if target is Stage.FOSSILIZED:
            measured = self.contribution
            limit = self.rules.contribution
            passed = measured is not None and measured.accuracy > limit
            seen = f"{measured.accuracy:+.2f} (over {limit:g})" if measured is not None else "not measured"
            return GateResult(target, (Criterion("contribution", passed, seen),))
        raise ValueError(f"no gate guards {target.name}")

    # -- internals --------------------------------------------------------------------------------------------

    def _ramp_up(self) -> None:
        assert self.blend is not None
        self.alpha = ramp(self.blend, (self.dwell + 1) / self.rules.blending_epochs)

    def _ramp_out(self) -> None:
        steps = self.rules.ramp_out_epochs
        self.alpha = self._ramp_from * (steps - self.dwell) / (steps + 1)

    def _remove(self, epoch: int, reason: str) -> Transition:
        self.alpha, self.retiring = 0.0, False
        return self._enter(Stage.PRUNED, epoch, reason)

    def _forget(self) -> None:
        """An empty slot knows nothing of the seed that was there."""
        self.age = self.measured_age = 0
        self.gradient = self.shadow_benefit = self.contribution = None

    def _enter(self, target: Stage, epoch: int, reason: str) -> Transition:
        if target not in TRANSITIONS[self.stage]:
            raise IllegalTransitionError(f"slot {self.name}: {self.stage.name} may not become {target.name}")
        transition = Transition(epoch, self.name, self.seed, self.stage, target, reason)
        self.stage, self.dwell = target, 0
        self.history.append(transition)
        return transition


def _at_least(name: str, value: float | None, limit: float) -> Criterion:
    if value is None:
        return Criterion(name, False, "not measured")
    return Criterion(name, value >= limit, f"{value:.3g} (at least {limit:g})")
