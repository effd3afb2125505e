"""Recordings in proportion, as one recording to clone.

    python benchmarks/recipe/together.py recordings/all:3 recordings/labelled:0.5 --out recordings/final
    esper clone recordings/final --epochs 20 --out controller.safetensors

A whole number repeats a recording, the rest is a share of its episodes, drawn at random. What there is more of weighs
more; and what a policy learns from one family it forgets of another, unless both are there. A folder that is named
twice counts as two: then copies of its problems lie on both sides of the clone's split, nothing stops it early, and
its agreement with the teacher means nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rounds import chosen_options

from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.recording import append, read

APART = 10_000_000
"""Between the numbers of one recording and the next, because the same number may mean another problem."""


def in_proportion(recordings: Sequence[tuple[Episodes, float]]) -> Episodes:
    """Each recording as often as its number says."""
    parts: list[Episodes] = []
    for episodes, times in recordings:
        order = torch.randperm(len(episodes), generator=torch.Generator().manual_seed(0))
        some = order[: int((times - int(times)) * len(episodes))].sort().values
        rows = torch.cat([*[torch.arange(len(episodes))] * int(times), some])
        parts.append(replace(episodes.select(rows), draw=episodes.draw[rows] + APART * len(parts)))
    return join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", nargs="+", help="folder:times")
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    named = [name.rpartition(":") for name in chosen.recordings]
    if wrong := [name for name, (folder, _, _) in zip(chosen.recordings, named, strict=True) if not folder]:
        parser.error(f"how often is {wrong[0]} to count? Say {wrong[0]}:1, or another number")
    found = [(read(Path(folder), growth_schema()).episodes, float(times)) for folder, _, times in named]
    together = in_proportion(found)
    command = f"python benchmarks/recipe/together.py {' '.join(chosen.recordings)}"
    append(chosen.out, together, growth_schema(), {"command": command})
    print(f"{len(together):,} episodes, {together.steps:,} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
