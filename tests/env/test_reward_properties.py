"""What must hold for every reward of every story: hypothesis invents the stories, spoilt measurements included."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_scenarios import CLASSES, HOST, Kind, Policy, Pretended, Step, discounted, plant, play, rewards

from esper.actions import WAIT, Action, Op
from esper.engine.measure import Evaluation
from esper.env.reward import RewardConfig
from esper.env.reward.config import COST_TERMS as COSTS
from esper.env.reward.config import SHAPING_TERMS, LossScale
from esper.env.reward.reward import INDECISION_CAP, SCORE_LIMIT
from esper.env.situation import Situation
from esper.lifecycle import Contrast, Rules

EXACT = 1e-9
SLOTS = 3
KINDS = {"helps": Kind(250, 9.0, 4.0), "harms": Kind(100, -6.0, 8.0), "large": Kind(9000, 14.0)}
MODES = st.sampled_from(["shaped", "simplified", "sparse", "minimal"])
FAMILIES = st.sampled_from(["contribution", "loss"])
GAMMAS = st.one_of(st.just(1.0), st.floats(0.5, 1.0))


def any_action(random: Random) -> Policy:
    """Acts at random, legally or not."""

    def decide(s: Situation) -> Action:
        op, slot = random.choice(list(Op)), random.randrange(SLOTS)
        if op is Op.GERMINATE:
            return plant(random.choice(list(KINDS)), slot)
        return WAIT if op is Op.WAIT else Action(op, slot)

    return decide


def spoiler(random: Random, *, noise: float, trouble: float) -> object:
    """Noise on every number; now and then one that is missing, not a number, or infinite."""

    def number(value: float) -> float:
        if random.random() < trouble:
            return random.choice([math.nan, math.inf, -math.inf, 0.0])
        return value + random.gauss(0.0, noise)

    def contrasts(found: dict[int, Contrast]) -> dict[int, Contrast]:
        kept = {i: c for i, c in found.items() if random.random() >= trouble}
        return {i: Contrast(number(c.accuracy), number(c.loss), abs(c.error)) for i, c in kept.items()}

    return lambda e: Evaluation(
        number(e.loss), number(e.accuracy), contrasts(e.contributions), contrasts(e.shadow_benefits)
    )


@st.composite
def stories(draw: st.DrawFn, trouble: float = 0.15) -> list[Step]:
    random = Random(draw(st.integers(0, 2**32)))
    world = Pretended(
        slots=SLOTS,
        kinds=KINDS,
        horizon=draw(st.integers(1, 30)),
        rules=Rules(shadow_benefit=-100.0),
        spoil=spoiler(random, noise=draw(st.sampled_from([0.0, 3.0, 30.0])), trouble=trouble),
    )
    return play(any_action(random), world)


def shaping(steps: list) -> list[float]:
    return [math.fsum(step.terms[name] for name in SHAPING_TERMS) for step in steps]


def initial_potential(config: RewardConfig, story: list[Step]) -> float:
    """Φ of the initial situation: the first measurement of a network that is only a host."""
    if config.mode in ("sparse", "minimal"):
        return 0.0
    measured = story[0].record.measured
    level = measured.accuracy
    if config.signal == "loss":
        scale = LossScale.for_classes(CLASSES)
        counted = max(0.0, min(scale.worst, measured.loss))
        level = math.nan if math.isnan(measured.loss) else 100.0 * (1.0 - counted / scale.baseline)
    return bounded(level if math.isfinite(level) else 0.0)


def bounded(points: float) -> float:
    return max(-SCORE_LIMIT, min(SCORE_LIMIT, points))


@given(stories(), MODES, FAMILIES, GAMMAS)
def test_terms_sum_to_the_total_and_everything_is_finite(story, mode, family, gamma):
    """Covers: R148."""
    for step in rewards(RewardConfig(mode=mode, signal=family, discount=gamma), story):
        assert step.total == sum(step.terms.values())
        assert all(math.isfinite(term) for term in step.terms.values())
        assert 0.0 <= step.shaping_share <= 1.0


@given(stories(), MODES, FAMILIES, GAMMAS)
def test_shaping_telescopes_exactly(story, mode, family, gamma):
    """Covers: R114, R148. Discounted by its own gamma (1 included), all shaping sums to −Φ of the beginning."""
    config = RewardConfig(mode=mode, signal=family, discount=gamma)
    assert abs(discounted(shaping(rewards(config, story)), gamma) + initial_potential(config, story)) <= EXACT


@given(stories(), FAMILIES, GAMMAS)
def test_every_beginning_of_an_episode_telescopes_too(story, family, gamma):
    """Covers: R114, R148. Cut anywhere, the sum is γᵗΦ(there) − Φ(beginning): nothing else was paid on the way."""
    config = RewardConfig(signal=family, discount=gamma)
    steps = rewards(config, story)
    for length in range(1, len(steps) + 1):
        expected = gamma**length * steps[length - 1].potential - initial_potential(config, story)
        assert abs(discounted(shaping(steps[:length]), gamma) - expected) <= EXACT


@given(st.integers(), st.integers(), MODES, FAMILIES, GAMMAS)
def test_the_sum_of_shaping_does_not_depend_on_the_path(first, second, mode, family, gamma):
    """Covers: R114, R148. Two policies in the same world are shaped by the same amount, whatever they did."""
    config = RewardConfig(mode=mode, signal=family, discount=gamma)
    sums = []
    for seed in (first, second):
        story = play(any_action(Random(seed)), Pretended(slots=SLOTS, kinds=KINDS, rules=Rules(shadow_benefit=-100.0)))
        sums.append(discounted(shaping(rewards(config, story)), gamma))
    assert abs(sums[0] - sums[1]) <= EXACT


@given(stories(), MODES, FAMILIES)
def test_the_return_is_the_objective_minus_costs(story, mode, family):
    """Covers: R144, R148. Undiscounted: final score − first level − what was declared; no other income exists."""
    config = RewardConfig(mode=mode, signal=family, discount=1.0)
    steps = rewards(config, story)
    charged = math.fsum(step.terms[name] for step in steps for name in COSTS)
    expected = bounded(steps[-1].score) - initial_potential(config, story) + charged
    assert abs(math.fsum(step.total for step in steps) - expected) <= EXACT


@given(stories(), MODES, FAMILIES)
def test_costs_never_pay_and_are_bounded_per_seed(story, mode, family):
    """Covers: R117, R123, R144, R148."""
    config = RewardConfig(mode=mode, signal=family)
    steps = rewards(config, story)
    acted = sum(step.record.effect.changed for step in story)
    seeds = sum(step.record.effect.changed and step.record.effect.action.op is Op.GERMINATE for step in story)
    totals = {name: math.fsum(step.terms[name] for step in steps) for name in COSTS}
    assert all(step.terms[name] <= 0.0 for step in steps for name in COSTS)
    assert totals["action_cost"] >= -config.action_cost * acted - EXACT
    assert all(step.terms["prune_cost"] >= -3.0 * config.prune_cost - EXACT for step in steps)
    assert totals["indecision_cost"] >= -INDECISION_CAP * config.indecision_cost * seeds - EXACT
    assert totals["ratio_cost"] >= -config.ratio_cost * seeds - EXACT
    assert totals["unfinished"] >= -config.claim_limit * SLOTS - EXACT


@given(stories(), MODES, FAMILIES, GAMMAS)
def test_rewards_are_bounded(story, mode, family, gamma):
    """Covers: R148."""
    config = RewardConfig(mode=mode, signal=family, discount=gamma)
    most = SCORE_LIMIT + SLOTS * (config.progress_weight + config.claim_limit)
    costs = config.action_cost + 3.0 * config.prune_cost
    costs += SLOTS * (config.indecision_cost + config.ratio_cost + config.claim_limit)
    for step in rewards(config, story):
        assert abs(step.potential) <= most + EXACT
        assert abs(step.total) <= 2.0 * most + SCORE_LIMIT + costs + EXACT


@given(stories(), MODES, FAMILIES, st.floats(1e-3, 1e3))
def test_the_scale_is_linear(story, mode, family, scale):
    """Covers: R116, R148."""
    config = RewardConfig(mode=mode, signal=family)
    for plain, scaled in zip(rewards(config, story), rewards(replace(config, scale=scale), story), strict=True):
        assert scaled.terms == {name: pytest.approx(scale * term, rel=1e-12) for name, term in plain.terms.items()}
        assert scaled.events == plain.events


@given(stories(), FAMILIES)
def test_suspicions_name_seeds_that_exist(story, family):
    """Covers: R115, R148."""
    born = {
        (transition.seed, transition.slot)
        for step in story
        for transition in step.record.transitions
        if transition.target.name == "GERMINATED"
    }
    for step in rewards(RewardConfig(signal=family), story):
        assert all((seed, f"stage{slot}") in born for _, slot, seed in step.events)


@given(st.integers(0, 2**32), MODES, FAMILIES)
def test_a_host_that_never_changes_earns_only_its_costs(seed, mode, family):
    """Covers: R144, R148. Seeds that do nothing, in a host that stands still: acting can only lose."""
    idle = {name: Kind(100, 0.0) for name in KINDS}
    world = Pretended(slots=SLOTS, kinds=idle, host=lambda epoch: 50.0)
    waiting = Pretended(slots=SLOTS, kinds=idle, host=lambda epoch: 50.0)
    config = RewardConfig(mode=mode, signal=family, discount=1.0)
    acted = math.fsum(step.total for step in rewards(config, play(any_action(Random(seed)), world)))
    waited = math.fsum(step.total for step in rewards(config, play(lambda s: WAIT, waiting)))
    assert acted <= waited + EXACT
    assert waiting.situation().parameters == HOST
