"""A policy from what teachers say, and from what it would cost not to heed them.

    python benchmarks/recipe/learn.py --taught r/4 --portfolios p/a p/b --plays p/round1 --seeds 0 1 2 --out policies

`--taught` are recordings with labels: those are imitated. On the problems of portfolios, `planner.py` says what to do,
and what every planting promises; there the policy learns to lose little: the second-best plan costs it next to nothing,
a ruinous one a lot. Imitation would count both as one mistake. A seventh of these problems is kept apart: what is
printed, and which epoch's weights are kept, goes by them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from planner import Promises, lessons
from rounds import chosen_options
from seen import Seen, action
from torch import Tensor

from esper.actions import Op
from esper.agent.buffer import minibatches
from esper.agent.policies import growth_network_config, save_policy
from esper.growth.blueprints import blueprint_names
from esper.offline.cloning import CloneConfig, balanced, class_weights, counted
from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.fitting import Pace, fit, losses_of, mean_where, new_network
from esper.offline.recording import read
from esper.offline.rows import DISCOUNT, Rows, Units, prepare, units_of
from esper.policy.distribution import OP, SLOT, FactoredPolicy
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput

TAUGHT_TIMES = 3
"""How often the taught recordings count: there are fewer of them, and what is not repeated is forgotten."""
EPOCHS = 8
WEIGHT = 0.3
"""Of a point of regret per episode, beside the cross-entropy."""
IMITATED = 0.1
"""Weight of the label where plantings are promised: regret teaches little about what has no probability yet."""
MOST = 20.0
"""Points beyond which one mistake is as bad as another."""
STRANGE = -3.0
"""What a seed is taken to promise that no plan has ever had."""
KEPT_APART = 7
"""One problem of so many."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """Rows to imitate, with what plantings promise there."""

    rows: Rows
    promises: Promises

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def decided(self) -> Tensor:
        """Where there is something to plant, [E, T]."""
        return ~self.promises.wait.isnan() & self.rows.valid

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[Lessons]:
        for chosen in minibatches(len(self), -(-len(self) // size), generator):
            rows = self.rows.select(chosen)
            yield Lessons(rows, self.promises.select(chosen, rows.valid.shape[1]))


def losses(promises: Promises) -> tuple[Tensor, Tensor]:
    """Points that each planting, [..., slots, blueprints], and waiting, [...], promise less than the best choice."""
    wait = promises.wait.nan_to_num(0.0)  # where there is nothing to decide any number will do, but it must be one
    best = torch.maximum(promises.plant.nan_to_num(-torch.inf).flatten(-2).amax(-1), wait)
    plant = best[..., None, None] - promises.plant.nan_to_num(STRANGE)
    return plant.clamp(max=MOST), (best - wait).clamp(max=MOST)


def expected_regret(policy: FactoredPolicy, promises: Promises) -> Tensor:
    """Points that the policy gives away by what it plants, or does not, [...]."""
    plant, wait = losses(promises)
    choosing = policy.op[..., Op.GERMINATE, None] + policy.slot[..., Op.GERMINATE, :]
    planting = (choosing[..., None] + policy.blueprint).exp() * policy.masks.blueprint
    otherwise = 1.0 - planting.flatten(-2).sum(-1)
    return (planting * plant).flatten(-2).sum(-1) + otherwise * wait


def greedy_regret(policy: FactoredPolicy, promises: Promises) -> Tensor:
    """The same if it does what it finds most probable, which is how it will be used."""
    plant, wait = losses(promises)
    slot, blueprint, _, op = policy.mode().unbind(-1)
    chosen = plant.flatten(-2).gather(-1, (slot * plant.shape[-1] + blueprint)[..., None])[..., 0]
    return torch.where(op == Op.GERMINATE, chosen, wait)


def learn(taught: Episodes, told: Episodes, promises: Promises, seed: int) -> tuple[Learner, float]:
    """A policy, and the points that it gives away in a decision on problems that were kept apart."""
    known, asked = kept_apart(told, promises)
    learner = Learner(join([*[taught] * TAUGHT_TIMES, told.select(known)]), seed)
    to_learn = learner.lessons(promises.select(known))
    judge = Lessons(prepare(told.select(asked), learner.units, DISCOUNT, action="label"), promises.select(asked))
    pace = Pace(EPOCHS, CloneConfig().episodes, CloneConfig().learning_rate, seed)

    def regret() -> Tensor:
        return mean_where(greedy_regret(learner.output(judge.rows).policy, judge.promises), judge.decided)

    fit("policy", learner.network, to_learn, learner.loss, regret, pace, say)
    with torch.no_grad():
        return learner, float(regret())


def kept_apart(told: Episodes, promises: Promises) -> tuple[Tensor, Tensor]:
    """The rows to learn from, and those of the problems to judge by."""
    apart = told.draw % KEPT_APART == 0
    if apart.all() or not (~promises.wait[apart].isnan()).any():
        raise SystemExit("too few problems to learn from some and judge by others: play more with portfolio.py")
    return (~apart).nonzero().flatten(), apart.nonzero().flatten()


class Learner:
    """A network, and what it learns from."""

    def __init__(self, episodes: Episodes, seed: int) -> None:
        self.episodes = episodes
        self.network = new_network(growth_network_config(), seed)
        self.units = units_of(episodes, self.network, DISCOUNT)

    def lessons(self, promises: Promises) -> Lessons:
        """`promises` are of the last episodes; about the others nothing is promised."""
        rows = prepare(self.episodes, self.units, DISCOUNT, action="label")
        counts = counted(rows, self.network.uses)
        rows = balanced(rows, [class_weights(count, CloneConfig().balance) for count in counts])
        found = Lessons(rows, promises.after(self.episodes))
        weight = torch.where(found.decided, IMITATED, 1.0)[..., None]
        return replace(found, rows=replace(rows, weight=rows.weight * weight))

    def output(self, rows: Rows) -> NetworkOutput:
        found: NetworkOutput = self.network(rows.observation, rows.masks, self.network.initial_state(len(rows)))
        return found

    def loss(self, lessons: Lessons) -> Tensor:
        out = self.output(lessons.rows)
        regret = expected_regret(out.policy, lessons.promises)
        lost = torch.where(lessons.decided, regret, torch.zeros_like(regret)).sum() / len(lessons)
        return sum(losses_of(out, lessons.rows)) + WEIGHT * lost


def say(what: str, done: int, of: int, regret: float) -> None:
    print(f"epoch {done} of {of}: {regret:.2f} points given away in a decision on problems kept apart", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--taught", type=Path, required=True, help="recordings with a teacher's labels")
    parser.add_argument("--portfolios", type=Path, nargs="+", required=True, help="folders of portfolio.py")
    parser.add_argument("--plays", type=Path, nargs="*", default=[], help="of the same problems, by own_plays.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a policy for each")
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    told, promises = lessons(read_all([*chosen.portfolios, *chosen.plays]))
    taught = without_removals(read(chosen.taught, growth_schema()).episodes)
    for seed in chosen.seeds:
        learner, regret = learn(taught, told, promises, seed)
        said = f"{regret:.2f} points given away in a decision"
        print(f"{keep_policy(chosen.out, seed, learner.network, learner.units, said)}: {said}", flush=True)
    return 0


def keep_policy(folder: Path, seed: int, network: FactoredRecurrentActorCritic, units: Units, said: str) -> Path:
    """Write the policy of a seed, with what made it and what was said of it."""
    facts = {"command": shlex.join(["python", *sys.argv]), "seed": seed, "judged": said}
    path = folder / f"{seed}.safetensors"
    save_policy(path, network, units.observations, units.values, {**facts, "blueprints": list(blueprint_names())})
    return path


def without_removals(taught: Episodes) -> Episodes:
    """A teacher that knows which seed was missing removes every other, even one that helps. Who cannot know keeps those
    that earn their rent and leaves the others undecided: they may still learn."""
    label = taught.label.clone()
    for row, step in (taught.valid & (label[..., OP] == Op.PRUNE)).nonzero().tolist():
        seen, slot = Seen(taught, row, step), int(label[row, step, SLOT])
        permanent = seen.helps(slot) and seen.may[Op.FOSSILIZE, slot]
        label[row, step] = action(Op.FOSSILIZE, slot) if permanent else action(Op.WAIT)
    return replace(taught, label=label)


def read_all(folders: Sequence[Path]) -> Episodes:
    """All together. A number is one problem: no two families may share it, nor two versions of a family."""
    recordings = [read(folder, growth_schema()) for folder in folders]
    family_of: dict[int, str | None] = {}
    for folder, recording in zip(folders, recordings, strict=True):
        for number in recording.episodes.draw.tolist():
            if family_of.setdefault(number, recording.task) != recording.task:
                raise SystemExit(f"problem {number} of {recording.task} in {folder} is one of {family_of[number]}, too")
    found = join([recording.episodes for recording in recordings])
    first_of: dict[int, int] = {}
    for row, number in enumerate(found.draw.tolist()):
        costs = found.observation.costs[[first_of.setdefault(number, row), row], 0]
        if not torch.allclose(costs[0], costs[1]):  # of every seed in every slot: another host has others
            raise SystemExit(f"problem {number} was recorded with two hosts: its family has changed in between")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
