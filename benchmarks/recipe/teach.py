"""Episodes for a policy to start from: a teacher who knows what each training problem lacks, and the heuristic.

    python benchmarks/recipe/teach.py --episodes 480 --workers 2 --out recordings/taught
    esper clone recordings/taught --out start.safetensors
    esper train --task mixed --init start.safetensors ...

The family `mixed` writes down what its problems were made to need. On training draws, and only there, a teacher may
look at that; a policy never can, so what it clones is the best guess from what it sees. Exploration noise plants wrong
seeds, and the teacher shows how to go on from there. A share of the draws is played by the heuristic instead, which
finds out by trying: the other thing worth knowing.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from esper.actions import WAIT, Action, Op
from esper.env.situation import Situation
from esper.lifecycle import LIVE
from esper.offline.episodes import growth_schema, join
from esper.offline.recorder import Play, play
from esper.offline.recording import append
from esper.policy.controller import Controller, RuleController
from esper.policy.heuristic import Heuristic
from esper.tasks.draws import FIRST_TAUGHT
from esper.tasks.family import Fact, get_family
from esper.training.workers import in_processes

LATEST_START = 5
"""Epochs that the teacher lets pass at most before it plants; how many is drawn for each problem."""
EPISODES_PER_FILE = 64


@lru_cache(maxsize=8)
def facts_of(family: str, number: int) -> dict[str, Fact]:
    return dict(get_family(family).draw(number).facts)


Answer = tuple[int, tuple[tuple[str, int], ...]]
"""The first epoch to plant in, and the seeds that are meant: (blueprint, slot)."""


class Knowing(RuleController[Answer]):
    """Plants the meant answer, keeps it as soon as it may, and removes everything else."""

    name = "knowing"

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def new_memory(self, seed: int) -> Answer:
        """Of the draw with this number."""
        answer = str(facts_of(self.family, seed)["answer"])
        parts = [] if answer == "none" else answer.split("+")
        meant = tuple((part.split("@")[0], int(part.split("@")[1])) for part in parts)
        return random.Random(seed).randint(1, LATEST_START), meant

    def rule(self, situation: Situation, memory: Answer) -> Action:
        first_epoch, answer = memory
        for slot in situation.slots:
            wrong = slot.stage in LIVE and (slot.blueprint, slot.index) not in answer
            if wrong and slot.prunable:
                return Action(Op.PRUNE, slot.index, reason="it is not what the host lacks")
            if slot.fossilizable and not wrong:
                return Action(Op.FOSSILIZE, slot.index, reason="it is what the host lacks")
        if situation.epoch < first_epoch:
            return WAIT
        for blueprint, index in answer:
            slot = situation.slots[index]
            if slot.allows(Op.GERMINATE) and blueprint in slot.growable:
                return Action(Op.GERMINATE, index, blueprint, "linear", reason="the host lacks it")
        return WAIT


def jobs(family: str, episodes: int, heuristic_share: float, noise: float) -> list[Play]:
    """Two draws side by side; the first ones first."""
    every = round(1 / heuristic_share) if heuristic_share else episodes + 1
    numbers = range(FIRST_TAUGHT, FIRST_TAUGHT + episodes)
    found = []
    for place in range(0, episodes, 2):
        ours = tuple(numbers[place : place + 2])
        teacher: Controller = Heuristic() if place // 2 % every == every - 1 else Knowing(family)
        found.append(Play(family, teacher.name, teacher, ours, noise))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="mixed")
    parser.add_argument("--episodes", type=int, default=480)
    parser.add_argument("--heuristic-share", type=float, default=0.25)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("recordings/taught"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    provenance = {
        "command": f"python benchmarks/recipe/teach.py --family {chosen.family} --episodes {chosen.episodes} "
        f"--heuristic-share {chosen.heuristic_share} --noise {chosen.noise}",
        "task": chosen.family,
        "noise": chosen.noise,
    }
    started, waiting, done = time.perf_counter(), [], 0
    plays = jobs(chosen.family, chosen.episodes, chosen.heuristic_share, chosen.noise)
    for number, (_, episodes) in enumerate(in_processes(play, plays, chosen.workers), 1):
        waiting.append(episodes)
        done += len(episodes)
        if sum(map(len, waiting)) >= EPISODES_PER_FILE or number == len(plays):
            append(chosen.out, join(waiting), growth_schema(), provenance)
            waiting.clear()
            print(f"{done} of {chosen.episodes} episodes, {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
