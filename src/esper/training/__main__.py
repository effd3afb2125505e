"""`python -m esper.training`: start or resume a run with nothing but torch, numpy and safetensors installed.

It is `esper train` for machines that have no command line tools: the same configuration, folder and weights. It may be
given a time limit, so that a run can be done in parts; a part ends with a checkpoint. Nothing is compared at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from esper.config import settings_from
from esper.engine.gc_control import deferred_gc
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.engines import ONE_AT_A_TIME, players
from esper.training.interrupt import interruptible
from esper.training.loop import Trainer, UpdateReport, engine_of
from esper.training.run_folder import RunFolder
from esper.training.session import begin_session, duration_of
from esper.training.train_config import PRESETS, TrainConfig


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
    if options.resume:
        folder, config = RunFolder.open(options.run)
        opened: Any = folder.lock()
    else:
        config = configured(options.preset, options.seed, options.set)
        opened = RunFolder.begin(options.run, config)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with opened as begun, deferred_gc(torch.device(device)):
        return _train(RunFolder(options.run) if begun is None else begun, config, device, options)


def _train(folder: RunFolder, config: TrainConfig, device: str, options: argparse.Namespace) -> int:
    began, store = time.monotonic(), RunStore(folder.path / STORE_NAME)
    workers = players(options.workers, engine_of(config, config.family(), device).name, device)
    trainer = Trainer(config, folder, StoreRecorder(store), workers=workers, device=device)
    say(f"{folder.path}: {trainer.engine}, {workers} workers")
    if workers == 1 and device != "cpu" and trainer.engine.name == "stacked":
        say(ONE_AT_A_TIME)
    limit = TimeLimit(options.stop_after, began)
    try:
        trainer.resume()
        begin_session(trainer, store)
        if trainer.update == 0 and options.estimate:
            say(duration_of(config, trainer.engine.name, device, workers) or "a short run")
        with interruptible() as interrupt:
            finished = trainer.run(
                lambda report: _tell(report, limit), stop=lambda: interrupt.requested or limit.is_near()
            )
    finally:
        trainer.close()
    say(
        "finished" if finished else f"stopped after update {trainer.update} of {config.updates}: continue with --resume"
    )
    return 0


class TimeLimit:
    """Stops before an update that would end too late, if it took as long as the longest one so far."""

    def __init__(self, seconds: float | None, began: float) -> None:
        self.end = math.inf if seconds is None else began + seconds
        self.longest, self._update_began = 0.0, began

    def is_near(self) -> bool:
        """Asked before every update."""
        self._update_began = time.monotonic()
        return self._update_began + self.longest > self.end

    def note(self) -> None:
        """An update has ended."""
        self.longest = max(self.longest, time.monotonic() - self._update_began)


def configured(preset: str, seed: int, changes: Sequence[str]) -> TrainConfig:
    """A preset with `NAME=VALUE` changes: "envs=512", "ppo.learning_rate=3e-4"; values are JSON, or else text."""
    data: dict[str, Any] = {"seed": seed}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise SystemExit(f"--set needs NAME=VALUE, not {change!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        table, _, inner = name.rpartition(".")
        (data.setdefault(table, {}) if table else data)[inner] = value
    return settings_from(data, TrainConfig, "--set", default=PRESETS[preset])


def _tell(report: UpdateReport, limit: TimeLimit) -> None:
    limit.note()
    rollout, metrics = report.rollout, report.metrics
    judged = (
        "" if report.evaluation is None else f", held-out {report.evaluation:.2f}{' (best)' if report.best else ''}"
    )
    phases = ", ".join(f"{name} {metrics[f'seconds/{name}']:.1f} s" for name in ("environment", "update", "telemetry"))
    say(
        f"update {report.update}: score {fmean(rollout.scores):.2f}, entropy {metrics['entropy']:.2f}, "
        f"{metrics['steps_per_second']:,.0f} steps/s ({phases}){judged}"
    )
    for message in report.anomalies:
        say(f"  {message}")


def say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m esper.training", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--preset", choices=list(PRESETS), default="small")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="changes to the preset")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and stop before this time is up")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--workers", type=int, help="processes; by default one per core, on a GPU without MPS one")
    parser.add_argument("--estimate", action="store_true", help="say beforehand about how long it will take")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
