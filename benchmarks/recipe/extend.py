"""Teach a policy more, and let it keep what it knows.

    esper record --task mixed --controllers small --noise 0.1 --out k/mixed
    python benchmarks/recipe/extend.py --policy small --portfolios p/a p/b --kept k/mixed --seeds 0 1 --out policies

Where portfolios say what plantings promise, the policy learns to lose little (`learn.py`). Everywhere else, in the
other states of these plays and in all of `kept`, it is held to what it would have done before: by the divergence of
whole decisions, not by a label, so a doubt stays a doubt. Thus a policy can be taught without the recordings from which
it once learnt. A seventh of the portfolios' problems is kept apart: what is printed, and which epoch's weights are
kept, goes by them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from learn import IMITATED, KEPT_APART, WEIGHT, Lessons, expected_regret, greedy_regret, read_all, say
from planner import Promises, lessons
from rounds import chosen_options
from torch import Tensor

from esper.agent.checkpoints import load_checkpoint
from esper.agent.controller import LearnedController
from esper.agent.normalisers import ValueNormaliser
from esper.agent.policy_check import check_policy, tensors_under
from esper.agent.warm_start import save_policy
from esper.growth.blueprints import blueprint_names
from esper.offline.cloning import CloneConfig
from esper.offline.episodes import Episodes, growth_schema, join
from esper.offline.fitting import VALUE_COEFFICIENT, Pace, fit, mean_where
from esper.offline.recording import read
from esper.offline.rows import DISCOUNT, Units, prepare
from esper.training.catalogue import policy_file

EPOCHS = 4
LEARNING_RATE = 5e-4
"""A quarter of what a new policy learns at: it is to change where it must, not to begin again."""
FAITH = 1.0
"""Of a nat by which an episode's decisions differ from what they were, beside points of regret."""
KEPT_TIMES = 5
"""How often the kept recordings count. With once, a policy learnt no more, and drifted four times as far elsewhere."""


class Extended:
    """A policy, what it was before, and the units in which it reads and values, which stay as they are."""

    def __init__(self, path: Path) -> None:
        before = LearnedController.load(path)
        checkpoint = load_checkpoint(path)
        check_policy(path, checkpoint, values=True)
        if before.normaliser is None:
            raise SystemExit(f"{path} does not normalise observations: it is no policy that learn.py made")
        values = ValueNormaliser()
        values.moments.load(tensors_under("values/", checkpoint.tensors))
        self.before = before.network.requires_grad_(False)
        self.network = deepcopy(before.network).train().requires_grad_(True)
        self.units = Units(before.normaliser, values)

    def lessons(self, episodes: Episodes, promises: Promises) -> Lessons:
        """`promises` are of the last episodes; about the others nothing is promised."""
        rows = prepare(episodes, self.units, DISCOUNT, action="label")
        return Lessons(rows, promises.after(episodes))

    def loss(self, lessons: Lessons) -> Tensor:
        rows, decided = lessons.rows, lessons.decided
        state = self.network.initial_state(len(rows))
        out = self.network(rows.observation, rows.masks, state)
        with torch.no_grad():
            was = self.before(rows.observation, rows.masks, state).policy
        surprise = -out.policy.log_prob(rows.action).sum(-1)
        learnt = WEIGHT * expected_regret(out.policy, lessons.promises) + IMITATED * surprise
        kept = FAITH * out.policy.kl_from(was).sum(-1)
        decisions = torch.where(decided, learnt, kept) * rows.valid
        error = torch.nn.functional.huber_loss(out.value, rows.value, reduction="none")
        loss: Tensor = decisions.sum() / len(rows) + VALUE_COEFFICIENT * mean_where(error, rows.valid)
        return loss

    def regret(self, lessons: Lessons) -> Tensor:
        """Points that it gives away in a decision, if it does what it finds most probable."""
        rows = lessons.rows
        policy = self.network(rows.observation, rows.masks, self.network.initial_state(len(rows))).policy
        return mean_where(greedy_regret(policy, lessons.promises), lessons.decided)


def extend(path: Path, kept: Episodes, told: Episodes, promises: Promises, seed: int) -> tuple[Extended, float, float]:
    """The policy, and the points that it gave away in a decision on problems that were kept apart, before and after."""
    apart = told.draw % KEPT_APART == 0
    known, asked = (~apart).nonzero().flatten(), apart.nonzero().flatten()
    policy = Extended(path)
    to_learn = policy.lessons(join([*[kept] * KEPT_TIMES, told.select(known)]), promises.select(known))
    judge = policy.lessons(told.select(asked), promises.select(asked))
    with torch.no_grad():
        before = float(policy.regret(judge))
    pace = Pace(EPOCHS, CloneConfig().episodes, LEARNING_RATE, seed)
    fit("policy", policy.network, to_learn, policy.loss, lambda: policy.regret(judge), pace, say)
    with torch.no_grad():
        return policy, before, float(policy.regret(judge))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="a shipped one's name, or a file")
    parser.add_argument("--portfolios", type=Path, nargs="+", required=True, help="folders of portfolio.py")
    parser.add_argument("--plays", type=Path, nargs="*", default=[], help="of the same problems, by own_plays.py")
    parser.add_argument("--kept", type=Path, nargs="+", required=True, help="recordings of plays by this policy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a policy for each")
    parser.add_argument("--out", type=Path, required=True)
    chosen = chosen_options(parser, arguments)
    start = policy_file(chosen.policy)
    told, promises = lessons(read_all([*chosen.portfolios, *chosen.plays]))
    kept = join([read(folder, growth_schema()).episodes for folder in chosen.kept])
    for seed in chosen.seeds:
        policy, before, after = extend(start, kept, told, promises, seed)
        facts = {"command": shlex.join(["python", *sys.argv]), "seed": seed, "regret": after}
        path = chosen.out / f"{seed}.safetensors"
        units = policy.units
        data = {**facts, "blueprints": list(blueprint_names())}
        save_policy(path, policy.network, units.observations, units.values, data)
        print(f"{path}: {after:.2f} points given away in a decision, {before:.2f} before", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
