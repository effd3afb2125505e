"""Teach a policy more, and let it keep what it knows.

    esper record --task mixed --controllers small-conv --noise 0.1 --out k/mixed
    python benchmarks/recipe/extend.py --policy small-conv --portfolios p/a p/b --kept k/mixed --out policies

Where portfolios say what plantings promise, the policy learns to lose little (`learn.py`). Everywhere else, in the
other states of these plays and in all of `kept`, it is held to what it would have done before: by the divergence of
whole decisions, not by a label, so a doubt stays a doubt. Thus a policy can be taught without the recordings from which
it once learnt. A seventh of the portfolios' problems is kept apart: what is printed, and which epoch's weights are
kept, goes by them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from learn import WEIGHT, Lessons, expected_regret, greedy_regret, keep_policy, kept_apart, read_all, say
from planner import Promises, lessons
from rounds import chosen_options
from torch import Tensor

from esper.agent.normalisers import ValueNormaliser
from esper.agent.policies import LearnedController, read_policy, tensors_under
from esper.offline.cloning import CloneConfig
from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.fitting import Pace, fit, losses_of, mean_where
from esper.offline.recording import read
from esper.offline.rows import DISCOUNT, Units, prepare
from esper.policy.network import NetworkOutput
from esper.training.catalogue import policy_file

EPOCHS = 4
LEARNING_RATE = 5e-4
"""A quarter of what a new policy learns at: it is to change where it must, not to begin again."""
LABEL = 0.1
"""Of a nat of surprise at what the teacher plants, beside points of regret."""
FAITH = 1.0
"""Of a nat by which an episode's decisions differ from what they were, beside points of regret."""
KEPT_TIMES = 5
"""How often the kept recordings count. With once, a policy learnt no more, and drifted three times as far."""


class Extended:
    """A policy, what it was before, and the units in which it reads and values, which stay as they are."""

    def __init__(self, path: Path) -> None:
        before = LearnedController.load(path)
        checkpoint = read_policy(path, values=True)
        if before.normaliser is None:
            raise ValueError(f"{path} does not normalise observations: it is no policy that learn.py made")
        values = ValueNormaliser()
        values.moments.load(tensors_under("values/", checkpoint.tensors))
        self.before = before.network.requires_grad_(False)
        self.network = deepcopy(before.network).train().requires_grad_(True)
        self.units = Units(before.normaliser, values)

    def lessons(self, episodes: Episodes, promises: Promises) -> Lessons:
        """`promises` are of the last episodes; about the others nothing is promised."""
        return Lessons(prepare(episodes, self.units, DISCOUNT, action="label"), promises.after(episodes))

    def output(self, part: Lessons) -> NetworkOutput:
        rows = part.rows
        found: NetworkOutput = self.network(rows.observation, rows.masks, self.network.initial_state(len(rows)))
        return found

    def drift(self, part: Lessons, now: NetworkOutput) -> Tensor:
        """Nats by which decisions differ from what they were, [E, T]; padding may hold anything."""
        rows = part.rows
        with torch.no_grad():
            was = self.before(rows.observation, rows.masks, self.before.initial_state(len(rows))).policy
        return now.policy.kl_from(was).sum(-1)

    def loss(self, part: Lessons) -> Tensor:
        rows, out = part.rows, self.output(part)
        surprise = -out.policy.log_prob(rows.action).sum(-1)
        learnt = WEIGHT * expected_regret(out.policy, part.promises) + LABEL * surprise
        decisions = torch.where(part.decided, learnt, FAITH * self.drift(part, out))
        _, values = losses_of(out, rows)
        return per_episode(decisions, part) + values

    def regret(self, part: Lessons) -> Tensor:
        """Points that it gives away in a decision, if it does what it finds most probable."""
        return mean_where(greedy_regret(self.output(part).policy, part.promises), part.decided)


def per_episode(steps: Tensor, part: Lessons) -> Tensor:
    """The sum over an episode, on average."""
    return torch.where(part.rows.valid, steps, torch.zeros_like(steps)).sum() / len(part)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it."""

    before: float
    after: float
    """Points given away in a decision, on problems kept apart. The epoch was chosen by it, so it flatters a little."""
    drift: float
    """Nats by which an episode's decisions differ from what they were, on the recordings to be kept."""

    def __str__(self) -> str:
        lost = f"{self.after:.2f} points given away in a decision, {self.before:.2f} before"
        return f"{lost}; {self.drift:.2f} nats an episode from what it was"


def extend(policy: Extended, kept: Episodes, told: Episodes, promises: Promises, seed: int) -> Report:
    known, asked = kept_apart(told, promises)
    to_learn = policy.lessons(join([*[kept] * KEPT_TIMES, told.select(known)]), promises.select(known))
    judge = policy.lessons(told.select(asked), promises.select(asked))
    to_keep = policy.lessons(kept, Promises.none_for(kept))
    pace = Pace(EPOCHS, CloneConfig().episodes, LEARNING_RATE, seed)
    with torch.no_grad():
        before = policy.regret(judge)
    fit("policy", policy.network, to_learn, policy.loss, lambda: policy.regret(judge), pace, say)
    with torch.no_grad():
        after, drift = policy.regret(judge), policy.drift(to_keep, policy.output(to_keep))
        return Report(float(before), float(after), float(per_episode(drift, to_keep)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="a shipped one's name, or a file")
    parser.add_argument("--portfolios", type=Path, nargs="+", required=True, help="folders of portfolio.py")
    parser.add_argument("--kept", type=Path, nargs="+", required=True, help="recordings of plays by this policy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a policy for each")
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    try:  # everything is opened before the forecasts, which take minutes
        start = policy_file(chosen.policy)
        Extended(start)
        kept = join([read(folder, growth_schema()).episodes for folder in chosen.kept])
        played = read_all(chosen.portfolios)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    told, promises = lessons(played)
    for seed in chosen.seeds:
        policy = Extended(start)
        report = extend(policy, kept, told, promises, seed)
        path = keep_policy(chosen.out, seed, policy.network, policy.units, str(report))
        print(f"{path}: {report}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
