"""What should have been done: labels for recorded states by somebody who knows how each problem is best grown.

    python benchmarks/recipe/teacher.py recordings/mixed recordings/varied recordings/round1 --out recordings/labelled
    esper clone recordings/labelled --out policy.safetensors

An answer is what the best play of a problem kept: one of the plans of `portfolio.py`, or of a policy in a round of
`own_plays.py`. A policy cannot know it in the first epochs, so the teacher begins as the best schedule does, unless
nothing is worth growing. Then seeds can be measured: it keeps what is right or helps, removes the rest once there has
been time to see that it does not, and plants what is missing. It reads states as they were recorded, so any play can be
labelled later: the wrong plans of a portfolio, and what a policy did on its own.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rounds import chosen_options
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.env.observation import NOT_MEASURED, OVERALL_FIELDS, SLOT_FIELDS
from esper.env.reward.config import RENT_RATE
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.lifecycle import Stage
from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.recording import append, read
from esper.policy.schedule import FixedSchedule, parse_schedule

WORTH = 1.0
"""Points of return by which a play must be better than another to count as better, and growing than not."""
NEARLY = 3.0
"""Points within which one result is as good as another for most purposes."""
FIRST_EPOCHS = (1, 2)
"""When the teacher plants at the earliest; which of them depends on the problem."""
TIME_FOR_ANOTHER = 7
"""Epochs that a new seed needs to be worth it."""
TRIAL = 3
"""Epochs after which a seed has been looked at, and the opening is over."""
HELPS = 0.5
"""Points beyond its rent that a seed must contribute to be kept although it is not the answer."""
PATIENCE = {Stage.TRAINING: 7, Stage.BLENDING: 4, Stage.HOLDING: 5}
"""Age at which a seed that does not help is given up. Measured on portfolios of `disguised` (docs/experiments.md): of
seeds without benefit that incubate at age 5, one in three helps in the end; of those that blend at age 4, one in ten,
and of those that hold, one in twelve."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How the best play of a problem ended."""

    seeds: list[tuple[str, int]]
    """(blueprint, slot)"""
    also: list[tuple[str, int]]
    """Seeds of other plays that were nearly as good."""
    earned: float
    accuracy: float
    """On validation data, in percent."""


Answers = Mapping[int, Answer]

_FIELD = {name: index for index, name in enumerate(SLOT_FIELDS)}
_EPOCHS_LEFT, _ACCURACY = (list(OVERALL_FIELDS).index(name) for name in ("epochs_left", "val_accuracy_0_ago"))
_BLUEPRINT = {name: index for index, name in enumerate(blueprint_names())}
_ACTING = [_FIELD[f"stage_{stage.name.lower()}"] for stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)]


def ending(episodes: Episodes, row: int) -> Answer:
    """Of one play."""
    last = int(episodes.lengths[row]) - 1
    seen = episodes.observation
    acting = (seen.slots[row, last][:, _ACTING].sum(-1) > 0).nonzero().flatten().tolist()
    seeds = [(blueprint_names()[int(seen.blueprints[row, last, slot]) - 1], slot) for slot in acting]
    earned = float(episodes.reward[row, : last + 1].sum())
    return Answer(seeds, [], earned, 100 * float(seen.overall[row, last, _ACCURACY]))


def better(one: Answer, other: Answer) -> Answer:
    """The better of two answers; it knows of the other if that is nearly as good."""
    best, rest = (other, one) if other.earned > one.earned + WORTH else (one, other)
    if rest.earned < best.earned - NEARLY:
        return best
    also = dict.fromkeys([*best.also, *rest.seeds, *rest.also])
    return replace(best, also=[seed for seed in also if seed not in best.seeds])


def write_answers(folder: Path, family: str, answers: Answers) -> None:
    written = {"family": family, "answers": {number: asdict(answer) for number, answer in answers.items()}}
    (folder / "answers.json").write_text(json.dumps(written), "utf-8")


def read_answers(folders: Sequence[Path]) -> Answers:
    """Of all the folders together; a problem that is in several has the best answer of them."""
    found: dict[int, Answer] = {}
    family_of: dict[int, str] = {}
    for folder in folders:
        content = json.loads((folder / "answers.json").read_text("utf-8"))
        for number, written in content["answers"].items():
            if family_of.setdefault(int(number), content["family"]) != content["family"]:
                raise ValueError(f"problem {number} of {content['family']} in {folder} is one of another family, too")
            pairs = {name: [(blueprint, slot) for blueprint, slot in written[name]] for name in ("seeds", "also")}
            answer = Answer(**{**written, **pairs})
            found[int(number)] = better(found[int(number)], answer) if int(number) in found else answer
    return found


def relabelled(episodes: Episodes, answers: Answers, opening: FixedSchedule) -> Episodes:
    """The same plays with the teacher's decisions as labels."""
    label = torch.zeros_like(episodes.label)
    for row, number in enumerate(episodes.draw.tolist()):
        answer = answers[number]
        wanted, fine = _numbered(answer.seeds), _numbered([*answer.seeds, *answer.also])
        first_epoch = FIRST_EPOCHS[number % len(FIRST_EPOCHS)]
        for step in range(int(episodes.lengths[row])):
            seen = Seen(episodes, row, step)
            decided = _tend(seen, fine)
            solved = seen.accuracy >= answer.accuracy - NEARLY and not seen.opening
            if (
                decided is None
                and wanted
                and not solved
                and step >= first_epoch
                and seen.epochs_left >= TIME_FOR_ANOTHER
            ):
                decided = _plant(seen, wanted, opening)
            label[row, step] = action(Op.WAIT) if decided is None else decided
    return replace(episodes, label=label)


Seed = tuple[int, int]
"""The number of a blueprint, and a slot."""


def _numbered(seeds: Sequence[tuple[str, int]]) -> set[Seed]:
    return {(_BLUEPRINT[name], slot) for name, slot in seeds}


class Seen:
    """One recorded state, as far as the teacher looks at it."""

    def __init__(self, episodes: Episodes, row: int, step: int) -> None:
        observation, masks = episodes.observation, episodes.masks
        self.slots = observation.slots[row, step]
        self.planted = (observation.blueprints[row, step] - 1).tolist()
        self.may = masks.slot[row, step]  # [ops, slots]
        self.growable = masks.blueprint[row, step]  # [slots, blueprints]
        self.epochs_left = round(50 * float(observation.overall[row, step, _EPOCHS_LEFT]))
        self.accuracy = 100 * float(observation.overall[row, step, _ACCURACY])
        self.seeds = [(planted, slot) for slot, planted in enumerate(self.planted) if planted >= 0]

    def field(self, name: str, slot: int) -> float:
        return float(self.slots[slot, _FIELD[name]])

    def gain(self, slot: int) -> float:
        """Points that the seed contributes, or promises while it does not act."""
        contribution, promise = (self.field(name, slot) for name in ("contribution_points", "shadow_points"))
        return points(promise if contribution == NOT_MEASURED else contribution)

    def age(self, slot: int) -> int:
        return round(20 * self.field("age", slot))

    def helps(self, slot: int) -> bool:
        size = math.expm1(self.field("parameters", slot) * math.log1p(20.0))  # over that of the host
        return self.gain(slot) > RENT_RATE * size + HELPS

    def stage(self, slot: int) -> Stage:
        return next(stage for stage in Stage if self.field(f"stage_{stage.name.lower()}", slot) > 0)

    def hopeless(self, slot: int) -> bool:
        stage = self.stage(slot)
        return stage in PATIENCE and self.age(slot) >= PATIENCE[stage] and not self.helps(slot)

    @property
    def opening(self) -> bool:
        """Nothing has been learnt from a seed yet."""
        before = any(self.field("seeds_before", slot) > 0 for slot in range(len(self.planted)))
        return not before and not any(self.age(slot) >= TRIAL for _, slot in self.seeds)


def _tend(seen: Seen, fine: set[Seed]) -> Tensor | None:
    """What the seeds that are there call for."""
    for planted, slot in seen.seeds:
        right = (planted, slot) in fine
        if (right or seen.helps(slot)) and seen.may[Op.FOSSILIZE, slot]:
            return action(Op.FOSSILIZE, slot)
        if not right and seen.hopeless(slot) and seen.may[Op.PRUNE, slot]:
            return action(Op.PRUNE, slot)
    return None


def _plant(seen: Seen, wanted: set[Seed], opening: FixedSchedule) -> Tensor | None:
    if seen.opening:
        for planting in opening.plantings:
            for slot in range(len(seen.planted)):
                layout = next((name for name in LAYOUTS if seen.field(f"layout_{name}", slot) > 0), None)
                blueprint = planting.blueprints.get(str(layout))
                here = planting.slot in (slot, "*")
                if here and blueprint is not None and seen.growable[slot, _BLUEPRINT[blueprint]]:
                    return action(Op.GERMINATE, slot, _BLUEPRINT[blueprint])
        if seen.seeds:
            return None
    for planted, slot in sorted(wanted - set(seen.seeds), key=lambda seed: seed[1]):
        if seen.growable[slot, planted]:
            return action(Op.GERMINATE, slot, planted)
    return None


def points(squashed: float) -> float:
    """Of accuracy, from how an observation shows them; 0 where nothing was measured."""
    if squashed == NOT_MEASURED:
        return 0.0
    return math.copysign(math.expm1(abs(squashed) * math.log1p(50.0)), squashed)


def action(op: Op, slot: int = 0, blueprint: int = 0) -> Tensor:
    named = {"slot": slot, "blueprint": blueprint, "blend": BLENDS.index("linear"), "op": int(op)}
    return torch.tensor([named[head] for head in HEAD_NAMES])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", type=Path, nargs="+", help="folders of portfolio.py and own_plays.py")
    parser.add_argument("--opening", type=Path, default=Path("docs/results/schedule.toml"))
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    answers = read_answers(chosen.recordings)
    episodes = join([read(folder, growth_schema()).episodes for folder in chosen.recordings])
    opening = parse_schedule(chosen.opening.read_text("utf-8"), str(chosen.opening))
    labelled = relabelled(episodes, answers, opening)
    append(chosen.out, labelled, growth_schema(), {"command": shlex.join(["python", *sys.argv])})
    changed = (labelled.label != labelled.taken).any(-1)[labelled.valid].float().mean()
    print(
        f"{len(labelled):,} episodes of {len(answers)} problems; the teacher would have done otherwise in {changed:.1%}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
