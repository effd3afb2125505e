"""What the environment costs besides training and evaluating networks: phases of GrowthEnv.step at N = 16.

    python benchmarks/environment.py [--task mixed] [--size 16] [--episodes 2]

Plays random legal actions. The share of everything but SGD and evaluation must stay below 10 %.
"""

from __future__ import annotations

import argparse
import time

import torch

from esper.env.growth_env import GrowthEnv
from esper.policy.controller import RandomLegal
from esper.tasks.family import get_family


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mixed")
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    env = GrowthEnv(get_family(arguments.task), arguments.size)
    controller = RandomLegal()
    steps, seconds = 0, 0.0
    for episode in range(arguments.episodes):
        numbers = range(episode * arguments.size, (episode + 1) * arguments.size)
        controller.reset(numbers)
        env.reset(numbers)
        while not env.over:
            actions = controller.decide(env.situations)
            started = time.perf_counter()
            steps += int(env.step(actions).acted.sum())
            seconds += time.perf_counter() - started
    training = env.seconds["engine"]
    print(f"{arguments.task}, N = {arguments.size}: {steps} environment-steps, {steps / seconds:.1f} per second")
    for name in ("engine", "observe", "reward"):
        print(f"  {name:8s} {env.seconds[name] / seconds:6.1%} of a step")
    print(f"  reset    {env.seconds['reset'] / arguments.episodes / arguments.size * 1e3:6.1f} ms per episode")
    overhead = 1.0 - training / seconds
    print(f"overhead besides SGD and evaluation: {overhead:.1%} (limit 10 %)")
    return 0 if overhead < 0.10 else 1


if __name__ == "__main__":
    raise SystemExit(main())
