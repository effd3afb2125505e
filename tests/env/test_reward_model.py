"""The reward of whole stories, step by step, with numbers worked out by hand; and what the model refuses."""

import math
from dataclasses import replace

import pytest
import torch
from reward_scenarios import CLASSES, HOST, Kind, Paid, Pretended, Step, pay, plant, play, reward_of, rewards, scripted

from esper.actions import WAIT, Action, Op
from esper.engine.governor import Fault, Verdict
from esper.engine.measure import Evaluation
from esper.env.epoch_records import epoch_columns
from esper.env.growth_env import GrowthEnv
from esper.env.reward import TERMS, LossScale, Reward, RewardConfig
from esper.env.reward.config import COST_TERMS
from esper.env.reward.reward import shaping_share
from esper.env.world import World
from esper.lifecycle import Rules
from esper.tasks.family import get_family
from small_worlds import BUILT_IN, EAGER, germinate, learner_for, run_epoch

KEEP, REMOVE = Action(Op.FOSSILIZE, 0), Action(Op.PRUNE, 0)


def world(**changes) -> Pretended:
    """A host that stands at 50 %, and a seed that adds 6 points for 200 parameters: rent 1. Up to 5 points are a claim.

    Planted in epoch 1 it trains in 1 and 2, blends in 3, 4, 5 (52, 54, 56 %) and holds from the end of 5 on.
    """
    settings = {"host": lambda epoch: 50.0, "kinds": {"seed": Kind(200, 6.0)}, "slots": 1, "horizon": 8}
    return Pretended(**(settings | changes))


GROWN = play(scripted({1: plant("seed"), 6: KEEP}), world())


def of(term: str, steps: list[Paid]) -> list[float]:
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
    by_loss = rewards(RewardConfig(signal="loss", discount=1.0), GROWN)
    by_accuracy = rewards(RewardConfig(discount=1.0), GROWN)
    assert [s.total for s in by_loss] == pytest.approx([s.total for s in by_accuracy])
    scale = LossScale(baseline=math.log(CLASSES), target=math.log(CLASSES) / 4)
    totals = [
        s.total for s in rewards(RewardConfig(mode="simplified", signal="loss", discount=1.0, loss_scale=scale), GROWN)
    ]
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
    events = [(kind, epoch, slot, seed) for epoch, step in enumerate(steps) for kind, slot, seed in step.events]
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
        found = [kind for step in rewards(RewardConfig(mode=mode), story) for kind, _, _ in step.events]
        assert found == ["ransomware", "reward_hacking"]


def broken(step: Step, measured: Evaluation, end: Step | None = None) -> Step:
    """The step as it is when the governor undoes it; `end` has the columns of the restored network."""
    record = replace(step.record, verdict=Verdict(Fault.DIVERGENCE, 9.0, 3.0, ""), measured=measured)
    return replace(step, record=record, terminal=True, end=(end or step).end)


@pytest.mark.parametrize("mode", ["shaped", "simplified", "sparse", "minimal"])
def test_a_broken_run_ends_with_the_penalty(mode):
    model = reward_of(RewardConfig(mode=mode, discount=1.0, scale=2.0), GROWN[0])
    for step in GROWN[:3]:
        pay(model, step)
    end = pay(model, broken(GROWN[3], Evaluation(math.nan, math.nan)))
    assert end.terms["governor"] == -20.0
    assert end.score == pytest.approx(-1.0)  # a network without a finite accuracy, and a seed that costs its rent
    assert math.isfinite(end.total)


def test_a_rolled_back_run_is_worth_the_restored_network_minus_the_penalty():
    end = pay(reward_of(RewardConfig(mode="sparse"), GROWN[4]), broken(GROWN[4], Evaluation(1.0, 48.0), end=GROWN[0]))
    assert end.total == 38.0  # no rent and nothing forfeited: the seed is gone


def test_terms_are_the_same_names_in_every_mode():
    for mode in ("shaped", "simplified", "sparse", "minimal"):
        assert all(tuple(step.terms) == TERMS for step in rewards(RewardConfig(mode=mode), GROWN))


def share_of(**terms: float) -> float:
    return float(shaping_share(torch.tensor([terms.get(name, 0.0) for name in TERMS], dtype=torch.float64)))


def test_shaping_share_is_defined_when_nothing_is_paid():
    """Covers: R121."""
    assert share_of() == 0.0
    assert share_of(score_shaping=1e-9, objective=-1e-9) == 0.0
    assert share_of(score_shaping=-3.0, credit_shaping=1.0, objective=4.0) == 0.5


def test_an_episode_that_is_over_is_paid_nothing_more():
    model = reward_of(RewardConfig(), GROWN[0])
    pay(model, GROWN[0], terminal=True)
    assert set(pay(model, GROWN[1]).terms.values()) == {0.0}


def test_a_loss_signal_without_a_scale_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="needs a loss_scale, or tasks with classes"):
        Reward(RewardConfig(signal="loss"), GROWN[0].start)


def test_rows_are_paid_as_if_they_were_alone():
    """Three stories side by side, one of which ends early: every row gets what it gets alone, and then nothing."""
    stories = [GROWN, play(scripted({1: plant("seed"), 6: REMOVE}), world()), play(scripted({}), world(horizon=5))]
    config = RewardConfig()
    alone = [[paid.total for paid in rewards(config, story)] for story in stories]

    def joined(worlds: list[World]) -> World:
        return World.together(worlds)

    model = Reward(config, joined([story[0].start for story in stories]), [CLASSES] * 3)
    for t in range(8):
        rows = [story[min(t, len(story) - 1)] for story in stories]
        acted = torch.tensor([t < len(story) for story in stories])
        after = joined([row.end for row in rows])
        records = [row.record if on else None for row, on in zip(rows, acted.tolist(), strict=True)]
        ended = acted & torch.tensor([row.terminal for row in rows])
        found = model.step(joined([row.start for row in rows]), after, epoch_columns(records, after.slots), ended)
        wanted = [story[t] if t < len(story) else 0.0 for story in alone]
        assert found.total.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv1d", "gpt"])
def test_no_action_reaches_the_first_measurement(name):
    """Real learners. On this rests that the first level may stand for the initial situation (R114)."""
    first = {}
    for action in (None, germinate(0, "norm"), germinate(1, "norm", "gated")):
        record = run_epoch(learner_for(BUILT_IN[name], rules=EAGER), action)
        first[action] = (record.measured.loss, record.measured.accuracy)
    assert len(set(first.values())) == 1


def test_real_networks_are_rewarded():
    """Undiscounted, an episode of real networks is paid its score less its first level and what it was charged."""
    env = GrowthEnv(get_family("digits"), 2, reward=RewardConfig(discount=1.0))
    env.reset([0, 1])
    totals, terms, first, scores = torch.zeros(2), torch.zeros(2, len(TERMS)), None, [0.0, 0.0]
    while not env.over:
        planted = [germinate(0, "mlp") if s.epoch == 0 else WAIT for s in env.situations]
        step = env.step(planted)
        totals, terms = totals + step.reward, terms + step.facts.reward.terms
        first = first or [info.record.measured.accuracy for info in step.infos]
        for row, info in enumerate(step.infos):
            if info is not None and info.reward.score is not None:
                scores[row] = info.reward.score
    charged = terms[:, [TERMS.index(name) for name in COST_TERMS]].sum(1)
    wanted = [score - start + cost for score, start, cost in zip(scores, first, charged.tolist(), strict=True)]
    assert totals.tolist() == pytest.approx(wanted, abs=1e-3)
