"""Portfolios and their teacher: which plans are tried, which answer wins, and what the teacher says of a state.

Covers: R149 (growth under control: what a teacher plants, keeps and removes)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SLOT_FIELDS, squash
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import SlotShape, blueprint_names, fitting
from esper.lifecycle import Stage
from esper.offline.episodes import Episodes, check, growth_schema, join
from esper.offline.recorder import Play, play
from esper.offline.recording import append, read
from esper.policy.controller import NoGrowth
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.family import get_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
import own_plays
import playing
import portfolio
import teacher
import together
from portfolio import MEANT, NONE
from teacher import Answer, relabelled
from together import APART, in_proportion

SLOTS = 3
LINEAR = BLENDS.index("linear")
EVEN = 4  # of such problems, the teacher plants from epoch 1 on


# -- episodes by hand --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seed:
    """A seed as an observation shows it."""

    blueprint: str
    slot: int
    age: int = 5
    gain: float | None = None
    """Points of its contribution, if it was measured."""
    promise: float | None = None
    """Points of its shadow, if that was."""
    may: tuple[Op, ...] = ()
    stage: Stage = Stage.HOLDING
    size: float = 0.0
    """Its parameters over the host's."""


@dataclass(frozen=True)
class State:
    """One step: epochs left, what is planted, and whether anything can be planted beside it."""

    left: int
    seeds: tuple[Seed, ...] = ()
    room: bool = True
    accuracy: float = 50.0
    tried_before: bool = False
    """Whether a seed was there that is gone."""


def episode(*states: State, number: int = EVEN, by: str = "someone", earned: float = 0.0) -> Episodes:
    steps, kinds, field = len(states), len(blueprint_names()), list(SLOT_FIELDS).index
    overall = torch.zeros(1, steps, len(OVERALL_FIELDS))
    slots = torch.zeros(1, steps, SLOTS, len(SLOT_FIELDS))
    slots[..., field("contribution_points")] = slots[..., field("shadow_points")] = NOT_MEASURED
    slots[..., field("layout_dense")] = 1.0
    planted = torch.zeros(1, steps, SLOTS, dtype=torch.int64)
    can = torch.zeros(1, steps, len(Op), SLOTS, dtype=torch.bool)
    growable = torch.zeros(1, steps, SLOTS, kinds, dtype=torch.bool)
    for step, state in enumerate(states):
        overall[0, step, list(OVERALL_FIELDS).index("epochs_left")] = state.left / 50
        overall[0, step, list(OVERALL_FIELDS).index("val_accuracy_0_ago")] = state.accuracy / 100
        slots[0, step, SLOTS - 1, field("seeds_before")] = state.tried_before / 4
        taken = {seed.slot for seed in state.seeds}
        for slot in set(range(SLOTS)) - taken if state.room else ():
            growable[0, step, slot] = can[0, step, Op.GERMINATE, slot] = True
        for seed in state.seeds:
            shown = slots[0, step, seed.slot]
            planted[0, step, seed.slot] = blueprint_names().index(seed.blueprint) + 1
            shown[field(f"stage_{seed.stage.name.lower()}")] = 1.0
            shown[field("age")] = seed.age / 20
            shown[field("parameters")] = squash(seed.size, 20.0)
            if seed.gain is not None:
                shown[field("contribution_points")] = squash(seed.gain, 50.0)
            if seed.promise is not None:
                shown[field("shadow_points")] = squash(seed.promise, 50.0)
            for op in seed.may:
                can[0, step, op, seed.slot] = True
    op = can.any(-1)
    op[..., Op.WAIT] = True
    blend = growable.any(-1, keepdim=True).expand(1, steps, SLOTS, len(BLENDS)).clone()
    reward = torch.zeros(1, steps)
    reward[0, 0] = earned
    done = torch.arange(steps)[None] == steps - 1
    nothing = torch.zeros(1, steps, len(HEAD_NAMES), dtype=torch.int64)
    costs, present = torch.zeros(1, steps, SLOTS, kinds), torch.ones(1, steps, SLOTS, dtype=torch.bool)
    return Episodes(
        Observation(overall, slots, planted, costs, present),
        ActionMasks(op, can, growable, blend),
        label=nothing,
        taken=nothing.clone(),
        reward=reward,
        terminated=done,
        lengths=torch.tensor([steps]),
        draw=torch.tensor([number]),
        controller=torch.tensor([0]),
        controllers=(by,),
    )


def ended_with(*seeds: Seed, number: int, by: str, earned: float) -> Episodes:
    return episode(State(2), State(1, seeds, accuracy=earned), number=number, by=by, earned=earned)


def answer(*seeds: tuple[str, int], also: Sequence[tuple[str, int]] = (), earned: float = 90.0) -> Answer:
    """With the accuracy that `ended_with` gives to it."""
    return Answer(list(seeds), list(also), earned, pytest.approx(earned, abs=1e-4))


Told = tuple[str, int] | tuple[str, int, str] | str

OPENING = FixedSchedule("opening", [Planting(1, 0, {"dense": "mlp"}), Planting(1, "*", {"dense": "lora"})])


def labels(
    episodes: Episodes, *wanted: tuple[str, int], also: Sequence[tuple[str, int]] = (), opening: FixedSchedule = OPENING
) -> list[Told]:
    """What the teacher says at each step, readably. Whatever it says must be possible in that state."""
    best = Answer(list(wanted), list(also), earned=80.0, accuracy=90.0)
    labelled = relabelled(episodes, {int(episodes.draw[0]): best}, opening)
    check(labelled, growth_schema())
    assert torch.equal(labelled.taken, episodes.taken)
    told: list[Told] = []
    for slot, blueprint, blend, op in labelled.label[0, : int(labelled.lengths[0])].tolist():
        if op == Op.WAIT:
            told.append("wait")
        elif op == Op.GERMINATE:
            assert blend == LINEAR
            told.append(("plant", slot, blueprint_names()[blueprint]))
        else:
            told.append((Op(op).name.lower(), slot))
    return told


def says(state: State, *wanted: tuple[str, int], **known: Any) -> Told:
    """In one state, late enough to plant."""
    return labels(episode(State(30), State(30), State(30), state), *wanted, **known)[-1]


# -- the teacher, rule by rule -----------------------------------------------------------------------------------------

ANSWER = ("norm", 1)
BOTH = (Op.PRUNE, Op.FOSSILIZE)


@pytest.mark.parametrize(("number", "waits"), [(EVEN, 1), (EVEN + 1, 2)])
def test_the_teacher_begins_as_the_best_schedule_from_an_epoch_that_depends_on_the_problem(
    number: int, waits: int
) -> None:
    found = labels(episode(*(State(20 - step) for step in range(5)), number=number), ANSWER)
    assert found == ["wait"] * waits + [("plant", 0, "mlp")] * (5 - waits)


def test_as_long_as_nothing_was_learnt_it_follows_the_schedule() -> None:
    young = Seed("mlp", 0, age=2)
    assert says(State(20, (young,)), ANSWER) == ("plant", 1, "lora")
    assert says(State(20, (young, Seed("lora", 1, age=1))), ANSWER) == ("plant", 2, "lora")
    assert says(State(20, (young,), room=False), ANSWER) == "wait"
    assert says(State(20, accuracy=95.0), ANSWER) == ("plant", 0, "mlp")  # whatever the host can do by itself
    single = FixedSchedule("of one seed", OPENING.plantings[:1])
    assert says(State(20, (young,)), ANSWER, opening=single) == "wait"  # until something is known of that one
    looked_at = Seed("mlp", 0, age=teacher.TRIAL)
    assert says(State(20, (looked_at,)), ANSWER) == ("plant", 1, "norm")  # no longer
    assert says(State(20, (young,), tried_before=True), ANSWER) == ("plant", 1, "norm")
    assert says(State(20, (looked_at,), accuracy=95.0), ANSWER) == "wait"
    images = FixedSchedule("for images", [Planting(1, "*", {"conv2d": "conv"})])
    assert says(State(20), ANSWER, opening=images) == ("plant", 1, "norm")  # it has nothing for this layout


def test_it_plants_nothing_where_nothing_is_worth_it_or_there_is_no_time_or_no_room() -> None:
    learnt = {"tried_before": True}
    assert says(State(20)) == "wait"
    assert says(State(20, **learnt)) == "wait"
    assert says(State(7, **learnt), ANSWER) == ("plant", 1, "norm")
    assert says(State(6, **learnt), ANSWER) == "wait"
    assert says(State(6), ANSWER) == "wait"
    assert says(State(20, room=False, **learnt), ANSWER) == "wait"
    assert says(State(20, accuracy=86.9, **learnt), ANSWER) == ("plant", 1, "norm")
    assert says(State(20, accuracy=87.1, **learnt), ANSWER) == "wait"  # within 3 points of the best play's 90


def test_then_it_plants_what_is_missing_the_first_slot_first() -> None:
    two = (("norm", 2), ("mlp", 0))
    assert says(State(20, tried_before=True), *two) == ("plant", 0, "mlp")
    assert says(State(20, (Seed("mlp", 0),)), *two) == ("plant", 2, "norm")
    assert says(State(20, (Seed("norm", 2),)), *two) == ("plant", 0, "mlp")
    assert says(State(20, (Seed("mlp", 0), Seed("norm", 2))), *two) == "wait"
    taken = State(20, (Seed("lora", 0, age=1),), tried_before=True)
    assert says(taken, *two) == ("plant", 2, "norm")


@pytest.mark.parametrize("gain", [None, -3.0, 12.0])
@pytest.mark.parametrize("seed", [ANSWER, ("lora", 2)], ids=["the answer", "nearly as good"])
def test_it_makes_permanent_what_is_right_as_soon_as_it_may_and_never_removes_it(
    seed: tuple[str, int], gain: float | None
) -> None:
    for left in (20, 3):
        ready = Seed(*seed, gain=gain, may=BOTH)
        assert says(State(left, (ready,)), ANSWER, also=[("lora", 2)]) == ("fossilize", seed[1])
    not_ready = State(20, (Seed(*seed, gain=gain, may=(Op.PRUNE,)),), room=False)
    assert says(not_ready, ANSWER, also=[("lora", 2)]) == "wait"


@pytest.mark.parametrize("stranger", [("mlp", 1), ("norm", 0)], ids=["another seed", "another slot"])
@pytest.mark.parametrize(
    ("stage", "waits"), [(Stage.GERMINATED, 10), (Stage.TRAINING, 7), (Stage.BLENDING, 4), (Stage.HOLDING, 5)]
)
def test_it_gives_a_seed_that_does_not_help_up_after_a_time_that_depends_on_its_stage(
    stranger: tuple[str, int], stage: Stage, waits: int
) -> None:
    for wanted in ((), (ANSWER,)):
        trial = [State(20, (Seed(*stranger, age, may=(Op.PRUNE,), stage=stage),), room=False) for age in range(10)]
        assert labels(episode(*trial), *wanted) == ["wait"] * waits + [("prune", stranger[1])] * (10 - waits)
    forbidden = Seed(*stranger, age=9, may=(), stage=stage)
    assert says(State(20, (forbidden,), room=False), ANSWER) == "wait"  # the lifecycle does not let it


@pytest.mark.parametrize("measured", ["gain", "promise"])
@pytest.mark.parametrize("left", [20, 3])
@pytest.mark.parametrize(
    ("points", "size", "helps"),
    [
        (0.6, 0.0, True),
        (0.4, 0.0, False),
        (-1.0, 0.0, False),
        (None, 0.0, False),
        (2.6, 0.4, True),
        (2.4, 0.4, False),
        (8.0, 1.6, False),
        (9.0, 1.6, True),
    ],
)
def test_a_stranger_that_contributes_more_than_its_rent_is_kept(
    points: float | None, size: float, helps: bool, left: int, measured: str
) -> None:
    shown: Any = {measured: points, "size": size}
    for wanted in ((), (ANSWER,)):
        ready = State(left, (Seed("mlp", 0, may=BOTH, **shown),))
        assert says(ready, *wanted) == ("fossilize" if helps else "prune", 0)
    not_ready = State(left, (Seed("mlp", 0, may=(Op.PRUNE,), **shown),))
    assert says(not_ready) == ("wait" if helps else ("prune", 0))


def test_every_seed_is_looked_at_and_what_is_there_comes_before_what_is_missing() -> None:
    fine, hopeless = Seed("norm", 1, may=(Op.PRUNE,)), Seed("mlp", 2, may=(Op.PRUNE,))
    assert says(State(20, (fine, hopeless)), ANSWER, ("lora", 0)) == ("prune", 2)
    assert says(State(20, (fine,)), ANSWER, ("lora", 0)) == ("plant", 0, "lora")
    kept = Seed("mlp", 2, age=15, stage=Stage.FOSSILIZED)
    assert says(State(20, (kept,)), ANSWER) == ("plant", 1, "norm")


def test_what_a_seed_promised_does_not_count_once_it_acts() -> None:
    disappointing = Seed("mlp", 0, gain=-3.0, promise=8.0, may=BOTH, stage=Stage.HOLDING)
    assert says(State(20, (disappointing,)), ANSWER) == ("prune", 0)


def test_labels_are_legal_in_a_real_play_full_of_mistakes() -> None:
    """Another random legal decision every other time; the answer is not what the schedule plants."""
    number = 1
    played = play(Play("mixed/vector", "noisy", portfolio.plan("mlp_small@1"), (number,), noise=0.5))
    labelled = relabelled(played, {number: Answer([("norm", 0)], [], 99.0, 99.0)}, OPENING)
    check(labelled, growth_schema())
    ops = {Op(op) for op in labelled.label[labelled.valid][:, HEAD_NAMES.index("op")].tolist()}
    assert Op.PRUNE in ops


def test_an_observation_tells_the_points_that_went_into_it() -> None:
    for gain in (-20.0, -0.3, 0.0, 2.0, 49.0):
        assert teacher.points(squash(gain, 50.0)) == pytest.approx(gain, abs=1e-6)
    assert teacher.points(NOT_MEASURED) == 0.0


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_play_ends_with_what_takes_part_in_the_output_at_its_last_step() -> None:
    seeds = (
        Seed("norm", 0, stage=Stage.BLENDING),
        Seed("mlp", 1, stage=Stage.TRAINING),
        Seed("lora", 2, stage=Stage.FOSSILIZED),
    )
    last = episode(State(3, (Seed("mlp", 1),)), State(1, seeds, accuracy=70.0), earned=66.0)
    first = episode(State(3, (Seed("mlp", 1),), accuracy=60.0), earned=55.0)
    both = join([last, first])  # the second one is shorter: what lies beyond its end means nothing
    both.reward[1, 1] = 99.0
    found = [teacher.ending(both, row) for row in (0, 1)]
    assert found == [
        Answer([("norm", 0), ("lora", 2)], [], 66.0, pytest.approx(70.0, abs=1e-4)),
        Answer([("mlp", 1)], [], 55.0, pytest.approx(60.0, abs=1e-4)),
    ]


def test_an_answer_gives_way_to_one_that_is_better_beyond_doubt_and_knows_of_those_nearly_as_good() -> None:
    norm, mlp = answer(("norm", 0), also=[("conv", 1)], earned=60.0), answer(("mlp", 1), ("norm", 0), earned=60.9)
    assert teacher.better(norm, mlp) == answer(("norm", 0), also=[("conv", 1), ("mlp", 1)], earned=60.0)
    assert teacher.better(mlp, norm) == answer(("mlp", 1), ("norm", 0), also=[("conv", 1)], earned=60.9)
    lora = answer(("lora", 2), earned=62.5)
    assert teacher.better(norm, lora) == answer(("lora", 2), also=[("norm", 0), ("conv", 1)], earned=62.5)
    far = answer(("lora", 2), earned=63.5)
    assert teacher.better(norm, far) == far
    assert teacher.better(far, norm) == far


def test_one_number_cannot_be_a_problem_of_two_families(tmp_path: Path) -> None:
    for name in ("mixed", "varied"):
        (tmp_path / name).mkdir()
        teacher.write_answers(tmp_path / name, name, {1: Answer([("norm", 0)], [], 10.0, 50.0)})
    with pytest.raises(ValueError, match=r"problem 1 of varied in .* is one of another family, too"):
        teacher.read_answers([tmp_path / "mixed", tmp_path / "varied"])


def test_the_best_answer_of_several_folders_wins(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    one = {1: Answer([("norm", 0)], [("conv", 2)], 10.0, 50.0), 2: Answer([("mlp", 1), ("norm", 0)], [], 20.0, 60.0)}
    two = {
        1: Answer([("mlp", 2)], [], 14.5, 55.0),
        2: Answer([], [], 16.5, 57.0),
        4: Answer([("conv", 3)], [], 7.0, 8.0),
    }
    for folder, written in zip(folders, (one, two), strict=True):
        folder.mkdir()
        teacher.write_answers(folder, "mixed", written)
        assert teacher.read_answers([folder]) == written
    expected = {1: two[1], 2: one[2], 4: two[4]}
    assert teacher.read_answers(folders) == teacher.read_answers(folders[::-1]) == expected


def test_a_policy_that_earned_more_than_the_best_plan_has_the_better_answer() -> None:
    known = {1: answer(("norm", 0), earned=10.0), 2: answer(("mlp", 1), earned=20.0), 3: answer(earned=5.0)}
    plays = [
        ended_with(Seed("lora", 0), number=1, by="sibling 0", earned=12.0),
        ended_with(Seed("mlp", 0), number=1, by="sibling 1", earned=15.5),
        ended_with(Seed("norm", 2), number=1, by="sibling 2", earned=16.0),  # better than the one before by too little
        ended_with(Seed("norm", 2), number=2, by="sibling 0", earned=20.9),
        ended_with(number=3, by="sibling 0", earned=1.5),
    ]
    assert own_plays.better_answers(join(plays), known) == {
        1: answer(("mlp", 0), also=[("norm", 2)], earned=15.5),
        2: answer(("mlp", 1), also=[("norm", 2)], earned=20.0),
        3: known[3],
    }


# -- the portfolio -----------------------------------------------------------------------------------------------------


def test_a_plan_is_read_in_the_order_in_which_it_plants() -> None:
    assert isinstance(portfolio.plan(NONE), NoGrowth)
    found = portfolio.plan("norm@0+mlp_small@*", epoch=4)
    assert isinstance(found, FixedSchedule)
    assert [(p.epoch, p.slot, p.blueprints["dense"]) for p in found.plantings] == [
        (4, 0, "norm"),
        (4, "*", "mlp_small"),
    ]


@pytest.mark.parametrize("layout", portfolio.PLANS)
def test_every_plan_names_seeds_that_fit_its_layout(layout: Any) -> None:
    fit = {blueprint.name for blueprint in fitting(SlotShape(layout, 8))}
    plans = portfolio.PLANS[layout]
    assert len(set(plans)) == len(plans)
    assert {part.split("@")[0] for text in plans for part in text.split("+")} <= fit


def test_every_problem_is_played_without_growth_with_what_was_meant_and_by_some_plans() -> None:
    family = "mixed/vector"
    numbers = range(get_family(family).round)
    found = portfolio.jobs(family, numbers, others=2)
    for number in numbers:
        draw = get_family(family).draw(number)
        jobs = [job for job in found if job.numbers == (number,)]
        assert isinstance(jobs[0].controller, NoGrowth)
        meant = [job for job in jobs if job.name == MEANT]
        assert len(meant) == (draw.facts["answer"] != NONE)
        for job in meant:
            assert isinstance(job.controller, FixedSchedule)
            planted = [f"{p.blueprints['dense']}@{p.slot}" for p in job.controller.plantings]
            assert "+".join(planted) == draw.facts["answer"]
        others = [job.name.removeprefix("dense ") for job in jobs if job.name not in (NONE, MEANT)]
        assert len(set(others)) == 2
        assert set(others) <= set(portfolio.PLANS["dense"])
        assert not any(job.noise for job in jobs)
    again = portfolio.jobs(family, numbers, others=2)
    assert [(job.name, job.numbers) for job in again] == [(job.name, job.numbers) for job in found]
    many = portfolio.jobs("varied", [3], others=99)  # which says nothing of what was meant
    assert [job.name for job in many[:1]] == [NONE]
    assert {job.name for job in many[1:]} == {f"dense {text}" for text in portfolio.PLANS["dense"]}


def portfolio_plays() -> list[Episodes]:
    return [
        # 1: what was meant is as good as the best, up to what may be chance.
        ended_with(number=1, by=NONE, earned=50.0),
        ended_with(Seed("mlp", 0), Seed("mlp", 1), number=1, by="dense mlp@*", earned=60.9),
        ended_with(Seed("norm", 0), number=1, by=MEANT, earned=60.0),
        # 2: something else is clearly better.
        ended_with(number=2, by=NONE, earned=50.0),
        ended_with(Seed("norm", 0), number=2, by=MEANT, earned=60.0),
        ended_with(Seed("mlp", 0), number=2, by="dense mlp@*", earned=61.5),
        # 3: growing hardly pays.
        ended_with(number=3, by=NONE, earned=50.0),
        ended_with(Seed("lora", 0), number=3, by="dense lora@*", earned=50.9),
    ]


def test_the_answer_is_how_the_best_play_ended_unless_growing_hardly_paid() -> None:
    assert portfolio.answers(join(portfolio_plays())) == {
        1: answer(("norm", 0), also=[("mlp", 0), ("mlp", 1)], earned=60.0),
        2: answer(("mlp", 0), also=[("norm", 0)], earned=61.5),
        3: answer(earned=50.0),
    }


def test_schedules_are_judged_by_what_they_gain_on_the_problems_that_they_played() -> None:
    found = portfolio.table(join(portfolio_plays()))
    assert found.keys() == {NONE, MEANT, "dense mlp@*", "dense lora@*"}
    assert found[NONE] == (0.0, 3)
    assert found[MEANT] == (10.0, 2)
    assert found["dense mlp@*"] == (pytest.approx((10.9 + 11.5) / 2, abs=1e-4), 2)
    assert found["dense lora@*"] == (pytest.approx(0.9, abs=1e-4), 1)


def test_problems_that_time_cut_short_are_left_out() -> None:
    cut = ended_with(Seed("mlp", 0), number=4, by="dense mlp@*", earned=99.0)
    asked = [*(number for one in portfolio_plays() for number in one.draw.tolist()), 4, 4]
    plays = [Play("mixed", "anyone", portfolio.plan(NONE), (number,)) for number in asked]
    found = portfolio.complete(join([*portfolio_plays(), cut]), plays)
    assert sorted(set(found.draw.tolist())) == [1, 2, 3]
    assert len(found) == len(portfolio_plays())


# -- playing -----------------------------------------------------------------------------------------------------------


def at_once(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: int, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Any, Any]]:
    """`in_processes` without processes."""
    for job in jobs:
        if stop():
            return
        yield job, function(job)


def test_playing_stops_when_time_is_up_and_keeps_what_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def ten_seconds(number: int) -> Episodes:
        nonlocal now
        now += 10.0
        return episode(State(2), number=number, by=f"player {number % 2}")

    monkeypatch.setattr(playing, "in_processes", at_once)
    monkeypatch.setattr(playing, "time", SimpleNamespace(perf_counter=lambda: now))
    many = 2 * playing.EPISODES_AT_ONCE + 6
    assert playing.play_all(ten_seconds, range(many), 1, seconds=25.0).draw.tolist() == [0, 1, 2]
    everything = playing.play_all(ten_seconds, range(many), 1)
    assert everything.draw.tolist() == list(range(many))
    assert [everything.controllers[i] for i in everything.controller.tolist()] == [
        f"player {n % 2}" for n in range(many)
    ]


def test_playing_says_so_when_nothing_was_finished_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "in_processes", at_once)
    monkeypatch.setattr(playing, "time", SimpleNamespace(perf_counter=iter(range(0, 1000, 100)).__next__))
    with pytest.raises(SystemExit, match="no episode of 3 was finished within 5"):
        playing.play_all(lambda number: episode(State(2), number=number), range(3), 1, seconds=5.0)


# -- from plays to labels ----------------------------------------------------------------------------------------------


SCHEDULE = """name = "best schedule"
[[grow]]
epoch = 1
slot = "*"
blueprint = {{ {layout} = "norm" }}
"""


def test_the_teacher_labels_recordings_by_the_answers_beside_them(tmp_path: Path) -> None:
    plays, round1, out = (tmp_path / name for name in ("plays", "round1", "labelled"))
    opening = tmp_path / "opening.toml"
    opening.write_text(SCHEDULE.format(layout="conv1d"))
    one = episode(State(20), State(19), number=EVEN)
    append(plays, one, growth_schema(), {"command": "test"})
    teacher.write_answers(plays, "mixed", {EVEN: Answer([("norm", 1)], [], 10.0, 90.0)})
    append(round1, one, growth_schema(), {"command": "test"})
    teacher.write_answers(round1, "mixed", {EVEN: Answer([("mlp", 2)], [], 20.0, 95.0)})
    arguments = [str(plays), str(round1), "--opening", str(opening), "--out", str(out)]
    assert teacher.main(arguments) == 0
    labelled = read(out, growth_schema()).episodes
    expected = teacher.action(Op.GERMINATE, 2, blueprint_names().index("mlp"))
    assert torch.equal(labelled.label[:, 1], expected.expand(2, -1))  # the better answer, in both
    with pytest.raises(SystemExit):
        teacher.main(arguments)


def test_a_round_is_played_on_known_problems_and_keeps_the_answers_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, out = tmp_path / "known", tmp_path / "round1"
    known.mkdir()
    teacher.write_answers(
        known, "mixed/vector", {number: Answer([("norm", 0)], [], 50.0, 60.0) for number in (9, 7, 8, 5)}
    )

    def play_all(play: Any, plays: Sequence[Play], workers: int, seconds: float | None) -> Episodes:
        assert [(one.numbers, one.noise) for one in plays] == [((7,), 0.2), ((7,), 0.2), ((8,), 0.2), ((8,), 0.2)]
        return join(
            [
                ended_with(Seed("mlp", 1), number=7, by="sibling 0", earned=40.0),
                ended_with(Seed("mlp", 1), number=8, by="sibling 1", earned=70.0),
            ]
        )

    monkeypatch.setattr(own_plays, "play_all", play_all)
    arguments = ["--policy", "small", "--family", "mixed/vector", "--known", str(known), "--out", str(out)]
    more = ["--first", "1", "--problems", "2", "--siblings", "2", "--noise", "0.2"]
    assert own_plays.main([*arguments, *more]) == 0
    assert teacher.read_answers([out]) == {
        7: Answer([("norm", 0)], [], 50.0, 60.0),
        8: answer(("mlp", 1), earned=70.0),
    }
    assert read(out, growth_schema()).episodes.draw.tolist() == [7, 8]


def test_a_portfolio_a_round_and_the_teacher_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one problem, whose draw must be a training one."""
    monkeypatch.setattr(playing, "in_processes", at_once)
    first, second, out, opening = (str(tmp_path / name) for name in ("portfolio", "round1", "labelled", "best.toml"))
    Path(opening).write_text(SCHEDULE.format(layout="dense"))
    of = ["--family", "disguised/vector", "--problems", "1"]
    assert portfolio.main([*of, "--first", "1", "--others", "1", "--out", first]) == 0
    assert own_plays.main([*of, "--policy", "small", "--known", first, "--out", second]) == 0
    assert teacher.main([first, second, "--opening", opening, "--out", out]) == 0
    labelled = read(Path(out), growth_schema()).episodes
    assert set(labelled.draw.tolist()) == {portfolio.FIRST_DRAW + 1}
    assert {NONE, "sibling 0"} <= set(labelled.controllers)
    with pytest.raises(SystemExit):
        portfolio.main([*of, "--out", first])  # its answers would be lost


# -- together ----------------------------------------------------------------------------------------------------------


def test_recordings_are_repeated_and_thinned_and_their_problems_kept_apart() -> None:
    one = join([episode(State(20), number=number) for number in (1, 2, 3, 4)])
    other = join([episode(State(20), State(19), number=number) for number in range(1, 11)])
    found = in_proportion([(one, 2.0), (other, 0.4)])
    assert len(found) == 2 * 4 + 4
    first, second = found.draw[:8].tolist(), found.draw[8:].tolist()
    assert first == [1, 2, 3, 4] * 2
    assert len(set(second)) == 4
    assert all(APART < number <= APART + 10 for number in second)
    assert found.lengths.tolist() == [1] * 8 + [2] * 4


def test_how_often_a_recording_counts_must_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        together.main(["recordings", "--out", str(tmp_path / "out")])
    assert "Say recordings:1" in capsys.readouterr().err
