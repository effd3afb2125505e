"""A policy plays, and the teacher who knows says at every step what should have been done instead.

    python benchmarks/recipe/correct.py --policy start.safetensors --episodes 240 --workers 2 --out recordings/corrected

Noise plants seeds that are obviously wrong; a policy's own mistakes are the plausible ones, and only here does it see
how to notice them and what to do then. Training problems of `mixed` only: others have no answer that a teacher could
know.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from improve import EPISODES_AT_ONCE, Sampling
from teach import Answer, Knowing

from esper.actions import WAIT, Action, Op
from esper.agent.controller import LearnedController
from esper.env.growth_env import GrowthEnv
from esper.env.observation import to_tensor
from esper.env.situation import Situation
from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.recorder import Tape
from esper.offline.recording import append, read
from esper.tasks.family import get_family
from esper.training.catalogue import policy_file
from esper.training.workers import in_processes

FIRST_DRAW = 4_000_000
"""Training draws that no training run with a seed below 4 sees."""
TIME_FOR_ANOTHER = 10
"""Epochs that a new seed needs to be worth it."""
WORTH_KEEPING = 0.5
"""Points that a seed must contribute to be kept although it is not the answer, or cost to be removed late."""


class Correcting(Knowing):
    """Gives up on a wrong seed while there is time for the right one; later, it makes the best of what is there."""

    name = "correcting"

    def rule(self, situation: Situation, memory: Answer) -> Action:
        if situation.remaining >= TIME_FOR_ANOTHER:
            return super().rule(situation, memory)
        for slot in situation.slots:
            gain = 0.0 if slot.contribution is None else slot.contribution.accuracy
            if slot.fossilizable and (gain > WORTH_KEEPING or (slot.blueprint, slot.index) in memory[1]):
                return Action(Op.FOSSILIZE, slot.index, reason="there is no time for a better one")
            if slot.prunable and gain < -WORTH_KEEPING:
                return Action(Op.PRUNE, slot.index, reason="it harms")
        return WAIT


@dataclass(frozen=True, slots=True)
class Lesson:
    family: str
    number: int
    student: Sampling


def lesson(job: Lesson) -> Episodes:
    """One episode that the student plays, with the teacher's decisions as labels."""
    env, teacher = GrowthEnv(get_family(job.family), 1), Correcting(job.family)
    observation, masks = env.reset((job.number,))
    teacher.reset((job.number,))
    job.student.reset((job.number,))
    tape = Tape()
    while not env.over:
        label, taken = (who.decide(env.situations) for who in (teacher, job.student))
        step = env.step(taken)
        tape.note(observation, masks, to_tensor(label), to_tensor(taken), step.reward, step.terminated, step.acted)
        observation, masks = step.observation, step.masks
    return tape.episodes(torch.tensor([job.number]), teacher.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--family", default="mixed")
    parser.add_argument("--episodes", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="leave out so many problems: those of earlier rounds")
    parser.add_argument("--also", type=Path, nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    if chosen.out.exists():
        parser.error(f"{chosen.out} exists: name another --out, or everything would be in it twice")
    torch.set_num_threads(1)
    learned = LearnedController.load(policy_file(chosen.policy))
    student = Sampling(learned.network, learned.normaliser, "student")
    first = FIRST_DRAW + chosen.first
    lessons = [Lesson(chosen.family, number, student) for number in range(first, first + chosen.episodes)]
    started, played = time.perf_counter(), []
    for count, (_, episodes) in enumerate(in_processes(lesson, lessons, chosen.workers), 1):
        played.append(episodes)
        if count % EPISODES_AT_ONCE == 0 or count == len(lessons):
            played = [join(played)]  # tensors of another process each hold a file open until they are copied
            print(f"{count} of {len(lessons)} episodes, {time.perf_counter() - started:.0f} s", flush=True)
    provenance = {"command": f"python benchmarks/recipe/correct.py --policy {chosen.policy}", "task": chosen.family}
    for folder in chosen.also:
        append(chosen.out, read(folder, growth_schema()).episodes, growth_schema(), {**provenance, "from": str(folder)})
    append(chosen.out, played[0], growth_schema(), provenance)
    wrong = (played[0].label != played[0].taken).any(-1)[played[0].valid].float().mean()
    print(f"{played[0].steps:,} env-steps; the teacher would have done otherwise at {100 * wrong:.1f} % of them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
