"""An optional sink: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.telemetry import optional
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
        mode: str | None = None,
        level: Level = Level.NORMAL,
    ) -> None:
        """`settings` is what the run page shows as its configuration; `mode` is online, offline or disabled, and None
        what the variable WANDB_MODE says."""
        package = optional.wandb()
        where = None if folder is None else str(folder.absolute())
        self.level = level
        try:
            self._run: Any = package.init(project=project, name=name, dir=where, config=dict(settings or {}), mode=mode)
        except Exception as error:  # of its own kinds: no account, no network
            raise RuntimeError(
                f"Weights & Biases did not start ({error}); WANDB_MODE=offline needs no account"
            ) from error
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
