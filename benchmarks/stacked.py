"""The stacked engine beside the per-network ones: how fast it is, and whether it judges controllers alike.

    python benchmarks/stacked.py speed --device cpu
    python benchmarks/stacked.py speed --device cuda --task mixed --networks 4096 --precision bf16
    python benchmarks/stacked.py agreement --task mixed --controllers none,heuristic,small --episodes 48

`speed` on a CPU: both engines play the same networks with the same random legal actions, in one process; the ratio is
of process times. On a GPU: whole episodes with resets, evaluation and the controller's own passes, by as many processes
as `esper train` uses; steps are counted for networks whose episode goes on. Exits with 1 where a limit is missed.
`agreement`: for each controller, the mean score by each engine and their paired difference with a 95 % interval.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import torch
import tyro

from esper.config import EngineName
from esper.engine.precision import Precision
from esper.env.growth_env import GrowthEnv
from esper.env.stacked_env import StackedEnv
from esper.policy.controller import RandomLegal
from esper.rollout.play import ControllerActor, play
from esper.tasks.draws import comparison_draws
from esper.tasks.family import Family, get_family
from esper.training.catalogue import make_controller
from esper.training.comparison import compare
from esper.training.engines import parts_by_sort, per_network, players
from esper.training.statistics import Estimate, bootstrap, mean, paired
from esper.training.workers import Processes


@dataclass(frozen=True, slots=True)
class Agreement:
    """One controller under both engines."""

    controller: str
    stacked: float
    """Mean score."""
    plain: float
    difference: Estimate
    """Stacked minus per-network, paired by draw, of the score."""
    accuracy: Estimate
    """The same of the test accuracy."""
    seconds: tuple[float, float]
    """Of all episodes of the comparison: stacked, per-network."""

    def __str__(self) -> str:
        score, accuracy = _said(self.difference), _said(self.accuracy)
        return f"{self.controller:14s}{self.stacked:9.2f}{self.plain:13.2f}   {score:26s}{accuracy}"


def _said(found: Estimate) -> str:
    between = "" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
    return f"{found.value:+.2f}{between}"


def agreement(
    task: Family | str,
    controllers: Mapping[str, str],
    numbers: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    workers: int = 1,
) -> list[Agreement]:
    """What both engines make of the same held-out draws."""
    engines: tuple[EngineName, EngineName] = ("stacked", per_network(device))
    found = [
        compare(task, controllers, numbers, controls=False, workers=workers, device=device, engine=engine)
        for engine in engines
    ]
    rows = []
    for name in controllers:
        ours, theirs = (one.controllers[name] for one in found)
        scores = [{n: r.score for n, r in side.items()} for side in (ours, theirs)]
        tests = [{n: r.test_accuracy for n, r in side.items()} for side in (ours, theirs)]
        rows.append(
            Agreement(
                name,
                *(float(np.mean(list(side.values()))) for side in scores),
                bootstrap(paired(*scores), mean),
                bootstrap(paired(*tests), mean),
                (found[0].seconds, found[1].seconds),
            )
        )
    return rows


def show(rows: Sequence[Agreement]) -> None:
    print(f"{'controller':14s}{'stacked':>9s}{'per network':>13s}   {'difference of score':26s}of test accuracy")
    for row in rows:
        print(row)
    stacked, plain = rows[0].seconds
    print(f"seconds: stacked {stacked:.0f}, per network {plain:.0f} (×{plain / stacked:.1f})")


# -- speed -------------------------------------------------------------------------------------------------------------

RATIOS = {"mixed/vector": 4.0, "mixed": 2.5}
"""Of the stacked engine to the eager one, on one CPU core with 64 networks."""
RATES = {"mixed/vector": 8000.0, "mixed": 3000.0}
"""Steps a second on one H200."""


def cpu_ratio(task: str, networks: int, steps: int) -> float:
    """Process time of the eager engine over that of the stacked one, the decision process included."""
    torch.set_num_threads(1)
    draws = range(networks)
    plain, stacked = GrowthEnv(get_family(task), networks), StackedEnv(get_family(task), networks)
    observation, masks = plain.reset(draws)
    stacked.reset(draws)
    chooser, seconds = RandomLegal(), [0.0, 0.0]
    chooser.reset(draws)
    for _ in range(steps):
        actions = chooser.act(plain.world, observation, masks)
        for i, env in enumerate((plain, stacked)):
            began = time.process_time()
            step = env.step(actions)
            seconds[i] += time.process_time() - began
            if i == 0:
                observation, masks = step.observation, step.masks
    rates = [networks * steps / spent for spent in seconds]
    print(
        f"{task:14s} {networks} networks, {steps} steps: eager {rates[0]:.1f}, stacked {rates[1]:.1f} steps/s of a core"
    )
    return seconds[0] / seconds[1]


def gpu_rate(task: str, networks: int, precision: str, controller: str, rollouts: int, workers: int) -> float:
    """Steps a second of whole rollouts by so many processes, one sort of hosts a job, as `esper train` plays them; the
    first one, in which kernels are compiled, is shown and not counted."""
    family, rates = get_family(task), []
    pool = Processes(workers).pool(partial(_play, precision=precision), networks)
    try:
        for rollout in range(rollouts):
            draws = range(rollout * networks, (rollout + 1) * networks)
            parts = parts_by_sort(family, draws, held_out=False).values()
            began = time.perf_counter()
            steps = sum(pool.map([(task, controller, tuple(draws[place] for place in part)) for part in parts]))
            spent = time.perf_counter() - began
            rates.append(steps / spent)
            print(
                f"{task} {precision} {controller}, {networks} networks, {workers} processes, rollout {rollout}: "
                f"{steps} steps in {spent:.1f} s, {rates[-1]:.0f}/s",
                flush=True,
            )
    finally:
        pool.close()
    return max(rates[1:] or rates)


def _play(job: tuple[str, str, tuple[int, ...]], precision: str) -> int:
    """Steps of whole episodes."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as in training/fleet.py
    task, controller, draws = job
    env = StackedEnv(get_family(task), len(draws), device="cuda", precision=Precision(precision))
    steps = play(env, ControllerActor(make_controller(controller)), draws).steps
    del env
    torch.cuda.empty_cache()
    return steps


def speed(tasks: Sequence[str], found: Callable[[str], float], limits: Mapping[str, float], unit: str) -> int:
    """Print what was found for each task; exit code 1 where a limit is missed."""
    rates = {task: found(task) for task in tasks or limits}
    for task, value in rates.items():
        limit = f" (asked for: {limits[task]:g})" if task in limits else ""
        print(f"{task:14s} {value:.1f} {unit}{limit}")
    return int(any(value < limits.get(task, 0.0) for task, value in rates.items()))


def main(
    what: tyro.conf.Positional[Literal["speed", "agreement"]],
    task: str = "",
    controllers: str = "",
    episodes: int = 48,
    device: str = "cpu",
    workers: int = 2,
    networks: int | None = None,
    steps: int = 6,
    rollouts: int = 2,
    precision: str = "fp32,bf16",
) -> int:
    """`task`, `controllers` and `precision` may be several, with commas between them."""
    if what == "agreement":
        names = {name: name for name in (controllers or "none,heuristic,small").split(",")}
        show(agreement(task or "mixed", names, comparison_draws(episodes), device=device, workers=workers))
        return 0
    tasks = task.split(",") if task else ()
    if device == "cpu":
        return speed(tasks, lambda one: cpu_ratio(one, networks or 64, steps), RATIOS, "× eager")
    arms = list(product(precision.split(","), (controllers or "random,small").split(",")))

    def fastest(one: str) -> float:
        processes = players(None, "stacked", "cuda")
        return max(gpu_rate(one, networks or 4096, *arm, rollouts, processes) for arm in arms)

    return speed(tasks, fastest, RATES, "steps/s")


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))
