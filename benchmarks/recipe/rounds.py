"""What the steps of the recipe share: options, and keeping episodes with those of earlier rounds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from esper.offline.episodes import Episodes, growth_schema
from esper.offline.recording import append, read
from esper.tasks.draws import FIRST_JUDGED, FIRST_PLAYED
from esper.training.catalogue import policy_file


def round_options(description: str) -> argparse.ArgumentParser:
    """The options that all rounds have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--family", default="mixed")
    parser.add_argument("--first", type=int, default=0, help="leave out so many problems: those of earlier rounds")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="recordings of earlier rounds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def chosen_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """With an --out that is new, and one thread, because the work is done in processes."""
    chosen = parser.parse_args(arguments)
    if chosen.out.exists():
        parser.error(f"{chosen.out} exists: name another --out, or everything would be in it twice")
    torch.set_num_threads(1)
    return chosen


def policy_of(parser: argparse.ArgumentParser, name: str) -> Path:
    """One policy's checkpoint; what has none is told as a wrong option is."""
    try:
        return policy_file(name)
    except ValueError as error:
        parser.error(str(error))


def training_draws(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> range:
    """The problems that were asked for, unless policies are chosen by them."""
    numbers = range(FIRST_PLAYED + chosen.first, FIRST_PLAYED + chosen.first + chosen.problems)
    if numbers.stop > FIRST_JUDGED:
        most = FIRST_JUDGED - FIRST_PLAYED
        parser.error(f"--first and --problems together must be at most {most:,}: judge.py chooses by the next ones")
    return numbers


def keep(script: str, chosen: argparse.Namespace, episodes: Episodes) -> None:
    """Write what earlier rounds have kept, and this one."""
    command = f"python benchmarks/recipe/{script} --policy {chosen.policy}"
    provenance = {"command": command, "task": chosen.family}
    for folder in chosen.also:
        append(chosen.out, read(folder, growth_schema()).episodes, growth_schema(), {**provenance, "from": str(folder)})
    append(chosen.out, episodes, growth_schema(), provenance)
