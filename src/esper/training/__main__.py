"""`python -m esper.training`: start or resume a run with nothing but torch, numpy and safetensors installed.

It is `esper train` for machines that have no command line tools: the same configuration, folder and weights. It may be
given a time limit, so that a run can be done in parts; a part ends with a checkpoint. Nothing is compared at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from esper.config import settings_from
from esper.engine.gc_control import deferred_gc
from esper.errors import RefusedError
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.catalogue import with_start
from esper.training.engines import ONE_AT_A_TIME, check_gpu_options, players
from esper.training.interrupt import interruptible
from esper.training.loop import Trainer, UpdateReport, engine_of
from esper.training.own.grow import pick_device
from esper.training.run_folder import RunFolder
from esper.training.session import begin_session, duration_of
from esper.training.train_config import COMMAND_ONLY, PRESETS, TrainConfig

PRESET = "small"


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
    try:
        return _run(options)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("ESPER_TRACEBACK"):
            raise
        print(f"esper.training: {error}", file=sys.stderr)  # one line, as the commands give it
        return 2 if isinstance(error, RefusedError) else 1


def _run(options: argparse.Namespace) -> int:
    """What cannot be used is found out before there is a folder."""
    device = pick_device(options.device or "auto")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers must be at least 1, not {options.workers}")
    if options.resume:
        if options.preset or options.seed is not None or options.set:
            raise ValueError("a resumed run keeps its configuration: leave out --preset, --seed and --set")
        folder, config = RunFolder.open(options.run)
        opened: Any = folder.lock()
    else:
        config = with_start(configured(options.preset or PRESET, options.seed, options.set))
        config.family().draw(config.draw_ids(1)[0])
        opened = RunFolder.begin(options.run, config)
    check_gpu_options(config.precision, config.compiled, device, resumed=options.resume)
    workers = players(options.workers, engine_of(config, config.family(), str(device)).name, device)
    with opened as begun, deferred_gc(device):
        return _train(RunFolder(options.run) if begun is None else begun, config, str(device), workers, options)


def _train(folder: RunFolder, config: TrainConfig, device: str, workers: int, options: argparse.Namespace) -> int:
    began, store = time.monotonic(), RunStore(folder.path / STORE_NAME)
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


def configured(preset: str, seed: int | None, changes: Sequence[str]) -> TrainConfig:
    """A preset with `NAME=VALUE` changes: "envs=512", "ppo.learning_rate=3e-4"; values are JSON, or else text."""
    data: dict[str, Any] = {}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise SystemExit(f"--set needs NAME=VALUE, not {change!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        table, _, inner = name.rpartition(".")
        place = data.setdefault(table, {}) if table else data
        if not isinstance(place, dict):
            raise ValueError(f"--set gives {table} a value and {name} another")
        place[inner] = value
    for name in COMMAND_ONLY:
        if data.get(name):
            raise ValueError(f"--set {name}=… has an effect in `esper train` only: leave it out")
    if seed is not None:
        data["seed"] = seed
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
    parser.add_argument("--preset", choices=list(PRESETS), help=f"by default {PRESET}")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    parser.add_argument("--seed", type=int, help="by default that of the preset, 0")
    parser.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help="changes to the preset"
    )
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and stop before this time is up")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--workers", type=int, help="processes; by default one per core, on a GPU without MPS one")
    parser.add_argument("--estimate", action="store_true", help="say beforehand about how long it will take")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
