"""How much of the noise in the advantages belongs to the problem, not to what was done: does it pay to have siblings?

    python benchmarks/siblings.py --controller small --problems 24 --workers 2

Four copies of a policy play each problem with different seeds. What their advantages at a step have in common is what
the critic did not know about the problem; `PPOConfig.siblings` subtracts it. Printed by the age of the episode: the
variance between and within problems, and that of the advantages as they are and against siblings.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import tyro

from esper.agent.config import PPOConfig
from esper.agent.gae import against_siblings
from esper.training.catalogue import policy_file
from esper.training.journal import RolloutSummary
from esper.training.loop import Trainer
from esper.training.train_config import TrainConfig

SIBLINGS = 4
AGES = ((0, 1), (1, 3), (3, 6), (6, 10), (10, 18))
SEED = 5


def main(controller: str = "small", task: str = "mixed", problems: int = 24, workers: int = 2) -> None:
    torch.set_num_threads(1)
    config = TrainConfig(
        task=task,
        envs=SIBLINGS * problems,
        seed=SEED,
        init=str(policy_file(controller)),
        ppo=PPOConfig(siblings=SIBLINGS),
    )
    trainer = Trainer(config, workers=workers)
    trainer.agent.config = replace(config.ppo, siblings=1)  # the advantages as they are
    try:
        episodes = trainer.collect(1)
    finally:
        trainer.close()
    scores = RolloutSummary.of(episodes).scores
    batch, _ = trainer.agent.replay(episodes)
    relative = against_siblings(batch.advantage, batch.valid, SIBLINGS)
    print(f"{problems} problems × {SIBLINGS}: mean score {sum(scores) / len(scores):.1f}")
    print("epochs      between problems   within   variance as it is   against siblings")
    for first, last in AGES:
        groups = batch.advantage[:, first:last].reshape(problems, SIBLINGS, -1)
        within = groups.var(1).mean()
        between = groups.mean(1).var(0).mean() - within / SIBLINGS
        plain, left = (a[:, first:last].var() for a in (batch.advantage, relative))
        print(f"{first:3d} to {last - 1:3d} {between:17.1f} {within:9.1f} {plain:17.1f} {left:17.1f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
