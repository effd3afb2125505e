"""`make demo`: compare the controller that ships with Esper with rules, and grow a network with it. Two minutes.

Every demo has a folder of its own (runs/demo, runs/demo-2, …): nothing that was there before is touched.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from esper.cli import main as esper
from esper.cli.options import new_folder
from esper.cli.terminal import clock

CONTROLLER = "small"
EPISODES = 16
DRAW = 7
"""A problem of the comparison whose host lacks something that growing can give it."""


def step(words: list[str]) -> None:
    """One command, as a person would type it; the demo ends where one fails or is interrupted."""
    print(f"\n$ {shlex.join(['esper', *words])}", flush=True)
    code = esper(words)
    if code:
        sys.exit(code)


def main() -> None:
    started = time.perf_counter()
    run = new_folder(Path("runs"), "demo")
    compared, grown = run / "comparison", run / "grown"
    controllers = f"none,heuristic,{CONTROLLER}"
    judged = ["--controllers", controllers, "--episodes", str(EPISODES), "--no-controls"]
    step(["compare", "--task", "mixed", *judged, "--out", str(compared)])
    step(["grow", "--task", "mixed", "--draw", str(DRAW), "--controller", CONTROLLER, "--out", str(grown)])
    reports = [folder / "report.html" for folder in (compared, grown)]
    for file in reports:
        step(["report", str(file.parent), "--out", str(file)])
    print(f"\nDone in {clock(time.perf_counter() - started)}. Pictures and files of this demo:")
    kept = {
        compared / "comparison.png": "the learned controller beside the rule, on held-out problems",
        grown / "growth.png": "how it grew one of these problems' networks",
        grown / "model.py": "that network; it loads without Esper",
    }
    width = max(len(str(path)) for path in kept)
    for path, what in kept.items():
        print(f"  {path!s:<{width}}  {what}")
    program = Path(sys.executable).with_name("esper")  # `make demo` does not activate its environment
    print("Next, train a controller of your own, in a few minutes:")
    print(f"  {program} train --preset demo")
    print(f"More: {program} --help, README.md")
    print("The reports of this demo, to be read in a browser and mailed:")
    for file in reports:
        print(f"  {file}")


if __name__ == "__main__":
    main()
