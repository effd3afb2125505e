"""Each detector fires on the fault that it is for, once, and stays silent on a healthy run.

Covers: R058, R065, R110, R111, R115, R120, R131, R145, R151, R152, R157
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields, replace
from math import inf, nan

import pytest
from telemetry_samples import healthy

from esper.agent.config import PPOConfig
from esper.agent.metrics import measure_state
from esper.cli.train import Train
from esper.telemetry.alarms import ALARM_RULES, ENTROPY_COLLAPSED, RATIO_HIGH, RATIO_LOW, AlarmRule, RunPhase
from esper.telemetry.health import (
    RECOVERY,
    REMINDER,
    Anomaly,
    AnomalyDetector,
    GradientDrift,
    HealthMonitor,
    Improvement,
)
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Event, Level

UPDATES = 60


def detector() -> AnomalyDetector:
    return AnomalyDetector(clip_norm=0.5)


def series(fault: dict[str, float], since: int = 30, until: int = UPDATES) -> list[Anomaly]:
    """What a run of 60 updates reports whose metrics are replaced by `fault` from update `since` up to `until`."""
    watching, found = detector(), []
    for update in range(1, UPDATES + 1):
        metrics = healthy(update, UPDATES)
        if since <= update < until:
            metrics |= fault
        found += watching.check_all(metrics, update / UPDATES)
    return found


def test_a_healthy_run_is_silent() -> None:
    assert series({}) == []


@pytest.mark.parametrize("seed", range(5))
def test_returns_may_be_noisy_and_flat(seed: int) -> None:
    rng, watching = random.Random(seed), detector()
    for update in range(1, 400):
        assert watching.check_all({"update": update, "return_mean": rng.gauss(20.0, 5.0)}, update / 400) == []


FAULTS = {
    # name: (fault, first update that reports it when the fault begins at update 30, seen, limit)
    "ratio_explosion": ({"ratio_max": 6.0}, 30, 6.0, RATIO_HIGH),
    "entropy_collapse": ({"blueprint/entropy": 0.01, "return_mean": 30.0}, 32, 0.01, 0.5 * ENTROPY_COLLAPSED),
    "kl_spike": ({"kl_max": 0.2}, 30, 0.2, 0.1),
    "kl_extreme": ({"kl_max": 0.9}, 30, 0.9, 0.5),
    "kl_stalled": ({"kl": 1e-9}, 32, 1e-9, 1e-7),
    "clip_stalled": ({"clip_fraction": 0.0}, 39, 0.0, 1e-4),
    "value_collapse": ({"explained_variance": -0.4}, 34, -0.4, 0.0),
    "value_stuck": ({"explained_variance": 0.01}, 44, 0.01, 0.05),
    "head_starved": ({"blueprint/live_fraction": 0.002, "return_mean": 30.0}, 34, 0.002, 0.01),
    "gradient_vanishing": ({"trunk_gradient_norm": 0.0}, 31, 0.0, 0.5e-6),
    "gradient_exploding": ({"gradient_norm": 80.0}, 30, 80.0, 50.0),
    "lstm_saturated": ({"lstm/cell_rms": 40.0}, 31, 40.0, 10.0),
    "lstm_dead": ({"lstm/hidden_rms": 1e-9}, 31, 1e-9, 1e-6),
    "lstm_not_finite": ({"lstm/finite": 0.0}, 30, 0.0, 1.0),
    "skipped_steps": ({"skipped": 2.0}, 30, 2.0, 0.0),
    "non_finite": ({"policy_loss": inf}, 30, inf, inf),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_lasting_fault_is_reported_once_with_what_was_seen_and_the_limit(name: str) -> None:
    fault, at, seen, limit = FAULTS[name]
    found = series(fault, until=50)  # shorter than the time to a reminder
    assert [(a.name, a.update, a.seen, a.limit) for a in found if a.name == name] == [(name, at, seen, limit)]
    (anomaly,) = [a for a in found if a.name == name]
    assert anomaly.message.startswith(f"{name}: {anomaly.metric} is ")
    assert ALARM_RULES[name].meaning in anomaly.message
    assert ALARM_RULES[name].remedy in anomaly.message
    also = {"value_collapse": {"value_stuck"}, "gradient_exploding": {"gradient_drift"}}.get(name, set())
    assert {a.name for a in found} <= {name} | also, "one fault, one alarm"


def test_every_rule_has_a_fault_that_shows_it() -> None:
    assert set(FAULTS) | {"gradient_drift", "return_collapse"} == set(ALARM_RULES)


@pytest.mark.parametrize("name", [name for name in FAULTS if ALARM_RULES[name].updates > 1])
def test_what_passes_before_its_time_is_not_reported(name: str) -> None:
    assert series(FAULTS[name][0], until=30 + ALARM_RULES[name].updates - 1) == []


def test_too_small_a_ratio_is_an_explosion_too() -> None:
    (found,) = series({"ratio_min": 0.05})[:1]
    assert (found.metric, found.limit) == ("ratio_min", RATIO_LOW)


@pytest.mark.parametrize(("count", "reported"), [(1, False), (8, False), (9, True), (50, True)])
def test_single_steps_may_stray(count: int, reported: bool) -> None:
    """400 steps, 1.6 heads live on each, 4 minibatches a pass: 160 pairs a minibatch; 5 % of them are 8."""
    live = {
        "op/live_fraction": 1.0,
        "slot/live_fraction": 0.3,
        "blueprint/live_fraction": 0.2,
        "blend/live_fraction": 0.1,
    }
    sizes = {"steps": 400.0, "epochs": 3.0, "minibatches": 12.0, "ratio_explosions": float(count)}
    watching = detector()
    assert bool(watching.check_all({"ratio_max": 6.0, **sizes, **live}, 0.5)) is reported


def test_numbers_that_are_not_numbers_are_one_anomaly() -> None:
    names = ["kl", "kl_max", "policy_loss", "value_loss", "entropy", "gradient_norm", "gradient_norm_max"]
    found = series(dict.fromkeys(names, nan), until=40)
    (anomaly,) = found
    assert anomaly.metric == "kl, kl_max, gradient_norm, gradient_norm_max, policy_loss and 2 more"
    assert "not a finite number" in anomaly.message


# -- lasting, coming back ----------------------------------------------------------------------------------------------


def kl_series(values: list[float]) -> list[int]:
    watching = detector()
    return [u for u, kl in enumerate(values, start=1) if watching.check_all({"update": u, "kl_max": kl}, 0.5)]


def test_a_fault_that_lasts_is_recalled_now_and_then() -> None:
    assert kl_series([0.2] * 60) == [1, 1 + REMINDER, 1 + 2 * REMINDER]


def test_a_fault_that_comes_back_after_recovery_is_a_new_one() -> None:
    calm = [0.01]
    assert kl_series([0.2, *calm * RECOVERY, 0.2]) == [1, 2 + RECOVERY]
    assert kl_series([0.2, *calm * (RECOVERY - 1), 0.2]) == [1]  # not over yet


def test_a_limit_that_is_grazed_is_one_alarm() -> None:
    assert kl_series([0.11, 0.095] * 10) == [1]  # 0.095 is behind the limit of 0.1, but not clearly


# -- phases ------------------------------------------------------------------------------------------------------------


def test_phases() -> None:
    assert [RunPhase.of(p) for p in (0.0, 0.09, 0.1, 0.39, 0.4, 1.0)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="share between 0 and 1"):
        RunPhase.of(1.5)


def lasting(metrics: dict[str, float], phase: float, updates: int = 20) -> list[str]:
    """Names of what is reported when the same metrics come again and again in one phase."""
    watching = detector()
    if "op/entropy" in metrics:
        watching.check_all({"op/entropy": 0.9}, phase)  # the head had a choice
    return [a.name for _ in range(updates) for a in watching.check_all(metrics, phase)]


@pytest.mark.parametrize(
    ("metrics", "warm_up", "early", "late"),
    [
        ({"op/entropy": 0.2}, ["entropy_collapse"], [], []),
        ({"op/entropy": 0.08}, ["entropy_collapse"], ["entropy_collapse"], []),
        ({"op/entropy": 0.04}, ["entropy_collapse"], ["entropy_collapse"], ["entropy_collapse"]),
        ({"kl_max": 0.15}, [], ["kl_spike"], ["kl_spike"]),
        ({"explained_variance": -0.3}, [], ["value_collapse"], ["value_collapse", "value_stuck"]),
        ({"explained_variance": -0.1}, [], [], ["value_collapse", "value_stuck"]),
        ({"explained_variance": 0.02}, [], [], ["value_stuck"]),
        ({"clip_fraction": 0.0}, [], ["clip_stalled"], ["clip_stalled"]),
        ({"kl": 0.0}, ["kl_stalled"], ["kl_stalled"], ["kl_stalled"]),
    ],
)
def test_what_is_normal_depends_on_the_phase(
    metrics: dict[str, float], warm_up: list[str], early: list[str], late: list[str]
) -> None:
    assert [lasting(metrics, phase) for phase in (0.05, 0.2, 0.8)] == [warm_up, early, late]


# -- what must not be an alarm -----------------------------------------------------------------------------------------


def test_an_update_of_one_minibatch_cannot_show_kl_or_clipping() -> None:
    assert lasting({"minibatches": 1.0, "kl": 0.0, "clip_fraction": 0.0}, 0.5) == []


def test_a_head_without_a_choice_has_no_entropy_to_lose() -> None:
    watching = detector()
    assert [
        a for _ in range(10) for a in watching.check_all({"slot/entropy": 0.0, "slot/live_fraction": 0.3}, 0.5)
    ] == []
    watching.check_all({"slot/entropy": 0.9, "slot/live_fraction": 0.3}, 0.5)
    gone = {"slot/entropy": 0.0, "slot/live_fraction": 0.3}
    assert [a.name for _ in range(10) for a in watching.check_all(gone, 0.5)] == ["entropy_collapse"]


@pytest.mark.parametrize("entropy", [0.0, 0.9])
def test_a_head_that_is_hardly_ever_used_is_starved(entropy: float) -> None:
    """Whatever its entropy is: that of so few steps says nothing, and neither does their gradient."""
    rarely = {"slot/entropy": entropy, "slot/live_fraction": 0.009, "slot/gradient_norm": 0.0}
    watching = detector()
    watching.check_all({"slot/entropy": 0.9, "slot/live_fraction": 0.3}, 0.5)
    found = [a for _ in range(10) for a in watching.check_all(rarely, 0.5)]
    assert [(a.name, a.metric) for a in found] == [("head_starved", "slot/live_fraction")]
    unused = {"slot/entropy": 0.0, "slot/live_fraction": 0.0}  # by no operation: never had a choice
    watching = detector()
    assert [a for _ in range(10) for a in watching.check_all(unused, 0.5)] == []


def test_a_run_that_has_improved_may_stop_using_a_head_late() -> None:
    def found(phase: float, objectives: list[float]) -> list[str]:
        watching, names = detector(), []
        for update, objective in enumerate(objectives, start=1):
            metrics = {"blueprint/entropy": 0.9, "blueprint/live_fraction": 0.3 if update <= 10 else 0.0}
            names += [a.name for a in watching.check_all(metrics | {"episode/score": objective}, phase)]
        return names

    assert found(0.8, FLAT) == found(0.2, FLAT) == found(0.2, RISING) == ["head_starved"]
    assert found(0.8, RISING) == []


def test_advice_names_settings_that_exist() -> None:
    """What is named as code or as an option can be set, in [ppo] or on the command line, or is a metric."""
    settings = {field.name for field in fields(PPOConfig)}
    options = {f"--{field.name.replace('_', '-')}" for field in fields(Train)}
    for name, rule in ALARM_RULES.items():
        assert set(re.findall(r"--[a-z-]+", rule.remedy)) <= options, name
        named = {word for word in re.findall(r"[a-z]+_[a-z_]+", rule.remedy) if f"`{word}`" not in rule.remedy}
        assert named <= settings, name
    for name in ("entropy_collapse", "head_starved"):
        assert "--floor" in ALARM_RULES[name].remedy


def decided(head: str, phase: float, objectives: list[float], metric: str = "episode/score") -> list[str]:
    """What is reported when a head is sure of itself from the eleventh update on, in a run with these objectives."""
    watching, found = detector(), []
    for update, objective in enumerate(objectives, start=1):
        metrics = {f"{head}/entropy": 0.9 if update <= 10 else 0.001, metric: objective}
        found += [a.name for a in watching.check_all(metrics, phase)]
    return found


FLAT, RISING = [50.0, 54.0, 48.0, 52.0, 46.0] * 4, [50.0, 54.0, 48.0, 52.0, 46.0] + [80.0, 84.0, 78.0, 82.0, 76.0] * 3


def test_a_head_may_decide_in_a_run_that_has_improved() -> None:
    # the first five: mean 50, variance 10; the last five the same 30 points higher: 30 > 2·√(20 / 5) = 4
    for head in ("slot", "blueprint", "blend"):
        assert decided(head, 0.2, FLAT) == ["entropy_collapse"]
        assert decided(head, 0.2, RISING) == []
        assert decided(head, 0.05, RISING) == ["entropy_collapse"]  # nothing can be known in the first tenth
    assert decided("op", 0.2, RISING) == ["entropy_collapse"]  # it decides whether the others are ever tried
    assert decided("op", 0.8, RISING) == []
    assert decided("op", 0.8, FLAT) == ["entropy_collapse"]
    assert decided("blueprint", 0.2, RISING, "return_mean") == []  # where the loop reports no score


def test_returns_that_rise_without_the_score_are_no_improvement() -> None:
    watching, found = detector(), []
    for update in range(1, 21):
        entropy = 0.9 if update <= 10 else 0.001
        metrics = {"blueprint/entropy": entropy, "episode/score": 50.0 + update % 2, "return_mean": 10.0 * update}
        found += [a.name for a in watching.check_all(metrics, 0.5)]
    assert found == ["entropy_collapse"]


def test_an_improvement_is_more_than_its_noise() -> None:
    improvement = Improvement()
    for value in [50.0, 54.0, 48.0, 52.0, 46.0]:  # mean 50, variance 10
        improvement.note({"return_mean": value})
    for value in [54.0, 58.0, 52.0, 56.0]:
        improvement.note({"return_mean": value})
        assert not improvement.shown  # fewer than five
    improvement.note({"return_mean": 49.9})
    # five with mean 53.98: 3.98 < 2·√((10 + 10.2) / 5) = 4.02
    assert not improvement.shown
    improvement.note({"return_mean": 54.5})
    assert improvement.shown  # 58, 52, 56, 49.9, 54.5: mean 54.08
    improvement.note({"return_mean": nan})
    assert len(improvement.last) == 5


def test_without_a_recurrent_state_there_is_nothing_to_judge() -> None:
    assert measure_state(None) == {}  # so the metrics have no lstm/… at all
    assert lasting({"kl": 0.01}, 0.5) == []
    assert lasting({"lstm/hidden_rms": 0.0, "lstm/cell_rms": 0.0, "lstm/finite": 1.0}, 0.5) == []  # just reset


def test_a_state_of_nan_is_reported() -> None:
    found = lasting({"lstm/hidden_rms": nan, "lstm/cell_rms": nan, "lstm/largest": nan, "lstm/finite": 0.0}, 0.5, 1)
    assert found == ["non_finite", "lstm_not_finite"]


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradient_limits_follow_the_clip_norm_and_can_be_set() -> None:
    def found(norm: float, clip_norm: float, rules: dict[str, AlarmRule] = ALARM_RULES) -> list[str]:
        watching = AnomalyDetector(clip_norm, rules)
        return [a.name for _ in range(2) for a in watching.check_all({"gradient_norm": norm}, 0.5)]

    assert found(80.0, clip_norm=0.5) == ["gradient_exploding"]
    assert found(80.0, clip_norm=1.0) == []
    own = ALARM_RULES | {"gradient_exploding": replace(ALARM_RULES["gradient_exploding"], above=70.0)}
    assert found(80.0, clip_norm=1.0, rules=own) == ["gradient_exploding"]
    assert found(1e-6, clip_norm=10.0) == ["gradient_vanishing"]
    assert found(1e-6, clip_norm=0.5) == []


def test_a_head_without_gradient_is_named() -> None:
    fault = {"blend/gradient_norm": 0.0}
    assert [(a.name, a.metric) for a in series(fault, until=50)] == [("gradient_vanishing", "blend/gradient_norm")]


def test_gradient_drift_by_hand() -> None:
    """Average 1 throughout, then a norm of 2.5 for good. Momentum 0.9: the averages before each update are 1, 1.15,
    1.285, 1.4065, 1.5159, …, so the drifts are 1.5, 1.17, 0.95, 0.78, 0.65: five above 0.5, then 0.55 and 0.47."""
    watching = detector()
    calm = [watching.check_all({"gradient_norm": 1.0}, 0.5) for _ in range(20)]
    assert calm == [[]] * 20
    found = [watching.check_all({"gradient_norm": 2.5}, 0.5) for _ in range(10)]
    assert [[a.name for a in one] for one in found] == [[]] * 4 + [["gradient_drift"]] + [[]] * 5
    (anomaly,) = found[4]
    assert anomaly.seen == pytest.approx((2.5 - 1.51585) / 1.51585, rel=1e-4)
    assert anomaly.limit == 0.5


def test_gradients_that_become_smaller_are_no_drift() -> None:
    """A policy that makes up its mind has smaller ones; a healthy run of sixty updates showed it."""
    watching = detector()
    assert [watching.check_all({"gradient_norm": 5.0 / (1 + i)}, 0.5) for i in range(20)] == [[]] * 20


def test_drift_is_not_judged_during_warm_up() -> None:
    norms = [1.0] * 3 + [9.0] * 5
    watching = detector()
    assert [a for norm in norms for a in watching.check_all({"gradient_norm": norm}, 0.05)] == []
    watching = detector()
    found = [a.name for norm in norms for a in watching.check_all({"gradient_norm": norm}, 0.5)]
    assert found == ["gradient_drift"]
    assert [a for a in watching.check_all({"gradient_norm": nan}, 0.5) if a.name == "gradient_drift"] == []


def test_the_average_gradient_by_hand() -> None:
    drift = GradientDrift()
    assert drift.update(1.0) == 0.0
    assert drift.update(2.0) == pytest.approx(1.0, abs=1e-6)  # twice the average
    assert drift.average == pytest.approx(1.1)
    assert drift.update(1.1) == pytest.approx(0.0, abs=1e-6)
    assert drift.update(2.0) > 0.5
    assert drift.update(drift.average / 4) == pytest.approx(-0.75, abs=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        drift.update(nan)


# -- returns -----------------------------------------------------------------------------------------------------------


def test_return_collapse_by_hand() -> None:
    """Returns alternate 19 and 21, then fall to 5 for good. The level is 20 ± 0.11 and the spread (mean distance of a
    return from the level before it) about 1.1, so the limit is near 20.1 − 4.4 = 15.7. The level after the fall is 5 +
    15·0.8ⁿ: 17.0, 14.6, 12.7, 11.1: the second to fourth are below, the third of those reports."""
    watching = detector()
    before = [watching.check_all({"return_mean": 20.0 + (-1.0) ** i}, 0.5) for i in range(30)]
    assert before == [[]] * 30
    after = [[a.name for a in watching.check_all({"return_mean": 5.0}, 0.5)] for _ in range(10)]
    assert after == [[]] * 3 + [["return_collapse"]] + [[]] * 6


def test_returns_that_rise_and_one_bad_update_are_no_collapse() -> None:
    watching = detector()
    values = [float(u) for u in range(40)] + [10.0] + [40.0] * 10
    assert [a for value in values for a in watching.check_all({"return_mean": value}, 0.5)] == []


# -- state and escalation ----------------------------------------------------------------------------------------------


def test_a_resumed_detector_reports_what_an_uninterrupted_one_does() -> None:
    fault = {"kl": 1e-9, "clip_fraction": 0.0, "return_mean": -50.0, "gradient_norm": 5.0}

    def metrics(update: int) -> dict[str, float]:
        return healthy(update) | (fault if update >= 30 else {})

    whole = detector()
    expected = [whole.check_all(metrics(u), u / 60) for u in range(1, 61)]
    assert {a.name for one in expected for a in one} >= {"kl_stalled", "clip_stalled", "return_collapse"}
    for cut in (10, 31, 35, 50):
        first, second = detector(), detector()
        found = [first.check_all(metrics(u), u / 60) for u in range(1, cut)]
        second.load(json.loads(json.dumps(first.state())))
        found += [second.check_all(metrics(u), u / 60) for u in range(cut, 61)]
        assert found == expected


class Events(RunRecorder):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize("fault", [{"op/entropy": 0.01, "return_mean": 30.0}, {"kl_max": 0.3}])
def test_an_anomaly_makes_the_next_updates_detailed_then_back(fault: dict[str, float]) -> None:
    recorder = Events()
    monitor = HealthMonitor(recorder, detector(), detailed_updates=3)
    levels = []
    for update in range(1, 21):
        metrics = healthy(update, 20) | (fault if update >= 10 else {})
        monitor.after_update(update, metrics, update / 20)
        levels.append(recorder.level)  # of the next update
    began = levels.index(Level.DETAILED)
    assert levels[began : began + 5] == [Level.DETAILED] * 3 + [Level.NORMAL] * 2
    assert began in (9, 11)
    assert levels.count(Level.DETAILED) == 3
    kinds = [(event.kind, event.severity) for event in recorder.events]
    assert kinds == [("anomaly", "warning"), ("telemetry", "info"), ("telemetry", "info")]
    assert recorder.events[0].data["limit"] > 0.0
    assert "back" in recorder.events[2].message or "normal" in recorder.events[2].message


def test_escalation_counts() -> None:
    def levels(base: Level, updates: int, anomalies: list[bool]) -> list[Level]:
        recorder, found = Events(), []
        recorder.level = base
        monitor = HealthMonitor(recorder, detector(), updates)
        for anomaly in anomalies:
            monitor.detector.rules = ALARM_RULES if anomaly else {}
            monitor.detector._tracks.clear()  # so that each is a new one
            monitor.after_update(1, {"kl_max": 9.0}, 0.5)
            found.append(recorder.level)
        return found

    normal, detailed = Level.NORMAL, Level.DETAILED
    # the second anomaly starts the count of two afresh
    assert levels(normal, 2, [False, True, True, False, False]) == [normal, detailed, detailed, detailed, normal]
    assert levels(normal, 0, [True]) == [normal]
    assert levels(detailed, 5, [False]) == [detailed]
    with pytest.raises(ValueError, match="at least 0"):
        HealthMonitor(Events(), detector(), -1)


def test_the_monitor_can_be_saved() -> None:
    monitor = HealthMonitor(Events(), detector())
    monitor.after_update(1, {"kl_max": 9.0}, 0.5)
    other = HealthMonitor(Events(), detector())
    other.load(json.loads(json.dumps(monitor.state())))
    assert other.recorder.level is Level.DETAILED
    assert other.after_update(2, {"kl_max": 9.0}, 0.5) == []  # reported already
