"""What the learned controller does: what it grows where, when, what it gives up on; with episodes told step by step.

    python benchmarks/behaviour.py                          # the shipped controller; about 5 minutes of a core
    python benchmarks/behaviour.py runs/mine --draws 20     # a checkpoint or a run of your own

Plays held-out draws of `mixed` and writes docs/behaviour.md with pictures in docs/images.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.lifecycle import Stage
from esper.tasks.draws import comparison_draws
from esper.training.catalogue import make_controller
from esper.training.workers import in_processes
from results.behaviour_pictures import draw_choices, draw_episode, draw_timing
from results.kept import ROOT
from results.lives import KEPT, PRUNED, Episode, Life, Play, play
from results.wording import plain, share, signed, table

BATCH = 4
VERBS = {"germinate": "plants", "prune": "prunes", "fossilize": "makes permanent"}


def played(controller: str, numbers: Sequence[int], workers: int) -> dict[int, Episode]:
    jobs = [Play(controller, tuple(numbers[i : i + BATCH])) for i in range(0, len(numbers), BATCH)]
    finished = in_processes(play, jobs, workers) if workers > 1 else ((job, play(job)) for job in jobs)
    started, found = time.perf_counter(), dict[int, Episode]()
    for _, episodes in finished:
        found |= {episode.number: episode for episode in episodes}
        told = f"{time.perf_counter() - started:6.0f} s  {controller}: {len(found)} of {len(numbers)} episodes"
        print(told, file=sys.stderr, flush=True)
    return dict(sorted(found.items()))


# -- the page ----------------------------------------------------------------------------------------------------------


def page(learned: dict[int, Episode], none: dict[int, Episode], command: str, docs: Path) -> str:
    episodes = list(learned.values())
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    draw_choices(images / "behaviour_choices.png", episodes)
    draw_timing(images / "behaviour_timing.png", episodes)
    told = []
    for old in images.glob("behaviour_example_*.png"):  # there may be fewer examples this time
        old.unlink()
    for i, (title, number) in enumerate(examples(learned, none).items(), 1):
        draw_episode(images / f"behaviour_example_{i}.png", learned[number], none[number])
        told += ["", f"### {title}", "", f"![{title}](images/behaviour_example_{i}.png)", ""]
        told += story(learned[number], none[number])
    sections = [
        [
            "# What the learned controller does",
            "",
            f"Written by `{command}`; do not edit.",
            "",
            *summary(episodes, none),
        ],
        [
            "## What it grows, and where",
            "",
            "![Kept seeds by kind](images/behaviour_choices.png)",
            "",
            *choices(episodes),
        ],
        ["## When, and how long", "", "![Timing](images/behaviour_timing.png)", "", *timing(episodes)],
        ["## Episodes, step by step", *told],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def summary(episodes: Sequence[Episode], none: dict[int, Episode]) -> list[str]:
    count = len(episodes)
    planted, kept = sum(len(e.lives) for e in episodes), sum(len(e.kept) for e in episodes)
    gain = _mean([episode.test_accuracy - none[episode.number].test_accuracy for episode in episodes])
    ungrown, size = _mean([not e.kept for e in episodes]), _mean([e.size for e in episodes])
    stopped = sum(e.stopped is not None for e in episodes)
    return [
        f"{count} held-out draws of `mixed`. It plants {plain(planted / count)} seeds an episode and ends with "
        f"{plain(kept / count)}; {share(ungrown)} of the networks end ungrown. Test accuracy is {signed(gain)} points "
        f"against the ungrown host, at ×{size:.2f} its parameters. The governor ended {stopped} episodes."
    ]


def choices(episodes: Sequence[Episode]) -> list[str]:
    """How often it grew what was meant; a different answer can be as good, so this is no score."""
    wanting, idle = [e for e in episodes if e.meant], [e for e in episodes if not e.meant]
    rows = [[name, _share(right, wanting), _share(right, idle)] for name, right in _MEASURES.items()]
    head = ["", f"something was meant ({len(wanting)} draws)", f"nothing was meant ({len(idle)})"]
    return [
        "A number is the share of that kind's draws whose final network has that seed. What was meant when a kind of "
        "problem was made is not always what scores best ([need and place](need_and_place.md)).",
        "",
        *table(head, rows),
    ]


def _share(right: Callable[[Episode], bool | None], episodes: Sequence[Episode]) -> str:
    answers = [answer for episode in episodes if (answer := right(episode)) is not None]
    return share(_mean(answers)) if answers else "–"


def _parts(places: Sequence[str], part: int) -> set[str]:
    """The blueprints (0) or the slots (2) of some seeds."""
    return {place.partition("@")[part] for place in places}


_MEASURES: dict[str, Callable[[Episode], bool | None]] = {
    "kept exactly what was meant": lambda e: e.kept == e.meant,
    "kept what was meant, and perhaps more": lambda e: set(e.meant) <= set(e.kept) if e.meant else None,
    "kept the meant blueprint somewhere": lambda e: _parts(e.meant, 0) <= _parts(e.kept, 0) if e.meant else None,
    "kept something at the meant slot": lambda e: _parts(e.meant, 2) <= _parts(e.kept, 2) if e.meant else None,
    "kept nothing": lambda e: not e.kept,
}
"""None where the question makes no sense: nothing was meant."""


def timing(episodes: Sequence[Episode]) -> list[str]:
    lives = [life for episode in episodes for life in episode.lives]
    kept, pruned = ([life for life in lives if life.fate == fate] for fate in (KEPT, PRUNED))
    undecided = [life for life in lives if life.fate not in (KEPT, PRUNED)]
    early = [life for life in pruned if life.ended_in is Stage.TRAINING]
    first = _average([episode.lives[0].born for episode in episodes if episode.lives])
    lengths = [_average([getattr(life, part) for life in kept]) for part in ("incubated", "blended", "held")]
    late = [life for life in pruned if life not in early]
    promised = _average([life.shadow for life in early if life.shadow is not None])
    age = _average([life.incubated for life in early])
    while_young = (
        f"{len(early)} seeds are pruned while they incubate, after {age} epochs, when their shadow promises {promised} "
        "points (mean)"
        if early
        else "No seed is pruned while it incubates"
    )
    later = f"{len(late)} later, when they contribute {_average(_contributions(late))} points" if late else "none later"
    found = [
        f"- {len(lives)} seeds: {len(kept)} made permanent, {len(pruned)} pruned, {len(undecided)} never decided on. "
        f"The first one of an episode is planted after epoch {first} on average.",
        f"- A seed that is made permanent incubates {lengths[0]} epochs, blends {lengths[1]} and holds {lengths[2]}; "
        f"it then contributes {_average(_contributions(kept))} points of validation accuracy (mean).",
        f"- {while_young}; {later}.",
    ]
    names = dict.fromkeys(life.blueprint for life in lives)
    body = [
        [name, *(str(sum(life.blueprint == name for life in group)) for group in (lives, kept, pruned, undecided))]
        for name in sorted(names, key=lambda name: -sum(life.blueprint == name for life in lives))
    ]
    return [*found, "", *table(["blueprint", "planted", "made permanent", "pruned", "undecided"], body)]


def _contributions(lives: Sequence[Life]) -> list[float]:
    return [life.contribution for life in lives if life.contribution is not None]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _average(values: Sequence[float]) -> str:
    return plain(_mean(values)) if len(values) else "–"


# -- examples ----------------------------------------------------------------------------------------------------------


def examples(learned: dict[int, Episode], none: dict[int, Episode]) -> dict[str, int]:
    """By title: the greatest gain, one that gave up on a seed and kept another, and the least gain. Chosen by rule."""
    gain = {n: episode.test_accuracy - none[n].test_accuracy for n, episode in learned.items()}
    found = {"The greatest gain": max(gain, key=gain.__getitem__)}
    both = [n for n, e in learned.items() if e.kept and any(life.fate == PRUNED for life in e.lives)]
    rest = [n for n in both if n not in found.values()]
    if rest:
        found["A seed given up, another kept"] = max(rest, key=gain.__getitem__)
    worst = min((n for n in gain if n not in found.values()), key=gain.__getitem__, default=None)
    if worst is not None:
        found["The least gain"] = worst
    return found


def story(episode: Episode, none: Episode) -> list[str]:
    """The episode in sentences: epoch, decision, what was measured."""
    budget = (
        "no budget" if episode.budget is None else f"a budget of {episode.budget - episode.host_parameters} for seeds"
    )
    limit = "any number of" if episode.most_seeds is None else f"at most {episode.most_seeds}"
    lines = [
        f"Draw {episode.number}, *{episode.kind}*: a host of {episode.host_parameters} parameters, {budget}, "
        f"{limit} seeds "
        f"at a time, {episode.horizon} epochs. Meant: {episode.answer}.",
        "",
    ]
    for decision in episode.decisions:
        lines.append(
            f"- After epoch {decision.epoch}: {VERBS[decision.op]} {decision.what}; {_typeset(decision.seen)}."
        )
    if not episode.decisions:
        lines.append("- It waits throughout.")
    if episode.stopped:
        lines.append(f"- The governor ends the episode: {episode.stopped}.")
    kept = f"{' and '.join(episode.kept) or 'nothing'} {'are' if len(episode.kept) > 1 else 'is'} kept"
    lines.append(
        f"- In the end {kept}, ×{episode.size:.2f} the parameters: {plain(episode.test_accuracy)} % on "
        "the test set, "
        f"against {plain(none.test_accuracy)} % without growth."
    )
    return lines


def _typeset(text: str) -> str:
    return text.replace(" -", " −")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("controller", nargs="?", default=DEFAULT_CONTROLLER, help="a name, a checkpoint, a run")
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where behaviour.md and images/ go")
    options = parser.parse_args()
    make_controller(options.controller)
    numbers = comparison_draws(options.draws)
    learned, none = (played(name, numbers, options.workers) for name in (options.controller, "none"))
    command = shlex.join(["python", "benchmarks/behaviour.py", *sys.argv[1:]])
    (options.docs / "behaviour.md").write_text(page(learned, none, command, options.docs), "utf-8")
    print(f"Written: {options.docs / 'behaviour.md'}")


if __name__ == "__main__":
    main()
