"""How much of the noise in the advantages belongs to the problem, not to what was done: does it pay to have siblings?

    python benchmarks/siblings.py --controller small-conv --problems 24 --workers 2

Four copies of a policy play each problem with different seeds. What their advantages at a step have in common is what
the critic did not know about the problem; `PPOConfig.siblings` subtracts it. Printed by the age of the episode: the
variance between and within problems, and that of the advantages as they are and against siblings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from esper.agent.config import PPOConfig
from esper.agent.gae import against_siblings
from esper.training.catalogue import policy_file
from esper.training.journal import RolloutSummary
from esper.training.loop import Trainer
from esper.training.train_config import TrainConfig

SIBLINGS = 4
AGES = ((0, 1), (1, 3), (3, 6), (6, 10), (10, 18))
SEED = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--controller", default="small-conv")
    parser.add_argument("--task", default="mixed")
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = TrainConfig(
        task=chosen.task,
        envs=SIBLINGS * chosen.problems,
        seed=SEED,
        init=str(policy_file(chosen.controller)),
        ppo=PPOConfig(siblings=SIBLINGS),
    )
    trainer = Trainer(config, workers=chosen.workers)
    trainer.agent.config = replace(config.ppo, siblings=1)  # the advantages as they are
    try:
        episodes = trainer.collect(1)
    finally:
        trainer.close()
    scores = RolloutSummary.of(episodes).scores
    batch, _ = trainer.agent.replay(episodes)
    relative = against_siblings(batch.advantage, batch.valid, SIBLINGS)
    print(f"{chosen.problems} problems × {SIBLINGS}: mean score {sum(scores) / len(scores):.1f}")
    print("epochs      between problems   within   variance as it is   against siblings")
    for first, last in AGES:
        groups = batch.advantage[:, first:last].reshape(chosen.problems, SIBLINGS, -1)
        within = groups.var(1).mean()
        between = groups.mean(1).var(0).mean() - within / SIBLINGS
        plain, left = (a[:, first:last].var() for a in (batch.advantage, relative))
        print(f"{first:3d} to {last - 1:3d} {between:17.1f} {within:9.1f} {plain:17.1f} {left:17.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
