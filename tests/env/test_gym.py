"""GrowthEnv behind Gymnasium: other people's agents can play, and never choose the impossible.

Covers: R092, R103, R149
"""

from __future__ import annotations

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402

from esper.actions import BLENDS, WAIT, Action, Op  # noqa: E402
from esper.env.growth_env import GrowthEnv  # noqa: E402
from esper.env.gym import FlatActions, GrowthGymEnv, GrowthVectorEnv  # noqa: E402
from esper.env.reward.config import TERMS  # noqa: E402
from esper.growth.blueprints import blueprint_names  # noqa: E402
from esper.tasks.family import get_family  # noqa: E402


def test_gymnasium_finds_it_and_its_checks_pass() -> None:
    env = gymnasium.make("esper/Growth-v0", task="digits", slots=2)
    check_env(env.unwrapped, skip_render_check=True)


def test_every_number_is_one_action_and_back() -> None:
    flat = FlatActions(slots=2)
    meanings = [flat.action(number, present=2) for number in range(flat.size)]
    assert len(set(meanings)) == flat.size == 1 + 2 * len(blueprint_names()) * len(BLENDS) + 4
    assert meanings[0] == WAIT
    assert meanings[1] == Action(Op.GERMINATE, 0, blueprint_names()[0], BLENDS[0])
    assert meanings[-1] == Action(Op.FOSSILIZE, 1)
    with pytest.raises(ValueError, match="numbered 0 to"):
        flat.action(flat.size, present=2)


def test_the_mask_is_exact() -> None:
    env = GrowthGymEnv("digits", slots=3)  # the host has two
    rng = np.random.default_rng(0)
    env.reset(seed=1)
    over = False
    while not over:
        mask = env.action_masks()
        situation = env._env.situations[0]
        for number in range(env.action_space.n):
            action = env._actions.action(number, present=3) if number else WAIT
            possible = action.slot is None or (action.slot < 2 and situation.allows(action))
            assert bool(mask[number]) is possible
        _, _, over, _, info = env.step(rng.choice(np.flatnonzero(mask)))
    assert "score" in info


def test_a_family_brings_its_own_number_of_slots() -> None:
    """Networks of `varied` have up to eight slots: every reset fits the spaces, without a number from the user."""
    env = gymnasium.make("esper/Growth-v0", task="varied/vector")
    seen = set()
    for seed in range(12):
        observation, info = env.reset(seed=seed)
        assert observation.shape == env.observation_space.shape
        assert info["action_mask"].shape == (env.action_space.n,)
        seen.add(len(env.unwrapped._env.situations[0].slots))
    assert max(seen) > 3
    assert env.unwrapped._actions.slots == 8


def test_too_few_slots_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"networks of 'varied' have up to 8 slots: slots=3 is too few"):
        GrowthGymEnv("varied", slots=3)
    narrow = GrowthEnv(get_family("digits"), 1, slots=1)
    with pytest.raises(ValueError, match="a network has 2 slots, and observations have room for 1"):
        narrow.reset([0])


@pytest.mark.parametrize("discount", [0.9, 1.0])
def test_shaping_pays_nothing_under_the_discount_that_was_given(discount: float) -> None:
    """Σ γ^t (γΦ' − Φ) = −Φ(start), which is 0 for a network without seeds: under any other γ it is not."""
    env = GrowthGymEnv("digits", discount=discount)
    rng, over, paid = np.random.default_rng(0), False, []
    env.reset(seed=1)
    while not over:
        _, _, over, _, info = env.step(rng.choice(np.flatnonzero(env.action_masks())))
        paid.append(info["reward_terms"]["progress_shaping"])
    assert any(paid)
    assert sum(discount**t * one for t, one in enumerate(paid)) == pytest.approx(0.0, abs=1e-9)
    assert abs(sum(0.995**t * one for t, one in enumerate(paid))) > 1e-3


def test_the_same_seed_is_the_same_episode() -> None:
    env = GrowthGymEnv("digits", slots=2)
    first = env.reset(seed=4)[0], env.step(0)[0]
    second = env.reset(seed=4)[0], env.step(0)[0]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_vector_environment_begins_anew_after_an_end() -> None:
    env = gymnasium.make_vec(
        "esper/Growth-v0", num_envs=2, vectorization_mode="vector_entry_point", task="digits", slots=2
    )
    assert isinstance(env, GrowthVectorEnv)
    observation, info = env.reset(seed=0)
    assert observation.shape == env.observation_space.shape
    assert info["action_mask"].shape == (2, env.single_action_space.n)
    over = np.zeros(2, bool)
    while not over.any():
        observation, reward, over, _, info = env.step(np.zeros(2, np.int64))
        assert sum(info["reward_terms"][name] for name in TERMS) == pytest.approx(reward, abs=1e-4)
    assert over.all()
    assert (info["score"] == info["val_accuracy"]).all()  # nothing grew, so there is no rent
    observation, reward, over, _, info = env.step(np.zeros(2, np.int64))
    assert "score" not in info
    assert not over.any()
    assert reward.tolist() == [0.0, 0.0]
    assert (observation[:, 0] == 0.0).all()  # progress: a new episode


@pytest.mark.slow
def test_maskable_ppo_trains_on_it() -> None:
    sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs sb3-contrib: pip install 'esper[peers]'")
    env = GrowthGymEnv("digits", slots=2)
    agent = sb3_contrib.MaskablePPO("MlpPolicy", env, n_steps=250, batch_size=125, seed=0)
    agent.learn(2_000)
    assert agent.num_timesteps == 2_000


def test_what_does_not_fit_is_refused_before_any_network_takes_a_step() -> None:
    """Actions too many were dropped in silence; others ended as an error from somewhere within."""
    env = GrowthVectorEnv(2, task="digits")
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset the environment before a step"):
        env.step(np.zeros(2, int))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"there are 2 environments, and {count} actions"):
            env.step(np.zeros(count, int))
        with pytest.raises(ValueError, match=f"there are 2 environments, and {count} seeds"):
            env.reset(seed=[1] * count)
