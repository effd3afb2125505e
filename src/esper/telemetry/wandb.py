"""An optional sink: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.telemetry.episode_means import EpisodeMeans
from esper.telemetry.records import Decision, Episode, Event, Level


class WandbSink:
    """A recorder for Weights & Biases. Episodes appear as means per update; decisions stay in the run store."""

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        folder: Path | None = None,
        settings: Mapping[str, object] | None = None,
        mode: str = "online",
        level: Level = Level.NORMAL,
    ) -> None:
        """`settings` is what the run page shows as its configuration; `mode` is online, offline or disabled."""
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise ImportError("Weights & Biases is not installed: pip install 'esper[wandb]'") from error
        where = None if folder is None else str(folder.absolute())
        self.level = level
        self._run = wandb.init(project=project, name=name, dir=where, config=dict(settings or {}), mode=mode)
        self._episodes = EpisodeMeans()

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, **self._episodes.drain(update)}, step=update)

    def event(self, event: Event) -> None:
        if event.severity != "info":
            severity = "ERROR" if event.severity == "error" else "WARN"
            self._run.alert(title=event.kind, text=event.message, level=severity)

    def episode(self, episode: Episode) -> None:
        self._episodes.add(episode)

    def decision(self, decision: Decision) -> None:
        pass

    def flush(self) -> None:
        pass  # its own process sends what it has when it can

    def close(self) -> None:
        self._run.finish()
