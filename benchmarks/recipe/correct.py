"""A policy plays, and the teacher who knows says at every step what should have been done instead.

    python benchmarks/recipe/correct.py --policy start.safetensors --episodes 240 --workers 2 --out recordings/corrected

Noise plants seeds that are obviously wrong; a policy's own mistakes are the plausible ones, and only here does it see
how to notice them and what to do then. Training problems of `mixed` only: others have no answer that a teacher could
know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from improve import Sampling
from playing import play_all
from rounds import chosen_options, keep, policy_of, round_options
from teach import Answer, Knowing

from esper.actions import WAIT, Action, Op
from esper.agent.policies import LearnedController
from esper.env.growth_env import GrowthEnv
from esper.env.observation import to_tensor
from esper.env.situation import Situation
from esper.offline.episodes import Episodes
from esper.offline.recorder import Tape
from esper.tasks.draws import FIRST_CORRECTED
from esper.tasks.family import get_family

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
    parser = round_options(__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=240)
    chosen = chosen_options(parser, arguments)
    learned = LearnedController.load(policy_of(parser, chosen.policy))
    student = Sampling(learned.network, learned.normaliser, "student")
    first = FIRST_CORRECTED + chosen.first
    lessons = [Lesson(chosen.family, number, student) for number in range(first, first + chosen.episodes)]
    played = play_all(lesson, lessons, chosen.workers)
    keep("correct.py", chosen, played)
    wrong = (played.label != played.taken).any(-1)[played.valid].float().mean()
    print(f"{played.steps:,} env-steps; the teacher would have done otherwise at {100 * wrong:.1f} % of them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
