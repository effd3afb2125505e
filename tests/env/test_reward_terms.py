"""Each part of the reward by itself, with numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
from reward_scenarios import HOST, KINDS, Kind, World, plant, play, scripted, sensible

from esper.actions import Action, Effect, Op
from esper.engine.governor import Fault, Verdict
from esper.engine.measure import Evaluation
from esper.env.reward import (
    LossScale,
    Result,
    RewardConfig,
    check_discount,
    final_result,
    rent,
    score,
)
from esper.env.reward.costs import action_cost, claim_ratio, indecision_cost, prune_cost, ratio_cost, unfinished_cost
from esper.env.reward.detectors import detect
from esper.env.reward.level import Meter
from esper.env.reward.objective import bounded
from esper.env.reward.shaping import credit, discount, legitimacy, potential, progress
from esper.env.reward.traces import SeedTrace
from esper.lifecycle import Contrast, Stage

POINTS = Meter("contribution")
CONFIG = RewardConfig()


def view(**changes):
    """A slot with a seed of 200 parameters in a host of 1000: its rent is 1 point."""
    return replace(World().situation().slots[0], parameters=200, blueprint="useful", **changes)


def situation(*slots):
    """These slots, with a network that is as large as they say."""
    slots = tuple(replace(slot, index=i) for i, slot in enumerate(slots))
    return replace(World().situation(), slots=slots, parameters=HOST + sum(slot.parameters for slot in slots))


def points(accuracy, error=0.0):
    return Contrast(accuracy, accuracy / 10.0, error)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_the_rewards_discount_must_be_the_agents():
    """Covers: R103."""
    check_discount(RewardConfig(discount=0.99), 0.99)
    with pytest.raises(ValueError, match=r"discount 0\.99 but the agent discounts with 0\.995"):
        check_discount(RewardConfig(discount=0.99), 0.995)


def test_the_default_discount_is_the_agents_default():
    """Covers: R103."""
    from esper.agent.config import PPOConfig

    check_discount(RewardConfig(), PPOConfig().discount)


def test_the_proxy_weight_follows_the_contribution_weight():
    """Covers: R122."""
    assert RewardConfig(contribution_weight=0.5).proxy_weight == 0.15
    assert RewardConfig(contribution_weight=1.0).proxy_weight == 0.3
    assert RewardConfig(contribution_weight=0.0).proxy_weight == 0.0


def test_intervention_costs_have_one_source():
    """Covers: R125."""
    costs = RewardConfig(action_cost=0.2).action_costs
    assert costs == {Op.WAIT: 0.0, Op.GERMINATE: 0.2, Op.PRUNE: 0.2, Op.FOSSILIZE: 0.2}
    done = Effect(Action(Op.PRUNE, 0), True, "")
    assert action_cost(RewardConfig(action_cost=0.2), done) == 0.2
    assert action_cost(RewardConfig(action_cost=0.2), replace(done, changed=False)) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "dense"}, "mode must be one of shaped, simplified, sparse, minimal"),
        ({"family": "profit"}, "family must be one of contribution, loss"),
        ({"discount": 1.1}, "discount must lie in"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"ratio_cost": -1.0}, "ratio_cost must be a number of at least 0"),
        ({"rent_rate": math.nan}, "rent_rate must be a number of at least 0"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**change)


# -- the objective -----------------------------------------------------------------------------------------------------


def test_score_is_accuracy_minus_rent():
    assert rent(1500, 1000) == 2.5  # half a host more, at 5 points a host
    assert score(70.0, 1500, 1000) == 67.5
    assert score(70.0, 1500, 1000, rent_rate=10.0) == 65.0
    assert score(70.0, 1000, 1000) == 70.0


def last_step(actions):
    """The last of eight epochs in which the host stands at 50 %."""
    return play(scripted(actions), World(host=lambda epoch: 50.0, horizon=8))[-1]


def test_the_result_is_the_network_that_was_measured():
    held = last_step({0: plant("useful")})
    assert final_result(held.before, held.record, held.after) == Result(62.0, HOST + 300)  # it acts, so it pays
    incubating = last_step({7: plant("useful")})
    assert final_result(incubating.before, incubating.record, incubating.after) == Result(50.0, HOST)  # it does neither


def test_a_seed_that_leaves_with_the_last_epoch_acted_in_it():
    leaving = last_step({0: plant("useful"), 6: Action(Op.PRUNE, 0)})
    assert leaving.after.slots[0].stage is Stage.PRUNED
    assert final_result(leaving.before, leaving.record, leaving.after) == Result(54.0, HOST + 300)  # alpha 1/3 of 12


def test_what_was_tidied_up_and_measured_again_counts():
    held, empty = last_step({0: plant("useful")}), World().situation()
    assert final_result(held.before, held.record, empty, Evaluation(1.0, 47.0)) == Result(47.0, HOST)


def test_after_a_rollback_the_restored_network_counts():
    held, empty = last_step({0: plant("useful")}), World().situation()
    verdict = Verdict(Fault.DIVERGENCE, 9.0, 3.0, "")
    undone = replace(held.record, verdict=verdict, measured=Evaluation(1.0, 49.0))
    assert final_result(held.before, undone, empty) == Result(49.0, HOST)


def test_a_network_without_a_finite_accuracy_is_worth_nothing():
    last = play(sensible("useful"))[-1]
    broken = replace(last.record, measured=Evaluation(math.nan, math.nan))
    assert final_result(last.before, broken, last.after).accuracy == 0.0
    assert final_result(last.before, broken, last.after, Evaluation(math.nan, math.inf)).accuracy == 0.0


def test_unfinished_seeds_forfeit_what_they_claim():
    world = World(host=lambda epoch: 50.0, horizon=8, kinds=KINDS | {"small": Kind(100, 2.0)})
    last = play(scripted({0: plant("useful"), 1: plant("small", 1)}), world)[-1]  # 15 and 2 points claimed
    assert unfinished_cost(CONFIG, last.record, last.after) == pytest.approx(5.0 + 2.0)
    assert unfinished_cost(RewardConfig(claim_limit=0.0), last.record, last.after) == 0.0
    kept = play(sensible("useful"))[-1]
    assert unfinished_cost(CONFIG, kept.record, kept.after) == 0.0


# -- levels ------------------------------------------------------------------------------------------------------------


def test_any_task_has_a_loss_scale():
    """Covers: R124."""
    scale = LossScale.of(baseline=4.0, target=2.0)  # std a tenth of 2
    assert scale == LossScale(4.0, 2.0, 0.2)
    assert scale.level(4.0) == 0.0
    assert scale.level(3.0) == 50.0
    assert scale.level(2.0) == 100.0
    assert scale.saved(0.5) == 25.0
    assert scale.level(math.inf) == scale.level(90.0) == pytest.approx(-50.0)  # 5 stds above the baseline
    assert scale.level(-90.0) == 100.0
    assert LossScale.for_classes(10).level(math.log(10) / 2) == pytest.approx(50.0)
    with pytest.raises(ValueError, match="must be above the target"):
        LossScale.of(1.0, 2.0)
    with pytest.raises(ValueError, match="at least 2 classes"):
        LossScale.for_classes(1)


def test_the_loss_family_needs_a_scale():
    with pytest.raises(ValueError, match="needs a LossScale"):
        Meter("loss")


def test_each_family_reads_its_own_number():
    by_loss = Meter("loss", LossScale.of(4.0, 2.0))
    assert POINTS.level(Evaluation(3.0, 61.0)) == 61.0
    assert by_loss.level(Evaluation(3.0, 61.0)) == 50.0
    assert POINTS.value(Contrast(6.0, 0.5)) == 6.0
    assert by_loss.value(Contrast(6.0, 0.5)) == 25.0
    assert POINTS.level(Evaluation(3.0, math.nan)) is None
    assert by_loss.level(Evaluation(math.nan, 61.0)) is None
    assert POINTS.value(None) is None
    assert POINTS.value(Contrast(math.inf, 0.0)) is None


def test_a_seed_at_alpha_0_is_judged_by_its_shadow():
    """Covers: R122, R138."""
    assert POINTS.worth(view(stage=Stage.TRAINING, shadow_benefit=points(8.0))) == pytest.approx(2.4)  # 0.3 · 8
    assert POINTS.worth(view(stage=Stage.TRAINING, shadow_benefit=points(-8.0))) == 0.0
    assert POINTS.worth(view(stage=Stage.TRAINING)) == 0.0  # nothing measured, nothing claimed
    assert POINTS.worth(view(stage=Stage.HOLDING, shadow_benefit=points(8.0), contribution=points(5.0))) == 5.0


# -- potentials --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "dwell", "expected"),
    [
        (Stage.DORMANT, 0, 0.0),
        (Stage.GERMINATED, 0, 0.1),
        (Stage.TRAINING, 0, 0.2),
        (Stage.TRAINING, 2, 0.25),  # half of the counted dwell, half of the way to 0.4 is counted: 0.2 + 0.5·0.2·0.5
        (Stage.TRAINING, 40, 0.3),
        (Stage.BLENDING, 4, 0.5),
        (Stage.HOLDING, 1, 0.65),  # 0.6 + 0.5·0.4·0.25
        (Stage.FOSSILIZED, 9, 1.0),
        (Stage.PRUNED, 1, 0.0),
        (Stage.EMBARGOED, 1, 0.0),
    ],
)
def test_progress_is_the_stage_and_its_real_dwell(stage, dwell, expected):
    """Covers: R114."""
    assert progress(view(stage=stage, dwell=dwell)) == pytest.approx(expected)


def test_a_seed_on_its_way_out_has_no_progress():
    assert progress(view(stage=Stage.BLENDING, retiring=True)) == 0.0


def test_a_hasty_fossil_is_believed_less():
    """Covers: R144."""
    watched = [legitimacy(CONFIG, SeedTrace(1, 50.0, epochs_held=held)) for held in (0, 1, 3, 9)]
    assert watched == [0.0, pytest.approx(1 / 3), 1.0, 1.0]
    assert progress(view(stage=Stage.FOSSILIZED), 1 / 3) == pytest.approx(0.6 + 0.4 / 3)
    assert legitimacy(RewardConfig(legitimacy_epochs=0), SeedTrace(1, 50.0)) == 1.0


def test_a_contribution_is_believed_less_when_the_network_got_worse():
    """Covers: R144."""
    trace = SeedTrace(1, level_at_birth=50.0)
    assert discount(CONFIG, trace, 55.0) == 1.0
    assert discount(CONFIG, trace, 48.0) == pytest.approx(math.exp(-1.0))  # 0.5 a point
    assert discount(RewardConfig(attribution_steepness=0.0), trace, 0.0) == 1.0


@pytest.mark.parametrize(
    ("slot", "discounted", "expected"),
    [
        ({"stage": Stage.HOLDING, "contribution": points(4.0)}, 1.0, -2.0),  # half of it is not safe yet
        ({"stage": Stage.HOLDING, "contribution": points(4.0)}, 0.5, -3.0),  # a quarter is believed
        ({"stage": Stage.HOLDING, "contribution": points(-4.0)}, 0.5, 0.0),  # harm is in the level, in full
        ({"stage": Stage.HOLDING, "contribution": points(90.0)}, 1.0, -2.5),  # limited to 5
        ({"stage": Stage.BLENDING, "contribution": points(4.0), "retiring": True}, 1.0, -4.0),  # all of it will go
        ({"stage": Stage.TRAINING, "shadow_benefit": points(4.0)}, 0.5, 0.6),  # 0.15 · 4: a promise has no discount
        ({"stage": Stage.TRAINING, "shadow_benefit": points(90.0)}, 1.0, 0.75),
        ({"stage": Stage.TRAINING, "shadow_benefit": points(-8.0)}, 1.0, 0.0),  # the gate will not let it blend
        ({"stage": Stage.TRAINING}, 1.0, 0.0),
        ({"stage": Stage.FOSSILIZED, "contribution": points(6.0)}, 1.0, 0.0),  # the level has all of it
        ({"stage": Stage.DORMANT}, 1.0, 0.0),
    ],
)
def test_credit_by_hand(slot, discounted, expected):
    """Covers: R122, R138, R144."""
    assert credit(CONFIG, POINTS, view(**slot), discounted) == pytest.approx(expected)


def test_the_potential_of_each_mode_by_hand():
    """Covers: R144."""
    state = situation(
        view(stage=Stage.FOSSILIZED), view(stage=Stage.HOLDING, dwell=4, contribution=points(4.0))
    )  # 400 parameters more: rent 2
    traces = {0: SeedTrace(1, 50.0, epochs_held=3), 1: SeedTrace(2, 60.0)}
    shaped = potential(RewardConfig(progress_weight=2.0), POINTS, state, 70.0, traces)
    assert shaped.score == 68.0
    assert shaped.progress == pytest.approx(2.0 * (1.0 + 0.8))
    assert shaped.credit == -2.0
    assert shaped.total == pytest.approx(68.0 + 3.6 - 2.0)
    assert potential(RewardConfig(mode="simplified"), POINTS, state, 70.0, traces).total == 68.0
    assert potential(RewardConfig(mode="sparse"), POINTS, state, 70.0, traces).total == 0.0
    assert potential(RewardConfig(mode="minimal"), POINTS, state, 70.0, traces).total == 0.0
    assert bounded(-440.0) == -100.0


# -- declared costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        ({"contribution": points(6.0)}, 0.2),  # worth 6 − rent 1 = 5: one cost and one more
        ({"contribution": points(1.5)}, 0.11),
        ({"contribution": points(80.0)}, 0.3),  # never more than three times
        ({"contribution": points(0.5)}, 0.0),  # not worth its rent
        ({"contribution": points(-9.0)}, 0.0),  # removing harm costs nothing, and earns nothing here
        ({"shadow_benefit": points(10.0)}, 0.14),  # 0.3 · 10 − 1 = 2
        ({}, 0.0),
    ],
)
def test_pruning_what_pays_its_rent_costs_up_to_three_times_the_base(slot, expected):
    """Covers: R123, R138."""
    before = situation(view(stage=Stage.HOLDING, **slot))
    done = Effect(Action(Op.PRUNE, 0), True, "")
    assert prune_cost(CONFIG, POINTS, before, done) == pytest.approx(expected)
    assert prune_cost(CONFIG, POINTS, before, replace(done, changed=False)) == 0.0
    assert prune_cost(RewardConfig(prune_cost=0.0), POINTS, before, done) == 0.0
    assert prune_cost(CONFIG, POINTS, before, Effect(Action(Op.FOSSILIZE, 0), True, "")) == 0.0


def test_indecision_is_linear_then_capped():
    """Covers: R117."""
    trace = SeedTrace(1, 50.0)
    charges = [indecision_cost(CONFIG, view(stage=Stage.HOLDING, dwell=dwell), trace) for dwell in range(1, 15)]
    assert charges == pytest.approx([0.0] * 3 + [0.05] * 6 + [0.0] * 5)
    assert trace.indecision_charged == pytest.approx(0.3)
    assert indecision_cost(CONFIG, view(stage=Stage.BLENDING, dwell=9), SeedTrace(1, 50.0)) == 0.0
    assert indecision_cost(RewardConfig(indecision_cost=0.0), view(stage=Stage.HOLDING, dwell=9), trace) == 0.0


def test_the_claim_ratio_never_divides_by_zero():
    """Covers: R104, R121."""
    assert claim_ratio(CONFIG, 8.0, 2.0) == 4.0
    assert claim_ratio(CONFIG, 8.0, 0.0) == claim_ratio(CONFIG, 8.0, -30.0) == 8.0  # at least 1 point
    assert claim_ratio(CONFIG, 0.9, 0.0) == 0.0  # no claim
    for threshold in (0.0, -1.0, 1e-300):
        assert claim_ratio(RewardConfig(ratio_threshold=threshold), 8.0, 0.0) == pytest.approx(8e8)


def test_a_seed_pays_once_for_its_worst_claim():
    """Covers: R104, R144."""
    trace = SeedTrace(1, 50.0)
    assert ratio_cost(CONFIG, 5.0, trace) == 0.0
    assert ratio_cost(CONFIG, 8.0, trace) == pytest.approx(0.18)  # 0.3 · (8/5 − 1)
    assert ratio_cost(CONFIG, 8.0, trace) == 0.0
    assert ratio_cost(CONFIG, 9e9, trace) == pytest.approx(0.12)  # up to 0.3 in all
    assert ratio_cost(RewardConfig(ratio_cost=0.0), 9e9, SeedTrace(2, 50.0)) == 0.0


# -- detectors ---------------------------------------------------------------------------------------------------------


def test_detectors_name_the_seed_and_speak_once():
    """Covers: R115, R144."""
    trace, slot = SeedTrace(7, 50.0), view(stage=Stage.HOLDING)

    def look(contribution, improvement, *, sure=True):
        ratio = claim_ratio(CONFIG, contribution, improvement)
        return detect(3, slot, trace, contribution, improvement, ratio, sure=sure)

    assert look(4.0, -0.9) == []
    (found,) = look(4.0, -1.1)
    assert (found.kind, found.epoch, found.slot, found.path) == ("ransomware", 3, 0, "stage0")
    assert (found.seed, found.blueprint) == (7, "useful")
    assert "without seed 7 (useful) the network loses 4.0 points, but it changed by -1.1" in str(found)
    assert look(4.0, -1.2) == []  # still the same suspicion
    assert look(4.0, 2.0) == []
    assert [finding.kind for finding in look(6.0, -3.0)] == ["ransomware", "reward_hacking"]
    assert look(6.0, -3.0, sure=False) == []
    assert [finding.kind for finding in look(10.0, 2.0)] == ["reward_hacking"]
