"""Portfolios and their teacher: which plans are tried, what is expected of them, and what the teacher says of a state.

Covers: R149 (growth under control: what a teacher plants, keeps and removes)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SLOT_FIELDS, squash
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import SlotShape, blueprint_names, fitting
from esper.lifecycle import Stage
from esper.offline.episodes import Episodes, check, growth_schema, join
from esper.offline.recorder import Play
from esper.offline.recording import append, read
from esper.policy.controller import NoGrowth
from esper.policy.schedule import FixedSchedule
from esper.tasks.family import get_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
import own_plays
import planner
import playing
import portfolio
import seen
import together
from portfolio import MEANT, NONE
from together import APART, in_proportion

SLOTS = 3
LINEAR = BLENDS.index("linear")


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


def episode(*states: State, number: int = 4, by: str = "someone", earned: float = 0.0) -> Episodes:
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


Told = tuple[str, int] | tuple[str, int, str] | str


def told(label: torch.Tensor) -> Told:
    """A decision, readably."""
    slot, blueprint, blend, op = label.tolist()
    if op == Op.WAIT:
        return "wait"
    if op == Op.GERMINATE:
        assert blend == LINEAR
        return "plant", slot, blueprint_names()[blueprint]
    return Op(op).name.lower(), slot


def says(state: State, plan: str = NONE, outlook: float = 5.0, step: int = 5) -> Told:
    """What the teacher says in one state, late enough to plant. Whatever it says must be possible there."""
    episodes = episode(state)
    label = planner.decide(seen.Seen(episodes, 0, 0), step, plan, outlook)
    check(replace(episodes, label=label[None, None]), growth_schema())
    return told(label)


# -- the teacher, rule by rule -----------------------------------------------------------------------------------------

PLAN = "norm@1"
BOTH = (Op.PRUNE, Op.FOSSILIZE)


def test_it_begins_the_plan_once_the_host_has_been_seen_alone() -> None:
    assert [says(State(20), PLAN, step=step) for step in range(4)] == ["wait", "wait", *[("plant", 1, "norm")] * 2]


def test_it_plants_nothing_where_nothing_is_promised_or_there_is_no_time_or_no_room() -> None:
    assert says(State(20)) == "wait"
    assert says(State(7), PLAN) == ("plant", 1, "norm")
    assert says(State(6), PLAN) == "wait"
    assert says(State(20, room=False), PLAN) == "wait"
    assert says(State(20, tried_before=True), "norm@2") == "wait"  # not twice in the same slot
    assert says(State(20, tried_before=True), PLAN) == ("plant", 1, "norm")


def test_it_plants_what_the_plan_has_for_a_slot_the_first_slot_first() -> None:
    assert says(State(20), "norm@2+mlp@0") == ("plant", 0, "mlp")
    assert says(State(20), "norm@2+mlp@*") == ("plant", 0, "mlp")
    everywhere = (Seed("mlp", 0), Seed("mlp", 1))
    assert says(State(20, everywhere), "norm@2+mlp@*") == ("plant", 2, "norm")  # what is named first for a slot
    assert says(State(20, (*everywhere, Seed("norm", 2))), "norm@2+mlp@*") == "wait"


@pytest.mark.parametrize("gain", [None, -3.0, 12.0])
def test_it_makes_permanent_what_the_plan_planted_as_soon_as_it_may_and_does_not_remove_it(gain: float | None) -> None:
    for left in (20, 3):
        assert says(State(left, (Seed("norm", 1, gain=gain, may=BOTH),)), PLAN) == ("fossilize", 1)
    assert says(State(20, (Seed("norm", 1, gain=gain, may=(Op.PRUNE,)),), room=False), PLAN) == "wait"


def test_it_removes_what_is_there_if_growing_promises_a_loss_and_there_is_time_to_recover() -> None:
    good, bad = Seed("norm", 1, gain=12.0, may=BOTH), Seed("mlp", 0, gain=3.0, may=BOTH)
    state = State(20, (good, bad))
    assert says(state, PLAN, outlook=planner.LOSS) == ("fossilize", 0)
    assert says(state, PLAN, outlook=planner.LOSS - 0.1) == ("prune", 0)  # the lesser one first
    assert says(State(20, (good,)), PLAN, outlook=planner.LOSS - 0.1) == ("prune", 1)
    late = State(planner.TIME_TO_RECOVER - 1, (good,))
    assert says(late, PLAN, outlook=-9.0) == ("fossilize", 1)
    kept = Seed("mlp", 0, age=15, stage=Stage.FOSSILIZED)
    assert says(State(20, (kept,), room=False), outlook=-9.0) == "wait"


@pytest.mark.parametrize("stranger", [("mlp", 1), ("norm", 0)], ids=["another seed", "another slot"])
@pytest.mark.parametrize(
    ("stage", "waits"), [(Stage.GERMINATED, 10), (Stage.TRAINING, 7), (Stage.BLENDING, 4), (Stage.HOLDING, 5)]
)
def test_it_gives_a_stranger_that_does_not_help_up_after_a_time_that_depends_on_its_stage(
    stranger: tuple[str, int], stage: Stage, waits: int
) -> None:
    for plan in (NONE, PLAN):
        trial = [State(20, (Seed(*stranger, age, may=(Op.PRUNE,), stage=stage),), room=False) for age in range(10)]
        assert [says(state, plan) for state in trial] == ["wait"] * waits + [("prune", stranger[1])] * (10 - waits)
    forbidden = Seed(*stranger, age=9, may=(), stage=stage)
    assert says(State(20, (forbidden,), room=False), PLAN) == "wait"  # the lifecycle does not let it


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
    for plan in (NONE, PLAN):
        ready = State(left, (Seed("mlp", 0, may=BOTH, **shown),))
        assert says(ready, plan) == ("fossilize" if helps else "prune", 0)
    not_ready = State(left, (Seed("mlp", 0, may=(Op.PRUNE,), **shown),))
    assert says(not_ready) == ("wait" if helps else ("prune", 0))


def test_what_a_seed_promised_does_not_count_once_it_acts() -> None:
    disappointing = Seed("mlp", 0, gain=-3.0, promise=8.0, may=BOTH, stage=Stage.HOLDING)
    assert says(State(20, (disappointing,)), PLAN) == ("prune", 0)


def test_an_observation_tells_the_points_that_went_into_it() -> None:
    for gain in (-20.0, -0.3, 0.0, 2.0, 49.0):
        assert seen.points(squash(gain, 50.0)) == pytest.approx(gain, abs=1e-6)
    assert seen.points(NOT_MEASURED) == 0.0


# -- forecasts ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_described_by_what_it_has_for_the_first_slot_the_second_and_the_others() -> None:
    norm, mlp = (blueprint_names().index(name) for name in ("norm", "mlp"))

    def ones(plan: str) -> list[list[int]]:
        return [row.nonzero()[0].tolist() for row in planner.described(plan).reshape(3, -1)]

    assert ones("norm@0") == [[norm], [], []]
    assert ones("mlp@*") == [[mlp], [mlp], [mlp]]
    assert ones("norm@1+mlp@*") == [[mlp], [norm], [mlp]]
    assert ones("mlp@*+norm@1") == [[mlp], [mlp], [mlp]]


def test_states_do_not_depend_on_how_many_slots_were_left_empty_to_fill_up() -> None:
    one = episode(State(20), State(19, (Seed("mlp", 1, gain=3.0),)))
    more = join([one, one])
    wider = replace(
        more,
        observation=replace(
            more.observation,
            slots=torch.nn.functional.pad(more.observation.slots, (0, 0, 0, 2)),
            blueprints=torch.nn.functional.pad(more.observation.blueprints, (0, 2)),
        ),
    )
    found = planner.states(wider)
    assert found.shape[:2] == (2, 2)
    assert np.array_equal(found[:1], planner.states(one))


def portfolio_of(rule: Callable[[float, str], float], count: int = 120) -> list[Episodes]:
    """Problems whose accuracy at first says what a plan gains."""
    found = []
    for number in range(count):
        look = 10.0 + 80.0 * (number % 2)
        start = [State(20 - step, accuracy=look) for step in range(planner.SEEN)]
        for plan in (NONE, "mlp@*", "norm@0"):
            seeds = (Seed(plan.split("@")[0], 0),) if plan != NONE else ()
            rest = [State(10 - step, seeds, accuracy=look) for step in range(3)]
            name, earned = (NONE, 50.0) if plan == NONE else (f"dense {plan}", 50.0 + rule(look, plan))
            found.append(episode(*start, *rest, number=number, by=name, earned=earned))
    return found


def gain_of(look: float, plan: str) -> float:
    return {(10.0, "mlp@*"): 20.0, (10.0, "norm@0"): 5.0, (90.0, "mlp@*"): -8.0, (90.0, "norm@0"): -2.0}[look, plan]


def test_a_forecast_goes_by_how_a_problem_looks_and_never_by_its_own_plays() -> None:
    plays = join(portfolio_of(gain_of))
    known = planner.portfolios(plays, planner.states(plays))["dense"]
    forecast = planner.plan_forecasts(known)
    assert [planner.best_plan(forecast[number]) for number in (0, 1)] == ["mlp@*", NONE]
    assert forecast[0]["mlp@*"] == pytest.approx(20.0, abs=1.0)
    assert forecast[1]["norm@0"] == pytest.approx(-2.0, abs=1.0)
    astray = portfolio_of(lambda look, plan: 10_000.0 if plan == "norm@0" else gain_of(look, plan), 2)
    mixed = join([*astray[3:], plays.select((plays.draw != 1).nonzero().flatten())])  # problem 1 went quite otherwise
    told_otherwise = planner.plan_forecasts(planner.portfolios(mixed, planner.states(mixed))["dense"])
    assert told_otherwise[1] == pytest.approx(forecast[1], abs=1e-6)
    assert max(gains["norm@0"] for gains in told_otherwise.values()) > 50.0  # the others did learn from it


def test_an_outlook_tells_states_from_which_growing_costs_from_others() -> None:
    plays = join(portfolio_of(gain_of))
    states = planner.states(plays)
    known = planner.portfolios(plays, states)["dense"]
    outlook = planner.outlooks(known, plays, states, range(len(plays)))
    names = [plays.controllers[int(c)] for c in plays.controller]
    for row in range(12):
        expected = (
            0.0 if names[row] == NONE else gain_of(90.0 if int(plays.draw[row]) % 2 else 10.0, names[row].split()[1])
        )
        assert outlook[row][-1] == pytest.approx(expected, abs=1.5)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_is_read_in_the_order_in_which_it_plants() -> None:
    assert isinstance(portfolio.plan(NONE), NoGrowth)
    found = portfolio.plan("norm@0+mlp_small@*")
    assert isinstance(found, FixedSchedule)
    assert [(p.epoch, p.slot, p.blueprints["dense"]) for p in found.plantings] == [
        (portfolio.FIRST_EPOCH, 0, "norm"),
        (portfolio.FIRST_EPOCH, "*", "mlp_small"),
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
        ended_with(number=1, by=NONE, earned=50.0),
        ended_with(Seed("mlp", 0), Seed("mlp", 1), number=1, by="dense mlp@*", earned=60.9),
        ended_with(Seed("norm", 0), number=1, by=MEANT, earned=60.0),
        ended_with(number=2, by=NONE, earned=50.0),
        ended_with(Seed("norm", 0), number=2, by=MEANT, earned=60.0),
        ended_with(Seed("mlp", 0), number=2, by="dense mlp@*", earned=61.5),
        ended_with(number=3, by=NONE, earned=50.0),
        ended_with(Seed("norm", 0), number=3, by="dense norm@*", earned=50.9),
    ]


def test_schedules_are_judged_by_what_they_gain_on_the_problems_that_they_played() -> None:
    found = portfolio.table(join(portfolio_plays()))
    assert found.keys() == {NONE, MEANT, "dense mlp@*", "dense norm@*"}
    assert found[NONE] == (0.0, 3)
    assert found[MEANT] == (10.0, 2)
    assert found["dense mlp@*"] == (pytest.approx((10.9 + 11.5) / 2, abs=1e-4), 2)
    assert found["dense norm@*"] == (pytest.approx(0.9, abs=1e-4), 1)


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


def test_a_round_is_played_on_known_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, out = tmp_path / "known", tmp_path / "round1"
    plays = join([ended_with(number=number, by=NONE, earned=50.0) for number in (9, 7, 8, 7, 5)])
    append(known, plays, growth_schema(), {"command": "test", "task": "mixed/vector"})

    def play_all(play: Any, plays: Sequence[Play], workers: int, seconds: float | None) -> Episodes:
        assert [(one.numbers, one.noise) for one in plays] == [((7,), 0.2), ((7,), 0.2), ((8,), 0.2), ((8,), 0.2)]
        return join([ended_with(Seed("mlp", 1), number=number, by="sibling 0", earned=40.0) for number in (7, 8)])

    monkeypatch.setattr(own_plays, "play_all", play_all)
    arguments = ["--policy", "small", "--known", str(known), "--out", str(out)]
    more = ["--first", "1", "--problems", "2", "--siblings", "2", "--noise", "0.2"]
    with pytest.raises(SystemExit):
        own_plays.main([*arguments, *more, "--family", "varied"])
    assert "has problems of mixed/vector, not of varied" in capsys.readouterr().err
    assert own_plays.main([*arguments, *more, "--family", "mixed/vector"]) == 0
    assert read(out, growth_schema()).episodes.draw.tolist() == [7, 8]


def test_a_portfolio_a_round_and_the_teacher_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few problems, whose draws must be training ones; labels are possible whatever was done."""
    monkeypatch.setattr(playing, "in_processes", at_once)
    first, second, out = (str(tmp_path / name) for name in ("portfolio", "round1", "labelled"))
    of = ["--family", "disguised/vector", "--problems", "3"]
    assert portfolio.main([*of, "--first", "6", "--others", "1", "--out", first]) == 0
    assert own_plays.main([*of, "--policy", "small", "--known", first, "--noise", "0.5", "--out", second]) == 0
    assert planner.main([first, "--also", second, "--out", out]) == 0
    labelled = read(Path(out), growth_schema()).episodes
    assert set(labelled.draw.tolist()) == {portfolio.FIRST_DRAW + number for number in range(6, 9)}
    assert {NONE, "sibling 0"} <= set(labelled.controllers)
    with pytest.raises(SystemExit):
        portfolio.main([*of, "--out", first])


def test_one_number_cannot_be_a_problem_of_two_families(tmp_path: Path) -> None:
    for family in ("mixed", "varied"):
        append(tmp_path / family, join(portfolio_of(gain_of, 2)), growth_schema(), {"command": "test", "task": family})
    folders = [str(tmp_path / family) for family in ("mixed", "varied")]
    with pytest.raises(SystemExit, match=r"problem 0 of varied in .* is one of mixed, too"):
        planner.main([*folders, "--out", str(tmp_path / "labelled")])


def test_the_teacher_says_so_if_there_are_too_few_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "one", join(portfolio_of(gain_of, 1)), growth_schema(), {"command": "test"})
    with pytest.raises(SystemExit):
        planner.main([str(tmp_path / "one"), "--out", str(tmp_path / "labelled")])
    assert "too few dense problems" in capsys.readouterr().err


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
