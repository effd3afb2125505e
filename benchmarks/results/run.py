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

import argparse
import os
import sys
import time
from pathlib import Path

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


def main() -> None:
    options = arguments()
    if options.part == "render":
        from results.page import render  # noqa: PLC0415  (needs matplotlib; the parts do not)

        provenance(DEFAULT_CONTROLLER)  # a pair whose policies were replaced is not what the numbers are of
        print(render(folder=options.out or FOLDER))
        for name in shipped_names():
            if options.out is None and (FOLDER / name).is_dir():
                print(render(name, FOLDER / name))
        return
    controllers = {name: name for name in RULES[options.part]} | {LEARNED: options.controller}
    if SCHEDULE in controllers:
        controllers[SCHEDULE] = options.schedule
    for who in controllers.values():
        make_controller(who)  # a wrong path is reported now, not after an hour
    out = options.out or folder_of(options.controller) / f"{options.part}.json"
    episodes, started = options.episodes or EPISODES.get(options.part), time.perf_counter()
    if options.part == "mixed":
        measure_mixed(controllers, episodes, options.workers, out)
    elif options.part == "harm":
        measure_harm(controllers, episodes, options.workers, out)
    elif options.part == "transfer":
        only = [name.strip() for name in options.families.split(",") if name.strip()]
        measure_transfer(controllers, episodes, options.workers, out, only)
    elif options.data_dir is None:
        raise SystemExit("cifar needs --data-dir: the folder with data_batch_1.bin and the others")
    else:
        measure_cifar(controllers, options, out)
    print(f"{out} ({out.stat().st_size / 1000:.0f} kB) in {(time.perf_counter() - started) / 60:.1f} minutes")


def folder_of(controller: str) -> Path:
    """The folder for results of a controller. Those of one that does not ship must not lie among those that do."""
    if controller == DEFAULT_CONTROLLER:
        return FOLDER
    if controller not in shipped_names():
        raise SystemExit(f"{controller} does not ship: say with --out where its results shall be kept")
    return FOLDER / controller


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*RULES, "render"))
    parser.add_argument(
        "--controller", default=DEFAULT_CONTROLLER, help="the learned controller: a name, a checkpoint, a run"
    )
    parser.add_argument("--schedule", default=SCHEDULE, help="the best fixed schedule's TOML file, or the built-in one")
    parser.add_argument("--episodes", type=int, help="draws; each part has its own default")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="the JSON file; for render, the folder to read from")
    parser.add_argument("--families", default="", help="transfer: only these, separated by commas")
    images = parser.add_argument_group("cifar")
    images.add_argument("--data-dir", type=Path)
    images.add_argument("--device", default="cuda:0")
    images.add_argument("--seeds", type=int, default=5)
    images.add_argument("--horizon", type=int, default=30)
    images.add_argument("--updates", type=int, default=196, help="per epoch, of 128 images; 352 see every image once")
    images.add_argument("--room", type=float, default=4.0, help="budget for seeds in host sizes; 0 is no limit")
    images.add_argument("--max-seeds", type=lambda text: int(text) or None, default=3, help="at a time; 0 is no limit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
