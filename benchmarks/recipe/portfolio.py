"""Many plans on every training problem: what do they gain, and what does a problem look like on which they do?

    python benchmarks/recipe/portfolio.py --family mixed --problems 240 --workers 2 --out recordings/mixed

Each problem is played without growth, with the seeds that it was made to need (where its family says so), and by some
fixed schedules of `PLANS`, drawn at random. All plays are kept: they show a policy right and wrong seeds, and
`planner.py` says what should have been done about them. Printed is what each schedule gained. Test data play no part.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from playing import play_all
from rounds import chosen_options, training_draws

from esper.growth.blueprints import blueprint_names
from esper.offline.episodes import Episodes, growth_schema
from esper.offline.recorder import Play, play
from esper.offline.recording import append
from esper.policy.controller import Controller, NoGrowth
from esper.policy.schedule import FixedSchedule, Planting
from esper.tasks.family import get_family

_CONVOLUTIONAL = (
    "bottleneck@0+depthwise@1",
    "bottleneck@0+bottleneck@1",
    "bottleneck@*",
    "depthwise@*",
    "bottleneck@0+depthwise@*",
    "depthwise@0",
    "depthwise@1",
    "bottleneck@1",
    "conv@0",
    "conv@1",
    "conv@*",
    "depthwise@0+attention@1",
    "attention@0",
    "attention@1",
    "attention@*",
    "norm@*",
    "pointwise@0",
)
PLANS: dict[str, tuple[str, ...]] = {
    "conv1d": _CONVOLUTIONAL,
    "conv2d": _CONVOLUTIONAL,
    "dense": (
        "mlp_small@*",
        "mlp_small@0",
        "mlp_small@1",
        "mlp@*",
        "norm@*",
        "norm@0",
        "norm@1",
        "norm@0+mlp_small@1",
        "mlp_small@0+norm@*",
        "mlp_small@1+norm@*",
    ),
    "sequence": (
        "attention@*",
        "attention@0",
        "attention@1",
        "mlp_small@0",
        "mlp_small@1",
        "mlp_small@*",
        "mlp@*",
        "norm@*",
        "attention@0+mlp_small@1",
        "mlp_small@0+attention@1",
    ),
}
FIRST_EPOCH = 1
"""When plans begin."""
NONE, MEANT = "none", "meant"


def plan(text: str) -> Controller:
    """`none`, or seeds in the order in which they are planted: `norm@0+mlp_small@*`."""
    if text == NONE:
        return NoGrowth()
    plantings = []
    for part in text.split("+"):
        blueprint, _, slot = part.partition("@")
        if blueprint not in blueprint_names() or not (slot.isdigit() or slot == "*"):
            raise ValueError(f"{part!r} in the plan {text!r} is no seed at a slot, such as norm@0 or norm@*")
        plantings.append(Planting(FIRST_EPOCH, int(slot) if slot.isdigit() else slot, dict.fromkeys(PLANS, blueprint)))
    return FixedSchedule(text, plantings)


def jobs(family: str, numbers: Sequence[int], others: int) -> list[Play]:
    found = []
    for number in numbers:
        draw = get_family(family).draw(number)
        found.append(Play(family, NONE, plan(NONE), (number,)))
        if draw.facts.get("answer", NONE) != NONE:
            found.append(Play(family, MEANT, plan(str(draw.facts["answer"])), (number,)))
        if "layout" not in draw.facts:
            raise SystemExit(f"{family} does not say which layout its hosts have, so no plan fits: try varied")
        layout = str(draw.facts["layout"])
        plans = PLANS[layout]
        for text in random.Random(number).sample(plans, min(others, len(plans))):
            found.append(Play(family, f"{layout} {text}", plan(text), (number,)))
    return found


def complete(episodes: Episodes, plays: Sequence[Play]) -> Episodes:
    """The problems of which nothing is missing: the last ones may not have been played by all when time was up."""
    asked = Counter(number for one in plays for number in one.numbers)
    played = Counter(episodes.draw.tolist())
    whole = torch.tensor([number for number in played if played[number] == asked[number]])
    return episodes.select(torch.isin(episodes.draw, whole).nonzero().flatten())


def table(episodes: Episodes) -> dict[str, tuple[float, int]]:
    """Per schedule, the mean gain over no growth and on how many problems."""
    returns = episodes.returns()
    none = {
        int(episodes.draw[row]): float(returns[row])
        for row in range(len(episodes))
        if episodes.controllers[int(episodes.controller[row])] == NONE
    }
    gains = defaultdict(list)
    for row in range(len(episodes)):
        name = episodes.controllers[int(episodes.controller[row])]
        gains[name].append(float(returns[row]) - none[int(episodes.draw[row])])
    return {name: (sum(found) / len(found), len(found)) for name, found in sorted(gains.items())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="mixed")
    parser.add_argument("--problems", type=int, default=240)
    parser.add_argument(
        "--first", type=int, default=0, help="leave out so many problems: no two families may share numbers"
    )
    parser.add_argument("--others", type=int, default=5, help="schedules per problem, beside none and what was meant")
    parser.add_argument("--seconds", type=float, help="stop after so long, with what was played by then")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    numbers = training_draws(parser, chosen)
    plays = jobs(chosen.family, numbers, chosen.others)
    played = complete(play_all(play, plays, chosen.workers, chosen.seconds), plays)
    if not len(played):
        parser.error("no problem was played by all plans in time: allow more --seconds")
    command = shlex.join(["python", *sys.argv])
    append(chosen.out, played, growth_schema(), {"command": command, "task": chosen.family})
    print(f"{played.steps:,} env-steps, {len(torch.unique(played.draw))} problems")
    for name, (gain, count) in sorted(table(played).items(), key=lambda entry: -entry[1][0]):
        print(f"  {name}: {gain:+.1f} points over none on {count}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
