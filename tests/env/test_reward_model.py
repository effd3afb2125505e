"""The reward of whole stories, step by step, with numbers worked out by hand; and what the model refuses."""

import math
from dataclasses import replace

import pytest
from reward_scenarios import CLASSES, HOST, Kind, World, plant, play, rewards, scripted

from esper.actions import Action, Op
from esper.engine.governor import Fault, Verdict
from esper.engine.measure import Evaluation
from esper.env.reward import TERMS, LossScale, RewardConfig, RewardModel, RewardStep, score
from esper.env.reward.model import COST_TERMS
from esper.env.reward.objective import bounded
from esper.env.situation import Situation, observe
from esper.lifecycle import Rules, Stage
from small_worlds import BUILT_IN, EAGER, germinate, learner_for, run_epoch

KEEP, REMOVE = Action(Op.FOSSILIZE, 0), Action(Op.PRUNE, 0)


def world(**changes) -> World:
    """A host that stands at 50 %, and a seed that adds 6 points for 200 parameters: rent 1. Up to 5 points are a claim.

    Planted in epoch 1 it trains in 1 and 2, blends in 3, 4, 5 (52, 54, 56 %) and holds from the end of 5 on.
    """
    settings = {"host": lambda epoch: 50.0, "kinds": {"seed": Kind(200, 6.0)}, "slots": 1, "horizon": 8}
    return World(**(settings | changes))


GROWN = play(scripted({1: plant("seed"), 6: KEEP}), world())


def of(term: str, steps: list[RewardStep]) -> list[float]:
    return [step.terms[term] for step in steps]


def test_the_story_is_as_told():
    assert [step.record.measured.accuracy for step in GROWN] == pytest.approx([50, 50, 50, 52, 54, 56, 56, 56])
    assert [step.after.slots[0].stage.name for step in GROWN] == (
        ["DORMANT", "TRAINING", "BLENDING", "BLENDING", "BLENDING", "HOLDING", "FOSSILIZED", "FOSSILIZED"]
    )


def test_simplified_pays_the_change_of_score():
    """Covers: R144."""
    steps = rewards(RewardConfig(mode="simplified", discount=1.0), GROWN)
    # Φ: 50 | 50 49 49 51 53 55 55 0, objective 56 − 1
    assert of("score_shaping", steps) == pytest.approx([0, -1, 0, 2, 2, 2, 0, -55])
    assert of("objective", steps) == pytest.approx([0] * 7 + [55])
    assert of("action_cost", steps) == pytest.approx([0, -0.05, 0, 0, 0, 0, -0.05, 0])
    assert [step.total for step in steps] == pytest.approx([0, -1.05, 0, 2, 2, 2, -0.05, 0])
    assert [step.potential for step in steps] == pytest.approx([50, 49, 49, 51, 53, 55, 55, 0])
    assert [step.score for step in steps] == [None] * 7 + [pytest.approx(55.0)]


def test_simplified_discounts_with_gamma():
    """Covers: R103, R114."""
    steps = rewards(RewardConfig(mode="simplified", discount=0.9), GROWN)
    # γΦ(s′) − Φ(s): 45 − 50, 44.1 − 50, 44.1 − 49, 45.9 − 49, 47.7 − 51, 49.5 − 53, 49.5 − 55, 0 − 55
    assert of("score_shaping", steps) == pytest.approx([-5, -5.9, -4.9, -3.1, -3.3, -3.5, -5.5, -55])


def test_shaped_adds_progress_and_credit():
    """Covers: R114, R122, R138, R144."""
    steps = rewards(RewardConfig(mode="shaped", discount=1.0), GROWN)
    # Progress: TRAINING after 1 epoch 0.225; BLENDING after 0, 1, 2: 0.4, 0.425, 0.45; HOLDING 0.6; kept at once 0.6
    assert of("progress_shaping", steps) == pytest.approx([0, 0.225, 0.175, 0.025, 0.025, 0.15, 0, -0.6])
    # Credit: shadow 0.15 · 5 = 0.75 twice; then −half of the claims 2, 4, 5; nothing once it is kept
    assert of("credit_shaping", steps) == pytest.approx([0, 0.75, 0, -1.75, -1, -0.5, 2.5, 0])
    assert of("score_shaping", steps) == pytest.approx([0, -1, 0, 2, 2, 2, 0, -55])
    # Planted at 50, it claims 2, 4, 6 where 2, 4, 6 were gained: no ratio to pay for
    assert of("ratio_cost", steps) == of("indecision_cost", steps) == of("prune_cost", steps) == [0.0] * 8
    assert sum(step.total for step in steps) == pytest.approx(55 - 50 - 0.1)


def test_sparse_and_minimal_speak_at_the_end():
    sparse, minimal = (rewards(RewardConfig(mode=mode, discount=1.0), GROWN) for mode in ("sparse", "minimal"))
    assert [step.total for step in sparse] == pytest.approx([0] * 7 + [55])
    assert [step.total for step in minimal] == pytest.approx([0, -0.05, 0, 0, 0, 0, -0.05, 55])


def test_sparse_is_clamped_and_then_scaled():
    """Covers: R116."""
    huge = play(scripted({0: plant("seed"), 6: KEEP}), world(kinds={"seed": Kind(50 * HOST, 6.0)}))
    for scale in (0.1, 1.0, 3.0):
        last = rewards(RewardConfig(mode="sparse", scale=scale), huge)[-1]
        assert last.terms["objective"] == pytest.approx(-100.0 * scale)  # 56 − 250, clamped
        assert last.score == pytest.approx(56.0 - 250.0)


def test_the_loss_family_looks_at_the_loss():
    """Covers: R124. The pretended loss says the same as the accuracy on its own scale, so the shaping is the same."""
    by_loss = rewards(RewardConfig(family="loss", discount=1.0), GROWN)
    by_accuracy = rewards(RewardConfig(discount=1.0), GROWN)
    assert [s.total for s in by_loss] == pytest.approx([s.total for s in by_accuracy])
    model = RewardModel(RewardConfig(mode="simplified", family="loss", discount=1.0))
    model.reset(HOST, LossScale.of(baseline=math.log(CLASSES), target=math.log(CLASSES) / 4))
    totals = [model.step(s.before, s.record, s.after, terminal=s.terminal).total for s in GROWN]
    assert totals[3:6] == pytest.approx([2.0 / 0.75] * 3)  # three quarters of the way are 100 points


@pytest.mark.parametrize("mode", ["shaped", "simplified", "sparse", "minimal"])
def test_a_seed_that_nobody_decided_on_forfeits_its_claim(mode):
    steps = rewards(RewardConfig(mode=mode, discount=1.0), play(scripted({1: plant("seed")}), world()))
    assert steps[-1].score == pytest.approx(55.0)  # the network is as good as if it had been kept
    assert of("unfinished", steps) == pytest.approx([0] * 7 + [-5])


def test_a_seed_that_is_held_for_ever_pays_up_to_the_cap():
    """Covers: R117."""
    steps = rewards(RewardConfig(), play(scripted({1: plant("seed")}), world(horizon=25)))
    assert of("indecision_cost", steps) == pytest.approx([0] * 9 + [-0.05] * 6 + [0] * 10)


def test_pruning_what_pays_costs_and_its_potential_goes():
    """Covers: R123."""
    steps = rewards(RewardConfig(discount=1.0), play(scripted({1: plant("seed"), 6: REMOVE}), world(horizon=12)))
    assert of("prune_cost", steps) == pytest.approx([0] * 6 + [-0.2] + [0] * 5)  # worth 6 − 1: twice the base
    # Ramped out in 6 and 7 (alpha 2/3, 1/3: 54 and 52 %), gone at the end of 7: Φ 55 | 53 52 50 …
    assert of("score_shaping", steps)[6:9] == pytest.approx([-2, -1, -2])
    # Held: −2.5; on its way out nothing is believed, of claims of 4: −4; gone: 0
    assert of("credit_shaping", steps)[6:9] == pytest.approx([-1.5, 4, 0])
    assert steps[-1].score == pytest.approx(50.0)


def test_what_was_asked_for_does_not_matter():
    """A refused action is paid like waiting."""
    config = RewardConfig(discount=1.0)
    refused = play(scripted({1: plant("seed"), 2: KEEP, 3: REMOVE, 4: plant("seed"), 6: KEEP}), world())
    assert not any(refused[t].record.effect.changed for t in (2, 3, 4))
    assert [s.terms for s in rewards(config, refused)] == [s.terms for s in rewards(config, GROWN)]


def test_a_ransom_is_found_and_not_believed():
    """Covers: R115, R144."""
    kinds = {"seed": Kind(200, gain=-4.0, dependence=12.0)}  # harms by 4, and the host comes to rely on it for 12
    taken = world(kinds=kinds, rules=Rules(shadow_benefit=-100.0))
    steps = rewards(RewardConfig(discount=1.0), play(scripted({1: plant("seed")}), taken))
    # Epoch 3: alpha 1/3, contribution 8/3, network −4/3: suspicious. Epoch 4: contribution 16/3 of 1: a claim, too.
    events = [(event.kind, event.epoch, event.slot, event.seed) for step in steps for event in step.events]
    assert events == [("ransomware", 3, 0, 1), ("reward_hacking", 4, 0, 1)]
    # Ratios 16/3 and 8 over the limit of 5: 0.3 · 1/15, then 0.3 · 3/5 in all
    assert of("ratio_cost", steps)[4:6] == pytest.approx([-0.02, -0.16])
    # Credit in epoch 5: 5 of the 8 points are a claim, 4 were lost: half · e^−2 believed
    assert sum(of("credit_shaping", steps)[:6]) == pytest.approx(-(1 - 0.5 * math.exp(-2.0)) * 5.0)


def test_detectors_run_in_every_mode():
    """Covers: R115."""
    kinds = {"seed": Kind(200, gain=-4.0, dependence=12.0)}
    for mode in ("shaped", "simplified", "sparse", "minimal"):
        story = play(scripted({1: plant("seed")}), world(kinds=kinds, rules=Rules(shadow_benefit=-100.0)))
        found = [event.kind for step in rewards(RewardConfig(mode=mode), story) for event in step.events]
        assert found == ["ransomware", "reward_hacking"]


@pytest.mark.parametrize("mode", ["shaped", "simplified", "sparse", "minimal"])
def test_a_broken_run_ends_with_the_penalty(mode):
    config = RewardConfig(mode=mode, discount=1.0, scale=2.0)
    model = RewardModel(config)
    model.reset(HOST)
    for step in GROWN[:3]:
        model.step(step.before, step.record, step.after, terminal=False)
    step = GROWN[3]
    broken = replace(step.record, measured=Evaluation(math.nan, math.nan))
    end = model.step(step.before, broken, step.after, terminal=True, governor_penalty=config.governor_penalty)
    assert end.terms["governor"] == -20.0
    assert end.score == pytest.approx(-1.0)  # knows nothing, and the seed that acts costs its rent
    assert math.isfinite(end.total)


def test_a_rolled_back_run_is_worth_the_restored_network_minus_the_penalty():
    model, step = RewardModel(RewardConfig(mode="sparse")), GROWN[4]
    for kept in (None, Evaluation(1.0, 48.0)):
        model.reset(HOST)
        undone = replace(step.record, verdict=Verdict(Fault.DIVERGENCE, 9.0, 3.0, ""), measured=Evaluation(1.0, 48.0))
        end = model.step(step.before, undone, GROWN[0].after, terminal=True, governor_penalty=10.0, kept=kept)
        assert end.total == 38.0  # no rent and nothing forfeited: the seed is gone


def test_whoever_tidies_up_first_forfeits_nothing_more():
    """Unfinished seeds were removed and the network measured without them: that loss is in the score already."""
    steps, model = play(scripted({1: plant("seed")}), world()), RewardModel(RewardConfig(mode="sparse"))
    model.reset(HOST)
    for step in steps[:-1]:
        model.step(step.before, step.record, step.after, terminal=False)
    last = steps[-1]
    end = model.step(last.before, last.record, GROWN[0].after, terminal=True, kept=Evaluation(1.0, 50.0))
    assert (end.total, end.terms["unfinished"]) == (50.0, 0.0)


def test_terms_are_the_same_names_in_every_mode():
    for mode in ("shaped", "simplified", "sparse", "minimal"):
        assert all(tuple(step.terms) == TERMS for step in rewards(RewardConfig(mode=mode), GROWN))


def test_shaping_share_is_defined_when_nothing_is_paid():
    """Covers: R121."""
    terms = dict.fromkeys(TERMS, 0.0)
    assert RewardStep(terms, (), 0.0, None).shaping_share == 0.0
    assert RewardStep(terms | {"score_shaping": 1e-9, "objective": -1e-9}, (), 0.0, None).shaping_share == 0.0
    mixed = RewardStep(terms | {"score_shaping": -3.0, "credit_shaping": 1.0, "objective": 4.0}, (), 0.0, None)
    assert mixed.shaping_share == 0.5


def test_misuse_is_refused_with_the_reason():
    model, first = RewardModel(RewardConfig()), GROWN[0]

    def step(index: int, before: Situation | None = None, **options: object) -> RewardStep:
        told = GROWN[index]
        return model.step(before or told.before, told.record, told.after, terminal=False, **options)

    with pytest.raises(RuntimeError, match="call reset first"):
        step(0)
    with pytest.raises(ValueError, match="at least 1 parameter"):
        model.reset(0)
    model.reset(HOST)
    with pytest.raises(ValueError, match="another host"):
        step(0, replace(first.before, host_parameters=7))
    with pytest.raises(ValueError, match="finite amount"):
        step(0, governor_penalty=-1.0)
    step(0)
    with pytest.raises(ValueError, match="led to epoch 1, but this one starts from epoch 3"):
        step(3)
    model.step(GROWN[1].before, GROWN[1].record, GROWN[1].after, terminal=True)
    with pytest.raises(RuntimeError, match="call reset first"):
        step(2)
    with pytest.raises(ValueError, match="needs a LossScale"):
        RewardModel(RewardConfig(family="loss")).reset(HOST)


@pytest.mark.parametrize("name", ["mlp", "conv1d", "gpt"])
def test_no_action_reaches_the_first_measurement(name):
    """Real learners. On this rests that the first level may stand for the initial situation (R114)."""
    first = {}
    for action in (None, germinate(0, "norm"), germinate(1, "norm", "gated")):
        record = run_epoch(learner_for(BUILT_IN[name], rules=EAGER), action)
        first[action] = (record.measured.loss, record.measured.accuracy)
    assert len(set(first.values())) == 1


def test_a_real_learner_is_rewarded():
    """The records that the engine makes have all that the reward reads."""
    learner, horizon, model = learner_for(BUILT_IN["conv1d"], rules=EAGER), 8, RewardModel(RewardConfig(discount=1.0))
    model.reset(learner.model.host_parameters)
    history, steps = [], []
    for epoch in range(horizon):
        before = observe(learner, horizon, tuple(history))
        history.append(run_epoch(learner, germinate(0, "conv") if epoch == 0 else None))
        after = observe(learner, horizon, tuple(history))
        steps.append(model.step(before, history[-1], after, terminal=epoch == horizon - 1))
    grown = learner.model.parameter_count
    assert after.slots[0].stage is Stage.HOLDING
    assert steps[-1].score == score(history[-1].measured.accuracy, grown, learner.model.host_parameters)
    charged = sum(sum(step.terms[name] for name in COST_TERMS) for step in steps)
    first = history[0].measured.accuracy
    assert sum(step.total for step in steps) == pytest.approx(bounded(steps[-1].score) - first + charged, abs=1e-9)


def test_reset_forgets_the_last_episode():
    model, config = RewardModel(RewardConfig()), RewardConfig()
    for _ in range(2):
        model.reset(HOST)
        totals = [model.step(s.before, s.record, s.after, terminal=s.terminal).total for s in GROWN]
        assert totals == [step.total for step in rewards(config, GROWN)]
    assert GROWN[-1].after.slots[0].stage is Stage.FOSSILIZED
