"""Random search over the heuristic's settings, by successive halving, so that the heuristic is a strong baseline.

Candidates, the default settings among them, meet on the same *training* draws and are ranked by their mean score on
validation data; the better third goes on to more draws. The budget counts env-steps: one epoch of one network. Held-out
draws and test data play no part in the choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from esper.config import EngineName
from esper.env.rent import score
from esper.policy.controller import Controller
from esper.policy.heuristic import ROTATION, Heuristic, HeuristicSettings
from esper.tasks.draws import COMPARISON_DRAWS_PER_SEED
from esper.tasks.family import Family, get_family
from esper.training.evaluation import Job, batch_size, jobs_for, run_jobs
from esper.training.pools import Executor
from esper.training.results import EpisodeResult, Results

KEEP = 3
"""One candidate in this many goes on to the next round."""
FIRST_DRAWS = 4
"""Draws of the first round; each further round brings the total to `KEEP` times as many."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the search: every candidate meets draws `start` to `stop`, which are new to all of them."""

    candidates: int
    start: int
    stop: int

    @property
    def episodes(self) -> int:
        return self.candidates * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome of a search."""

    settings: HeuristicSettings
    score: float
    """Mean over the training draws of the last round; chosen for it, so it flatters."""
    default_score: float | None
    """Of the default settings on the same draws; None if they were dropped before the last round."""
    draws: int
    candidates: int
    steps: int
    """Env-steps spent."""
    interrupted: bool


def sample_settings(rng: np.random.Generator) -> HeuristicSettings:
    """Settings over the range in which each of them changes what the heuristic does."""
    order = [str(name) for name in rng.permutation(ROTATION)]
    return HeuristicSettings(
        first_epoch=int(rng.integers(1, 7)),
        plateau_gain=round(float(np.exp(rng.uniform(np.log(0.5), np.log(30.0)))), 2),
        plateau_epochs=int(rng.integers(1, 5)),
        patience=int(rng.integers(2, 7)),
        harm=round(float(np.exp(rng.uniform(np.log(1.0), np.log(20.0)))), 2),
        keep_above=round(float(rng.uniform(0.0, 5.0)), 2),
        late_margin=int(rng.integers(6, 13)),
        rotation=tuple(order[: int(rng.integers(3, len(order) + 1))]),
    )


def plan_rounds(budget_steps: int, horizon: int) -> list[Round]:
    """As many candidates as the budget has episodes for; the last round has at most `KEEP` of them."""
    episodes = budget_steps // horizon
    rounds: list[Round] = []
    for count in range(2, 1 + episodes):
        trial = _rounds(count)
        if sum(one.episodes for one in trial) > episodes:
            break
        rounds = trial
    if not rounds:
        least = sum(one.episodes for one in _rounds(2)) * horizon
        raise ValueError(f"a budget of {budget_steps:,} steps is too small: two candidates need {least:,} here")
    return rounds


def _rounds(candidates: int) -> list[Round]:
    found = [Round(candidates, 0, FIRST_DRAWS)]
    while found[-1].candidates > KEEP:
        last = found[-1]
        found.append(Round(-(-last.candidates // KEEP), last.stop, last.stop * KEEP))
    return found


def tune(
    family: Family | str,
    budget_steps: int,
    *,
    seed: int,
    executor: Executor,
    device: torch.device,
    engine: EngineName,
    progress: Callable[[int, int, str], None],
    stop: Callable[[], bool],
) -> Tuned:
    """The best settings that the budget could find. Same seed and budget, same choice, wherever the jobs are done."""
    first = seed * COMPARISON_DRAWS_PER_SEED
    drawn = get_family(family) if isinstance(family, str) else family
    horizon = max(drawn.draw(first + i).horizon for i in range(2 * FIRST_DRAWS))
    rounds = plan_rounds(budget_steps, horizon)
    rng = np.random.default_rng(seed)
    settings = [HeuristicSettings(), *(sample_settings(rng) for _ in range(rounds[0].candidates - 1))]
    search = _Search(settings, sum(one.episodes for one in rounds), progress)
    for one in rounds:
        numbers = range(first + one.start, first + one.stop)
        # The plan is made from the first draws; if later ones are longer, the budget still holds.
        cost = len(search.survivors) * sum(drawn.draw(number).horizon for number in numbers)
        if search.steps + cost > budget_steps:
            break
        batch = batch_size(engine, len(numbers), device)
        jobs = jobs_for(family, search.controllers(), numbers, held_out=False, batch=batch, engine=engine)
        found = run_jobs(jobs, executor=executor, device=device, progress=search.note, stop=stop)
        if stop():  # a round that was cut short decides nothing
            break
        search.rank(found, last=one is rounds[-1])
    return search.outcome(interrupted=stop())


class _Search:
    """The candidates, what they scored, and which of them are still in."""

    def __init__(
        self, settings: list[HeuristicSettings], episodes: int, progress: Callable[[int, int, str], None]
    ) -> None:
        self.settings = settings
        self.scores: list[list[float]] = [[] for _ in settings]
        self.survivors = list(range(len(settings)))
        self.steps = 0
        self._episodes, self._done, self._progress = episodes, 0, progress

    def controllers(self) -> dict[str, Controller]:
        return {str(i): Heuristic(self.settings[i]) for i in self.survivors}

    def note(self, job: Job, results: list[EpisodeResult]) -> None:
        self._done += len(results)
        self.steps += sum(result.epochs for result in results)
        self._progress(self._done, self._episodes, f"{len(self.survivors)} candidates are in")

    def rank(self, found: Results, *, last: bool) -> None:
        """Best first; all but the better third go, unless this was the last round."""
        for i in self.survivors:
            results = found[str(i)]
            self.scores[i] += [_score(results[number]) for number in sorted(results)]
        self.survivors.sort(key=lambda i: -float(np.mean(self.scores[i])))  # stable: the default wins a tie
        if not last:
            del self.survivors[-(-len(self.survivors) // KEEP) :]

    def outcome(self, *, interrupted: bool) -> Tuned:
        best = self.survivors[0]
        draws = len(self.scores[best])
        if draws == 0:
            raise KeyboardInterrupt("the search was stopped in its first round: there is nothing to choose from")
        return Tuned(
            settings=self.settings[best],
            score=float(np.mean(self.scores[best])),
            default_score=float(np.mean(self.scores[0])) if len(self.scores[0]) == draws else None,
            draws=draws,
            candidates=len(self.settings),
            steps=self.steps,
            interrupted=interrupted,
        )


def _score(result: EpisodeResult) -> float:
    """On validation data: the test set is for judging, and this is choosing."""
    return score(result.val_accuracy, result.parameters, result.host_parameters)


def as_toml(settings: HeuristicSettings, name: str, remarks: Sequence[str] = ()) -> str:
    """A file that `--controller` and `--controllers` understand."""
    lines = [
        *(f"# {remark}" for remark in remarks),
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "",
        "[heuristic]",
    ]
    for one in fields(settings):
        value = getattr(settings, one.name)
        text = "[" + ", ".join(f'"{part}"' for part in value) + "]" if isinstance(value, tuple) else repr(value)
        lines.append(f"{one.name} = {text}")
    return "\n".join(lines) + "\n"
