"""The reward of one environment: named terms, in points, that sum to what the agent is paid.

It reads what happened (effects, transitions, measurements after them) and never what was asked for. Each part has a
file of its own: `objective` (what counts), `shaping` (what is promised), `costs` (what is charged), `detectors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.engine.eager import EpochRecord
from esper.engine.measure import Evaluation
from esper.env.reward import costs
from esper.env.reward.config import Mode, RewardConfig
from esper.env.reward.detectors import SURE_ERRORS, Finding, detect
from esper.env.reward.level import LossScale, Meter
from esper.env.reward.objective import bounded, final_result, score
from esper.env.reward.shaping import Potential, potential
from esper.env.reward.traces import SeedTrace, follow
from esper.env.situation import Situation

SHAPING_TERMS = ("score_shaping", "progress_shaping", "credit_shaping")
COST_TERMS = ("unfinished", "governor", "action_cost", "prune_cost", "indecision_cost", "ratio_cost")
"""Never above 0."""
TERMS = ("objective", *SHAPING_TERMS, *COST_TERMS)
"""Every term, in every mode; one that the mode does not use is 0."""
_ALWAYS = ("objective", "unfinished", "governor")
TERMS_OF_MODE: dict[Mode, tuple[str, ...]] = {
    "shaped": TERMS,
    "simplified": (*_ALWAYS, "score_shaping", "action_cost"),
    "minimal": (*_ALWAYS, "action_cost"),
    "sparse": _ALWAYS,
}
NEGLIGIBLE = 1e-8
"""Points. Rounding makes some 1e-13 of them, one example in a million makes 1e-4: below this there is no reward."""


@dataclass(frozen=True, slots=True)
class RewardStep:
    """The reward of one step."""

    terms: dict[str, float]
    """By name, scaled: `TERMS`."""
    events: tuple[Finding, ...]
    potential: float
    """Φ of the situation reached, unscaled; 0 at the end."""
    score: float | None
    """At the end: the true score on validation, neither clamped nor scaled."""

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def shaping_share(self) -> float:
        """In [0, 1]: how much of what was said in this step is shaping; 0 when nothing was said (R121)."""
        everything = sum(abs(term) for term in self.terms.values())
        if everything < NEGLIGIBLE:
            return 0.0
        return sum(abs(self.terms[name]) for name in SHAPING_TERMS) / everything


class RewardModel:
    """Rewards the steps of one environment, episode after episode."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._host_parameters: int | None = None

    def reset(self, host_parameters: int, loss_scale: LossScale | None = None) -> None:
        """Begin an episode. The loss family needs the scale of the task's loss."""
        if host_parameters < 1:
            raise ValueError(f"a host has at least 1 parameter, not {host_parameters}")
        self._host_parameters = host_parameters
        self._meter = Meter(self.config.family, loss_scale)
        self._traces: dict[int, SeedTrace] = {}
        self._level: float | None = None
        self._potential = Potential()
        self._epoch: int | None = None

    def step(
        self,
        before: Situation,
        record: EpochRecord,
        after: Situation,
        *,
        terminal: bool,
        governor_penalty: float = 0.0,
        kept: Evaluation | None = None,
    ) -> RewardStep:
        """The reward for getting from `before` to `after`.

        `terminal` is the end of the process, not a cut of the rollout. What counts is then the network that the epoch
        measured, unless someone removed seeds and measured again (`kept`); `after` must then be the situation after
        that. A `governor_penalty` says that the run broke and was restored.
        """
        self._check(before, after, governor_penalty)
        level_before, level = self._levels(record)
        if self._level is None:
            # The first measurement stands for the initial situation as well. No action can reach it (a seed is
            # invisible in its first epoch), so this is still a constant of the episode, and the host's first leap,
            # which is larger than any effect of growing, is no reward.
            self._potential = potential(self.config, self._meter, before, level_before, self._traces)
        follow(self._traces, before, record, level_before)
        terms = dict.fromkeys(TERMS, 0.0)
        events = self._judge_seeds(record, after, level, terms)
        terms["action_cost"] -= costs.action_cost(self.config, record.effect)
        terms["prune_cost"] -= costs.prune_cost(self.config, self._meter, before, record.effect)
        terms["governor"] -= governor_penalty
        final = self._end(terms, before, record, after, kept) if terminal else None
        self._shape(terms, Potential() if terminal else self._reached(after, level))
        self._level, self._epoch = level, after.epoch
        return RewardStep(self._paid(terms), tuple(events), self._potential.total, final)

    # -- the parts ------------------------------------------------------------------------------------------------

    def _check(self, before: Situation, after: Situation, governor_penalty: float) -> None:
        if self._host_parameters is None:
            raise RuntimeError("the episode is over or has not begun: call reset first")
        if before.host_parameters != self._host_parameters or after.host_parameters != self._host_parameters:
            raise ValueError("these situations are of another host than the one that reset was told of")
        if self._epoch is not None and before.epoch != self._epoch:
            raise ValueError(f"the last step led to epoch {self._epoch}, but this one starts from epoch {before.epoch}")
        if not 0.0 <= governor_penalty < math.inf:
            raise ValueError(f"a penalty is a finite amount of at least 0, not {governor_penalty}")

    def _levels(self, record: EpochRecord) -> tuple[float, float]:
        """How good the network was and is; an epoch without a usable number leaves the last one standing."""
        measured = self._meter.level(record.measured)
        known = self._level if self._level is not None else measured
        before = 0.0 if known is None else known
        return before, before if measured is None else measured

    def _reached(self, after: Situation, level: float) -> Potential:
        return potential(self.config, self._meter, after, level, self._traces)

    def _shape(self, terms: dict[str, float], reached: Potential) -> None:
        """γΦ(s′) − Φ(s), part by part. Φ(s) is the very number of the last step, so that the sum telescopes."""
        discount, last = self.config.discount, self._potential
        terms["score_shaping"] += discount * reached.score - last.score
        terms["progress_shaping"] += discount * reached.progress - last.progress
        terms["credit_shaping"] += discount * reached.credit - last.credit
        self._potential = reached

    def _judge_seeds(
        self, record: EpochRecord, after: Situation, level: float, terms: dict[str, float]
    ) -> list[Finding]:
        """Charge and suspect each seed for what was measured of it in this epoch."""
        events: list[Finding] = []
        for index, trace in self._traces.items():
            slot = after.slots[index]
            terms["indecision_cost"] -= costs.indecision_cost(self.config, slot, trace)
            contrast = record.measured.contributions.get(index)
            contribution = self._meter.value(contrast)
            if contrast is None or contribution is None or slot.retiring:
                continue
            improvement = level - trace.level_at_birth
            ratio = costs.claim_ratio(self.config, contribution, improvement)
            terms["ratio_cost"] -= costs.ratio_cost(self.config, ratio, trace)
            sure = contrast.accuracy >= SURE_ERRORS * contrast.error
            events += detect(record.epoch, slot, trace, contribution, improvement, ratio, sure=sure)
        return events

    def _end(
        self, terms: dict[str, float], before: Situation, record: EpochRecord, after: Situation, kept: Evaluation | None
    ) -> float:
        """Pay the objective and close the episode; the true score."""
        self._host_parameters = None
        if kept is None and record.verdict is None:  # else unfinished seeds are gone, with all that they gave
            terms["unfinished"] -= costs.unfinished_cost(self.config, record, after)
        result = final_result(before, record, after, kept)
        final = score(result.accuracy, result.parameters, after.host_parameters, self.config.rent_rate)
        terms["objective"] += bounded(final)
        return final

    def _paid(self, terms: dict[str, float]) -> dict[str, float]:
        """The terms of the mode, scaled. Clamping came first, so that the scale changes every magnitude (R116)."""
        used, scale = TERMS_OF_MODE[self.config.mode], self.config.scale
        return {name: scale * value if name in used else 0.0 for name, value in terms.items()}
