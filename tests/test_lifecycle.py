"""The life of a slot: every transition, gate, ramp and count, by hand and under random play.

Covers: R149 (lifecycle of seeds), R138 (nothing is decided on what was not measured), R156
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esper.actions import BLENDS
from esper.lifecycle import IN_FORWARD, LIVE, TRANSITIONS, Contrast, IllegalTransitionError, Rules, Stage, Transition
from esper.slot_columns import SlotColumns
from esper.slot_views import Slots


class OneSlot:
    """A network of one slot, driven by hand."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.slots = Slots(["s"], rules)
        self.history: list[Transition] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.slots.lives[0], name)

    @property
    def measured_age(self) -> int:
        return int(self.slots.columns.measured_age)

    def _noted(self, transitions: list[Transition]) -> list[Transition]:
        self.history += transitions
        return transitions

    def germinate(self, epoch: int, blueprint: int = 0, blend: str = "linear", reason: str = "") -> Transition:
        done = self.slots.germinate(0, blueprint, BLENDS.index(blend), 10, epoch=epoch, reason=reason)
        return self._noted(done)[0]

    def prune(self, epoch: int, reason: str, *, at_once: bool = False) -> list[Transition]:
        return self._noted(self.slots.prune(0, epoch=epoch, reason=reason, at_once=at_once))

    def fossilize(self, epoch: int, reason: str) -> Transition:
        return self._noted(self.slots.fossilize(0, epoch=epoch, reason=reason))[0]

    def begin_epoch(self, epoch: int) -> list[Transition]:
        return self._noted(self.slots.begin_epoch(epoch))

    def measure(self, gradient=None, shadow_benefit=None, contribution=None) -> None:
        found = (gradient, shadow_benefit, contribution)
        self.slots.measure(*({} if one is None else {0: one} for one in found))

    def end_epoch(self, epoch: int) -> list[Transition]:
        return self._noted(self.slots.end_epoch(epoch))


GOOD = {"gradient": 1.0, "shadow_benefit": Contrast(1.0, 0.1), "contribution": Contrast(1.0, 0.1)}


def epoch(life: OneSlot, number: int, **measured: object) -> list[Stage]:
    """One epoch; the stages that were entered."""
    begun = life.begin_epoch(number)
    life.measure(**measured)  # type: ignore[arg-type]
    return [transition.target for transition in begun + life.end_epoch(number)]


def held(rules: Rules | None = None, blend: str = "linear") -> OneSlot:
    """A life whose seed has just entered HOLDING."""
    life = OneSlot(rules)
    life.germinate(0, blend=blend)
    for number in range(50):
        if life.stage is Stage.HOLDING:
            return life
        epoch(life, number, **GOOD)
    raise AssertionError("never held")


# -- by hand ------------------------------------------------------------------------------------------------------


def test_a_seed_that_passes_every_gate_walks_this_path_and_no_other() -> None:
    life = OneSlot(Rules(training_epochs=2, blending_epochs=3))
    germinated = life.germinate(0, reason="because")
    assert (germinated.seed, germinated.slot, germinated.reason) == (1, "s", "because")
    seen = []
    for number in range(7):
        entered = epoch(life, number, **GOOD)
        seen.append((life.stage.name, round(life.alpha, 4), life.age, life.dwell, [s.name for s in entered]))
    assert seen == [
        ("TRAINING", 0.0, 1, 1, ["TRAINING"]),
        ("BLENDING", 0.3333, 2, 0, ["BLENDING"]),  # two epochs of incubation, then the first third
        ("BLENDING", 0.6667, 3, 1, []),
        ("BLENDING", 1.0, 4, 2, []),
        ("HOLDING", 1.0, 5, 0, ["HOLDING"]),  # three epochs of blending, the last one at full strength
        ("HOLDING", 1.0, 6, 1, []),
        ("HOLDING", 1.0, 7, 2, []),
    ]
    assert life.fossilize(7, "it helps").target is Stage.FOSSILIZED
    assert life.alpha == 1.0
    assert not life.prunable
    with pytest.raises(IllegalTransitionError, match="nothing to prune"):
        life.prune(8, "", at_once=True)


def test_pruning_a_holding_seed_ramps_out_in_these_steps() -> None:
    life = held(Rules(ramp_out_epochs=2, embargo_epochs=2))
    entered = life.prune(20, "it idles")
    assert [(t.target.name, t.reason) for t in entered] == [("BLENDING", "ramping out: it idles")]
    assert (life.alpha, life.retiring) == (pytest.approx(2 / 3), True)
    with pytest.raises(IllegalTransitionError, match="being ramped out already"):
        life.prune(20, "again")
    seen = []
    for number in range(20, 27):
        entered_stages = epoch(life, number, **GOOD)
        seen.append((life.stage.name, round(life.alpha, 4), [s.name for s in entered_stages]))
    assert seen == [
        ("BLENDING", 0.3333, []),
        ("PRUNED", 0.0, ["PRUNED"]),  # two epochs of ramp
        ("EMBARGOED", 0.0, ["EMBARGOED"]),
        ("EMBARGOED", 0.0, []),
        ("RESETTING", 0.0, ["RESETTING"]),  # two epochs of rest
        ("DORMANT", 0.0, ["DORMANT"]),
        ("DORMANT", 0.0, []),
    ]
    assert not life.retiring


def test_a_seed_pruned_while_it_blends_keeps_the_reason_until_it_is_gone() -> None:
    life = OneSlot(Rules(training_epochs=1, prune_age=1, blending_epochs=4, ramp_out_epochs=2))
    life.germinate(0)
    epoch(life, 0, **GOOD)
    assert life.alpha == 0.25
    assert life.prune(1, "it harms") == []
    assert life.alpha == pytest.approx(0.25 * 2 / 3)
    epoch(life, 1, **GOOD)
    assert life.alpha == pytest.approx(0.25 * 1 / 3)
    epoch(life, 2, **GOOD)
    assert life.stage is Stage.PRUNED
    assert life.history[-1].reason == "it harms"


def test_a_ramp_out_takes_its_time_wherever_in_the_ramp_up_it_begins() -> None:
    life = OneSlot(Rules(training_epochs=1, prune_age=1, blending_epochs=4, ramp_out_epochs=2))
    life.germinate(0)
    for number in range(3):
        epoch(life, number, **GOOD)
    assert (life.alpha, life.dwell) == (0.75, 2)
    life.prune(3, "")
    alphas = [life.alpha]
    while life.stage is Stage.BLENDING:
        epoch(life, 3, **GOOD)
        alphas.append(life.alpha)
    assert alphas == pytest.approx([0.5, 0.25, 0.0])


def test_an_incubating_seed_is_pruned_at_once_and_an_emergency_asks_no_age() -> None:
    life = OneSlot(Rules(prune_age=2, training_epochs=9))
    life.germinate(0)
    epoch(life, 0)
    with pytest.raises(IllegalTransitionError, match="1 epochs old and may be pruned from 2"):
        life.prune(1, "")
    epoch(life, 1)
    assert [t.target for t in life.prune(2, "dull")] == [Stage.PRUNED]

    life = held(Rules(prune_age=100))
    with pytest.raises(IllegalTransitionError):
        life.prune(9, "")
    assert [t.target for t in life.prune(9, "broken", at_once=True)] == [Stage.PRUNED]
    assert (life.alpha, life.retiring) == (0.0, False)


def test_an_emergency_also_ends_a_ramp_out() -> None:
    life = held()
    life.prune(9, "slow")
    assert [t.target for t in life.prune(9, "fast", at_once=True)] == [Stage.PRUNED]
    assert not life.retiring


@pytest.mark.parametrize(
    ("measured", "passed"),
    [
        ({"gradient": 1e-6, "shadow_benefit": Contrast(0.0, 0.0)}, True),  # both limits are inclusive
        ({"gradient": 0.9e-6, "shadow_benefit": Contrast(0.0, 0.0)}, False),
        ({"gradient": 1.0, "shadow_benefit": Contrast(-0.01, 5.0)}, False),
        ({"gradient": 1.0}, False),
        ({"shadow_benefit": Contrast(9.0, 1.0)}, False),
        ({"gradient": math.nan, "shadow_benefit": Contrast(9.0, 1.0)}, False),
        ({"gradient": 1.0, "shadow_benefit": Contrast(math.nan, 1.0)}, False),
    ],
)
def test_the_gate_of_blending_asks_for_dwell_gradient_and_benefit(measured: dict, passed: bool) -> None:
    life = OneSlot(Rules(training_epochs=2))
    life.germinate(0)
    epoch(life, 0, **measured)
    assert life.stage is Stage.TRAINING, "one epoch is not two"
    epoch(life, 1)
    assert (life.stage is Stage.BLENDING) == passed
    if not passed:
        assert "(not enough)" in str(life.gate(Stage.BLENDING))


def test_a_gate_says_what_it_saw_by_name() -> None:
    life = OneSlot(Rules(training_epochs=2))
    life.germinate(0)
    epoch(life, 0, gradient=0.5)
    assert life.gate(Stage.BLENDING).split(", ") == [
        "incubated epochs 1 (at least 2) (not enough)",
        "gradient 0.5 (at least 1e-06)",
        "shadow benefit not measured (not enough)",
    ]
    epoch(life, 1, shadow_benefit=Contrast(2.5, 0.1))
    assert life.history[-1].reason == "incubated epochs 2 (at least 2), gradient 0.5 (at least 1e-06), " + (
        "shadow benefit 2.5 (at least 0)"
    )


def test_fossilizing_needs_a_contribution_above_the_limit_that_was_measured() -> None:
    life = held(Rules(contribution=0.5))
    life.slots.columns.contribution.fill_(math.nan)
    assert not life.fossilizable
    with pytest.raises(IllegalTransitionError, match="contribution not measured"):
        life.fossilize(9, "")
    for value, allowed in ((0.5, False), (0.51, True), (math.nan, False)):
        life.measure(contribution=Contrast(value, 0.0))
        assert life.fossilizable == allowed
    life.measure(contribution=Contrast(0.5, 0.0))
    with pytest.raises(IllegalTransitionError, match=r"may not fossilize: contribution \+0.50 \(over 0.5\)"):
        life.fossilize(9, "")


def test_a_new_seed_inherits_nothing_from_the_one_before() -> None:
    life = held()
    life.prune(10, "", at_once=True)
    for number in range(10, 20):
        epoch(life, number)
    assert life.stage is Stage.DORMANT
    assert (life.gradient, life.shadow_benefit, life.contribution) == (None, None, None)
    assert (life.age, life.dwell, life.measured_age) == (0, 0, 0)
    life.germinate(20, blend="gated")
    assert (life.age, life.dwell, life.measured_age, life.alpha, life.seed) == (0, 0, 0, 0.0, 2)


def ramp(blend: str, epochs: int) -> list[float]:
    """Alpha from the first epoch of blending to the first of holding."""
    life = OneSlot(Rules(training_epochs=1, blending_epochs=epochs))
    life.germinate(0, blend=blend)
    alphas = []
    while life.stage is not Stage.HOLDING:
        epoch(life, 0, **GOOD)
        alphas.append(life.alpha)
    return alphas


def test_a_sigmoid_ramp_by_hand() -> None:
    def sigmoid(way: float) -> float:
        return 1.0 / (1.0 + math.exp(-12.0 * (way - 0.5)))

    low = sigmoid(0.0)
    wanted = [(sigmoid(i / 4) - low) / (1.0 - 2.0 * low) for i in (1, 2, 3)]
    assert ramp("sigmoid", 4) == pytest.approx([*wanted, 1.0, 1.0], abs=1e-12)


@pytest.mark.parametrize("blend", BLENDS)
@given(st.integers(1, 40))
def test_a_ramp_rises_to_exactly_1_and_is_symmetric(blend: str, epochs: int) -> None:
    *rising, last, held = ramp(blend, epochs)
    assert (last, held) == (1.0, 1.0)
    assert rising == sorted(rising)
    assert all(0.0 < alpha < 1.0 for alpha in rising)
    assert [a + b for a, b in zip(rising, reversed(rising), strict=True)] == pytest.approx([1.0] * len(rising))


@pytest.mark.parametrize(
    "name", ["training_epochs", "blending_epochs", "prune_age", "ramp_out_epochs", "embargo_epochs"]
)
def test_rules_without_time_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        Rules(**{name: 0})


@pytest.mark.parametrize("source", Stage)
@pytest.mark.parametrize("target", Stage)
def test_only_the_listed_transitions_can_be_entered(source: Stage, target: Stage) -> None:
    """Whoever writes the columns: what the table does not list is refused where changes are noted."""
    life = OneSlot()
    life.slots.stages[0] = source
    life.slots.columns.stage.fill_(int(target))
    if source is target or target in TRANSITIONS[source]:
        assert [t.target for t in life.slots.changes(0, "")] == [] if source is target else [target]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{source.name} may not become {target.name}"):
            life.slots.changes(0, "")


def test_rows_of_several_networks_do_not_touch_each_other() -> None:
    """Networks with other rules and numbers of slots, moved into common columns, go on as they would alone."""
    made = [(1, Rules(training_epochs=1)), (3, Rules(blending_epochs=2)), (2, Rules(embargo_epochs=4))]
    alone = [Slots([f"s{i}" for i in range(count)], rules) for count, rules in made]
    stacked = [Slots([f"s{i}" for i in range(count)], rules) for count, rules in made]
    columns = SlotColumns.together([slots.columns for slots in stacked])
    for i, slots in enumerate(stacked):
        slots.columns = columns.row(i, len(slots.names))
    good = Contrast(1.0, 0.1)
    for number in range(14):
        for one, other in zip(alone, stacked, strict=True):
            for slots in (one, other):
                last = len(slots.names) - 1
                if number in (0, 11) and slots.lives[last].stage is Stage.DORMANT:
                    slots.germinate(last, 0, 1, 5, epoch=number)
                elif number == 6:
                    slots.prune(last, epoch=number)
                slots.begin_epoch(number)
                slots.measure({last: 1.0}, {last: good}, {last: good})
        for slots in alone:
            slots.end_epoch(number)
        columns.end_epoch()
        for one, other in zip(alone, stacked, strict=True):
            other.changes(number)
            assert (other.stages, other.alphas) == (one.stages, one.alphas)
    assert columns.present.sum(1).tolist() == [1, 3, 2]


# -- under random play --------------------------------------------------------------------------------------------

contrasts = st.builds(Contrast, st.floats(-5, 5), st.floats(-1, 1))
few = st.integers(1, 4)


class RandomLife(RuleBasedStateMachine):
    """Any acts and measurements in any order; the invariants hold after each."""

    @initialize(rules=st.builds(Rules, few, st.just(1e-6), st.just(0.0), few, st.just(0.0), few, few, few))
    def begin(self, rules: Rules) -> None:
        self.rules = rules
        self.life = OneSlot(rules)
        self.epoch = 0
        self.stage, self.alpha, self.retiring = Stage.DORMANT, 0.0, False
        self.born = 0
        self.age = self.dwell = 0
        self.pruned_at: int | None = None
        self.retired_at: int | None = None

    def follow(self, transitions: list) -> None:
        """Check each transition against the table, and count dwell on our own."""
        for transition in transitions:
            assert transition.source is self.stage
            assert transition.target in TRANSITIONS[self.stage]
            assert (transition.epoch, transition.seed, transition.slot) == (self.epoch, self.born, "s")
            self.stage, self.dwell = transition.target, 0
            if transition.target is Stage.PRUNED:
                self.pruned_at = self.epoch
        assert self.life.stage is self.stage

    @rule(blend=st.sampled_from(BLENDS))
    def germinate(self, blend: str) -> None:
        if self.stage is not Stage.DORMANT:
            with pytest.raises(IllegalTransitionError):
                self.life.germinate(self.epoch, blend=blend, reason="no")
            return
        if self.pruned_at is not None:  # one epoch PRUNED, the embargo, one epoch RESETTING
            assert self.epoch - self.pruned_at >= self.rules.embargo_epochs + 2
        self.born += 1
        self.age = 0
        self.follow([self.life.germinate(self.epoch, blend=blend, reason="grow")])
        self.alpha = 0.0

    @rule(at_once=st.booleans())
    def prune(self, at_once: bool) -> None:
        live, old, retiring = self.stage in LIVE, self.age >= self.rules.prune_age, self.life.retiring
        assert self.life.prunable == (live and old and not retiring)
        if not live or (not at_once and (not old or retiring)):
            with pytest.raises(IllegalTransitionError):
                self.life.prune(self.epoch, "no", at_once=at_once)
            return
        before = self.life.alpha
        self.follow(self.life.prune(self.epoch, "enough", at_once=at_once))
        assert (self.stage is Stage.PRUNED) == (at_once or before == 0.0)
        if self.stage is Stage.BLENDING:
            assert self.life.alpha < before
            self.dwell, self.retired_at = 0, self.epoch

    @rule()
    def fossilize(self) -> None:
        measured = self.life.contribution
        if self.stage is Stage.HOLDING and measured is not None and measured.accuracy > 0.0:
            assert self.life.fossilizable
            self.follow([self.life.fossilize(self.epoch, "keep")])
        else:
            assert not self.life.fossilizable
            with pytest.raises(IllegalTransitionError):
                self.life.fossilize(self.epoch, "no")

    @rule(gradient=st.none() | st.floats(0, 1), benefit=st.none() | contrasts, worth=st.none() | contrasts)
    def run_an_epoch(self, gradient: float | None, benefit: Contrast | None, worth: Contrast | None) -> None:
        self.follow(self.life.begin_epoch(self.epoch))
        before, stage, retiring = self.life.alpha, self.stage, self.life.retiring
        if stage in LIVE | IN_FORWARD:  # only a seed can be measured
            self.life.measure(gradient=gradient, shadow_benefit=benefit, contribution=worth)
        if stage is not Stage.DORMANT:
            self.age += 1
            self.dwell += 1
        self.follow(self.life.end_epoch(self.epoch))
        self.epoch += 1
        if retiring:
            assert self.life.alpha < before
            assert self.retired_at is not None
            gone = self.epoch - self.retired_at >= self.rules.ramp_out_epochs
            assert (self.stage is Stage.PRUNED) == gone, "a ramp out ends after its epochs, not earlier or later"
        elif stage is Stage.BLENDING:
            assert self.life.alpha >= before
            assert (self.stage is Stage.HOLDING) == (self.dwell == 0)
        elif stage is Stage.TRAINING and self.stage is Stage.BLENDING:
            assert self.life.alpha > 0.0

    @rule(epochs=st.integers(1, 4))
    def run_good_epochs(self, epochs: int) -> None:
        """Chance alone seldom gets a seed far."""
        for _ in range(epochs):
            self.run_an_epoch(1.0, Contrast(1.0, 0.1), Contrast(1.0, 0.1))

    @precondition(lambda self: self.stage is Stage.DORMANT)
    @rule()
    def an_empty_slot_forgets(self) -> None:
        life = self.life
        assert (life.gradient, life.shadow_benefit, life.contribution, life.retiring) == (None, None, None, False)

    @invariant()
    def the_counts_and_alpha_are_right(self) -> None:
        if not hasattr(self, "life"):
            return
        life = self.life
        assert life.dwell == self.dwell
        if self.stage is not Stage.DORMANT:
            assert life.age == self.age
        assert 0.0 <= life.alpha <= 1.0
        assert (life.alpha > 0.0) == (self.stage in IN_FORWARD)
        if self.stage in (Stage.HOLDING, Stage.FOSSILIZED):
            assert life.alpha == 1.0
        assert not life.retiring or self.stage is Stage.BLENDING
        assert 0 <= life.measured_age <= life.age

    @invariant()
    def the_history_is_one_unbroken_story_with_reasons(self) -> None:
        if not hasattr(self, "life"):
            return
        stage = Stage.DORMANT
        for transition in self.life.history:
            assert transition.source is stage
            assert transition.reason
            stage = transition.target
        assert stage is self.life.stage


RandomLife.TestCase.settings = settings(stateful_step_count=40)
TestRandomLife = RandomLife.TestCase
