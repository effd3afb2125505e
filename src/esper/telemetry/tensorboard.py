"""An optional sink: metrics, episodes and warnings in TensorBoard's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.telemetry import optional
from esper.telemetry.episode_means import EpisodeMeans
from esper.telemetry.records import Decision, Episode, Event, Level


class TensorBoardSink:
    """A recorder for TensorBoard. Episodes appear as means per update; decisions stay in the run store."""

    def __init__(self, folder: Path, level: Level = Level.NORMAL) -> None:
        self.level = level
        self._writer: Any = optional.tensorboard().SummaryWriter(str(folder.absolute()))
        self._episodes = EpisodeMeans()

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, **self._episodes.drain(update)}.items():
            self._writer.add_scalar(name, float(value), update)

    def event(self, event: Event) -> None:
        if event.severity != "info":
            self._writer.add_text(event.kind, event.message, event.update)

    def episode(self, episode: Episode) -> None:
        self._episodes.add(episode)

    def decision(self, decision: Decision) -> None:
        pass

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
