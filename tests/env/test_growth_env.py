"""GrowthEnv as a decision process: determinism, independence, ends, observations, masks, exploits, the governor's mark.

Covers: R016, R031, R071, R109, R115, R138, R146, R149, R157
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from esper.actions import BLENDS, WAIT, Action, Op
from esper.engine import prepare
from esper.engine.learner import Learner
from esper.env.growth_env import GrowthEnv
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SCHEMA_VERSION, SLOT_FIELDS, decode, to_tensor
from esper.env.reward import RewardConfig
from esper.env.situation import Situation, as_tensors, observe
from esper.env.steps import EnvStep
from esper.growth.attach import survey
from esper.growth.blueprints import blueprint_names
from esper.growth.model import Survey
from esper.lifecycle import Rules, Stage
from esper.policy.controller import RandomLegal
from esper.tasks.family import Draw, TaskFamily

FAMILY = TaskFamily("digits", horizon=8)
QUICK = Rules(training_epochs=1, blending_epochs=1, prune_age=1, ramp_out_epochs=1, embargo_epochs=1)

Policy = Callable[[Situation], Action]


def play(env: GrowthEnv, policy: Policy, numbers: Sequence[int]) -> list[EnvStep]:
    env.reset(numbers)
    steps = []
    while not env.over:
        steps.append(env.step([policy(situation) for situation in env.situations]))
    return steps


def at_random(seed: int) -> Policy:
    rng, rule = random.Random(seed), RandomLegal()
    return lambda situation: rule.rule(situation, rng)


def rewards(steps: list[EnvStep]) -> torch.Tensor:
    return torch.stack([step.reward for step in steps], 1)  # [N, T]


def test_the_same_number_and_actions_give_the_same_episode_whoever_else_is_there() -> None:
    alone = GrowthEnv(FAMILY, 1, rules=QUICK)
    together = GrowthEnv(FAMILY, 3, rules=QUICK)
    single = play(alone, at_random(5), [7])
    shared = at_random(5)
    others = at_random(99)
    together.reset([3, 7, 11])
    many = []
    while not together.over:
        s = together.situations
        many.append(together.step([others(s[0]), shared(s[1]), others(s[2])]))
    assert torch.equal(rewards(single)[0], rewards(many)[1])
    for a, b in zip(single, many, strict=True):
        assert torch.equal(a.observation.overall[0], b.observation.overall[1])
        assert torch.equal(a.observation.slots[0], b.observation.slots[1])
    for a, b in zip(alone.learners[0].model.parameters(), together.learners[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sixteen_environments_give_what_sixteen_single_ones_give() -> None:
    family = TaskFamily("digits", horizon=4)
    numbers = range(16)
    policies = [at_random(number) for number in numbers]
    together = GrowthEnv(family, 16, rules=QUICK)
    together.reset(numbers)
    steps = []
    while not together.over:
        steps.append(together.step([p(s) for p, s in zip(policies, together.situations, strict=True)]))
    tested = together.evaluate_test()
    for number in numbers:
        alone = GrowthEnv(family, 1, rules=QUICK)
        single = play(alone, at_random(number), [number])
        assert torch.equal(rewards(single)[0], rewards(steps)[number])
        assert alone.evaluate_test() == [tested[number]]


def test_fixed_addresses_change_no_number() -> None:
    """The graph engine in an environment, two episodes one after the other; on a CPU nothing is captured."""
    eager, fixed = GrowthEnv(FAMILY, 2, rules=QUICK), GrowthEnv(FAMILY, 2, rules=QUICK, graphs=True)
    for numbers in ([7, 8], [9, 10]):
        expected, seen = (play(env, at_random(3), numbers) for env in (eager, fixed))
        torch.testing.assert_close(rewards(seen), rewards(expected), rtol=1e-4, atol=1e-4)
        for a, b in zip(expected, seen, strict=True):
            torch.testing.assert_close(b.observation.slots, a.observation.slots, rtol=1e-4, atol=1e-4)
    assert fixed.captures > 0
    assert eager.captures == 0


def test_at_a_reset_the_old_networks_are_gone_before_new_ones_are_made() -> None:
    """On a GPU both together might not fit."""
    alive: list[int] = []

    class Watched(TaskFamily):
        def draw(self, number: int, *, held_out: bool = False) -> Draw:
            alive.append(sum(old() is not None for old in watched))
            return super().draw(number, held_out=held_out)

    watched: list[weakref.ref[Learner]] = []
    env = GrowthEnv(Watched("digits", horizon=3), 2, rules=QUICK, graphs=True)
    play(env, at_random(3), [7, 8])
    watched = [weakref.ref(learner) for learner in env.learners]
    env.reset([9, 10])
    assert len(alive) == 4
    assert alive[2:] == [0, 0]


def test_networks_of_one_task_are_surveyed_once_in_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def counted(host: nn.Module, *rest: Any, **settings: Any) -> Survey:
        looked_at.append(id(host))
        return survey(host, *rest, **settings)

    monkeypatch.setattr(prepare, "survey", counted)
    env = GrowthEnv(TaskFamily("digits", horizon=2, data_seeds=2), 5)
    env.reset(range(5))  # two data sets, so two tasks
    assert len(looked_at) == 2
    assert len({learner.model.host for learner in env.learners}) == 5
    assert len({id(slot.module) for learner in env.learners for slot in learner.model.slots}) == 5 * len(
        env.learners[0].model.slots
    )
    env.reset(range(5))
    assert len(looked_at) == 4


def test_observations_are_bounded_and_masks_are_exactly_what_is_possible() -> None:
    env = GrowthEnv(FAMILY, 2, rules=QUICK)
    policy = at_random(1)
    observation, masks = env.reset([0, 1])
    while True:
        for part in (observation.overall, observation.slots, observation.costs):
            assert bool(((part >= NOT_MEASURED) & (part <= 1.0)).all())
        for i, situation in enumerate(env.situations):
            for op in Op:
                for slot in situation.slots:
                    possible = not env.over and situation.slots[slot.index].allows(op)
                    assert bool(masks.slot[i, op, slot.index]) is possible
            for j, name in enumerate(blueprint_names()):
                for slot in situation.slots:
                    assert bool(masks.blueprint[i, slot.index, j]) is (not env.over and name in slot.growable)
        assert bool(masks.op[:, Op.WAIT].all())
        if env.over:
            break
        step = env.step([policy(situation) for situation in env.situations])
        observation, masks = step.observation, step.masks


@pytest.mark.parametrize("max_seeds", [None, 1])
def test_columns_that_follow_an_episode_are_what_a_fresh_look_finds(max_seeds: int | None) -> None:
    """Side by side and carried along, or alone and made anew from the history: the same views, the same tensors."""
    env = GrowthEnv(TaskFamily("digits", horizon=12, max_seeds=max_seeds), 2, rules=QUICK)
    policy = at_random(4)
    env.reset([0, 1])
    while not env.over:
        step = env.step([policy(situation) for situation in env.situations])
        fresh = [observe(one, s.horizon, s.history) for one, s in zip(env.learners, env.situations, strict=True)]
        assert list(env.situations) == fresh
        for seen, expected in zip((step.observation, step.masks), as_tensors(fresh), strict=True):
            for field in fields(expected):
                assert torch.equal(getattr(seen, field.name), getattr(expected, field.name)), field.name


def test_situations_are_read_before_the_next_step() -> None:
    env = GrowthEnv(FAMILY, 1)
    env.reset([0])
    old = env.situations
    env.step([WAIT])
    with pytest.raises(RuntimeError, match="of an earlier step"):
        old[0]


def test_what_was_not_measured_is_the_sentinel_and_never_zero() -> None:
    env = GrowthEnv(FAMILY, 1)
    observation, _ = env.reset([0])
    fields = dict(zip(OVERALL_FIELDS, observation.overall[0].tolist(), strict=True))
    assert fields["val_accuracy_0_ago"] == fields["train_loss"] == NOT_MEASURED
    slot = dict(zip(SLOT_FIELDS, observation.slots[0, 0].tolist(), strict=True))
    assert slot["contribution_points"] == slot["shadow_points"] == slot["gradient"] == NOT_MEASURED


def test_the_layout_is_pinned() -> None:
    """Trained policies depend on it: whoever changes the fields must raise SCHEMA_VERSION, and then these numbers."""
    assert (SCHEMA_VERSION, len(OVERALL_FIELDS), len(SLOT_FIELDS)) == (2, 30, 32)


def test_a_tensor_of_actions_means_what_its_records_mean() -> None:
    actions = [WAIT, Action(Op.GERMINATE, 1, "mlp", BLENDS[2]), Action(Op.PRUNE, 0), Action(Op.FOSSILIZE, 2)]
    assert decode(to_tensor(actions)) == actions


def test_networks_with_fewer_slots_are_padded() -> None:
    env = GrowthEnv(FAMILY, 1, slots=5)
    observation, masks = env.reset([0])
    assert observation.present[0].tolist() == [True, True, False, False, False]
    assert not bool(masks.slot[0, :, 2:].any())


def test_an_episode_ends_at_its_horizon_and_then_says_so() -> None:
    env = GrowthEnv(FAMILY, 1, rules=QUICK)
    steps = play(env, lambda situation: WAIT, [0])
    assert len(steps) == FAMILY.horizon
    assert [bool(step.terminated[0]) for step in steps] == [False] * (FAMILY.horizon - 1) + [True]
    after = env.step([WAIT])
    assert not bool(after.acted[0])
    assert after.infos == (None,)
    assert float(after.reward[0]) == 0.0


def test_the_network_at_the_end_is_the_one_that_was_measured() -> None:
    env = GrowthEnv(FAMILY, 1, rules=QUICK)
    play(env, at_random(3), [2])
    learner = env.learners[0]
    last = env.situations[0].history[-1]
    from esper.engine.measure import gather

    again = gather([learner.evaluate()])[0]
    assert again.accuracy == last.measured.accuracy


def test_reset_and_step_refuse_the_wrong_count() -> None:
    env = GrowthEnv(FAMILY, 2)
    with pytest.raises(RuntimeError, match="reset before step"):
        env.step([WAIT, WAIT])
    with pytest.raises(ValueError, match="2 networks"):
        env.reset([1])
    with pytest.raises(ValueError, match="at least one"):
        GrowthEnv(FAMILY, 0)


# -- the governor's mark on the process ----------------------------------------------------------------------------


def break_weights(learner: Learner) -> None:
    with torch.no_grad():
        next(learner.model.host.parameters()).fill_(float("nan"))


def test_a_broken_run_ends_with_its_penalty_and_the_others_do_not_notice() -> None:
    config = RewardConfig(mode="sparse")
    env = GrowthEnv(FAMILY, 2, reward=config)
    healthy = rewards(play(env, lambda s: WAIT, [0, 1]))
    env.reset([0, 1])
    env.step([WAIT, WAIT])
    break_weights(env.learners[0])
    step = env.step([WAIT, WAIT])
    info = step.infos[0]
    assert info is not None
    assert info.record.verdict is not None
    assert step.terminated.tolist() == [True, False]
    assert info.reward.terms["governor"] == -config.governor_penalty
    assert float(step.reward[0]) == pytest.approx(info.reward.score - config.governor_penalty)
    got = [step.reward[1]]
    while not env.over:
        step = env.step([WAIT, WAIT])
        assert step.acted.tolist() == [False, True]
        got.append(step.reward[1])
    assert torch.equal(torch.stack(got), healthy[1, 1:])


# -- it cannot be gamed, and it can be learnt --------------------------------------------------------------------------


@pytest.mark.slow
def test_uniform_play_completes_lifecycles() -> None:
    """Under the default rules and horizon: else there would be nothing to learn from."""
    env = GrowthEnv(TaskFamily("digits", horizon=25), 8)
    completed = 0
    for batch in range(5):
        numbers = list(range(8 * batch, 8 * batch + 8))
        controller = RandomLegal()
        controller.reset(numbers)
        env.reset(numbers)
        while not env.over:
            env.step(controller.decide(env.situations))
        completed += sum(any(v.stage is Stage.FOSSILIZED for v in s.slots) for s in env.situations)
    assert completed / 40 >= 0.05
