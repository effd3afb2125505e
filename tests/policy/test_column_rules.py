"""Rules over columns decide as plain rules over records do, with the same reasons; random play is legal and uniform.

Covers: R149
"""

from __future__ import annotations

import random

import pytest
import torch
from pinned_replay import Replay, pinned
from reference_rules import PlainHeuristic, PlainSchedule
from torch import Tensor

from esper.actions import BLENDS, Op
from esper.agent.policies import LearnedController
from esper.agent.shipped import shipped_path
from esper.env.growth_env import GrowthEnv
from esper.env.observation import encode, to_tensor
from esper.env.situation import Situation, Situations, world_of
from esper.env.spaces import ActionMasks
from esper.growth.blueprints import blueprint_names
from esper.policy.controller import RandomLegal, RuleController
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import FixedSchedule, Planting, default_schedule
from esper.tasks.mixed import Mixed
from esper.training.catalogue import make_controller

EAGER_SETTINGS = HeuristicSettings(first_epoch=0, plateau_gain=200.0, plateau_epochs=1, late_margin=0, patience=1)
SETTINGS = [
    HeuristicSettings(),
    EAGER_SETTINGS,
    HeuristicSettings(harm=0.0, keep_above=-3.0, patience=2, plateau_gain=50.0, rotation=("norm", "mlp", "conv")),
    HeuristicSettings(plateau_epochs=4, late_margin=3, first_epoch=6, keep_above=2.0, plateau_gain=8.0),
]
PLANS = [
    default_schedule().plantings,
    (
        Planting(3, "*", {"dense": "mlp", "conv1d": "conv"}, "gated"),
        Planting(0, 1, dict.fromkeys(("dense", "conv1d", "conv2d", "sequence"), "norm"), "sigmoid"),
        Planting(5, "stages.0", {"conv2d": "depthwise", "conv1d": "depthwise", "dense": "lora"}),
        Planting(0, 9, {"dense": "mlp"}),
    ),
    (),
]


def situation_of(replay: Replay) -> Situation:
    return Situations(replay.world, [replay.model], [replay.history])[0]  # type: ignore[list-item]


def pairs() -> list[tuple[RuleController, PlainHeuristic | PlainSchedule]]:
    """The same rule in both forms."""
    heuristics = [(Heuristic(one), PlainHeuristic(one)) for one in SETTINGS]
    return [*heuristics, *((FixedSchedule("plan", plan), PlainSchedule(plan)) for plan in PLANS)]


@pytest.mark.parametrize("index", range(20))
def test_rules_over_columns_decide_as_the_plain_rules_on_recorded_episodes(index: int) -> None:
    replay, rules = Replay(pinned()["episodes"][index]), pairs()
    for rule, _ in rules:
        rule.reset([0])
    for t in range(len(replay.e["action"])):
        situation = situation_of(replay)
        for rule, plain in rules:
            wanted, (found,) = plain(situation), rule.decide([situation])
            assert found == wanted
            assert found.reason == wanted.reason
        replay.step(t)


def test_networks_of_other_sizes_are_decided_as_if_they_were_alone() -> None:
    replays = [Replay(pinned()["episodes"][index]) for index in range(20)]
    rules = [(rule, [pairs()[i][0] for _ in replays]) for i, (rule, _) in enumerate(pairs())]
    for rule, alone in rules:
        rule.reset(range(20))
        for one in alone:
            one.reset([0])
    for t in range(min(len(replay.e["action"]) for replay in replays)):
        situations = [situation_of(replay) for replay in replays]
        for rule, alone in rules:
            assert rule.decide(situations) == [a.decide([s])[0] for a, s in zip(alone, situations, strict=True)]
        for replay in replays:
            replay.step(t)


def test_rules_over_columns_decide_as_the_plain_rules_in_live_play_of_mixed() -> None:
    """One network follows the heuristic, the other the schedule; both are asked about all, by both forms."""
    env, rows = GrowthEnv(Mixed(kinds=["vector channel @0", "series motif @0"]), 2), range(2)
    observation, masks = env.reset(list(rows))
    heuristic, plan = Heuristic(SETTINGS[2]), default_schedule()
    rules: list[tuple[RuleController, list[PlainHeuristic] | list[PlainSchedule]]] = [
        (heuristic, [PlainHeuristic(SETTINGS[2]) for _ in rows]),
        (plan, [PlainSchedule(plan.plantings) for _ in rows]),
    ]
    for rule, _ in rules:
        rule.reset(rows)
    done: set[int] = set()
    while not env.over:
        decided = []
        for rule, plains in rules:
            action = rule.act(env.world, observation, masks)
            wanted = [plain(situation) for plain, situation in zip(plains, env.situations, strict=True)]
            assert action.tolist() == to_tensor(wanted).tolist()
            decided.append(action)
        action = torch.where(torch.tensor([[True], [False]]), *decided)
        done |= set(action[:, 3].tolist())
        step = env.step(action)
        observation, masks = step.observation, step.masks
    assert {Op.WAIT, Op.GERMINATE, Op.FOSSILIZE} <= done


def test_the_decisions_of_an_earlier_step_are_refused() -> None:
    replay = Replay(pinned()["episodes"][0])
    situation, rule = situation_of(replay), Heuristic()
    rule.reset([0])
    replay.step(0)
    with pytest.raises(RuntimeError, match="of an earlier step"):
        rule.decide([situation])


# -- random play -------------------------------------------------------------------------------------------------------


def legal(action: Tensor, masks: ActionMasks) -> bool:
    slot, blueprint, blend, op = action.unbind(-1)
    row = torch.arange(len(action))
    grows = masks.blueprint[row, slot, blueprint] & masks.blend[row, slot, blend]
    return bool((masks.op[row, op] & ((op == 0) | masks.slot[row, op, slot]) & ((op != Op.GERMINATE) | grows)).all())


def test_random_play_is_legal_uniform_and_the_same_for_the_same_seeds() -> None:
    """30,000 copies of one network, in which a seed can be pruned and others can be planted."""
    replay = Replay(pinned()["episodes"][0])
    t = 0
    while not (situation_of(replay).slots_for(Op.PRUNE) and situation_of(replay).slots_for(Op.GERMINATE)):
        replay.step(t)
        t += 1
    copies = 30_000
    world, _ = world_of([situation_of(replay)])
    world = world.select(torch.zeros(copies, dtype=torch.int64))
    observation, masks = encode(world)
    rule = RandomLegal()
    rule.reset(range(copies))
    action, more = rule.act(world, observation, masks), rule.act(world, observation, masks)
    assert legal(action, masks)
    assert not action.equal(more)
    rule.reset(range(copies))
    assert action.equal(rule.act(world, observation, masks))
    rule.reset(range(1, copies + 1))
    assert not action.equal(rule.act(world, observation, masks))

    def check(column: Tensor, choices: int) -> None:
        shares = column.unique(return_counts=True)[1] / len(column)
        assert len(shares) == choices
        assert float((shares - 1 / choices).abs().max()) < 5 * (0.25 / len(column)) ** 0.5

    check(action[:, 3], int(masks.op[0].sum()))
    planted = action[action[:, 3] == Op.GERMINATE]
    check(planted[:, 0], int(masks.slot[0, Op.GERMINATE].sum()))
    check(planted[:, 2], len(BLENDS))
    slot = int(planted[0, 0])
    check(planted[planted[:, 0] == slot, 1], int(masks.blueprint[0, slot].sum()))


# -- learned policies --------------------------------------------------------------------------------------------------


def test_a_learned_policy_acts_as_it_decides() -> None:
    env = GrowthEnv(Mixed(), 5)
    observation, masks = env.reset(range(5))
    acting, deciding = (make_controller("small") for _ in range(2))
    for controller in (acting, deciding):
        controller.reset(range(5))
    rng = random.Random(0)
    for _ in range(4):
        decided = deciding.decide(env.situations)
        assert acting.act(env.world, observation, masks).tolist() == to_tensor(decided).tolist()
        step = env.step([RandomLegal.rule(situation, rng) for situation in env.situations])
        observation, masks = step.observation, step.masks


def test_a_learned_policy_asks_to_be_reset() -> None:
    learned = LearnedController.load(shipped_path("small"))
    world, _ = world_of([situation_of(Replay(pinned()["episodes"][0]))])
    with pytest.raises(RuntimeError, match="reset the controller"):
        learned.act(world, *encode(world))
    assert len(blueprint_names()) == world.costs.shape[-1]
