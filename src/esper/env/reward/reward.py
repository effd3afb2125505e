"""The reward of N environments: named terms, in points, that sum to what the agent is paid. Everything is columns.

It reads what happened (effects, stages, measurements after them) and never what was asked for. In this file, in order:
the objective (what counts), potentials (what is promised), costs (what is charged), and the step that puts them
together. A potential is paid as γΦ(s′) − Φ(s), so no path can earn from it: it moves credit in time and never changes
what is optimal, and may therefore be generous; Φ of the end is 0. A cost is small beside the objective, and none can
pay. Costs of a seed's state are charged by high-water mark: only what exceeds the most charged so far. So waiting in a
bad state is not charged again and again, and what one seed can cost in its whole life has a bound.

The network that an episode ends with is the host and every seed that acts in it, finished or not: what a person would
take home. A seed that was never decided on is no way around FOSSILIZE: at the end it forfeits what it claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from esper.actions import Op
from esper.engine.epoch import EpochColumns
from esper.env.rent import rent, score
from esper.env.reward.config import PROXY_CONFIDENCE, SHAPING_TERMS, TERMS, TERMS_OF_MODE, LossScale, RewardConfig
from esper.env.reward.suspicion import RATIO_LIMIT, SUSPICION_KINDS, suspicious
from esper.env.world import World
from esper.lifecycle import LIVE, Stage

SCORE_LIMIT = 100.0
"""Rewards and potentials clamp a score to ± this: a network a hundred times its host is no better than chance."""
PROGRESS: Mapping[Stage, float] = {
    Stage.GERMINATED: 0.1,
    Stage.TRAINING: 0.2,
    Stage.BLENDING: 0.4,
    Stage.HOLDING: 0.6,
    Stage.FOSSILIZED: 1.0,
}
"""Share of a seed's way that it has behind it on entering a stage."""
DWELL_SHARE = 0.5
"""Part of the way to the next stage that is counted for staying in this one."""
DWELL_EPOCHS = 4
"""Epochs after which staying counts no more."""
PRUNE_CAP = 3.0
"""Most that a pruning costs, in multiples of `prune_cost` (R123)."""
PRUNE_POINTS = 5.0
"""Points of worth beyond its rent that add one `prune_cost`."""
INDECISION_GRACE = 3
"""Epochs of holding that are free: long enough to be watched, see `legitimacy_epochs`."""
INDECISION_CAP = 6.0
"""Most that a held seed pays in all, in multiples of `indecision_cost` (R117)."""
LEAST_CLAIM = 1.0
"""Contributions below this many points are no claim."""
LEAST_DIVISOR = 1e-8
"""Whatever the threshold: far below one example of any validation set, far above rounding (R104)."""
NEGLIGIBLE = 1e-8
"""Points. Rounding makes some 1e-13 of them, one example in a million makes 1e-4: below this there is no reward."""


@dataclass(frozen=True, slots=True)
class RewardColumns:
    """The rewards of one step. Rows that did not act are 0."""

    terms: Tensor
    """[N, terms], scaled: `TERMS`."""
    potential: Tensor
    """[N] Φ of the situation reached, unscaled; 0 at the end."""
    score: Tensor
    """[N] at the end: the true score on validation, neither clamped nor scaled; NaN before."""
    suspicions: Tensor
    """[N, S, kinds] bool: suspicions that begin, in the order of `suspicion.SUSPICION_KINDS`."""
    contribution: Tensor
    """[N, S] points that leaving a seed out would cost, as measured in this epoch; NaN where it was not."""
    improvement: Tensor
    """[N, S] points that the network gained since the seed was planted."""

    @property
    def total(self) -> Tensor:
        return self.terms.sum(-1)


def shaping_share(terms: Tensor) -> Tensor:
    """Of [..., terms] the share of their sizes that is shaping, in [0, 1]; 0 where there is no reward (R121)."""
    sizes = terms.abs()
    first = TERMS.index(SHAPING_TERMS[0])  # they lie side by side
    everything, shaping = sizes.sum(-1), sizes[..., first : first + len(SHAPING_TERMS)].sum(-1)
    return torch.where(everything < NEGLIGIBLE, 0.0, shaping / everything.clamp(min=NEGLIGIBLE))


class Reward:
    """Rewards the steps of N environments, from the first to the last of one episode each."""

    def __init__(self, config: RewardConfig, start: World, classes: Sequence[int] | Tensor | None = None) -> None:
        """`start` is the world before the first epoch; `classes` [N] give the loss signal its scale."""
        self.config = config
        alpha, host = start.slots.alpha, start.host_parameters
        self._scale = None if config.signal != "loss" else loss_columns(config.loss_scale, classes, host)
        self._prices = torch.tensor([config.action_costs[op] for op in Op], dtype=torch.float64, device=host.device)
        self._scales = torch.tensor(
            [config.scale if name in TERMS_OF_MODE[config.mode] else 0.0 for name in TERMS],
            dtype=torch.float64,
            device=host.device,
        )
        self._level = torch.full_like(host, math.nan)
        """[N] points of the network when it was last measured."""
        self._potential = torch.zeros((*host.shape, len(SHAPING_TERMS)), dtype=torch.float64, device=host.device)
        self._begun = False
        self._over = torch.zeros_like(start.over)
        self.traced = torch.zeros_like(start.slots.present)
        """[N, S] the seed there is followed from its germination to its removal."""
        self.level_at_birth, self.epochs_held = torch.zeros_like(alpha), torch.zeros_like(alpha)
        self.ratio_charged, self.indecision_charged = torch.zeros_like(alpha), torch.zeros_like(alpha)
        self._suspected = torch.zeros((*alpha.shape, len(SUSPICION_KINDS)), dtype=torch.bool, device=alpha.device)

    def step(self, before: World, after: World, epoch: EpochColumns, terminal: Tensor) -> RewardColumns:
        """The reward for getting from `before` to `after` in `epoch`. An episode that is over is paid nothing more.

        `terminal` [N] is the end of the process, not a cut of a rollout. What counts is then the network that the epoch
        measured; after a rollback, the restored one.
        """
        acted = epoch.played & ~self._over
        found = self._points(epoch.accuracy, epoch.loss)
        known = torch.where(self._level.isnan(), found, self._level).nan_to_num(0.0)
        level = torch.where(found.isnan(), known, found)
        # The first measurement stands for the initial situation as well. No action can reach it (a seed is invisible in
        # its first epoch), so this is still a constant of the episode, and the host's first leap, which is larger than
        # any effect of growing, is no reward.
        last = self._potential if self._begun else self.potential(before, known)
        self._begun = True
        self._follow(before, after, known)
        costs, suspicions, contribution, improvement = self._judge_seeds(after, level, epoch, acted)
        ending, final = self._end(before, after, epoch, terminal)
        reached = torch.where(terminal[:, None], 0.0, self.potential(after, level))
        shaping = zip(SHAPING_TERMS, (self.config.discount * reached - last).unbind(1), strict=True)
        columns = {**dict(shaping), **costs, **self._charge(before, epoch), **ending}
        terms = torch.stack([columns[name] for name in TERMS], 1)
        paid = torch.where(acted[:, None] & (self._scales != 0.0), self._scales * terms, 0.0)  # clamped first: R116
        self._potential = torch.where(acted[:, None], reached, self._potential)
        self._level = torch.where(acted, level, self._level)
        self._over = self._over | (acted & terminal)
        return RewardColumns(
            paid, self._potential.sum(-1), final, suspicions & acted[:, None, None], contribution, improvement
        )

    # -- how good a network is, in points: by its accuracy, or by its loss on a task's own scale --------------------

    def _points(self, accuracy: Tensor, loss: Tensor) -> Tensor:
        """Of networks [N]; NaN where there is no usable number."""
        if self._scale is None:
            return finite(accuracy)
        baseline, target, worst = self._scale
        return 100.0 * (baseline - loss.clamp(min=target, max=worst)) / (baseline - target)  # infinity is the worst

    def value(self, contrast: Tensor) -> Tensor:
        """[N, S] of contrasts [N, S, 3]; NaN where there is no usable number."""
        if self._scale is None:
            return finite(contrast[..., 0])
        baseline, target, _ = self._scale
        return finite(100.0 * contrast[..., 1] / (baseline - target)[:, None])

    # -- potentials -------------------------------------------------------------------------------------------------

    def potential(self, w: World, level: Tensor) -> Tensor:
        """Φ [N, 3] in the configured mode, in the order of `SHAPING_TERMS`; `level` [N] is how good the networks are.

        Seeds pay rent from germination on: the decision that makes the network larger feels it at once.
        """
        config, nothing = self.config, torch.zeros_like(level)
        if config.mode in ("sparse", "minimal"):
            return torch.stack((nothing,) * len(SHAPING_TERMS), -1)
        worth = bounded(level - rent(w.parameters, w.host_parameters, w.rent))
        if config.mode == "simplified":
            return torch.stack((worth, nothing, nothing), -1)
        progress = config.progress_weight * self.progress(w).sum(1)
        return torch.stack((worth, progress, self.credit(w, level).sum(1)), -1)

    def progress(self, w: World) -> Tensor:
        """[N, S] in [0, 1]: how far seeds are. A stage's real dwell counts, before as after the step (R114).

        A fossilized seed counts in full if it was watched at full strength before it was kept: haste counts less.
        """
        v = w.slots
        start, slope = _ways(v.stage.device)
        way = start[v.stage] + slope[v.stage] * (v.dwell.double() / DWELL_EPOCHS).clamp(max=1.0)
        if self.config.legitimacy_epochs:
            held, counted = PROGRESS[Stage.HOLDING], (self.epochs_held / self.config.legitimacy_epochs).clamp(max=1.0)
            kept = held + (PROGRESS[Stage.FOSSILIZED] - held) * torch.where(self.traced, counted, 1.0)
            way = torch.where(v.stage == Stage.FOSSILIZED, kept, way)
        return torch.where(v.retiring, 0.0, way)

    def credit(self, w: World, level: Tensor) -> Tensor:
        """[N, S] what an unfinished seed changes about the score: a promise added, or a claim that is not safe yet.

        The level contains what a seed gives that acts. Were the episode over, its claim would be forfeited; once it is
        fossilized, it is safe. So the share of the claim that does not count yet is taken out, and fossilizing puts it
        back. A claim counts the less the more the network has lost since the seed was planted; a shadow benefit does
        not: nothing depends on an incubating seed, so its shadow cannot be a ransom.
        """
        config, contribution = self.config, self.value(w.slots.contribution)
        lost = (level[:, None] - self.level_at_birth).clamp(max=0.0)
        trust = torch.where(self.traced, (config.attribution_steepness * lost).exp(), 1.0)
        counted = torch.where(w.slots.retiring, 0.0, config.contribution_weight * trust)
        promised = torch.where(w.slots.retiring, 0.0, config.proxy_weight * self._claim(self.value(w.slots.shadow)))
        claimed = -(1.0 - counted) * self._claim(contribution)
        return torch.where(w.slots.within(LIVE), torch.where(contribution.isnan(), promised, claimed), 0.0)

    def _claim(self, points: Tensor) -> Tensor:
        """The part of a contribution that counts. Limited: when a host has adapted, leaving its seed out ruins it, and
        the difference (80 points where growing gained 6) says little about what the seed gave."""
        return points.nan_to_num(0.0).clamp(min=0.0, max=self.config.claim_limit)

    # -- what must be known of each living seed -----------------------------------------------------------------------

    def _follow(self, before: World, after: World, level: Tensor) -> None:
        """Bring the traces up to date with the epoch's stage changes."""
        born = after.slots.seed != before.slots.seed
        kept = (after.slots.stage == Stage.FOSSILIZED) & (before.slots.stage != Stage.FOSSILIZED)
        self.traced = (self.traced | born) & (after.slots.pruned == before.slots.pruned)
        self.level_at_birth = torch.where(born, level[:, None], self.level_at_birth)
        self.epochs_held = torch.where(kept, before.slots.dwell.double(), torch.where(born, 0.0, self.epochs_held))
        self.ratio_charged = torch.where(born, 0.0, self.ratio_charged)
        self.indecision_charged = torch.where(born, 0.0, self.indecision_charged)
        self._suspected &= ~born[..., None]

    def _judge_seeds(
        self, after: World, level: Tensor, epoch: EpochColumns, acted: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """Charge each seed for what was measured of it in this epoch; the suspicions that begin."""
        config, judged = self.config, self.traced & acted[:, None]
        held = judged & (after.slots.stage == Stage.HOLDING)
        overdue = (after.slots.dwell.double() - INDECISION_GRACE).clamp(min=0.0, max=INDECISION_CAP)
        due = torch.where(held, config.indecision_cost * overdue, 0.0)
        undecided = (due - self.indecision_charged).clamp(min=0.0)
        self.indecision_charged = self.indecision_charged + undecided

        contribution = self.value(epoch.contribution)
        improvement = level[:, None] - self.level_at_birth
        claims = judged & ~contribution.isnan() & ~after.slots.retiring
        ratio = claim_ratio(contribution, improvement, config.ratio_threshold)
        due = torch.where(claims, config.ratio_cost * (ratio / RATIO_LIMIT - 1.0).clamp(min=0.0, max=1.0), 0.0)
        overclaimed = (due - self.ratio_charged).clamp(min=0.0)
        self.ratio_charged = self.ratio_charged + overclaimed

        accuracy, _, error = epoch.contribution.unbind(-1)
        now = suspicious(contribution, improvement, ratio, accuracy, error) & claims[..., None]
        begun = now & ~self._suspected
        self._suspected = torch.where(claims[..., None], now, self._suspected)
        costs = {"indecision_cost": -undecided.sum(1), "ratio_cost": -overclaimed.sum(1)}
        return costs, begun, contribution, improvement

    # -- costs and the end --------------------------------------------------------------------------------------------

    def _charge(self, before: World, epoch: EpochColumns) -> dict[str, Tensor]:
        """What acting costs, what pruning costs, and what a broken run costs. What had no effect costs nothing."""
        config, v, host = self.config, before.slots, before.host_parameters
        # A mask in place of `gather`, which a batch without any slot has nothing for.
        here = torch.arange(v.size.shape[1], device=host.device) == epoch.slot[:, None]  # [N, S]
        promise = PROXY_CONFIDENCE * self.value(v.shadow).nan_to_num(0.0).clamp(min=0.0)
        contribution = self.value(v.contribution)
        worth = torch.where(here, torch.where(contribution.isnan(), promise, contribution), 0.0).sum(1)  # R138
        worth = worth - rent(host + (here * v.size).sum(1), host, before.rent)
        cost = config.prune_cost * (1.0 + worth / PRUNE_POINTS).clamp(max=PRUNE_CAP)
        pruned = epoch.changed & (epoch.op == Op.PRUNE) & (worth > 0.0)
        return {
            "action_cost": -torch.where(epoch.changed, self._prices[epoch.op], 0.0),
            "prune_cost": -torch.where(pruned, cost, 0.0),
            "governor": -config.governor_penalty * epoch.undone.double(),
        }

    def _end(
        self, before: World, after: World, epoch: EpochColumns, terminal: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Pay the objective where an episode ends; the true scores, NaN elsewhere.

        Incubating seeds do not act: they neither help nor pay. Sizes are from before the epoch, because a seed that was
        ramped out at its end is gone by now, but it acted.
        """
        acting = epoch.alpha > 0.0
        loose = acting & (after.slots.stage != Stage.FOSSILIZED)
        forfeited = torch.where(loose, self._claim(finite(after.slots.contribution_points)), 0.0).sum(1)
        ended = terminal & ~epoch.undone  # else unfinished seeds are gone, with all that they gave
        measured_size = before.host_parameters + (before.slots.size * acting).sum(1)
        size = torch.where(epoch.undone, after.parameters, measured_size)
        accuracy = finite(epoch.accuracy).nan_to_num(0.0)  # a network without a finite accuracy is worth nothing
        final = score(accuracy, size, after.host_parameters, after.rent)
        terms = {
            "objective": torch.where(terminal, bounded(final), 0.0),
            "unfinished": -torch.where(ended, forfeited, 0.0),
        }
        return terms, torch.where(terminal, final, math.nan)


@cache
def _ways(device: torch.device) -> tuple[Tensor, Tensor]:
    """By stage: share of a seed's way that is behind it on entering, and what staying adds in all."""
    start = [PROGRESS.get(stage, 0.0) for stage in Stage]
    slope = [0.0] * len(Stage)
    for (at, behind), (_, following) in pairwise(PROGRESS.items()):
        slope[at] = DWELL_SHARE * (following - behind)
    both = torch.tensor([start, slope], dtype=torch.float64, device=device)
    return both[0], both[1]


def bounded(points: Tensor) -> Tensor:
    return points.clamp(-SCORE_LIMIT, SCORE_LIMIT)


def finite(points: Tensor) -> Tensor:
    """NaN where there is no usable number."""
    return points.nan_to_num(math.nan, math.nan, math.nan)  # one kernel; `isfinite` alone takes four


def claim_ratio(contribution: Tensor, improvement: Tensor, threshold: float) -> Tensor:
    """How many times the network's improvement since germination a seed claims; 0 where it claims nothing."""
    ratio = contribution / improvement.clamp(min=max(threshold, LEAST_DIVISOR))
    return torch.where(contribution >= LEAST_CLAIM, ratio, 0.0)


def loss_columns(
    scale: LossScale | None, classes: Sequence[int] | Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Baseline, target and the loss beyond which nothing counts, each [N] as `like`."""
    if scale is None and classes is None:
        raise ValueError("the loss signal needs a loss_scale, or tasks with classes")
    if scale is None:
        counts = classes.tolist() if isinstance(classes, Tensor) else list(classes or ())
        known = {count: LossScale.for_classes(count) for count in set(counts)}
        scales = [known[count] for count in counts]
    else:
        scales = [scale] * like.shape[0]
    rows = [(one.baseline, one.target, one.worst) for one in scales]
    baseline, target, worst = torch.tensor(rows, dtype=torch.float64, device=like.device).unbind(1)
    return baseline, target, worst
