"""`make demo`: train a small controller, judge it beside the rules, and grow a network with it. A few minutes.

Every run has a folder of its own (runs/demo, runs/demo-2, …): nothing that was there before is touched.
"""

from __future__ import annotations

import shlex
import sys
import time
from itertools import count
from pathlib import Path

from esper.cli import main as esper
from esper.cli.episodes import clock

DRAW = 3
"""A held-out problem whose host lacks something that growing can give it (`esper compare` judges on it, too)."""


def free_folder(runs: Path = Path("runs")) -> Path:
    """The first of runs/demo, runs/demo-2, … that does not exist."""
    names = (f"demo-{i}" if i > 1 else "demo" for i in count(1))
    return next(runs / name for name in names if not (runs / name).exists())


def step(words: list[str]) -> None:
    """One command, as a person would type it; the demo ends where one fails or is interrupted."""
    print(f"\n$ {shlex.join(['esper', *words])}", flush=True)
    code = esper(words)
    if code:
        sys.exit(code)


def main() -> None:
    started = time.perf_counter()
    run = free_folder()
    grown = run / "grown"
    step(["train", "--preset", "demo", "--run", str(run)])
    step(["grow", "--task", "mixed/vector", "--draw", str(DRAW), "--controller", str(run), "--out", str(grown)])
    print(f"\nDone in {clock(time.perf_counter() - started)}. Pictures and files of this run:")
    kept = {
        run / "comparison" / "comparison.png": "the controller you trained beside the rules, on problems it never saw",
        grown / "growth.png": "how it grew one network",
        grown / "model.py": "that network; it loads without Esper",
    }
    width = max(len(str(path)) for path in kept)
    for path, what in kept.items():
        print(f"  {path!s:<{width}}  {what}")
    print("More: esper grow --task mnist1d (a rule grows a network), esper --help, README.md")


if __name__ == "__main__":
    main()
