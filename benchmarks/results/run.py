"""The evidence for the learned controller, part by part; each part is kept as JSON in docs/results.

    python benchmarks/results/run.py mixed                     # 96 draws, a quarter of an hour on 2 cores
    python benchmarks/results/run.py harm                      # 50 draws, 3 seeds each, against no growth
    python benchmarks/results/run.py transfer                  # families that no controller was trained on
    python benchmarks/results/run.py cifar --data-dir ~/data --device cuda
    python benchmarks/results/run.py render                    # docs/results.md and its pictures, from the JSON;
                                                               # and a page for every other controller that ships

All on held-out draws and test data. The shipped controller, the schedule and the heuristic were made on training draws.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal

import tyro

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from esper.agent.shipped import DEFAULT_CONTROLLER, provenance, shipped_names
from esper.training.catalogue import make_controller
from results.measure import FOLDER, LEARNED, SCHEDULE, measure_cifar, measure_harm, measure_mixed, measure_transfer

EPISODES = {"mixed": 96, "harm": 50, "transfer": 16}
"""Draws: of `mixed`, whole rounds of its 24 kinds of problem."""
RULES = {
    "mixed": ("none", "random", SCHEDULE, "heuristic"),
    "harm": ("none",),
    "transfer": ("none", SCHEDULE, "heuristic"),
    "cifar": ("none", SCHEDULE, "heuristic"),
}


def main(
    part: tyro.conf.Positional[Literal["mixed", "harm", "transfer", "cifar", "render"]],
    controller: str = DEFAULT_CONTROLLER,
    schedule: str = SCHEDULE,
    episodes: int | None = None,
    workers: int = os.cpu_count() or 1,
    out: Path | None = None,
    families: str = "",
    data_dir: Path | None = None,
    device: str = "cuda:0",
    seeds: int = 5,
    horizon: int = 30,
    updates: int = 196,
    room: float = 4.0,
    max_seeds: int = 3,
) -> None:
    """Measure a part, or write the pages.

    Args:
        controller: The learned controller: a name, a checkpoint, a run.
        schedule: The best fixed schedule's TOML file, or the built-in one.
        episodes: Draws; each part has its own default.
        out: The JSON file; for render, the folder to read from.
        families: Of transfer: only these, separated by commas.
        data_dir: Of cifar, as all that follow: the folder with data_batch_1.bin and the others.
        updates: Per epoch, of 128 images; 352 see every image once.
        room: Budget for seeds in host sizes; 0 is no limit.
        max_seeds: At a time; 0 is no limit.
    """
    if part == "render":
        from results.page import render  # noqa: PLC0415  (needs matplotlib; the parts do not)

        provenance(DEFAULT_CONTROLLER)  # a pair whose policies were replaced is not what the numbers are of
        print(render(folder=out or FOLDER))
        for name in shipped_names():
            if out is None and (FOLDER / name).is_dir():
                print(render(name, FOLDER / name))
        return
    controllers = {name: schedule if name == SCHEDULE else name for name in RULES[part]} | {LEARNED: controller}
    for who in controllers.values():
        make_controller(who)  # a wrong path is reported now, not after an hour
    out = out or folder_of(controller) / f"{part}.json"
    episodes, started = episodes or EPISODES.get(part, 0), time.perf_counter()
    if part == "mixed":
        measure_mixed(controllers, episodes, workers, out)
    elif part == "harm":
        measure_harm(controllers, episodes, workers, out)
    elif part == "transfer":
        only = [name.strip() for name in families.split(",") if name.strip()]
        measure_transfer(controllers, episodes, workers, out, only)
    elif data_dir is None:
        raise SystemExit("cifar needs --data-dir: the folder with data_batch_1.bin and the others")
    else:
        setting = {"device": device, "seeds": seeds, "horizon": horizon, "updates": updates, "room": room}
        measure_cifar(controllers, data_dir, setting | {"max_seeds": max_seeds or None}, out)
    print(f"{out} ({out.stat().st_size / 1000:.0f} kB) in {(time.perf_counter() - started) / 60:.1f} minutes")


def folder_of(controller: str) -> Path:
    """The folder for results of a controller. Those of one that does not ship must not lie among those that do."""
    if controller == DEFAULT_CONTROLLER:
        return FOLDER
    if controller not in shipped_names():
        raise SystemExit(f"{controller} does not ship: say with --out where its results shall be kept")
    return FOLDER / controller


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
