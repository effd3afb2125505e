"""Portfolios and their teacher: which plans are tried, what is expected of them, and what the teacher says of a state.

Covers: R149 (growth under control: what a teacher plants and keeps)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import plays_by_hand as by_hand
import pytest
import torch
from plays_by_hand import (
    BETTER,
    BOTH,
    GOOD,
    SLOTS,
    Seed,
    State,
    Told,
    ended_with,
    episode,
    gain_of,
    kind_number,
    portfolio_of,
    told,
)

from esper.actions import Op
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, squash
from esper.growth.blueprints import SlotShape, blueprint_names, fitting
from esper.offline.episodes import Episodes, check, growth_schema, join
from esper.offline.recorder import Play, play
from esper.offline.recording import append, read
from esper.policy.controller import NoGrowth
from esper.policy.schedule import FixedSchedule
from esper.tasks.family import get_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
import forecasts
import own_plays
import planner
import playing
import portfolio
import seen
from portfolio import FIRST_EPOCH, MEANT, NONE


def says(state: State) -> Told:
    """What the teacher says about the seeds of a state. Whatever it says must be possible there."""
    episodes = episode(state)
    label = planner.care(seen.Seen(episodes, 0, 0))
    if label is None:
        return "nothing"
    check(replace(episodes, label=label[None, None]), growth_schema())
    return told(label)


def plants(state: State, promised: dict[tuple[str, int], float], wait: float = 0.0, step: int = 5) -> Told:
    """What it plants, told what plantings promise."""
    episodes = episode(state)
    promise = torch.full((SLOTS, len(blueprint_names())), torch.nan)
    for (blueprint, slot), points in promised.items():
        promise[slot, blueprint_names().index(blueprint)] = points
    offered = planner.offers(seen.Seen(episodes, 0, 0), step, promise)
    if offered.isnan().all():
        return "nothing to plant"
    label = planner.choose(offered, wait)
    check(replace(episodes, label=label[None, None]), growth_schema())
    return told(label)


# -- the teacher, rule by rule -----------------------------------------------------------------------------------------


def test_it_plants_what_promises_most_once_the_host_has_been_seen_for_an_epoch() -> None:
    two = {GOOD: 3.0, BETTER: 4.0}
    found = [plants(State(20), two, step=step) for step in range(4)]
    assert found == ["nothing to plant", *[("plant", 0, "mlp")] * 3]
    assert plants(State(20, (Seed("mlp", 0),)), two) == ("plant", 1, "norm")


def test_it_plants_nothing_where_waiting_promises_as_much_or_there_is_no_time_or_no_room() -> None:
    one = {GOOD: 3.0}
    assert plants(State(20), one, wait=2.9) == ("plant", 1, "norm")
    assert plants(State(20), one, wait=3.0) == "wait"
    assert plants(State(7), one) == ("plant", 1, "norm")
    for state in (State(6), State(20, room=False)):
        assert plants(state, one) == "nothing to plant"
    tried = State(20, tried_before=True)
    assert plants(tried, {("norm", SLOTS - 1): 9.0}) == "nothing to plant"  # not twice in the same slot
    assert plants(tried, {("norm", SLOTS - 1): 9.0, GOOD: 3.0}) == ("plant", 1, "norm")


@pytest.mark.parametrize("gain", [None, -3.0, 12.0])
@pytest.mark.parametrize("left", [20, 3])
def test_it_makes_permanent_what_is_there_as_soon_as_it_may_and_removes_nothing(gain: float | None, left: int) -> None:
    may = Seed("norm", 1, gain=gain, may=BOTH)
    assert says(State(left, (may,))) == ("fossilize", 1)
    not_yet = Seed("mlp", 0, age=19, gain=gain, may=(Op.PRUNE,))
    assert says(State(left, (not_yet,))) == "nothing"
    assert says(State(left, (not_yet, may))) == ("fossilize", 1)


def test_what_a_seed_promised_does_not_count_once_it_acts() -> None:
    acting = episode(State(20, (Seed("mlp", 0, gain=-3.0, promise=8.0),)))
    assert seen.Seen(acting, 0, 0).gain(0) == pytest.approx(-3.0, abs=1e-5)


def test_an_observation_tells_the_points_that_went_into_it() -> None:
    for gain in (-20.0, -0.3, 0.0, 2.0, 49.0):
        assert seen.points(squash(gain, 50.0)) == pytest.approx(gain, abs=1e-6)
    assert seen.points(NOT_MEASURED) == 0.0


# -- forecasts ---------------------------------------------------------------------------------------------------------


def host_of(costs: dict[tuple[str, int], float], room: float, most: int = SLOTS) -> forecasts.Host:
    """A host on which other seeds cost nothing."""
    one = episode(State(20))
    shown = torch.zeros_like(one.observation.costs)
    for (blueprint, slot), cost in costs.items():
        shown[0, 0, slot, kind_number(blueprint)] = squash(cost, 20.0) if cost < torch.inf else NOT_MEASURED
    overall = one.observation.overall.clone()
    overall[0, 0, list(OVERALL_FIELDS).index("budget_left")] = squash(room, 10.0)
    overall[0, 0, list(OVERALL_FIELDS).index("seeds_left")] = most / SLOTS
    return forecasts.Host(replace(one, observation=replace(one.observation, costs=shown, overall=overall)), 0)


def test_a_plan_is_carried_out_as_far_as_it_fits() -> None:
    norm, mlp = kind_number("norm"), kind_number("mlp")
    host = host_of({("mlp", 0): 0.5, ("mlp", 1): 0.4, ("mlp", 2): 0.1, ("norm", 1): torch.inf}, room=0.6)
    assert host.carried_out("mlp@*") == ((0, mlp), (2, mlp))
    assert host.carried_out("mlp@1+mlp@*") == ((1, mlp), (2, mlp))  # what is planted first takes its room first
    assert host.carried_out("norm@1+mlp@0") == ((0, mlp),)  # no norm fits there
    assert host.carried_out("norm@1+mlp@*") == ((0, mlp), (2, mlp))  # nor an mlp beside the first
    assert host.carried_out("mlp@*", ((0, norm),)) == ((0, norm), (1, mlp), (2, mlp))
    assert host.carried_out(NONE) == ()
    tight = host_of({("mlp", 0): 0.6}, room=0.6)
    assert tight.carried_out("mlp@0") == ((0, mlp),)  # room for it, and nothing more
    one = host_of({}, room=9.0, most=1)
    assert one.carried_out("mlp@1+norm@*") == ((1, mlp),)
    assert one.carried_out("mlp@*", ((2, norm),)) == ((2, norm),)
    assert host.cost(((0, mlp), (1, mlp))) == pytest.approx(0.9, abs=1e-5)


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_said_to_be_carried_out_is_what_a_plan_plants(most: int) -> None:
    family = get_family("mixed/vector")
    problem = next(n for n in range(50) if family.draw(n).max_seeds == most)
    for text in ("mlp_small@1+norm@*", "mlp@*"):
        played = play(Play("mixed/vector", text, portfolio.plan(text), (problem,)))
        planted = {seed for step in range(int(played.lengths[0])) for seed in planner.planted_at(played, 0, step)}
        assert planted == set(forecasts.Host(played, 0).carried_out(text))


def test_seeds_are_described_by_their_slots_and_by_what_they_cost() -> None:
    norm, mlp = kind_number("norm"), kind_number("mlp")
    host = host_of({("mlp", 0): 0.5, ("norm", 2): 0.25}, room=2.0)
    found = host.described(((0, mlp), (1, norm), (2, norm)))
    assert [row.nonzero()[0].tolist() for row in found[:-4].reshape(3, -1)] == [[mlp], [norm], [norm]]
    assert found[-4:].tolist() == pytest.approx([0.75, 3.0, 1.25, 1.0], abs=1e-5)


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
    found = forecasts.states(wider)
    assert found.shape[:2] == (2, 2)
    assert np.array_equal(found[:1], forecasts.states(one))


def said_of(plays: Episodes) -> dict[int, dict[str, float]]:
    """What each plan is forecast to gain on each problem."""
    known = forecasts.portfolios(plays, forecasts.states(plays))["dense"]
    found: dict[int, dict[str, float]] = {}
    for fold in range(forecasts.FOLDS):
        forecast = forecasts.forecasts(known, fold)
        own = [problem for problem in known.looks if forecasts.fold_of(problem) == fold]
        seeds = {plan: known.hosts[own[0]].carried_out(plan) for plan in known.plans}
        said = forecast((problem, seeds[plan]) for problem in own for plan in seeds)
        found |= {problem: {plan: said[problem, seeds[plan]] for plan in seeds} for problem in own}
        assert said[own[0], ()] == 0.0
    return found


def test_a_forecast_goes_by_how_a_problem_looks_and_never_by_its_own_plays() -> None:
    plays = join(portfolio_of(gain_of))
    forecast = said_of(plays)
    assert forecast[0]["mlp@*"] == pytest.approx(20.0, abs=1.0)
    assert forecast[1]["norm@0"] == pytest.approx(-2.0, abs=1.0)
    astray = portfolio_of(lambda look, plan: 10_000.0 if plan == "norm@0" else gain_of(look, plan), 2)
    mixed = join([*astray[3:], plays.select((plays.draw != 1).nonzero().flatten())])  # problem 1 went quite otherwise
    told_otherwise = said_of(mixed)
    assert told_otherwise[1] == pytest.approx(forecast[1], abs=1e-6)
    assert max(gains["norm@0"] for gains in told_otherwise.values()) > 50.0  # the others did learn from it


def test_lessons_say_what_to_plant_and_what_every_planting_promises() -> None:
    labelled, promises = planner.lessons(join(portfolio_of(gain_of)))
    bare = [row for row, c in enumerate(labelled.controller) if labelled.controllers[int(c)] == NONE]
    promising = next(row for row in bare if int(labelled.draw[row]) % 2 == 0)
    other = next(row for row in bare if int(labelled.draw[row]) % 2 == 1)
    step = forecasts.SEEN - 1
    assert told(labelled.label[promising, step]) == ("plant", 0, "mlp")
    assert told(labelled.label[other, step]) == "wait"
    plant, wait = promises.plant[promising, step], promises.wait[promising, step]
    assert plant[0, kind_number("mlp")] == pytest.approx(20.0, abs=1.0)
    assert plant[0, kind_number("norm")] == pytest.approx(5.0, abs=1.0)
    assert plant[1, kind_number("norm")].isnan()  # no plan has that
    assert wait == planner.WORTH
    assert promises.wait[promising, :FIRST_EPOCH].isnan().all()
    early = promises.wait[promising, FIRST_EPOCH]  # who waits will know what to plant, and plants it an epoch later
    assert early == pytest.approx(float(plant[0, kind_number("mlp")]) - planner.DELAY)
    assert promises.wait[other, FIRST_EPOCH] == planner.WORTH
    planted = [row for row in range(len(labelled)) if row not in bare and int(labelled.draw[row]) % 2 == 0]
    later = promises.wait[planted[0], forecasts.SEEN]
    assert later > 4.0  # with a seed there, to add nothing promises what that seed does


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


def test_playing_stops_when_time_is_up_and_keeps_what_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def ten_seconds(number: int) -> Episodes:
        nonlocal now
        now += 10.0
        return episode(State(2), number=number, by=f"player {number % 2}")

    monkeypatch.setattr(playing, "in_processes", by_hand.at_once)
    monkeypatch.setattr(playing, "time", SimpleNamespace(perf_counter=lambda: now))
    many = 2 * playing.EPISODES_AT_ONCE + 6
    assert playing.play_all(ten_seconds, range(many), 1, seconds=25.0).draw.tolist() == [0, 1, 2]
    everything = playing.play_all(ten_seconds, range(many), 1)
    assert everything.draw.tolist() == list(range(many))
    assert [everything.controllers[i] for i in everything.controller.tolist()] == [
        f"player {n % 2}" for n in range(many)
    ]


def test_playing_says_so_when_nothing_was_finished_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "in_processes", by_hand.at_once)
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
    arguments = ["--policy", "small-conv", "--known", str(known), "--out", str(out)]
    more = ["--first", "1", "--problems", "2", "--siblings", "2", "--noise", "0.2"]
    with pytest.raises(SystemExit):
        own_plays.main([*arguments, *more, "--family", "varied"])
    assert "has problems of mixed/vector, not of varied" in capsys.readouterr().err
    assert own_plays.main([*arguments, *more, "--family", "mixed/vector"]) == 0
    assert read(out, growth_schema()).episodes.draw.tolist() == [7, 8]


def test_the_teacher_says_so_if_there_are_too_few_problems() -> None:
    with pytest.raises(SystemExit, match="too few dense problems"):
        planner.lessons(join(portfolio_of(gain_of, 1)))
