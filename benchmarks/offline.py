"""Learning from recorded episodes, measured: the figures of docs/offline.md.

    python benchmarks/offline.py [toy] [clone] [warm] [iql] [--work FOLDER]

    toy    IQL against cloning on the op-conditional toy task, the same noisy mixture of teachers, paired by seed
    clone  the heuristic cloned on mixed/vector: agreement per head, and score beside the teacher on held-out draws
    warm   PPO from that clone against PPO from scratch: env-steps until the cold start's final return, three seeds
    iql    IQL and cloning from a noisy mixture on mnist1d, in the environment

Recordings, policies and results are kept in the work folder (default build/offline) and used again. With no name all
four are run, about an hour on one core. Nothing here is asserted: it prints what it found, with intervals.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "offline"))
from toy_recordings import toy_mixture, toy_network, toy_score

from esper.agent.config import PPOConfig
from esper.agent.policies import growth_network_config, save_policy, start_from
from esper.cli.record import Record
from esper.growth.blueprints import blueprint_names
from esper.offline.cloning import CloneConfig, clone
from esper.offline.fitting import Learned
from esper.offline.iql import IQLConfig, iql
from esper.offline.recording import growth_schema, read
from esper.rollout.episodes import Episodes, join
from esper.tasks.draws import comparison_draws
from esper.training.comparison import compare, summarise
from esper.training.loop import Trainer
from esper.training.statistics import Estimate, bootstrap
from esper.training.train_config import PRESETS, TrainConfig

TOY_SEEDS, TOY_EPISODES, TOY_NOISE = 8, 300, 0.2
FAMILY = "mixed/vector"
WARM_SEEDS = (1, 2, 3)
WARM = replace(PRESETS["demo"], envs=12, updates=16, draws=48)
CYCLE = 4
"""Updates in which every training problem comes once: returns are compared over whole cycles."""


def shown(estimate: Estimate) -> str:
    ends = "" if estimate.low is None else f" ({estimate.low:+.2f} … {estimate.high:+.2f})"
    return f"{estimate.value:+.2f}{ends}, n = {estimate.count}"


def recorded(folder: Path, task: str, controllers: str, episodes: int, noise: float, seed: int = 0) -> Episodes:
    """Recorded now, or read if it was before."""
    if not folder.exists():
        Record(task, controllers, episodes, noise, seed, folder).run()
    return read(folder, growth_schema()).episodes


def saved(path: Path, learned: Learned) -> Path:
    data = {"blueprints": list(blueprint_names())}
    save_policy(path, learned.network, learned.units.observations, learned.units.values, data)
    return path


# -- toy ---------------------------------------------------------------------------------------------------------------


def toy(work: Path) -> None:
    """Each seed is another recording, other first weights and other test problems; the pair shares all three."""
    differences, rows = [], []
    for seed in range(TOY_SEEDS):
        episodes = toy_mixture(TOY_EPISODES, TOY_NOISE, seed)
        cloned = clone(episodes, toy_network(), CloneConfig(seed=seed, discount=0.0))
        improved = iql(episodes, toy_network(), IQLConfig(seed=seed, discount=0.0))
        pair = [float(np.mean(toy_score(learned, seed=100 + seed))) for learned in (cloned, improved)]
        returns = episodes.returns()
        taught = {n: float(returns[episodes.controller == i].mean()) for i, n in enumerate(episodes.controllers)}
        rows.append(pair)
        differences.append(pair[1] - pair[0])
        print(f"toy seed {seed}: {len(episodes)} episodes, clone {pair[0]:.2f}, IQL {pair[1]:.2f}; data {taught}")
    means = np.mean(rows, axis=0)
    print(f"toy: clone {means[0]:.2f}, IQL {means[1]:.2f} of 5; IQL − clone {shown(bootstrap(differences))}")


# -- clone -------------------------------------------------------------------------------------------------------------


def vector_recording(work: Path) -> Episodes:
    """The heuristic with noise, and a part without: the states that mistakes lead to, and its own."""
    return join(
        [
            recorded(work / "vector-noisy", FAMILY, "heuristic", 448, 0.2),
            recorded(work / "vector-plain", FAMILY, "heuristic", 160, 0.0, seed=1),
        ]
    )


def the_clone(work: Path) -> Path:
    path = work / "clone.safetensors"
    if not path.exists():
        saved(path, clone(vector_recording(work), growth_network_config(), CloneConfig()))
    return path


def agreement_of_clones(work: Path) -> None:
    episodes = vector_recording(work)
    found: dict[str, list[float]] = {}
    for seed in range(3):
        started = time.perf_counter()
        learned = clone(episodes, growth_network_config(), CloneConfig(seed=seed))
        for name, head in learned.agreement.heads.items():
            found.setdefault(name, []).append(100 * (head.accuracy or 0.0))
            found.setdefault(f"{name} balanced", []).append(100 * (head.balanced_accuracy or 0.0))
        found.setdefault("whole decisions", []).append(100 * learned.agreement.decisions)
        print(
            f"clone seed {seed}: {len(episodes)} episodes, {episodes.steps} steps, "
            f"{time.perf_counter() - started:.0f} s; op confusion {learned.agreement.heads['op'].confusion}"
        )
        saved(work / f"clone-{seed}.safetensors", learned)
    for name, values in found.items():
        print(f"clone, held-out accuracy of {name}: {', '.join(f'{v:.1f}' for v in values)} %")


def scores(task: str, controllers: dict[str, str], episodes: int, pair: tuple[str, str]) -> None:
    found = compare(task, controllers, comparison_draws(episodes), controls=False)
    for row in summarise(found):
        low, high = row.score.low or 0.0, row.score.high or 0.0
        print(f"{task}, {row.name}: score {row.score.value:.1f} ({low:.1f} … {high:.1f}), ×{row.parameters_ratio:.2f}")
    first, second = (found.controllers[name] for name in pair)
    differences = [first[n].score - second[n].score for n in found.common]
    print(f"{task}: {pair[0]} − {pair[1]} {shown(bootstrap(differences))}; {found.seconds:.0f} s", flush=True)


def clone_heuristic(work: Path) -> None:
    agreement_of_clones(work)
    who = {"none": "none", "heuristic": "heuristic", "clone": str(work / "clone-0.safetensors")}
    scores(FAMILY, who, 48, ("clone", "heuristic"))


# -- warm start --------------------------------------------------------------------------------------------------------


def returns_of(config: TrainConfig, init: Path | None) -> list[float]:
    """Mean return of every rollout."""
    trainer = Trainer(config)
    if init is not None:
        start_from(trainer.agent, init)
    found: list[float] = []
    trainer.run(lambda report: found.append(report.metrics["episode/return"]))
    trainer.close()
    return found


def over_cycles(returns: list[float]) -> list[float]:
    """The mean of every CYCLE updates in a row; entry i ends with update i + CYCLE."""
    return [float(np.mean(returns[i : i + CYCLE])) for i in range(len(returns) - CYCLE + 1)]


def warm_start(work: Path) -> None:
    path = work / "warm.json"
    done: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    init = the_clone(work)
    with_teacher = PPOConfig(learning_rate=WARM.ppo.learning_rate, teacher_kl=0.2, teacher_updates=8)
    arms: dict[str, tuple[TrainConfig, Path | None]] = {
        "cold": (WARM, None),
        "warm": (replace(WARM, updates=8), init),
        "warm, teacher KL": (replace(WARM, updates=8, ppo=with_teacher), init),
    }
    for arm, (config, start) in arms.items():
        for seed in WARM_SEEDS:
            if f"{arm} {seed}" not in done:
                done[f"{arm} {seed}"] = returns_of(replace(config, seed=seed), start)
                path.write_text(json.dumps(done, indent=1))
    for seed in WARM_SEEDS:
        goal = over_cycles(done[f"cold {seed}"])[-1]
        first = over_cycles(done[f"cold {seed}"])[0]
        line = f"warm seed {seed}: cold {first:.1f} → {goal:.1f} in {WARM.updates} updates"
        for arm in list(arms)[1:]:
            cycles = over_cycles(done[f"{arm} {seed}"])
            reached = next((i + CYCLE for i, value in enumerate(cycles) if value >= goal), None)
            line += f"; {arm} {cycles[0]:.1f} → {cycles[-1]:.1f}, reached after {reached or 'more than 8'} updates"
        print(line, flush=True)


# -- IQL ---------------------------------------------------------------------------------------------------------------


def iql_mnist1d(work: Path) -> None:
    episodes = recorded(work / "mnist1d", "mnist1d", "heuristic,random,schedule", 24, 0.2)
    cloned = saved(work / "mnist1d-clone.safetensors", clone(episodes, growth_network_config(), CloneConfig()))
    improved = saved(work / "mnist1d-iql.safetensors", iql(episodes, growth_network_config(), IQLConfig()))
    returns = episodes.returns()
    for number, name in enumerate(episodes.controllers):
        print(f"mnist1d data, {name}: mean return {float(returns[episodes.controller == number].mean()):.1f}")
    who = {"none": "none", "heuristic": "heuristic", "schedule": "schedule", "clone": str(cloned), "IQL": str(improved)}
    scores("mnist1d", who, 12, ("IQL", "clone"))


PARTS = {"toy": toy, "clone": clone_heuristic, "warm": warm_start, "iql": iql_mnist1d}


def main(
    parts: tyro.conf.Positional[tuple[Literal["toy", "clone", "warm", "iql"], ...]] = (),
    work: Path = Path("build/offline"),
) -> None:
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    for name in parts or PARTS:
        PARTS[name](work)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
