"""The evidence for the learned controller, part by part; each part is kept as JSON in docs/results.

    python benchmarks/results/run.py mixed --quick             # the main table on 2 cores in a third of an hour
    python benchmarks/results/run.py mixed                     # 96 draws
    python benchmarks/results/run.py harm                      # 50 draws, 3 seeds each, against no growth
    python benchmarks/results/run.py transfer                  # families that none was trained on
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
from esper.tasks.mixed import KINDS
from esper.training.catalogue import make_controller
from results.cifar import Setting, run_cifar
from results.kept import FOLDER, LEARNED, SCHEDULE, TUNED
from results.parts import HARM_DRAWS, TRANSFER_DRAWS, run_harm, run_mixed, run_transfer

MIXED_DRAWS, QUICK_DRAWS = (-(-wanted // len(KINDS)) * len(KINDS) for wanted in (80, 40))
"""Whole rounds: every kind of problem as often as every other."""


def players(options: argparse.Namespace, *rules: str) -> dict[str, str]:
    """Who plays, by label: the named rules, then the tuned heuristic if there is one, then the learned controller."""
    chosen = {name: name for name in rules}
    if SCHEDULE in chosen and options.schedule:
        chosen[SCHEDULE] = options.schedule
    if "heuristic" in chosen and options.heuristic:
        chosen[TUNED] = options.heuristic
    chosen[LEARNED] = options.controller
    for who in chosen.values():
        make_controller(who)  # a wrong path is told now, not after an hour
    return chosen


def kept_at(controller: str) -> Path:
    """The folder for results of a controller. Those of one that does not ship must not lie among those that do."""
    if controller == DEFAULT_CONTROLLER:
        return FOLDER
    if controller not in shipped_names():
        raise SystemExit(f"{controller} does not ship: say with --out where its results shall be kept")
    return FOLDER / controller


def main() -> None:
    options = arguments()
    if options.part == "render":
        from results.render import render, render_other  # noqa: PLC0415  (needs matplotlib; the parts do not)

        provenance(DEFAULT_CONTROLLER)  # a pair whose policies were replaced is not what the numbers are of
        print(render(FOLDER if options.out is None else options.out))
        for name in shipped_names():
            if options.out is None and (FOLDER / name).is_dir():
                print(render_other(name))
        return
    out = options.out or kept_at(options.controller) / f"{options.part}{'_quick' if options.quick else ''}.json"
    started = time.perf_counter()
    if options.part == "mixed":
        everyone = players(options, "none", "random", SCHEDULE, "heuristic")
        run_mixed(everyone, options.episodes or (QUICK_DRAWS if options.quick else MIXED_DRAWS), options.workers, out)
    elif options.part == "harm":
        run_harm(players(options, "none"), options.episodes or HARM_DRAWS, options.workers, out)
    elif options.part == "transfer":
        everyone = players(options, "none", SCHEDULE, "heuristic")
        episodes = options.episodes or TRANSFER_DRAWS
        only = [name.strip() for name in options.families.split(",") if name.strip()]
        run_transfer(everyone, episodes, options.workers, out, only=only, text_file=options.text_file)
    else:
        run_cifar(players(options, "none", SCHEDULE, "heuristic"), cifar_setting(options), out)
    size = out.stat().st_size / 1000
    print(f"{out} ({size:.0f} kB) in {(time.perf_counter() - started) / 60:.1f} minutes")


def cifar_setting(options: argparse.Namespace) -> Setting:
    if options.data_dir is None:
        raise SystemExit("cifar needs --data-dir: the folder with data_batch_1.bin and the others")
    return Setting(
        data_dir=options.data_dir,
        device=options.device,
        seeds=options.seeds,
        horizon=options.horizon,
        updates=options.updates,
        room=options.room,
        max_seeds=options.max_seeds or None,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("mixed", "harm", "transfer", "cifar", "render"))
    parser.add_argument(
        "--controller", default=DEFAULT_CONTROLLER, help="the learned controller: a name, a checkpoint, a run"
    )
    parser.add_argument("--heuristic", help="the tuned heuristic's TOML file; the default settings play as well")
    parser.add_argument("--schedule", help="the best fixed schedule's TOML file, in place of the built-in one")
    parser.add_argument("--episodes", type=int, help="draws; each part has its own default")
    parser.add_argument("--quick", action="store_true", help=f"mixed: {QUICK_DRAWS} draws, wider intervals")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="the JSON file; for render, the folder to read from")
    parser.add_argument("--families", default="", help="transfer: only these, separated by commas")
    parser.add_argument("--text-file", type=Path, help="transfer: also the task `text`, on this file")
    images = parser.add_argument_group("cifar")
    images.add_argument("--data-dir", type=Path)
    images.add_argument("--device", default="cuda:0")
    images.add_argument("--seeds", type=int, default=5)
    images.add_argument("--horizon", type=int, default=30)
    images.add_argument("--updates", type=int, default=196, help="per epoch, of 128 images; 352 see every image once")
    images.add_argument("--room", type=float, default=4.0, help="budget for seeds in host sizes; 0 is no limit")
    images.add_argument("--max-seeds", type=int, default=3, help="at a time; 0 is no limit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
