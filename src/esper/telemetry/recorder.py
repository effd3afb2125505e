"""What takes the records of a run: the interface that a training loop writes to, the store, and a fan-out to sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, fields
from itertools import repeat

from esper.telemetry.records import Decision, EpisodeColumns, Event, Level, SlotState, StepDetails, to_json
from esper.telemetry.store import RunStore


class RunRecorder:
    """Takes what a run reports, and keeps nothing of it: others override what they keep. Calls return at once."""

    level: Level = Level.NORMAL
    """How much to record from now on."""

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Named numbers of one update. A name that comes twice keeps its last value."""

    def event(self, event: Event) -> None: ...

    def episodes(self, episodes: EpisodeColumns) -> None: ...

    def decision(self, decision: Decision) -> None: ...

    def flush(self) -> None:
        """Return when everything recorded so far is safe."""

    def close(self) -> None: ...


_METRIC = "INSERT OR REPLACE INTO metrics (update_number, name, value) VALUES (?, ?, ?)"
_EVENT = (
    "INSERT INTO events (time, kind, severity, update_number, arm, env, epoch, slot, seed, message, data) "
    f"VALUES ({', '.join('?' * 11)})"
)
# Plain INSERTs: an episode or decision that comes twice would silently replace another one, so it is an error.
_EPISODE = f"INSERT INTO episodes VALUES ({', '.join('?' * 11)})"
_EPISODE_REWARD = "INSERT INTO episode_rewards VALUES (?, ?, ?, ?, ?)"
_DECISION = f"INSERT INTO decisions VALUES ({', '.join('?' * 18)})"
_HEADS = ("op", "slot", "blueprint", "blend")
_DETAILS = "INSERT INTO step_details VALUES (?, ?, ?, ?, ?, ?)"
_SLOT_FIELDS = tuple(field.name for field in fields(SlotState))
_STEP_REWARD = "INSERT INTO step_rewards VALUES (?, ?, ?, ?, ?, ?)"


class StoreRecorder(RunRecorder):
    """Records into a run store.

    Numbers become plain here: one of NumPy or a tensor would fail later, in the store, far from its cause.
    """

    def __init__(self, store: RunStore, level: Level = Level.NORMAL) -> None:
        self.store = store
        self.level = level

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self.store.add((_METRIC, [(int(update), name, float(value)) for name, value in values.items()]))

    def event(self, event: Event) -> None:
        e = event
        where = (e.arm, _int(e.env), _int(e.epoch), e.slot, _int(e.seed))
        self.store.add((_EVENT, [(e.time, e.kind, e.severity, e.update, *where, e.message, to_json(e.data))]))

    def episodes(self, episodes: EpisodeColumns) -> None:
        e, update = episodes, int(episodes.update)
        results = (map(float, column) for column in (e.episode_return, e.score, e.accuracy))
        draw, *sizes = (map(int, column) for column in (e.draw, e.parameters, e.host_parameters, e.length))
        rows = zip(repeat(update), repeat(e.arm), range(len(e)), draw, *results, *sizes, e.governor, strict=False)
        by_term = enumerate([zip(e.terms, row, strict=True) for row in e.rewards])
        rewards = [(update, e.arm, env, term, float(value)) for env, row in by_term for term, value in row]
        self.store.add((_EPISODE, list(rows)), (_EPISODE_REWARD, rewards))

    def decision(self, decision: Decision) -> None:
        d, p = decision, decision.probabilities
        key = (int(d.update), d.arm, int(d.env), int(d.epoch))
        what = (d.op, d.slot, d.blueprint, d.blend)
        numbers = [_float(p.get(head)) for head in _HEADS] + [_float(d.value), _float(d.reward)]
        rewards = d.rewards if self.level is Level.DETAILED else {}
        row = (*key, *what, *numbers, bool(d.changed), d.message, _float(d.accuracy), _int(d.parameters))
        details = [] if d.details is None else [(*key, *_as_json(d.details))]
        by_term = [(*key, term, float(value)) for term, value in rewards.items()]
        self.store.add((_DECISION, [row]), (_DETAILS, details), (_STEP_REWARD, by_term))

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()


def _as_json(details: StepDetails) -> tuple[str, str | None]:
    """Four digits are enough for people, and half the space."""
    slots = [_known(dict(zip(_SLOT_FIELDS, astuple(slot), strict=True))) for slot in details.slots]
    choices = {head: {name: _short(p) for name, p in of.items()} for head, of in details.choices.items()}
    return to_json(slots), to_json(choices) if choices else None


def _known(values: Mapping[str, object]) -> dict[str, object]:
    return {name: _short(value) for name, value in values.items() if value is not None}


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _int(value: int | None) -> int | None:
    return None if value is None else int(value)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


class FanOut(RunRecorder):
    """One main recorder, and sinks that get the same.

    The main recorder's errors are the run's: without it there is no history. A sink that fails (a network is down) is
    let go, and the main recorder keeps an event that says so.
    """

    def __init__(self, main: RunRecorder, *sinks: RunRecorder) -> None:
        self.main = main
        self.sinks = list(sinks)
        self._update = 0

    @property
    def level(self) -> Level:
        return self.main.level

    @level.setter
    def level(self, level: Level) -> None:
        for recorder in (self.main, *self.sinks):
            recorder.level = level

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._update = update
        self._pass_on("metrics", update, values)

    def event(self, event: Event) -> None:
        self._pass_on("event", event)

    def episodes(self, episodes: EpisodeColumns) -> None:
        self._pass_on("episodes", episodes)

    def decision(self, decision: Decision) -> None:
        self._pass_on("decision", decision)

    def flush(self) -> None:
        self._pass_on("flush")

    def close(self) -> None:
        try:
            for sink in list(self.sinks):
                self._try(sink, "close")
        finally:
            self.main.close()

    def _pass_on(self, verb: str, *arguments: object) -> None:
        getattr(self.main, verb)(*arguments)
        for sink in list(self.sinks):
            self._try(sink, verb, *arguments)

    def _try(self, sink: RunRecorder, verb: str, *arguments: object) -> None:
        try:
            getattr(sink, verb)(*arguments)
        except Exception as error:
            self.sinks.remove(sink)
            name = type(sink).__name__
            self.main.event(
                Event("telemetry", self._update, f"{name} failed and gets nothing more: {error!r}", severity="warning")
            )
