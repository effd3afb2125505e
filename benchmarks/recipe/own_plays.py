"""One round of a policy's own plays on training problems whose best plans are known.

    python benchmarks/recipe/own_plays.py --policy start.safetensors --family mixed --known recordings/mixed \
        --problems 200 --workers 2 --out recordings/round1
    python benchmarks/recipe/teacher.py recordings/mixed recordings/round1 --out recordings/labelled

The wrong seeds of a portfolio are anyone's; a policy's own mistakes are the plausible ones, and only here does it see
how to notice them and what to do then. The policy rolls its dice, and now and then takes a random legal decision. Where
that earned more than the best plan so far, what it kept is the better answer from then on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from improve import jobs
from playing import play_all
from rounds import chosen_options
from teacher import WORTH, Answer, Answers, better, ending, read_answers, write_answers

from esper.offline.episodes import Episodes, growth_schema
from esper.offline.recorder import play
from esper.offline.recording import append
from esper.training.catalogue import policy_file


def better_answers(episodes: Episodes, known: Answers) -> Answers:
    """How those plays ended that earned more than the best that is known, and nearly as much."""
    found: dict[int, Answer] = {}
    for row, number in enumerate(episodes.draw.tolist()):
        found[number] = better(found.get(number, known[number]), ending(episodes, row))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--family", default="mixed")
    parser.add_argument("--known", type=Path, nargs="+", required=True, help="recordings with the answers so far")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the known problems")
    parser.add_argument("--siblings", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--seconds", type=float, help="stop after so long, with what was played by then")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    for folder in chosen.known:
        family = json.loads((folder / "answers.json").read_text("utf-8"))["family"]
        if family != chosen.family:
            parser.error(f"{folder} has answers for {family}, not for {chosen.family}")
    known = read_answers(chosen.known)
    numbers = sorted(known)[chosen.first : chosen.first + chosen.problems]
    plays = jobs(policy_file(chosen.policy), chosen.family, numbers, chosen.siblings, chosen.noise)
    played = play_all(play, plays, chosen.workers, chosen.seconds)
    found = better_answers(played, known)
    command = shlex.join(["python", *sys.argv])
    append(chosen.out, played, growth_schema(), {"command": command, "task": chosen.family})
    write_answers(chosen.out, chosen.family, found)
    best = sum(known[number].earned for number in played.draw.tolist()) / len(played)
    print(
        f"{played.steps:,} env-steps; mean return {float(played.returns().mean()):.1f}, of the best plans {best:.1f}; "
        f"{sum(found[number].earned > known[number].earned + WORTH for number in found)} better answers"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
