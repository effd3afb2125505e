"""The recipe of the shipped controller: what its teacher does, whose play is kept, and which schedules are tried."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from esper.actions import Op
from esper.agent.policies import LearnedController
from esper.agent.shipped import shipped_path
from esper.offline.episodes import check, growth_schema, join
from esper.offline.recorder import play
from esper.policy.schedule import FixedSchedule, Planting
from esper.training.catalogue import make_controller

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
import choose_schedule
import teach
from correct import FIRST_CORRECTED, Correcting, Lesson, lesson
from improve import Sampling, best_of, jobs


def test_the_teacher_plants_the_answer_and_removes_what_noise_planted() -> None:
    """Of a training problem whose host lacks something, with and without noise."""
    family, number = "mixed/vector", teach.FIRST_TAUGHT
    while teach.facts_of(family, number)["answer"] != "mlp_small@1":
        number += 1
    job = replace(teach.jobs(family, 2, 0.0, 0.0)[0], numbers=(number,))
    quiet, noisy = play(job), play(replace(job, noise=0.5))
    planted = [action for action in quiet.taken[0].tolist() if action[3] == 1]
    assert [action[0] for action in planted] == [1]  # once, at slot 1
    assert torch.equal(quiet.taken, quiet.label)
    wrong = (noisy.taken != noisy.label).any(-1)
    assert wrong.any()
    assert (noisy.label[0, :, 3] == 2).any()  # PRUNE
    assert len(teach.jobs(family, 8, 0.5, 0.1)) == 4
    assert [job.name for job in teach.jobs(family, 8, 0.5, 0.1)] == ["knowing", "heuristic"] * 2


def test_the_best_sibling_of_each_problem_is_kept_with_what_it_did() -> None:
    plays = [replace(job, numbers=(number,)) for job in teach.jobs("mixed/vector", 2, 0.0, 0.9) for number in (1, 1, 2)]
    episodes = join([play(job) for job in plays])
    episodes = replace(episodes, reward=torch.zeros_like(episodes.reward))
    episodes.reward[:, 0] = torch.tensor([3.0, 5.0, -1.0])
    kept = best_of(episodes)
    assert kept.draw.tolist() == [1, 2]
    assert kept.returns().tolist() == [5.0, -1.0]
    assert torch.equal(kept.label, kept.taken)
    assert kept.controllers == ("best sibling",)


def test_every_sibling_has_dice_of_its_own() -> None:
    found = jobs(shipped_path("small-conv"), "mixed", (6, 7), siblings=3, noise=0.0)
    assert [(job.numbers, job.name) for job in found[:4]] == [
        ((6,), "sibling 0"),
        ((6,), "sibling 1"),
        ((6,), "sibling 2"),
        ((7,), "sibling 0"),
    ]
    dice = set()
    for job in found:
        job.controller.reset(job.numbers)
        dice.add(job.controller._actor.generator.initial_seed())  # type: ignore[attr-defined]
    assert len(dice) == 6
    rivals = jobs(shipped_path("small-conv"), "mixed", (6,), siblings=1, noise=0.1, rivals=["heuristic"])
    assert [(job.name, job.noise) for job in rivals] == [("heuristic", 0.0), ("sibling 0", 0.1)]


def test_a_lesson_has_the_students_actions_and_the_teachers_labels() -> None:
    learned = LearnedController.load(shipped_path("small-conv"))
    student = Sampling(learned.network, learned.normaliser, "student")
    episode = lesson(Lesson("mixed/vector", FIRST_CORRECTED, student))
    again = lesson(Lesson("mixed/vector", FIRST_CORRECTED, student))
    assert torch.equal(episode.taken, again.taken)  # its dice follow from the problem
    assert episode.controllers == ("correcting",)
    check(episode, growth_schema())


def test_late_in_an_episode_the_teacher_makes_the_best_of_what_is_there() -> None:
    def gain(points: float) -> Any:
        return SimpleNamespace(accuracy=points)

    def says(points: float, **able: bool) -> Op:
        view = SimpleNamespace(index=0, blueprint="norm", contribution=gain(points), fossilizable=False, prunable=False)
        for name, value in able.items():
            setattr(view, name, value)
        situation = SimpleNamespace(remaining=3, slots=[view])
        return Correcting("mixed").rule(situation, (1, (("mlp_small", 1),))).op  # type: ignore[arg-type]

    assert says(5.0, fossilizable=True, prunable=True) is Op.FOSSILIZE
    assert says(0.1, fossilizable=True, prunable=True) is Op.WAIT
    assert says(-3.0, fossilizable=True, prunable=True) is Op.PRUNE
    assert says(-3.0) is Op.WAIT


def test_schedules_are_paired_where_they_want_different_slots(tmp_path: Path) -> None:
    first, second = (Planting(2, 0, {"dense": "norm"}),), (Planting(2, "*", {"dense": "mlp"}),)
    assert choose_schedule.pairs([first, second]) == [first + second, second + first]
    assert len(choose_schedule.singles("dense")) % len(choose_schedule.SLOTS) == 0
    assert {plan[0].epoch for plan in choose_schedule.at_other_epochs([first])} == set(choose_schedule.OTHER_EPOCHS)
    path = tmp_path / "best.toml"
    path.write_text(choose_schedule.as_toml({"dense": first + second}, 100, 2.0))
    read = make_controller(str(path))
    assert isinstance(read, FixedSchedule)
    assert read.plantings == (*first, *second)
