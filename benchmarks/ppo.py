"""This agent against sb3-contrib's RecurrentPPO (as shipped): one run, one environment, same epochs and minibatches.

    python benchmarks/ppo.py [--steps 51200] [--seed 0] [--hidden 128]

CartPole without velocities, 8 environments, rollouts of about 1,024 steps (episodes that are cut short after 128 steps
here, pieces of longer ones there), 4 epochs of 4 minibatches, the same LSTM width.
Times are CPU seconds of one thread, so that a busy machine disturbs them little; the environment's own time, which is
the same for both, is not counted. Needs stable-baselines3 and sb3-contrib, which are not dependencies of Esper: install
them into a virtual environment of their own, together with Esper.
Exits with 1 if the update is less than 5 times or the rollout step less than 2 times as fast, with 2 without the peer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))
from toy_environments import CartPoleWithoutVelocities, evaluate, make_agent, rollout

from esper.agent.config import PPOConfig
from esper.env.steps import EnvStep

try:
    import gymnasium
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import VecEnv
except ImportError:
    print("benchmarks/ppo.py: sb3-contrib is not installed, so there is nothing to compare with; see its first lines")
    sys.exit(2)

ENVIRONMENTS, ROW, EPOCHS, MINIBATCHES = 8, 128, 4, 4
LEARNING_RATE, DISCOUNT, DECAY = 1e-3, 0.99, 0.95


class TimedCartPole(CartPoleWithoutVelocities):
    """Measures how long its own steps take."""

    seconds, calls = 0.0, 0

    def step(self, action: torch.Tensor) -> EnvStep:
        began = process_time()
        result = super().step(action)
        self.seconds += process_time() - began
        self.calls += 1
        return result


class PeerCartPole(VecEnv):
    """The same environment behind the peer's interface, where rows restart one by one."""

    def __init__(self, environments: int, seed: int) -> None:
        box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.env = TimedCartPole(environments, seed)
        self.ages = np.zeros(environments, dtype=np.int64)
        super().__init__(environments, box, gymnasium.spaces.Discrete(2))

    def reset(self) -> np.ndarray:
        return self.env.reset()[0].overall.numpy().copy()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = torch.as_tensor(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        action = torch.zeros(self.num_envs, 4, dtype=torch.int64)
        action[:, 3] = self.actions
        self.env.time = 0  # the ages are counted here: rows restart at different times
        step = self.env.step(action)
        self.ages += 1
        fallen = step.terminated.numpy()
        done = fallen | (self.ages >= self.env.length)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for n in done.nonzero()[0]:
            infos[n]["terminal_observation"] = step.observation.overall[n].numpy().copy()
            infos[n]["TimeLimit.truncated"] = not fallen[n]
        self.ages[done] = 0
        body = self.env.body
        self.env.reset()
        self.env.body = torch.where(torch.from_numpy(done)[:, None], self.env.body, body)
        return self.env._observe().overall.numpy().copy(), step.reward.numpy(), done, infos

    def close(self) -> None: ...
    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...
    def env_method(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class TimedPeer(RecurrentPPO):
    """Nothing changed, only timed."""

    update_seconds, rollout_seconds = 0.0, 0.0

    def train(self) -> None:
        began = process_time()
        super().train()
        self.update_seconds += process_time() - began

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        began = process_time()
        going = super().collect_rollouts(*args, **kwargs)
        self.rollout_seconds += process_time() - began
        return going


def run_peer(total: int, seed: int, hidden: int) -> tuple[float, float, float]:
    peer = PeerCartPole(ENVIRONMENTS, seed)
    model = TimedPeer(
        "MlpLstmPolicy",
        peer,
        learning_rate=LEARNING_RATE,
        n_steps=ROW,
        batch_size=ENVIRONMENTS * ROW // MINIBATCHES,
        n_epochs=EPOCHS,
        gamma=DISCOUNT,
        gae_lambda=DECAY,
        seed=seed,
        device="cpu",
        policy_kwargs={"lstm_hidden_size": hidden},
    )
    model.learn(total)
    test = PeerCartPole(20, 1000 + seed)
    observation, state, start = test.reset(), None, np.ones(20, dtype=bool)
    returns: dict[int, float] = {}
    scores = np.zeros(20)
    while len(returns) < 20:
        action, state = model.predict(observation, state, start, deterministic=True)
        observation, reward, start, _ = test.step(action)
        scores += reward
        for n in start.nonzero()[0]:
            returns.setdefault(int(n), float(scores[n]))
    acting = (model.rollout_seconds - peer.env.seconds) / peer.env.calls
    return acting, model.update_seconds / total, float(np.mean(list(returns.values())))


def run_ours(total: int, seed: int, hidden: int) -> tuple[float, float, float]:
    """Seconds of acting per step of all environments and of the update per transition; the final return."""
    env = TimedCartPole(ENVIRONMENTS, seed, length=ROW)
    config = PPOConfig(
        learning_rate=LEARNING_RATE, discount=DISCOUNT, gae_decay=DECAY, epochs=EPOCHS, minibatches=MINIBATCHES,
        target_kl=None,  # every epoch is run, as the peer does
        validate_masks=False,  # a check for tests and new environments
    )  # fmt: skip
    agent = make_agent(env, config, seed, hidden=hidden)
    acting, learning, done = 0.0, 0.0, 0
    while done < total:
        began = process_time()
        episodes = rollout(env, agent, ENVIRONMENTS * ROW)
        between = process_time()
        agent.update(episodes)
        acting, learning = acting + between - began, learning + process_time() - between
        done += episodes.steps
    score = evaluate(CartPoleWithoutVelocities(20, 1000 + seed), agent, 20)
    return (acting - env.seconds) / env.calls, learning / done, score


def main(steps: int = 51_200, seed: int = 0, hidden: int = 128) -> int:
    """`steps` of the environment train each agent; `hidden` is the LSTM width of both."""
    torch.set_num_threads(1)
    ours, peer = run_ours(steps, seed, hidden), run_peer(steps, seed, hidden)
    print(f"{steps} steps, seed {seed}, LSTM width {hidden}, CPU time of one thread")
    print(f"{'':28}{'esper':>10}{'sb3-contrib':>14}{'ratio':>8}")
    per_step = [1e3 * x[0] for x in (ours, peer)]
    per_transition = [1e6 * x[1] for x in (ours, peer)]
    rollout_ratio, update_ratio = per_step[1] / per_step[0], per_transition[1] / per_transition[0]
    print(f"{'acting, ms per 8-env step':28}{per_step[0]:10.3f}{per_step[1]:14.3f}{rollout_ratio:8.1f}")
    print(f"{'update, µs per transition':28}{per_transition[0]:10.1f}{per_transition[1]:14.1f}{update_ratio:8.1f}")
    print(f"{'final return (20 episodes)':28}{ours[2]:10.1f}{peer[2]:14.1f}")
    return 0 if update_ratio >= 5.0 and rollout_ratio >= 2.0 else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
