"""Why a learned controller decided: what it says beside an action must be what its network computed.

Covers: R149
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from esper.actions import BLENDS, HEADS_USED, Action, Op
from esper.agent.actor import PolicyActor
from esper.agent.policies import LearnedController
from esper.agent.reasons import _worth
from esper.agent.shipped import shipped_path
from esper.engine.eager import EagerEngine, EpochRecord
from esper.env.observation import to_tensor
from esper.env.situation import Situation, as_tensors, observe
from esper.lifecycle import Contrast
from esper.policy.distribution import FactoredPolicy
from small_worlds import BUILT_IN, EAGER, learner_for

WORLDS = ("mlp", "conv1d", "gpt", "conv2d")
Played = list[tuple[list[Situation], list[Action]]]


@pytest.fixture(scope="module")
def learned() -> LearnedController:
    return LearnedController.load(shipped_path("small"))


@pytest.fixture(scope="module")
def played(learned: LearnedController) -> Played:
    """Twelve epochs of several hosts at once, and what was decided about them."""
    learners = [learner_for(BUILT_IN[world], rules=EAGER) for world in WORLDS]
    histories: list[list[EpochRecord]] = [[] for _ in learners]
    engine, rounds = EagerEngine(learners), []
    learned.reset(range(len(learners)))
    for _ in range(12):
        seen = [observe(learner, 12, list(past)) for learner, past in zip(learners, histories, strict=True)]
        actions = learned.decide(seen)
        rounds.append((seen, actions))
        for past, record in zip(histories, engine.step(actions), strict=True):
            past.append(record)
    return rounds


def policies(learned: LearnedController, played: Played) -> list[tuple[FactoredPolicy, torch.Tensor]]:
    """The network's own distribution and value at every round, asked again."""
    state, found = learned.network.initial_state(len(WORLDS)), []
    with torch.inference_mode():
        for seen, _ in played:
            observation, masks = as_tensors(seen)
            assert learned.normaliser is not None
            out = learned.network(learned.normaliser(observation), masks, state)
            state = out.state
            found.append((out.policy, out.value))
    return found


def every_action(situation: Situation) -> list[Action]:
    """All legal decisions, one by one."""
    found = [Action()]
    for op, slot in itertools.product(list(Op)[1:], situation.slots):
        if slot.allows(op):
            kinds = itertools.product(sorted(slot.growable), BLENDS) if "blend" in HEADS_USED[op] else [(None, None)]
            found += [Action(op, slot.index, blueprint, blend) for blueprint, blend in kinds]
    return found


def test_probabilities_are_those_of_the_whole_decision(learned: LearnedController, played: Played) -> None:
    """By enumeration: all legal decisions together are certain, and the one taken has the probability that is said."""
    seen_ops = set()
    for (seen, actions), (policy, _) in zip(played, policies(learned, played), strict=True):
        for row, (situation, action) in enumerate(zip(seen, actions, strict=True)):
            options = every_action(situation)
            rows = (one.expand(len(seen), -1) for one in to_tensor(options))
            chances = torch.stack([policy.log_prob(one)[row].sum().exp() for one in rows])
            assert chances.sum().item() == pytest.approx(1.0, abs=1e-4)
            assert action.probability == pytest.approx(chances[options.index(action)].item(), abs=1e-5)
            others = [(c, o) for c, o in zip(chances.tolist(), options, strict=True) if o != action]
            if others and max(others, key=lambda pair: pair[0])[0] > 1e-6:
                assert next_in(action) in words(max(others, key=lambda pair: pair[0])[1], situation, action)
            seen_ops.add(action.op)
    assert {Op.WAIT, Op.GERMINATE} <= seen_ops


def next_in(action: Action) -> str:
    found = re.search(r"\(next: (.+), [^,]+ %\)", action.reason)
    assert found, action.reason
    return found[1]


def words(other: Action, situation: Situation, taken: Action) -> str:
    if other.op is Op.WAIT:
        return "wait"
    assert other.slot is not None
    path = situation.slots[other.slot].path
    if other.op is not Op.GERMINATE:
        return f"{'keep' if other.op is Op.FOSSILIZE else 'prune'} {path}"
    if (other.slot, other.blueprint) == (taken.slot, taken.blueprint):
        return f"the same with a {other.blend} blend"
    return f"{other.blueprint} at {path}"


def test_the_reason_holds_what_was_measured_and_expected(learned: LearnedController, played: Played) -> None:
    acts = 0
    for (seen, actions), (_, values) in zip(played, policies(learned, played), strict=True):
        for situation, action, value in zip(seen, actions, values.tolist(), strict=True):
            if action.op is Op.WAIT:
                continue
            acts += 1
            assert action.slot is not None
            assert learned.value_units is not None
            points = learned.value_units.to_returns(torch.tensor([value])).item()
            assert f"expects {points:+z.1f} points" in action.reason
            slot = situation.slots[action.slot]
            if action.op is Op.GERMINATE and situation.history:
                assert f"accuracy {situation.history[-1].measured.accuracy:.1f} %" in action.reason
            elif slot.contribution is not None:
                worth = slot.contribution
                assert f"contribution {worth.accuracy:+z.1f} ± {worth.error:.1f}" in action.reason
            assert "\n" not in action.reason
    assert acts > 3


def test_the_same_actions_as_without_reasons(learned: LearnedController, played: Played) -> None:
    actor = PolicyActor(learned.network, learned.normaliser)
    actor.reset(range(len(WORLDS)))
    for seen, actions in played:
        observation, masks = as_tensors(seen)
        assert torch.equal(actor.act(seen, observation, masks).action, to_tensor(actions))


def test_without_the_value_units_nothing_is_said_about_points(learned: LearnedController, played: Played) -> None:
    bare = LearnedController(learned.network, learned.normaliser)
    bare.reset(range(len(WORLDS)))
    for seen, actions in played:
        again = bare.decide(seen)
        assert again == actions
        assert all("expects" not in action.reason for action in again)
        assert all(" sure" in action.reason or action.op is Op.WAIT for action in again)


def test_where_nothing_else_is_possible_the_reason_says_so(learned: LearnedController) -> None:
    learner = learner_for(BUILT_IN["mlp"], max_seeds=0)
    learned.reset([0])
    (action,) = learned.decide([observe(learner, 5, [])])
    assert (action.op, action.probability) == (Op.WAIT, pytest.approx(1.0))
    assert action.reason.startswith("nothing else is possible")


@pytest.mark.parametrize(
    ("op", "points", "said"),
    [
        (Op.FOSSILIZE, 9.0, "; its contribution +9.0 ± 0.5 is above its rent of 5.0"),
        (Op.FOSSILIZE, 1.9, "; kept although its contribution +1.9 ± 0.5 is below its rent of 5.0"),
        (Op.PRUNE, 1.9, "; its contribution +1.9 ± 0.5 is below its rent of 5.0"),
        (Op.PRUNE, 5.0, "; its contribution +5.0 ± 0.5 is equal to its rent of 5.0"),
        (Op.PRUNE, 9.0, "; removed although its contribution +9.0 ± 0.5 is above its rent of 5.0"),
    ],
)
def test_a_decision_against_the_figures_is_said_to_be_one(op: Op, points: float, said: str, played: Played) -> None:
    situation = played[0][0][0]
    slot = replace(situation.slots[0], contribution=Contrast(points, 0.0, 0.5), parameters=situation.host_parameters)
    assert _worth(op, slot, replace(situation, rent=5.0)) == said
