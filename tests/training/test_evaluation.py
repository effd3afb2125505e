"""Evaluation and its controls: paired, independent of batch and processes, counted right, and the right networks."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_family import TinyFamily, fail

from esper.actions import WAIT
from esper.engine.eager import EagerEngine
from esper.engine.prepare import task_learner
from esper.env.rent import score
from esper.growth.blueprints import SlotShape
from esper.growth.costs import flops_per_example, seed_flops
from esper.growth.export import plain_model
from esper.lifecycle import Stage
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.draws import comparison_draws
from esper.tasks.hosts import Conv1dHost, MLPHost
from esper.training.comparison import Comparison, compare, summarise
from esper.training.controls import (
    Static,
    altered,
    capacity_regret,
    control_jobs,
    from_scratch,
    static_widths,
    wider,
)
from esper.training.evaluation import Job, jobs_for, run_job, run_jobs
from esper.training.results import EpisodeResult, KeptSeed, Results
from esper.training.workers import ProcessPool, WorkerError, _serve
from small_worlds import force

FAMILY = TinyFamily()
PLAN = FixedSchedule("plan", [Planting(0, "*", {"conv1d": "conv"})])
WHO = {"none": "none", "random": "random", "plan": PLAN}

HOST_FLOPS = 208
# Per example, a multiplication and an addition each: 1×1 convolution of 1 to 4 channels at 8 places (64), after pooling
# 4 to 4 channels at 4 places (128), head of 4 to 2 (16).
EXAMPLES = 64  # four batches of 16 an epoch


def timeless(results: Results) -> Results:
    return {label: {n: replace(r, seconds=0.0) for n, r in some.items()} for label, some in results.items()}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_jobs(jobs_for(FAMILY, WHO, range(3), batch=3))


def test_every_controller_gets_the_same_draws(results: Results) -> None:
    assert {label: sorted(some) for label, some in results.items()} == {label: [0, 1, 2] for label in WHO}
    for number in range(3):
        assert len({(r.host_parameters, r.host_flops, str(r.facts), r.horizon) for r in _across(results, number)}) == 1
    idle = Heuristic(HeuristicSettings(first_epoch=1000))  # another controller that never acts
    waited = run_job(Job("idle", FAMILY, idle, (0, 1, 2)))
    assert [r.test_accuracy for r in waited] == [results["none"][n].test_accuracy for n in range(3)]


def _across(results: Results, number: int) -> list[EpisodeResult]:
    return [some[number] for some in results.values()]


def test_results_do_not_depend_on_the_batch(results: Results) -> None:
    again = run_jobs(jobs_for(FAMILY, WHO, range(3), batch=1))
    assert timeless(again) == timeless(results)


def test_results_do_not_depend_on_the_processes(results: Results) -> None:
    seen: list[tuple[str, int]] = []
    jobs = jobs_for(FAMILY, WHO, range(3), batch=2)
    again = run_jobs(jobs, workers=2, progress=lambda job, done: seen.append((job.label, len(done))))
    assert timeless(again) == timeless(results)
    assert sorted(seen) == sorted((job.label, len(job.draws)) for job in jobs)


def test_growing_was_worth_it_and_paid_its_rent(results: Results) -> None:
    grown = results["plan"][0]
    assert grown.kept
    assert grown.test_accuracy > results["none"][0].test_accuracy + 20
    assert grown.score == score(grown.test_accuracy, grown.parameters, grown.host_parameters)
    assert grown.epochs == grown.horizon == 10
    assert results["plan"][1].horizon == 9


def test_the_cost_of_training_by_hand(results: Results) -> None:
    plain = results["none"][0]
    assert (plain.flops, plain.host_flops, plain.examples) == (HOST_FLOPS, HOST_FLOPS, 10 * EXAMPLES)
    assert plain.training_flops == 10 * EXAMPLES * 3 * HOST_FLOPS


def test_a_shadow_pass_is_one_more_pass() -> None:
    """One seed: planted in epoch 0 it incubates while two epochs train, then it is part of the network."""
    only = FixedSchedule("one", [Planting(0, 0, {"conv1d": "conv"})])
    result = run_job(Job("one", FAMILY, only, (0,)))[0]
    seed = seed_flops("conv", SlotShape("conv1d", 4, (8,)), "linear")
    assert [(k.path, k.blueprint) for k in result.kept] == [("stages.0", "conv")]
    assert result.flops == HOST_FLOPS + seed
    incubating, joined = HOST_FLOPS + (HOST_FLOPS + seed), HOST_FLOPS + seed
    assert result.training_flops == 3 * EXAMPLES * (2 * incubating + 8 * joined)


def test_flops_are_those_of_the_plain_model() -> None:
    draw = FAMILY.draw(0, held_out=True)
    learner = task_learner(draw.task, draw.seed, draw.horizon)
    for slot in learner.model.slots:
        learner.model.germinate(slot, "attention", "gated", epoch=0)
        force(slot, stage=Stage.FOSSILIZED, alpha=1.0)
    shapes = [slot.shape for slot in learner.model.slots]
    whole = flops_per_example(plain_model(learner.model), draw.task.splits.train.x[:2])
    assert whole == HOST_FLOPS + sum(seed_flops("attention", shape, "gated") for shape in shapes)


def test_stopping_returns_what_is_complete() -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 15  # in the second job: one asks before each of its ten epochs

    found = run_jobs(jobs_for(FAMILY, {"none": "none", "random": "random"}, [0]), stop=stop)
    assert list(found["none"]) == [0]
    assert found["random"] == {}


def test_numbers_of_draws() -> None:
    assert list(comparison_draws(3, seed=2)) == [20_000, 20_001, 20_002]
    for bad in (0, 10_001):
        with pytest.raises(ValueError, match="episodes must be"):
            comparison_draws(bad)
    with pytest.raises(ValueError, match="workers must be"):
        run_jobs([], workers=0)


def test_trouble_in_a_worker_reaches_the_parent() -> None:
    with pytest.raises(WorkerError, match="exit code 3"):
        ProcessPool(fail, 1).map(["die"])
    ours, theirs = multiprocessing.Pipe()
    worker = threading.Thread(target=_serve, args=(theirs, fail))  # a thread will do: nothing dies here
    worker.start()
    ours.send("this")
    answer = pickle.loads(ours.recv_bytes())
    ours.close()
    worker.join(timeout=10)
    assert not worker.is_alive()  # it ended with its parent
    assert isinstance(answer, ValueError)
    assert str(answer) == "job 'this' is bad"


# -- controls ---------------------------------------------------------------------------------------------------------


def test_from_scratch_is_the_grown_architecture(results: Results) -> None:
    for number, grown in results["plan"].items():
        static = from_scratch({number: grown}, "epochs")[number]
        draw = altered(FAMILY.draw(number, held_out=True), static)
        learner = task_learner(draw.task, draw.seed, draw.horizon)
        assert learner.model.parameter_count == grown.parameters
        assert flops_per_example(learner.model, draw.task.splits.train.x[:2]) == grown.flops
        assert draw.horizon == grown.horizon


def test_from_scratch_begins_with_the_weights_of_the_draws_host(results: Results) -> None:
    static = from_scratch(results["plan"], "epochs")[0]
    draws = [FAMILY.draw(0, held_out=True), altered(FAMILY.draw(0, held_out=True), static)]
    plain, grafted = (task_learner(draw.task, draw.seed, draw.horizon).model.host for draw in draws)
    weights = dict(grafted.named_parameters())
    assert torch.equal(weights["stages.0.0.weight"], plain.get_parameter("stages.0.0.weight"))
    assert torch.equal(weights["head.weight"], plain.get_parameter("head.weight"))


def test_all_parts_of_a_static_network_are_trained() -> None:
    kept = KeptSeed("stages.0", "conv", "linear", SlotShape("conv1d", 4, (8,)))
    draw = altered(FAMILY.draw(0), Static(grafts=(kept,)))
    learner = task_learner(draw.task, draw.seed, draw.horizon)
    before = {name: value.clone() for name, value in learner.model.host.named_parameters()}
    EagerEngine([learner]).step([WAIT])
    after = dict(learner.model.host.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in before.items())


def test_equal_flops_buy_other_epochs(results: Results) -> None:
    grown = replace(results["plan"][0], flops=1000, training_flops=3 * 1000 * EXAMPLES * 7, horizon=10)
    assert from_scratch({0: grown}, "flops")[0].epochs == 7
    assert from_scratch({0: grown}, "epochs")[0].epochs is None
    assert from_scratch(results["none"], "flops") == dict.fromkeys(range(3), Static())  # the host itself


def test_a_network_that_two_plans_share_is_trained_once() -> None:
    plans = {"a": {0: Static(), 1: Static(ratio=2.0)}, "b": {1: Static(ratio=2.0), 2: Static()}}
    known = {(0, Static()): None}
    jobs = control_jobs(FAMILY, plans, known)  # type: ignore[arg-type]
    assert [job.draws for job in jobs] == [(1,), (2,)]


@pytest.mark.parametrize("ratio", [1.5, 4.0, 8.0])
def test_wider_hosts_have_the_size_that_was_asked_for(ratio: float) -> None:
    def size(host: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in host.parameters())

    for make in (lambda: Conv1dHost(1, [8, 3, 12], [5, 1, 3], 10), lambda: MLPHost(64, [8, 8], 10)):
        assert size(wider(make, ratio)()) == pytest.approx(ratio * size(make()), rel=0.12)
    with pytest.raises(ValueError, match="has no widths"):
        wider(lambda: torch.nn.Linear(2, 2), ratio)


def test_widths_cover_what_was_grown_and_no_more(results: Results) -> None:
    assert list(static_widths(results["none"], 1.0)) == []
    assert list(static_widths(results["none"], 1.3)) == ["static ×1.5"]
    assert list(static_widths(results["none"], 3.0)) == ["static ×1.5", "static ×2.5", "static ×4"]
    assert list(static_widths(results["none"], 99.0))[-1] == "static ×8"
    narrow = {0: replace(results["none"][0], host_widths=None)}
    assert static_widths(narrow, 1.3) == {"static ×1.5": {}}


def test_capacity_regret_by_hand(results: Results) -> None:
    def made(parameters: int, accuracy: float) -> EpisodeResult:
        return replace(results["none"][0], parameters=parameters, test_accuracy=accuracy)

    widths = [made(100, 60.0), made(400, 80.0), made(1600, 70.0)]
    # 200 lies half-way between 100 and 400 on a logarithmic scale, so the line stands at 70 there
    assert capacity_regret(made(200, 66.0), widths) == pytest.approx(4.0)
    assert capacity_regret(made(400, 85.0), widths) == pytest.approx(-5.0)
    assert capacity_regret(made(1000, 75.0), widths) == pytest.approx(5.0)  # the worse, larger width does not help
    assert capacity_regret(made(9999, 75.0), widths) == pytest.approx(5.0)  # level beyond the largest
    assert capacity_regret(made(200, 66.0), widths[:1]) is None


# -- the whole comparison --------------------------------------------------------------------------------------------


def test_compare_runs_controllers_and_controls() -> None:
    told: list[tuple[int, int]] = []
    found = compare(FAMILY, WHO, range(2), progress=lambda done, total, label: told.append((done, total)))
    rows = {row.name: row for row in summarise(found)}
    assert found.scratch_of == "plan"
    scratch = rows["plan: from scratch, equal epochs"]
    assert (scratch.is_control, scratch.parameters_ratio) == (True, rows["plan"].parameters_ratio)
    equal = rows["plan: from scratch, equal FLOPs"]
    assert equal.training_flops_ratio == pytest.approx(rows["plan"].training_flops_ratio, rel=0.1)
    assert rows["none"].vs_none is None
    assert rows["none"].parameters_ratio == 1.0
    assert rows["plan"].regret is not None
    assert rows["none"].regret is not None
    assert rows["none"].regret.value == 0.0  # the host is a static width itself
    assert told[-1][0] == told[-1][1]


def made_up(results: Results, scores: dict[str, Sequence[float]]) -> Comparison:
    """A comparison in which only the scores and sizes matter."""
    base = results["none"][0]
    controllers = {
        name: {n: replace(base, number=n, score=s, test_accuracy=s) for n, s in enumerate(row)}
        for name, row in scores.items()
    }
    return Comparison("tiny", tuple(range(9)), controllers, rules=frozenset({"none", "rule"}))


def test_rows_by_hand(results: Results) -> None:
    found = made_up(results, {"none": [10, 20, 30], "rule": [12, 22, 26], "learned": [14, 20, 32, 99]})
    rows = {row.name: row for row in summarise(found)}
    assert found.common == [0, 1, 2]  # draw 3 has no pair
    assert [row.episodes for row in rows.values()] == [3, 3, 3]
    # none and rule both have a mean of 20: the first one counts as the best
    assert found.best_rule() == "none"
    assert rows["rule"].vs_none is not None
    assert rows["rule"].vs_none.value == pytest.approx(0.0)  # +2 +2 −4
    assert rows["rule"].better_than_none is not None
    assert rows["rule"].better_than_none.value == pytest.approx(2 / 3)
    assert rows["learned"].vs_best_rule is not None
    assert rows["learned"].vs_best_rule.value == pytest.approx(2.0)  # +4 0 +2
    assert rows["learned"].better_than_best_rule is not None
    assert rows["learned"].better_than_best_rule.value == pytest.approx(2.5 / 3)
    assert rows["learned"].on_front
    assert not rows["none"].on_front  # as large, and worse


def test_without_a_common_draw_there_are_no_rows(results: Results) -> None:
    assert summarise(made_up(results, {"none": [1.0], "rule": []})) == []
