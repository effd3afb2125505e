"""Optional sinks for numbers per update and warnings: TensorBoard, Weights & Biases. Decisions stay in the store."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import EpisodeColumns, Event

MEANS = ("episode_return", "score", "accuracy", "parameters", "length")
"""Of an episode: what is averaged over the episodes of an update."""


class PackageMissingError(ImportError):
    """An optional package is not installed."""


def tensorboard() -> Any:
    return _optional("torch.utils.tensorboard", "TensorBoard", "tensorboard")


def wandb() -> Any:
    return _optional("wandb", "Weights & Biases", "wandb")


def _optional(module: str, name: str, extra: str) -> Any:
    """The module, for `name` as people call it; `extra` is the optional dependency of Esper that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise PackageMissingError(f"{name} is not installed: pip install 'esper[{extra}]'") from error


class ScalarSink(RunRecorder):
    """Keeps the results of episodes until the metrics of their update come, and adds their means by arm."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, str], dict[str, list[float]]] = {}
        """By update and arm: the columns of `MEANS`."""

    def episodes(self, episodes: EpisodeColumns) -> None:
        columns = self._results.setdefault((episodes.update, episodes.arm), {name: [] for name in MEANS})
        for name, column in columns.items():
            column += getattr(episodes, name)

    def with_means(self, update: int, values: Mapping[str, float]) -> dict[str, float]:
        """Also the means over the episodes of `update`; what is older is forgotten, so that nothing piles up."""
        named = dict(values)
        for (at, arm), columns in self._results.items():
            if at == update:
                named |= {f"{arm}/{name}": sum(column) / len(column) for name, column in columns.items()}
        self._results = {key: columns for key, columns in self._results.items() if key[0] > update}
        return named


class TensorBoardSink(ScalarSink):
    """Metrics, means of episodes and warnings in TensorBoard's format."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._writer: Any = tensorboard().SummaryWriter(str(folder.absolute()))

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in self.with_means(update, values).items():
            self._writer.add_scalar(name, float(value), update)

    def event(self, event: Event) -> None:
        if event.severity != "info":
            self._writer.add_text(event.kind, event.message, event.update)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink(ScalarSink):
    """The same in Weights & Biases, whose own process sends what it has when it can."""

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        folder: Path | None = None,
        settings: Mapping[str, object] | None = None,
        mode: str | None = None,
    ) -> None:
        """`settings` is what the run page shows as its configuration; `mode` is online, offline or disabled, and None
        what the variable WANDB_MODE says."""
        super().__init__()
        package = wandb()
        where = None if folder is None else str(folder.absolute())
        try:
            self._run: Any = package.init(project=project, name=name, dir=where, config=dict(settings or {}), mode=mode)
        except Exception as error:  # of its own kinds: no account, no network
            raise RuntimeError(
                f"Weights & Biases did not start ({error}); WANDB_MODE=offline needs no account"
            ) from error

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log(self.with_means(update, values), step=update)

    def event(self, event: Event) -> None:
        if event.severity != "info":
            severity = "ERROR" if event.severity == "error" else "WARN"
            self._run.alert(title=event.kind, text=event.message, level=severity)

    def close(self) -> None:
        self._run.finish()
