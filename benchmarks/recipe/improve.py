"""One round of learning from one's own best: a policy plays each problem several times, and the best play is kept.

    python benchmarks/recipe/improve.py --policy start.safetensors --problems 120 --workers 2 --out recordings/round1
    esper clone recordings/round1 --out better.safetensors

`--rivals docs/results/schedule.toml heuristic` let others play each problem too: what they do better is worth copying.
Siblings play the same training problem with different dice (the policy's own, and now and then a random legal action).
Everything about a problem is the same for all of them, so whoever earns most did something right, or was lucky; over
many problems luck averages out. The best sibling's actions become what the next policy imitates. `--also` adds earlier
recordings, so that nothing that was known is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from playing import play_all
from rounds import chosen_options, keep, policy_of, round_options, training_draws

from esper.agent.actor import Actor
from esper.agent.policies import LearnedController
from esper.offline.episodes import Episodes
from esper.offline.recorder import Play, play
from esper.policy.controller import Controller
from esper.tasks.family import get_family
from esper.training.catalogue import make_controller

AS_GOOD = 0.5
"""Points of return within which a sibling is as good as the best."""


class Sampling(LearnedController):
    """A policy that rolls its dice; which ones, follows from the problem and the sibling."""

    sibling = 0

    def reset(self, seeds: Sequence[int]) -> None:
        self._actor = Actor(self.network, len(seeds), self.normaliser, False, seed=1000 * seeds[0] + self.sibling)


def jobs(
    policy: Path, family: str, numbers: Sequence[int], siblings: int, noise: float, rivals: Sequence[str] = ()
) -> list[Play]:
    learned = LearnedController.load(policy)
    players: list[tuple[Controller, float]] = [(make_controller(rival), 0.0) for rival in rivals]
    for i in range(siblings):
        player = Sampling(learned.network, learned.normaliser, f"sibling {i}")
        player.sibling = i
        players.append((player, noise))
    return [Play(family, who.name, who, (number,), own_noise) for number in numbers for who, own_noise in players]


def best_of(episodes: Episodes) -> Episodes:
    """Per problem, the plays that earned most; what was done in them is what is to be imitated."""
    returns = episodes.returns()
    best = torch.stack([returns[episodes.draw == draw].max() for draw in episodes.draw])
    kept = episodes.select((returns >= best - AS_GOOD).nonzero().flatten())
    return replace(kept, label=kept.taken, controller=torch.zeros_like(kept.controller), controllers=("best sibling",))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = round_options(__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=120)
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--rivals", nargs="*", default=[])
    chosen = chosen_options(parser, arguments)
    numbers = training_draws(parser, chosen)
    get_family(chosen.family).draw(numbers[0])  # a name that nobody knows is the first thing to say
    policy = policy_of(parser, chosen.policy)
    plays = jobs(policy, chosen.family, numbers, chosen.siblings, chosen.noise, chosen.rivals)
    together = play_all(play, plays, chosen.workers)
    best = best_of(together)
    keep("improve.py", chosen, best)
    mean, most = float(together.returns().mean()), float(best.returns().mean())
    print(f"{together.steps:,} env-steps; mean return {mean:.1f}, of the best {most:.1f}; {len(best)} kept")
    for number, name in enumerate(together.controllers):
        own = together.controller == number
        print(f"  {name}: mean return {float(together.returns()[own].mean()):.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
