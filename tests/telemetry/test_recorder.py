"""Recorders: what is kept at which level, and what a failing sink may do to a run.

Covers: R115 (findings with slot and seed become events), R145
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from telemetry_samples import TERMS, record_update, sample_decision, sample_episodes

from esper.lifecycle import Stage, Transition
from esper.telemetry.recorder import FanOut, RunRecorder, StoreRecorder
from esper.telemetry.records import Decision, Event, Level
from esper.telemetry.schema import VIEWS
from esper.telemetry.store import RunStore, open_readonly


def written(path: Path, sql: str) -> list[tuple[object, ...]]:
    with open_readonly(path) as connection:
        return connection.execute(sql).fetchall()


def test_a_decision_keeps_what_was_chosen_and_how_surely(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with RunStore(path) as store:
        recorder = StoreRecorder(store)
        odds = {"op": 0.25, "slot": 0.5, "blueprint": 0.2, "blend": 0.3}
        planted = ("GERMINATE", "layers.1", "depthwise", "linear")
        recorder.decision(Decision(2, 3, 0, *planted, odds, 1.5, True, "policy", -0.5))
        recorder.decision(Decision(2, 3, 1, "WAIT", None, None, None, {"op": 0.9}, 1.0, False, "wait"))
    assert written(path, "SELECT * FROM decisions") == [
        (
            2,
            "train",
            3,
            0,
            "GERMINATE",
            "layers.1",
            "depthwise",
            "linear",
            *odds.values(),
            1.5,
            -0.5,
            1,
            "policy",
            None,
            None,
        ),
        (2, "train", 3, 1, "WAIT", None, None, None, 0.9, None, None, None, 1.0, None, 0, "wait", None, None),
    ]


def test_rewards_by_step_are_kept_at_the_detailed_level_only(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with RunStore(path) as store:
        recorder = StoreRecorder(store)
        recorder.decision(sample_decision(1, epoch=0))
        recorder.level = Level.DETAILED
        recorder.decision(sample_decision(1, epoch=1))
        recorder.level = Level.NORMAL
        recorder.decision(sample_decision(1, epoch=2))
        recorder.episodes(sample_episodes(1))
    assert written(path, "SELECT epoch, term, value FROM step_rewards") == [
        (1, "objective", 0.0),
        (1, "score_shaping", 2.0),
    ]
    assert dict(written(path, "SELECT term, value FROM v_episode_rewards")) == TERMS


def test_numbers_of_any_kind_are_stored_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with RunStore(path) as store:
        recorder = StoreRecorder(store)
        recorder.metrics(1, {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": 3, "d": float("nan")})
        recorder.metrics(1, {"a": 0.75})  # the last one counts
        recorder.episodes(sample_episodes(np.int64(1), {"draw": np.int64(7), "score": np.float32(0.5)}))
        recorder.decision(sample_decision(1, value=torch.tensor(0.25), changed=np.True_))
        recorder.event(
            Event("governor", 1, "gone", env=np.int64(2), data={"seen": float("nan"), "all": [1.0, -np.inf]})
        )
    assert written(path, "SELECT name, value FROM metrics") == [("a", 0.75), ("b", 2.0), ("c", 3.0), ("d", None)]
    assert written(path, "SELECT draw, score FROM episodes") == [(7, 0.5)]
    assert written(path, "SELECT value, changed FROM decisions") == [(0.25, 1)]
    ((data,),) = written(path, "SELECT data FROM events WHERE env = 2 AND json_valid(data)")
    assert json.loads(str(data)) == {"seen": "nan", "all": [1.0, "-inf"]}


def test_the_life_of_a_seed_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    life = [(0, Stage.DORMANT, Stage.GERMINATED), (0, Stage.GERMINATED, Stage.TRAINING)]
    life += [(2, Stage.TRAINING, Stage.BLENDING), (5, Stage.BLENDING, Stage.HOLDING)]
    with RunStore(path) as store:
        recorder = StoreRecorder(store)
        recorder.decision(sample_decision(1))
        for epoch, source, target in life:
            change = Transition(epoch, "layers.1", 1, source, target, f"into {target.name}")
            recorder.event(Event.of_transition(change, update=1, env=0))
        end = Transition(9, "layers.1", 1, Stage.HOLDING, Stage.FOSSILIZED, "it pays")
        recorder.event(Event.of_transition(end, update=1, env=0))
        finding = {"contribution": 4.0, "improvement": -2.0}
        hacking = Event("ransomware", 1, "…", "warning", env=0, epoch=7, slot="layers.1", seed=1, data=finding)
        recorder.event(hacking)
    assert written(path, "SELECT source, target FROM v_lifecycle WHERE epoch = 2") == [("TRAINING", "BLENDING")]
    seeds = "SELECT env, slot, seed, blueprint, blend, germinated, blending, fossilized, pruned, reason FROM v_seeds"
    assert written(path, seeds) == [(0, "layers.1", 1, "depthwise", "linear", 0, 2, 9, None, "it pays")]
    assert written(path, "SELECT kind, slot, seed FROM v_findings") == [("ransomware", "layers.1", 1)]


def test_every_view_answers_and_progress_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with RunStore(path) as store:
        recorder = StoreRecorder(store)
        for update in (1, 2):
            record_update(recorder, update, episodes=({}, {"score": 40.0, "governor": "divergence"}))
        recorder.episodes(sample_episodes(2, {"score": 70.0}, arm="heuristic"))
        recorder.metrics(2, {"seconds/collect": 3.5})
        recorder.decision(sample_decision(2, epoch=90, op="WAIT", changed=False))
    for view in VIEWS:
        written(path, f"SELECT * FROM {view}")
    progress = "SELECT update_number, episodes, score, stopped_by_governor, kl, clip_fraction FROM v_progress"
    assert written(path, progress) == [(1, 2, 50.0, 1, 0.01, None), (2, 2, 50.0, 1, 0.02, None)]
    assert written(path, "SELECT update_number, arm, score FROM v_evaluations") == [(2, "heuristic", 70.0)]
    assert written(path, "SELECT phase, seconds FROM v_timers") == [("collect", 3.5)]
    actions = "SELECT op, times, share, effective FROM v_actions WHERE update_number = 2"
    assert written(path, actions) == [("GERMINATE", 5, 5 / 6, 5), ("WAIT", 1, 1 / 6, 0)]


class Notes(RunRecorder):
    """A sink that remembers, and can break."""

    def __init__(self, broken: bool = False) -> None:
        self.seen: list[object] = []
        self.broken = broken
        self.closed = False

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        if self.broken:
            raise ConnectionError("the network is down")
        self.seen.append((update, dict(values)))

    def event(self, event: Event) -> None:
        self.seen.append(event.message)

    def close(self) -> None:
        self.closed = True


def test_a_broken_sink_is_let_go_with_an_event_and_the_others_go_on() -> None:
    main, broken, fine = Notes(), Notes(broken=True), Notes()
    recorder = FanOut(main, broken, fine)
    recorder.metrics(1, {"kl": 1.0})
    recorder.metrics(2, {"kl": 2.0})
    assert fine.seen == [(1, {"kl": 1.0}), (2, {"kl": 2.0})]
    ((first, event, second)) = main.seen
    assert (first, second) == ((1, {"kl": 1.0}), (2, {"kl": 2.0}))
    assert "Notes failed and gets nothing more: ConnectionError" in str(event)
    recorder.close()
    assert main.closed
    assert fine.closed
    assert not broken.closed


def test_the_main_recorders_error_is_the_runs() -> None:
    with pytest.raises(ConnectionError):
        FanOut(Notes(broken=True), Notes()).metrics(1, {})


def test_one_level_for_all() -> None:
    main, sink = Notes(), Notes()
    recorder = FanOut(main, sink)
    recorder.level = Level.DETAILED
    assert (main.level, sink.level, recorder.level) == (Level.DETAILED,) * 3
