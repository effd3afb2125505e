"""Each part of the reward by itself, with numbers worked out by hand."""

import math
from dataclasses import fields

import pytest
import torch
from reward_scenarios import CLASSES, KINDS, Kind, Pretended, plant, play, rewards, scripted
from torch import Tensor

from esper.actions import Action, Op
from esper.engine.epoch import EpochColumns
from esper.env.rent import rent, score
from esper.env.reward import LossScale, Reward, RewardConfig, check_discount
from esper.env.reward.config import TERMS
from esper.env.reward.reward import bounded, claim_ratio
from esper.env.reward.suspicion import Suspicion
from esper.env.world import World
from esper.lifecycle import Stage

CONFIG = RewardConfig()
YES = torch.tensor([True])
NO = torch.tensor([False])


def points(accuracy: float, error: float = 0.0) -> list[float]:
    return [accuracy, accuracy / 10.0, error]


def world(*slots: dict) -> World:
    """One network: a host of 1000, and slots with seeds of 200 parameters, whose rent is 1 point."""
    found = Pretended(slots=len(slots)).world
    for index, columns in enumerate(slots):
        for name, value in ({"size": 200, "seed": index + 1} | columns).items():
            getattr(found.slots, name)[0, index] = torch.tensor(value)
    return found


def reward(state: World, config: RewardConfig = CONFIG, **traces: float) -> Reward:
    """With traces of every seed, as planted at level 50."""
    model = Reward(config, state, [CLASSES])
    model.traced.fill_(True)
    model.level_at_birth.fill_(50.0)
    for name, value in traces.items():
        getattr(model, name).fill_(value)
    return model


def level(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def shown(
    state: World, accuracy: float = 50.0, contribution: list[float] | None = None, **more: Tensor
) -> EpochColumns:
    """An epoch in which nothing was done; `contribution` is that of the first slot."""
    contrasts = torch.full_like(state.slots.contribution, math.nan)
    if contribution is not None:
        contrasts[0, 0] = torch.tensor(contribution, dtype=torch.float64)
    numbers = {f.name: level(math.nan) for f in fields(EpochColumns)}
    zeros = dict.fromkeys(("op", "slot", "blueprint", "blend"), torch.tensor([0]))
    known = {"played": YES, "changed": NO, "accuracy": level(accuracy), "loss": level(1.0), "fault": torch.tensor([-1])}
    slots = {"contribution": contrasts, "alpha": torch.zeros_like(state.slots.alpha), "stage": state.slots.stage}
    return EpochColumns(**(numbers | zeros | known | slots | more))


def charged(
    config: RewardConfig, term: str, op: Op = Op.WAIT, *, changed: bool = True, before: World | None = None
) -> float:
    """What one step costs under this name, for an operation on the first slot."""
    state = before or world({})
    epoch = shown(state, op=torch.tensor([int(op)]), changed=torch.tensor([changed]))
    found = Reward(config, state, [CLASSES]).step(state, state.snapshot(), epoch, NO)
    return -float(found.terms[0, TERMS.index(term)])


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
    price = RewardConfig(action_cost=0.2)
    assert charged(price, "action_cost", op=Op.PRUNE) == pytest.approx(0.2)
    assert charged(price, "action_cost", op=Op.PRUNE, changed=False) == 0.0
    assert charged(price, "action_cost", op=Op.WAIT) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "dense"}, "mode must be one of shaped, simplified, sparse, minimal"),
        ({"signal": "profit"}, "signal must be one of contribution, loss"),
        ({"discount": 1.1}, "discount must lie in"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"ratio_cost": -1.0}, "ratio_cost must be a number of at least 0"),
        ({"action_cost": math.nan}, "action_cost must be a number of at least 0"),
        ({"ratio_threshold": math.nan}, "ratio_threshold must be a number of at least 0"),  # the reward would be NaN
    ],
)
def test_impossible_settings_are_refused_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**change)


# -- the objective -----------------------------------------------------------------------------------------------------


def test_score_is_accuracy_minus_rent():
    assert rent(1500, 1000) == 2.5  # half a host more, at 5 points a host
    assert score(70.0, 1500, 1000) == 67.5
    assert score(70.0, 1500, 1000, 10.0) == 65.0
    assert score(70.0, 1000, 1000) == 70.0


def final(actions: dict) -> float:
    """The score after eight epochs in which the host stands at 50 %."""
    found = rewards(CONFIG, play(scripted(actions), Pretended(host=lambda epoch: 50.0, horizon=8)))[-1].score
    assert found is not None
    return found


def test_the_result_is_the_network_that_was_measured():
    assert final({0: plant("useful")}) == pytest.approx(62.0 - 1.5)  # it acts, so it pays: 300 parameters
    assert final({7: plant("useful")}) == 50.0  # an incubating seed does neither


def test_a_seed_that_leaves_with_the_last_epoch_acted_in_it():
    assert final({0: plant("useful"), 6: Action(Op.PRUNE, 0)}) == pytest.approx(54.0 - 1.5)  # alpha 1/3 of 12


@pytest.mark.parametrize("accuracy", [math.nan, math.inf, -math.inf])
def test_a_network_without_a_finite_accuracy_is_worth_nothing(accuracy: float):
    state = world({"stage": Stage.FOSSILIZED, "alpha": 1.0})
    epoch = shown(state, accuracy, alpha=state.slots.alpha)
    assert reward(state).step(state, state, epoch, YES).score.tolist() == pytest.approx([-1.0])  # its rent


def test_unfinished_seeds_forfeit_what_they_claim():
    kinds = KINDS | {"small": Kind(100, 2.0)}

    def forfeited(config: RewardConfig, actions: dict) -> float:
        story = play(scripted(actions), Pretended(host=lambda epoch: 50.0, horizon=8, kinds=kinds))
        return -rewards(config, story)[-1].terms["unfinished"]

    both = {0: plant("useful"), 1: plant("small", 1)}  # 15 and 2 points claimed
    assert forfeited(CONFIG, both) == pytest.approx(5.0 + 2.0)
    assert forfeited(RewardConfig(claim_limit=0.0), both) == 0.0
    assert forfeited(CONFIG, {0: plant("useful"), 6: Action(Op.FOSSILIZE, 0)}) == 0.0


# -- levels ------------------------------------------------------------------------------------------------------------


def by_loss(scale: LossScale) -> Reward:
    return Reward(RewardConfig(signal="loss", loss_scale=scale), world({}))


def test_any_task_has_a_loss_scale():
    """Covers: R124."""
    model = by_loss(LossScale(baseline=4.0, target=2.0))  # std a tenth of 2
    losses = torch.tensor([4.0, 3.0, 2.0, math.inf, 90.0, -90.0], dtype=torch.float64)
    wanted = [0.0, 50.0, 100.0, -50.0, -50.0, 100.0]  # 5 stds above the baseline are the worst
    assert model._points(torch.zeros_like(losses), losses).tolist() == pytest.approx(wanted)
    assert model.value(torch.tensor([[points(5.0)]], dtype=torch.float64)).tolist() == [[25.0]]
    wider = by_loss(LossScale(4.0, 2.0, std=0.4))
    assert wider._points(level(0.0), level(math.inf)).tolist() == pytest.approx([-100.0])
    ten = by_loss(LossScale.for_classes(10))
    assert ten._points(level(0.0), level(math.log(10) / 2)).tolist() == pytest.approx([50.0])
    with pytest.raises(ValueError, match="must be above the target"):
        LossScale(1.0, 2.0)
    with pytest.raises(ValueError, match="must be finite"):
        LossScale(math.inf)
    with pytest.raises(ValueError, match="must be positive"):
        LossScale(4.0, 2.0, std=0.0)
    with pytest.raises(ValueError, match="at least 2 classes"):
        LossScale.for_classes(1)


def test_each_family_reads_its_own_number():
    loss, accuracy = by_loss(LossScale(4.0, 2.0)), reward(world({}))
    assert accuracy._points(level(61.0), level(3.0)).tolist() == [61.0]
    assert loss._points(level(61.0), level(3.0)).tolist() == [50.0]
    contrast = torch.tensor([[[6.0, 0.5, 0.0], [math.inf, 0.5, 0.0], [math.nan] * 3]], dtype=torch.float64)
    assert accuracy.value(contrast)[0].tolist() == pytest.approx([6.0, math.nan, math.nan], nan_ok=True)
    assert loss.value(contrast)[0].tolist() == pytest.approx([25.0, 25.0, math.nan], nan_ok=True)
    assert accuracy._points(level(math.nan), level(3.0)).isnan().all()
    assert loss._points(level(61.0), level(math.nan)).isnan().all()


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
    state = world({"stage": stage, "dwell": dwell})
    assert reward(state, epochs_held=3.0).progress(state).tolist() == [[pytest.approx(expected)]]


def test_a_seed_on_its_way_out_has_no_progress():
    state = world({"stage": Stage.BLENDING, "retiring": True})
    assert reward(state).progress(state).tolist() == [[0.0]]


def test_a_hasty_fossil_counts_less():
    """Covers: R144."""
    state = world({"stage": Stage.FOSSILIZED})
    shares = [float(reward(state, epochs_held=held).progress(state)) for held in (0, 1, 3, 9)]
    assert shares == pytest.approx([0.6, 0.6 + 0.4 / 3, 1.0, 1.0])
    assert float(reward(state, RewardConfig(legitimacy_epochs=0)).progress(state)) == 1.0
    assert float(reward(state, traced=False).progress(state)) == 1.0


def test_a_contribution_counts_less_when_the_network_got_worse():
    """Covers: R144."""
    state = world({"stage": Stage.HOLDING, "contribution": points(4.0)})
    assert float(reward(state).credit(state, level(55.0))) == -2.0
    lost = -(1.0 - 0.5 * math.exp(-1.0)) * 4.0  # 0.5 a point, for two points lost since it was planted
    assert float(reward(state).credit(state, level(48.0))) == pytest.approx(lost)
    assert float(reward(state, RewardConfig(attribution_steepness=0.0)).credit(state, level(0.0))) == -2.0


@pytest.mark.parametrize(
    ("slot", "trust", "expected"),
    [
        ({"stage": Stage.HOLDING, "contribution": points(4.0)}, 1.0, -2.0),  # half of it is not safe yet
        ({"stage": Stage.HOLDING, "contribution": points(4.0)}, 0.5, -3.0),  # a quarter is believed
        ({"stage": Stage.HOLDING, "contribution": points(-4.0)}, 0.5, 0.0),  # harm is in the level, in full
        ({"stage": Stage.HOLDING, "contribution": points(90.0)}, 1.0, -2.5),  # limited to 5
        ({"stage": Stage.BLENDING, "contribution": points(4.0), "retiring": True}, 1.0, -4.0),  # all of it will go
        ({"stage": Stage.TRAINING, "shadow": points(4.0)}, 0.5, 0.6),  # 0.15 · 4: a promise has no discount
        ({"stage": Stage.TRAINING, "shadow": points(90.0)}, 1.0, 0.75),
        ({"stage": Stage.TRAINING, "shadow": points(-8.0)}, 1.0, 0.0),  # the gate will not let it blend
        ({"stage": Stage.TRAINING}, 1.0, 0.0),
        ({"stage": Stage.FOSSILIZED, "contribution": points(6.0)}, 1.0, 0.0),  # the level has all of it
        ({"stage": Stage.DORMANT}, 1.0, 0.0),
    ],
)
def test_credit_by_hand(slot, trust, expected):
    """Covers: R122, R138, R144."""
    state = world(slot)
    fallen = 50.0 + math.log(trust) / CONFIG.attribution_steepness
    assert float(reward(state).credit(state, level(fallen))) == pytest.approx(expected)


def test_the_potential_of_each_mode_by_hand():
    """Covers: R144."""
    kept, held = {"stage": Stage.FOSSILIZED}, {"stage": Stage.HOLDING, "dwell": 4, "contribution": points(4.0)}
    state = world(kept, held)  # 400 parameters more: rent 2

    def potential(config: RewardConfig) -> list[float]:
        return reward(state, config, epochs_held=3.0).potential(state, level(70.0))[0].tolist()

    assert potential(RewardConfig(progress_weight=2.0)) == pytest.approx([68.0, 2.0 * (1.0 + 0.8), -2.0])
    assert potential(RewardConfig(mode="simplified")) == [68.0, 0.0, 0.0]
    assert potential(RewardConfig(mode="sparse")) == potential(RewardConfig(mode="minimal")) == [0.0] * 3
    assert bounded(level(-440.0)).tolist() == [-100.0]


# -- declared costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        ({"contribution": points(6.0)}, 0.2),  # worth 6 − rent 1 = 5: one cost and one more
        ({"contribution": points(1.5)}, 0.11),
        ({"contribution": points(80.0)}, 0.3),  # never more than three times
        ({"contribution": points(0.5)}, 0.0),  # not worth its rent
        ({"contribution": points(-9.0)}, 0.0),  # removing harm costs nothing, and earns nothing here
        ({"shadow": points(10.0)}, 0.14),  # 0.3 · 10 − 1 = 2
        ({}, 0.0),
    ],
)
def test_pruning_what_pays_its_rent_costs_up_to_three_times_the_base(slot, expected):
    """Covers: R123, R138. Before it acts, a seed is judged by its shadow: 0.3 of it."""
    before = world({"stage": Stage.HOLDING, **slot})
    assert charged(CONFIG, "prune_cost", Op.PRUNE, before=before) == pytest.approx(expected)
    assert charged(CONFIG, "prune_cost", Op.PRUNE, changed=False, before=before) == 0.0
    assert charged(RewardConfig(prune_cost=0.0), "prune_cost", Op.PRUNE, before=before) == 0.0
    assert charged(CONFIG, "prune_cost", Op.FOSSILIZE, before=before) == 0.0


def judged(model: Reward, state: World, contribution: list[float] | None = None) -> dict[str, float]:
    """What one more epoch in this state costs."""
    found = model.step(state, state, shown(state, contribution=contribution), NO)
    return {name: -cost for name, cost in zip(TERMS, found.terms[0].tolist(), strict=True)}


def test_indecision_is_linear_then_capped():
    """Covers: R117."""
    state = world({"stage": Stage.HOLDING})
    model = reward(state)
    charges = []
    for dwell in range(1, 15):
        state.slots.dwell.fill_(dwell)
        charges.append(judged(model, state)["indecision_cost"])
    assert charges == pytest.approx([0.0] * 3 + [0.05] * 6 + [0.0] * 5)
    assert float(model.indecision_charged) == pytest.approx(0.3)
    blending = world({"stage": Stage.BLENDING, "dwell": 9})
    assert judged(reward(blending), blending)["indecision_cost"] == 0.0
    assert judged(reward(state, RewardConfig(indecision_cost=0.0)), state)["indecision_cost"] == 0.0


def test_the_claim_ratio_never_divides_by_zero():
    """Covers: R104, R121."""

    def ratio(contribution: float, improvement: float, threshold: float = 1.0) -> float:
        return float(claim_ratio(level(contribution), level(improvement), threshold))

    assert ratio(8.0, 2.0) == 4.0
    assert ratio(8.0, 0.0) == ratio(8.0, -30.0) == 8.0  # at least 1 point
    assert ratio(0.9, 0.0) == 0.0  # no claim
    for threshold in (0.0, -1.0, 1e-300):
        assert ratio(8.0, 0.0, threshold) == pytest.approx(8e8)


def test_a_seed_pays_once_for_its_worst_claim():
    """Covers: R104, R144."""
    state = world({"stage": Stage.HOLDING})
    model = reward(state)
    costs = [judged(model, state, contribution=points(claim))["ratio_cost"] for claim in (5.0, 8.0, 8.0, 9e9)]
    assert costs == pytest.approx([0.0, 0.18, 0.0, 0.12])  # 0.3 · (8/5 − 1), then up to 0.3 in all
    free = reward(state, RewardConfig(ratio_cost=0.0))
    assert judged(free, state, contribution=points(9e9))["ratio_cost"] == 0.0


# -- suspicions --------------------------------------------------------------------------------------------------------


def test_suspicions_begin_once():
    """Covers: R115, R144."""
    state = world({"stage": Stage.HOLDING})
    model = reward(state)

    def look(contribution: float, improvement: float, error: float = 0.0) -> list[bool]:
        epoch = shown(state, 50.0 + improvement, points(contribution, error))
        return model.step(state, state, epoch, NO).suspicions[0, 0].tolist()

    assert look(4.0, -0.9) == [False, False]
    assert look(4.0, -1.1) == [True, False]  # ransomware
    assert look(4.0, -1.2) == [False, False]  # still the same suspicion
    assert look(4.0, 2.0) == [False, False]
    assert look(6.0, -3.0) == [True, True]  # and reward hacking
    assert look(6.0, -3.0, error=3.1) == [False, False]  # not sure
    assert look(10.0, 2.0) == [False, True]


def test_a_suspicion_names_the_seed():
    """Covers: R115."""
    found = Suspicion("ransomware", 3, 0, "stage0", 7, "useful", 4.0, -1.1)
    assert "without seed 7 (useful) the network loses 4.0 points, but it changed by -1.1" in str(found)
