"""The slots of N networks as columns [N, S], and the rules of the lifecycle over all of them at once.

Every rule is written once, here, and works on whole columns; who plays one network has columns of one row. Columns are
changed in place, so a row of them (`row`) shares its memory: what happens to a network is seen in the columns of all.
NaN is what was not measured.

Epoch order: actions (`germinate`, `prune`, `fossilize`), `begin_epoch`, the networks train and are measured, `measure`,
`end_epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from esper.actions import BLENDS
from esper.lifecycle import GATES, LIVE, RAMP_STEEPNESS, Rules, Stage

PLANTED = LIVE | {Stage.FOSSILIZED}
"""There is a seed in the slot."""
CONTRAST = ("accuracy", "loss", "error")
"""The last axis of a measured contrast; see `esper.lifecycle.Contrast`."""
RULE_NAMES = tuple(field.name for field in fields(Rules))
"""The order of `SlotColumns.rules`."""
_SIGMOID = BLENDS.index("sigmoid")


@dataclass(slots=True)
class SlotColumns:
    """Each column is [N, S] unless noted. Rows with fewer slots are padded; `present` says which are real."""

    present: Tensor
    """bool"""
    stage: Tensor
    """int64: a `Stage`."""
    seed: Tensor
    """int64: number of the current or last seed of its network; 0 is none yet."""
    blueprint: Tensor
    """int64: index of the planted blueprint; -1 is none."""
    blend: Tensor
    """int64: index into `BLENDS`; -1 is none."""
    size: Tensor
    """int64: parameters of the planted seed."""
    alpha: Tensor
    """float64"""
    age: Tensor
    """int64: epochs since germination."""
    dwell: Tensor
    """int64: epochs in this stage."""
    stayed: Tensor
    """int64: epochs that the slot was in the stage before this one."""
    retiring: Tensor
    """bool: alpha is on its way down to a pruning."""
    ramp_from: Tensor
    """float64: alpha when the seed began to retire."""
    pruned: Tensor
    """int64: seeds that were removed from the slot so far."""
    gradient: Tensor
    """float64: root-mean-square gradient of the seed's parameters in the last epoch."""
    shadow: Tensor
    """[N, S, 3] float64: shadow benefit, in the order of `CONTRAST`."""
    contribution: Tensor
    """[N, S, 3] float64: measured contribution."""
    measured_age: Tensor
    """int64: age of the seed when either of the two was last measured."""
    rules: Tensor
    """[N, rules] float64: the fields of `Rules`."""

    @classmethod
    def empty(
        cls, slots: Sequence[int], rules: Sequence[Rules], device: torch.device | str = "cpu", width: int | None = None
    ) -> SlotColumns:
        """Empty slots: `slots` of each network, and the rules of each; `width` is at least the most slots."""
        shape = (len(slots), width or max(slots, default=0))

        def column(value: float, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.full((*shape, *more), value, dtype=dtype, device=device)

        places = torch.arange(shape[1], device=device)
        whole = {name: column(0, torch.int64) for name in ("seed", "size", "age", "dwell", "stayed", "pruned")}
        return cls(
            present=places < torch.tensor(list(slots), device=device)[:, None],
            stage=column(Stage.DORMANT, torch.int64),
            blueprint=column(-1, torch.int64),
            blend=column(-1, torch.int64),
            alpha=column(0.0, torch.float64),
            retiring=column(False, torch.bool),
            ramp_from=column(0.0, torch.float64),
            gradient=column(math.nan, torch.float64),
            shadow=column(math.nan, torch.float64, len(CONTRAST)),
            contribution=column(math.nan, torch.float64, len(CONTRAST)),
            measured_age=column(0, torch.int64),
            rules=torch.tensor(
                [[getattr(one, name) for name in RULE_NAMES] for one in rules], dtype=torch.float64, device=device
            ),
            **whole,
        )

    @classmethod
    def together(cls, parts: Sequence[SlotColumns], width: int | None = None) -> SlotColumns:
        """Columns of all networks of `parts`, each of one row: copies, padded to the most slots or to `width`."""
        device = parts[0].present.device if parts else "cpu"
        joined = cls.empty([part.present.shape[1] for part in parts], [Rules()] * len(parts), device, width)
        for i, part in enumerate(parts):
            own = joined.row(i, part.present.shape[1])
            for name in COLUMNS:
                getattr(own, name).copy_(getattr(part, name))
        return joined

    def row(self, network: int, slots: int) -> SlotColumns:
        """One network's own columns [1, slots], in the same memory."""
        cut = {name: getattr(self, name)[network : network + 1] for name in COLUMNS}
        return SlotColumns(**{name: t if name == "rules" else t[:, :slots] for name, t in cut.items()})

    def clone(self) -> SlotColumns:
        return SlotColumns(**{name: getattr(self, name).clone() for name in COLUMNS})

    def select(self, networks: Tensor) -> SlotColumns:
        """Copies of some rows."""
        return SlotColumns(**{name: getattr(self, name)[networks] for name in COLUMNS})

    # -- what is so ---------------------------------------------------------------------------------------------------

    def rule(self, name: str) -> Tensor:
        """[N, 1]"""
        return self.rules[:, RULE_NAMES.index(name), None]

    def within(self, stages: Iterable[Stage]) -> Tensor:
        """bool: the slot is in one of these stages."""
        return _table(frozenset(stages), self.stage.device)[self.stage]

    @property
    def shadow_points(self) -> Tensor:
        return self.shadow[..., 0]

    @property
    def contribution_points(self) -> Tensor:
        return self.contribution[..., 0]

    @property
    def prunable(self) -> Tensor:
        return self.within(LIVE) & (self.age >= self.rule("prune_age")) & ~self.retiring

    @property
    def fossilizable(self) -> Tensor:
        return (self.stage == Stage.HOLDING) & self.passes(Stage.FOSSILIZED)

    def passes(self, target: Stage) -> Tensor:
        """bool: every criterion of the gate to `target` is met."""
        passed = torch.ones_like(self.retiring)
        for criterion in GATES[target]:
            value = getattr(self, criterion.column)
            limit = self.rule(criterion.limit) if isinstance(criterion.limit, str) else criterion.limit
            passed &= value > limit if criterion.above else value >= limit
        return passed

    # -- what a controller may do -------------------------------------------------------------------------------------

    def germinate(self, where: Tensor, seed: Tensor, blueprint: Tensor, blend: Tensor, size: Tensor) -> None:
        """Plant seeds where `where` [N, S] is true; the others are [N, 1]."""
        self._enter(where, Stage.GERMINATED)
        for column, value in (("seed", seed), ("blueprint", blueprint), ("blend", blend), ("size", size)):
            self._set(column, where, value)

    def prune(self, where: Tensor, *, at_once: bool = False) -> None:
        """Remove seeds: over a ramp where the host relies on them, else now. `at_once` is for emergencies."""
        out = torch.zeros_like(where) if at_once else where & (self.alpha != 0.0)
        self._remove(where & ~out)
        self._set("ramp_from", out, self.alpha)
        self._enter(out & (self.stage == Stage.HOLDING), Stage.BLENDING)
        self.retiring |= out
        self._set("dwell", out, 0)
        self._ramp_out(out)

    def fossilize(self, where: Tensor) -> None:
        self._enter(where, Stage.FOSSILIZED)

    # -- what happens by itself ---------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self._enter(self.stage == Stage.GERMINATED, Stage.TRAINING)

    def measure(self, gradient: Tensor, shadow: Tensor, contribution: Tensor) -> None:
        """What the epoch that ends now has shown. NaN keeps the last value; of a contrast, NaN as its error does."""
        self._set("gradient", ~gradient.isnan(), gradient)
        for name, new in (("shadow", shadow), ("contribution", contribution)):
            known = ~new[..., -1].isnan()
            old = getattr(self, name)
            old.copy_(torch.where(known[..., None], new, old))
            self._set("measured_age", known, self.age + 1)

    def end_epoch(self, networks: Tensor | None = None) -> None:
        """Count the epoch, move alpha, and take every advance whose gate passes; `networks` [N] leaves some out."""
        counted = self.stage != Stage.DORMANT
        if networks is not None:
            counted &= networks[:, None]
        self.age += counted
        self.dwell += counted
        at = {stage: counted & (self.stage == stage) for stage in Stage if stage is not Stage.DORMANT}
        retiring = at[Stage.BLENDING] & self.retiring
        gone = retiring & (self.dwell >= self.rule("ramp_out_epochs"))
        joining = at[Stage.BLENDING] & ~retiring
        held = joining & self.passes(Stage.HOLDING)
        begun = at[Stage.TRAINING] & self.passes(Stage.BLENDING)
        rested = at[Stage.EMBARGOED] & (self.dwell >= self.rule("embargo_epochs"))
        self._ramp_out(retiring & ~gone)
        self._remove(gone)
        self._enter(held, Stage.HOLDING)
        self._enter(begun, Stage.BLENDING)
        self._ramp_up((joining & ~held) | begun)
        self._enter(at[Stage.PRUNED], Stage.EMBARGOED)
        self._enter(rested, Stage.RESETTING)
        self._clear(at[Stage.RESETTING])
        self._enter(at[Stage.RESETTING], Stage.DORMANT)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _set(self, column: str, where: Tensor, value: Tensor | float) -> None:
        old = getattr(self, column)
        old.copy_(torch.where(where, value, old))

    def _enter(self, where: Tensor, target: Stage) -> None:
        self._set("stayed", where, self.dwell)
        self._set("stage", where, int(target))
        self._set("dwell", where, 0)

    def _ramp_up(self, where: Tensor) -> None:
        """Alpha of the next epoch: exactly 1 at the ramp's end, for every blend."""
        way = (self.dwell + 1) / self.rule("blending_epochs")
        edge = 1.0 / (1.0 + math.exp(RAMP_STEEPNESS / 2))
        sigmoid = (torch.sigmoid(RAMP_STEEPNESS * (way - 0.5)) - edge) / (1.0 - 2.0 * edge)
        alpha = torch.where(self.blend == _SIGMOID, sigmoid, way).clamp(min=0.0)
        self._set("alpha", where, torch.where(way >= 1.0, 1.0, alpha))

    def _ramp_out(self, where: Tensor) -> None:
        steps = self.rule("ramp_out_epochs")
        self._set("alpha", where, self.ramp_from * (steps - self.dwell) / (steps + 1))

    def _remove(self, where: Tensor) -> None:
        self._enter(where, Stage.PRUNED)
        self.retiring &= ~where
        self.pruned += where
        for column, value in (("alpha", 0.0), ("size", 0), ("blueprint", -1), ("blend", -1)):
            self._set(column, where, value)

    def _clear(self, where: Tensor) -> None:
        """An empty slot has nothing of the seed that was there."""
        for column, value in (("age", 0), ("measured_age", 0), ("gradient", math.nan)):
            self._set(column, where, value)
        for contrast in (self.shadow, self.contribution):
            contrast.copy_(torch.where(where[..., None], math.nan, contrast))


COLUMNS = tuple(field.name for field in fields(SlotColumns))


@cache
def _table(stages: frozenset[Stage], device: torch.device) -> Tensor:
    return torch.tensor([stage in stages for stage in Stage], device=device)
