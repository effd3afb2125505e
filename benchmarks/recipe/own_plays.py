"""One round of a policy's own plays on the training problems of a portfolio.

    python benchmarks/recipe/own_plays.py --policy start.safetensors --family varied --known recordings/varied \
        --problems 200 --workers 2 --out recordings/round1
    python benchmarks/recipe/learn.py --taught r/4 --portfolios recordings/varied --plays recordings/round1 --out better

The wrong seeds of a portfolio are anyone's; a policy's own mistakes are the plausible ones, and only here does it see
what can still be planted beside them. The policy rolls its dice, and now and then takes a random legal decision.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from improve import jobs
from playing import play_all
from rounds import chosen_options, policy_of

from esper.offline.episodes import growth_schema
from esper.offline.recorder import play
from esper.offline.recording import append, read


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--family", default="mixed")
    parser.add_argument(
        "--known", type=Path, nargs="+", required=True, help="recordings of the problems as they are now"
    )
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the known problems")
    parser.add_argument("--siblings", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--seconds", type=float, help="stop after so long, with what was played by then")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    recordings = [read(folder, growth_schema()) for folder in chosen.known]
    for folder, recording in zip(chosen.known, recordings, strict=True):
        if recording.task != chosen.family:
            parser.error(f"{folder} has problems of {recording.task}, not of {chosen.family}")
    known = {number for recording in recordings for number in recording.episodes.draw.tolist()}
    numbers = sorted(known)[chosen.first : chosen.first + chosen.problems]
    plays = jobs(policy_of(parser, chosen.policy), chosen.family, numbers, chosen.siblings, chosen.noise)
    played = play_all(play, plays, chosen.workers, chosen.seconds)
    command = shlex.join(["python", *sys.argv])
    append(chosen.out, played, growth_schema(), {"command": command, "task": chosen.family})
    print(f"{played.steps:,} env-steps on {len(numbers)} problems; mean return {float(played.returns().mean()):.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
