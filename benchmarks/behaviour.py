"""What the learned controller does: what it grows where, when, what it gives up on; with episodes step by step.

    python benchmarks/behaviour.py                          # the shipped controller; about 5 minutes of a core
    python benchmarks/behaviour.py runs/mine --draws 20     # a checkpoint or a run of your own

Plays held-out draws of `mixed` and writes docs/behaviour.md with pictures in docs/images.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro

from behaviour_plots import draw_choices, draw_timing
from esper.actions import Action, Op
from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.cli.terminal import ProgressDisplay, wide_console
from esper.engine.eager import EpochRecord
from esper.env.growth_env import GrowthEnv
from esper.env.situation import Situation, SlotView
from esper.lifecycle import IN_FORWARD, Contrast, Stage
from esper.tasks.draws import comparison_draws
from esper.tasks.family import Draw, get_family
from esper.training.catalogue import make_controller
from esper.training.engines import parts_of
from esper.training.own.history import History
from esper.training.plots import plot_history
from esper.training.pools import run_each
from esper.training.workers import Processes
from page_text import page_of, plain, share, signed, table

ROOT = Path(__file__).resolve().parents[1]
BATCH = 4
VERBS = {Op.GERMINATE: "plants", Op.PRUNE: "prunes", Op.FOSSILIZE: "makes permanent"}


# -- playing -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SeedLife:
    """One seed of an episode."""

    slot: int
    blueprint: str
    born: int
    epochs: Counter[Stage] = field(default_factory=Counter)
    """Spent in each stage, up to the decision about the seed."""
    shadow: Contrast | None = None
    """The last shadow benefit that was measured."""
    contribution: Contrast | None = None
    """The last contribution that was measured."""
    fate: Op | None = None
    """FOSSILIZE or PRUNE; None if the episode ended before either."""
    ended_in: Stage | None = None
    """The stage in which it was decided on, or in which the episode left it."""

    @property
    def place(self) -> str:
        return f"{self.blueprint}@{self.slot}"


@dataclass(slots=True)
class Episode:
    """One training under one controller."""

    draw: Draw
    history: History
    test_accuracy: float = 0.0
    size: float = 1.0
    seeds: list[SeedLife] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    """In sentences, with the measurements that bear on them."""

    @property
    def kind(self) -> str:
        return str(self.draw.facts["kind"])

    @property
    def kept(self) -> list[str]:
        """Seeds that act in the final network, made permanent or never decided on."""
        acting = [
            seed for seed in self.seeds if seed.fate is Op.FOSSILIZE or (not seed.fate and seed.ended_in in IN_FORWARD)
        ]
        return sorted(seed.place for seed in acting)

    @property
    def meant(self) -> list[str]:
        answer = str(self.draw.facts["answer"])
        return [] if answer == "none" else sorted(answer.split("+"))


def play(controller_name: str, family: str, numbers: Sequence[int]) -> dict[int, Episode]:
    """Held-out draws to their ends, by draw id. A result depends on its draw and its controller alone."""
    torch.set_num_threads(1)
    env = GrowthEnv(get_family(family), len(numbers), held_out=True)
    controller = make_controller(controller_name)
    env.reset(numbers)
    controller.reset(numbers)
    episodes = []
    for draw, learner in zip(env.draws, env.learners, strict=True):
        slots = tuple(slot.path for slot in learner.model.slots)
        episodes.append(Episode(draw, History(controller_name, slots, learner.model.host_parameters, ())))
    while not env.over:
        before = list(env.situations)
        actions = controller.decide(before)
        for i, info in enumerate(env.step(actions).infos):
            if info is not None:
                note(episodes[i], before[i], actions[i], info.record)
    for episode, test, learner in zip(episodes, env.evaluate_test(), env.learners, strict=True):
        episode.test_accuracy = test.accuracy
        episode.size = learner.model.acting_parameters / learner.model.host_parameters
        for seed in _undecided(episode):
            seed.ended_in = learner.model.slots[seed.slot].life.stage
    return dict(zip(numbers, episodes, strict=True))


def note(episode: Episode, situation: Situation, action: Action, record: EpochRecord) -> None:
    """One epoch: the decision before it, and what it made of the seeds."""
    if action.op is not Op.WAIT and record.effect.changed:
        assert action.slot is not None
        slot = situation.slots[action.slot]
        if action.op is Op.GERMINATE:
            seed = SeedLife(slot.index, str(action.blueprint), record.epoch)
            episode.seeds.append(seed)
        else:
            seed = next(seed for seed in _undecided(episode) if seed.slot == slot.index)
            seed.fate, seed.ended_in = action.op, slot.stage
        seen = _seen(situation, slot).replace(" -", " −")
        episode.decisions.append(f"After epoch {record.epoch}: {VERBS[action.op]} {seed.place}; {seen}.")
    for seed in _undecided(episode):
        seed.epochs[record.stages[seed.slot]] += 1
        seed.shadow = record.measured.shadow_benefits.get(seed.slot, seed.shadow)
        seed.contribution = record.measured.contributions.get(seed.slot, seed.contribution)
    episode.history = replace(episode.history, records=(*episode.history.records, record))


def _undecided(episode: Episode) -> list[SeedLife]:
    return [seed for seed in episode.seeds if seed.fate is None]


def _seen(situation: Situation, slot: SlotView) -> str:
    """The measurements that bear on the decision about a slot."""
    curve = [record.measured.accuracy for record in situation.history]
    if slot.stage is Stage.DORMANT:
        if not curve:
            return f"nothing is measured yet, {situation.remaining} epochs remain"
        rise = f", {curve[-1] - curve[-3]:+.1f} points over the last two epochs" if len(curve) > 2 else ""
        return f"validation accuracy {curve[-1]:.1f} %{rise}; {situation.remaining} epochs remain"
    if slot.stage is Stage.TRAINING:
        return f"after {slot.dwell} epochs of incubation its shadow promises {_points(slot.shadow_benefit)}"
    return f"it contributes {_points(slot.contribution)} after {slot.dwell} epochs of {slot.stage.name.lower()}"


def _points(contrast: Contrast | None) -> str:
    return "nothing measured" if contrast is None else f"{contrast.accuracy:+.1f} ± {contrast.error:.1f} points"


def played(controller: str, numbers: Sequence[int], workers: int) -> dict[int, Episode]:
    found: dict[int, Episode] = {}
    with ProgressDisplay(wide_console(stderr=True)) as watch:
        for _, episodes in run_each(partial(play, controller, "mixed"), parts_of(numbers, BATCH), Processes(workers)):
            found |= episodes
            watch.note(len(found), len(numbers), controller)
    return dict(sorted(found.items()))


# -- the page ----------------------------------------------------------------------------------------------------------


def page(learned: dict[int, Episode], none: dict[int, Episode], command: str, docs: Path) -> str:
    episodes, images = list(learned.values()), docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    draw_choices(images / "behaviour_choices.png", episodes)
    draw_timing(images / "behaviour_timing.png", episodes)
    for old in images.glob("behaviour_example_*.png"):  # there may be fewer examples this time
        old.unlink()
    shown = []
    for i, (title, number) in enumerate(examples(learned, none).items(), 1):
        episode, curve = learned[number], [record.measured.accuracy for record in none[number].history.records]
        picture = f"{episode.kind}, draw {number} (meant: {episode.draw.facts['answer']})"
        plot_history(images / f"behaviour_example_{i}.png", replace(episode.history, control=tuple(curve)), picture)
        shown += ["", f"### {title}", "", f"![{title}](images/behaviour_example_{i}.png)", ""]
        shown += story(number, episode, none[number])
    readers = "For everyone who wants to see decisions of the shipped controller before relying on it."
    title = ["# What the learned controller does", "", readers, "", f"Written by `{command}`; do not edit.", ""]
    what = ["## What it grows, and where", "", "![Kept seeds by kind](images/behaviour_choices.png)", ""]
    when = ["## When, and how long", "", "![Timing](images/behaviour_timing.png)", ""]
    return page_of(
        [
            [*title, *summary(learned, none)],
            [*what, *choices(episodes)],
            [*when, *timing(episodes)],
            ["## Episodes, step by step", *shown],
        ]
    )


def summary(learned: dict[int, Episode], none: dict[int, Episode]) -> list[str]:
    episodes, count = list(learned.values()), len(learned)
    planted, kept = sum(len(e.seeds) for e in episodes), sum(len(e.kept) for e in episodes)
    gain = _mean([episode.test_accuracy - none[number].test_accuracy for number, episode in learned.items()])
    ungrown, size = _mean([not e.kept for e in episodes]), _mean([e.size for e in episodes])
    stopped = sum(e.history.records[-1].verdict is not None for e in episodes)
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
    seeds = [seed for episode in episodes for seed in episode.seeds]
    kept, pruned, undecided = ([seed for seed in seeds if seed.fate is op] for op in (Op.FOSSILIZE, Op.PRUNE, None))
    early = [seed for seed in pruned if seed.ended_in is Stage.TRAINING]
    late = [seed for seed in pruned if seed.ended_in is not Stage.TRAINING]
    first = _average([episode.seeds[0].born for episode in episodes if episode.seeds])
    lengths = [_average([s.epochs[at] for s in kept]) for at in (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)]
    while_young = "No seed is pruned while it incubates"
    if early:
        age, promised = _average([s.epochs[Stage.TRAINING] for s in early]), _points_of([s.shadow for s in early])
        while_young = f"{len(early)} seeds are pruned while they incubate, after {age} epochs, when their shadow "
        while_young += f"promises {promised} points (mean)"
    given_up = _points_of([seed.contribution for seed in late])
    later = f"{len(late)} later, when they contribute {given_up} points" if late else "none later"
    found = [
        f"- {len(seeds)} seeds: {len(kept)} made permanent, {len(pruned)} pruned, {len(undecided)} never decided on. "
        f"The first one of an episode is planted after epoch {first} on average.",
        f"- A seed that is made permanent incubates {lengths[0]} epochs, blends {lengths[1]} and holds {lengths[2]}; "
        f"it then contributes {_points_of([s.contribution for s in kept])} points of validation accuracy (mean).",
        f"- {while_young}; {later}.",
    ]
    counts = [Counter(seed.blueprint for seed in group) for group in (seeds, kept, pruned, undecided)]
    body = [[name, *(str(count[name]) for count in counts)] for name, _ in counts[0].most_common()]
    return [*found, "", *table(["blueprint", "planted", "made permanent", "pruned", "undecided"], body)]


def _points_of(contrasts: Sequence[Contrast | None]) -> str:
    return _average([contrast.accuracy for contrast in contrasts if contrast is not None])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _average(values: Sequence[float]) -> str:
    return plain(_mean(values)) if len(values) else "–"


# -- examples ----------------------------------------------------------------------------------------------------------


def examples(learned: dict[int, Episode], none: dict[int, Episode]) -> dict[str, int]:
    """By title: the greatest gain, one that gave up on a seed and kept another, and the least gain. Chosen by rule."""
    gain = {n: episode.test_accuracy - none[n].test_accuracy for n, episode in learned.items()}
    found = {"The greatest gain": max(gain, key=gain.__getitem__)}
    both = [n for n, e in learned.items() if e.kept and any(seed.fate is Op.PRUNE for seed in e.seeds)]
    rest = [n for n in both if n not in found.values()]
    if rest:
        found["A seed given up, another kept"] = max(rest, key=gain.__getitem__)
    worst = min((n for n in gain if n not in found.values()), key=gain.__getitem__, default=None)
    if worst is not None:
        found["The least gain"] = worst
    return found


def story(number: int, episode: Episode, none: Episode) -> list[str]:
    """The episode in sentences: epoch, decision, what was measured."""
    draw, host, verdict = episode.draw, episode.history.host_parameters, episode.history.records[-1].verdict
    budget = "no budget" if draw.budget is None else f"a budget of {draw.budget - host} for seeds"
    limit = "any number of" if draw.max_seeds is None else f"at most {draw.max_seeds}"
    lines = [
        f"Draw {number}, *{episode.kind}*: a host of {host} parameters, {budget}, {limit} seeds at a time, "
        f"{draw.horizon} epochs. Meant: {draw.facts['answer']}.",
        "",
        *(f"- {decision}" for decision in episode.decisions or ["It waits throughout."]),
    ]
    if verdict is not None:
        lines.append(f"- The governor ends the episode: {verdict.message}.")
    kept = f"{' and '.join(episode.kept) or 'nothing'} {'are' if len(episode.kept) > 1 else 'is'} kept"
    lines.append(
        f"- In the end {kept}, ×{episode.size:.2f} the parameters: {plain(episode.test_accuracy)} % on "
        f"the test set, against {plain(none.test_accuracy)} % without growth."
    )
    return lines


def main(
    controller: tyro.conf.Positional[str] = DEFAULT_CONTROLLER,
    draws: int = 60,
    workers: int = 1,
    docs: Path = ROOT / "docs",
) -> None:
    """`controller` is a name, a checkpoint or a run; behaviour.md and images/ go to `docs`."""
    make_controller(controller)
    numbers = comparison_draws(draws)
    learned, none = (played(name, numbers, workers) for name in (controller, "none"))
    command = shlex.join(["python", "benchmarks/behaviour.py", *sys.argv[1:]])
    (docs / "behaviour.md").write_text(page(learned, none, command, docs), "utf-8")
    print(f"Written: {docs / 'behaviour.md'}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
