"""A network that grows as the record of a run: one update, one environment, one episode; the control is another arm.

The rows are made of the entries of `history.json`, while the network grows (`GrowthRecorder`) or afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.engine.eager import EpochRecord
from esper.env.rent import score as score_of
from esper.telemetry.recorder import RunRecorder, StoreRecorder
from esper.telemetry.records import Decision, EpisodeColumns, Event, SlotState, StepDetails
from esper.telemetry.store import RunStore, StoreError
from esper.training.own.history import record_json, transitions_json

HISTORY = "history.json"
GROWTH = "growth"
"""The key in `meta` that says that a store is of one network."""
CONTROL = "control"
"""The arm of the same host without growth."""


class GrowthRecorder:
    """Writes the epochs of a network while it grows; readers see each epoch as a whole."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._store, self._slots = RunStore(path), facts["slots"]
        self._recorder = StoreRecorder(self._store)
        self._settled = 0
        """Stage changes that are recorded already."""
        self._store.describe({GROWTH: dict(facts)})
        self._store.flush()

    def __enter__(self) -> GrowthRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()

    def note(self, record: EpochRecord, control: EpochRecord | None) -> None:
        changes = transitions_json(record)
        record_epochs(self._recorder, self._slots, [record_json(record)], changes)
        self._settled += len(changes)
        if control is not None:
            self._recorder.decision(_waiting(control.epoch, control.measured.accuracy))
        self._store.flush()

    def end(self, content: Mapping[str, Any]) -> None:
        """What was decided about unfinished seeds, and the result."""
        record_epochs(self._recorder, self._slots, [], content["transitions"][self._settled :])
        record_end(self._recorder, content)
        self._store.describe({"result": content["result"]})
        self._store.flush()


def store_of_history(history: Path, path: Path) -> Path:
    """A store at `path` with what a history says."""
    try:
        content = json.loads(history.read_text("utf-8"))
        with RunStore(path) as store:
            store.describe({GROWTH: _facts(content), "result": content.get("result")})
            recorder = StoreRecorder(store)
            record_epochs(recorder, content["slots"], content["epochs"], content["transitions"])
            record_control(recorder, content.get("control") or [])
            record_end(recorder, content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StoreError(f"{history} is not the history of a grown network ({error!r:.100})") from error
    return path


def _facts(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "controller": content["controller"],
        "slots": content["slots"],
        "host_parameters": content["host_parameters"],
        "epochs": len(content["epochs"]),
        "rent": content.get("rent"),
    }


def record_epochs(
    recorder: RunRecorder,
    slots: Sequence[str],
    epochs: Iterable[Mapping[str, Any]],
    transitions: Iterable[Mapping[str, Any]],
) -> None:
    """Entries of a history, in their order."""
    for one in epochs:
        recorder.decision(_decision(slots, one))
        verdict = one.get("verdict")
        if verdict:
            message = str(verdict["message"] if isinstance(verdict, Mapping) else verdict)
            recorder.event(Event("governor", 1, message, "warning", 0, int(one["epoch"])))
    for one in transitions:
        recorder.event(
            Event(
                "lifecycle",
                1,
                str(one["reason"]),
                env=0,
                epoch=int(one["epoch"]),
                slot=str(one["slot"]),
                seed=int(one["seed"]),
                data={"source": one["source"], "target": one["target"]},
            )
        )


def record_control(recorder: RunRecorder, accuracies: Iterable[float]) -> None:
    """Of the same host without growth."""
    for epoch, accuracy in enumerate(accuracies):
        recorder.decision(_waiting(epoch, accuracy))


def _waiting(epoch: int, accuracy: float | None) -> Decision:
    return Decision(1, 0, epoch, "WAIT", None, None, None, {}, None, False, "", arm=CONTROL, accuracy=accuracy)


def record_end(recorder: RunRecorder, content: Mapping[str, Any]) -> None:
    """The episode as a whole, on validation data: what was grown by.

    Of the network that came back, where that is known: it may be that of an earlier epoch, and seeds that the end of
    the run removed are no part of it.
    """
    last, host, result = content["epochs"][-1], int(content["host_parameters"]), content.get("result")
    result = result if isinstance(result, Mapping) else {}
    accuracy = result.get("validation_accuracy", last["val_accuracy"]) or 0.0
    size = int(result.get("parameters", last["parameters"]))
    score = score_of(accuracy, size, host, content.get("rent") or 0.0)
    epochs = len(content["epochs"])
    recorder.episodes(EpisodeColumns(1, [0], [score], [score], [accuracy], [size], [host], [epochs], [None]))


def _decision(slots: Sequence[str], one: Mapping[str, Any]) -> Decision:
    action, effect = one["action"], one["effect"]
    states = [
        SlotState(
            path,
            one["stages"][i],
            one["alphas"][i],
            *_points(one["contributions"], i),
            *_points(one["shadow_benefits"], i),
        )
        for i, path in enumerate(slots)
    ]
    return Decision(
        update=1,
        env=0,
        epoch=int(one["epoch"]),
        op=action["op"],
        slot=None if action["slot"] is None else slots[action["slot"]],
        blueprint=action["blueprint"],
        blend=action["blend"],
        probabilities={},
        value=None,
        changed=bool(effect["changed"]),
        message=effect["message"],
        accuracy=one["val_accuracy"],
        parameters=one["parameters"],
        details=StepDetails(states),
    )


def _points(measured: Mapping[Any, Any], slot: int) -> tuple[float | None, float | None]:
    """JSON has only texts as keys."""
    found = measured.get(slot) or measured.get(str(slot))
    return (None, None) if found is None else (found["accuracy"], found["error"])
