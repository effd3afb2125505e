"""The stacked engine: N networks in a few stacks, advanced by one epoch at a time. Everything that it says is columns.

It does what `EagerEngine.step` does, for all networks at once: act, train, measure, judge, move on. All networks begin
together, so all whose episodes go on are in the same epoch. An epoch that the governor undoes ends its episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, HEADS_USED, Op
from esper.engine.epoch import EpochColumns
from esper.engine.governor_columns import GovernorColumns
from esper.engine.stacked.composition import SeedStates
from esper.engine.stacked.stack import Measured, Stack
from esper.engine.stacked.training import EpochOfUpdates, TrainedEpoch
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.lifecycle import LIVE, Rules
from esper.slot_columns import CONTRAST, SlotColumns
from esper.tasks.problems import Problems

_GATED = BLENDS.index("gated")
_LAYOUTS = tuple(LAYOUTS)


class _Results:
    """What the stacks have found in an epoch, put together: columns of all networks, NaN where none took part."""

    def __init__(self, networks: int, slots: int, device: torch.device) -> None:
        def column(*more: int) -> Tensor:
            return torch.full((networks, *more), math.nan, dtype=torch.float64, device=device)

        self.train_loss, self.host_gradient, self.seed_gradient = column(), column(), column(slots)
        self.finite = torch.ones(networks, dtype=torch.bool, device=device)
        self.accuracy, self.loss = column(), column()
        self.shadow, self.contribution = column(slots, len(CONTRAST)), column(slots, len(CONTRAST))

    def take(self, places: Tensor, trained: TrainedEpoch, measured: Measured) -> None:
        slots = trained.seed_gradient.shape[1]
        self.train_loss[places], self.host_gradient[places] = trained.loss, trained.host_gradient
        self.seed_gradient[places, :slots] = trained.seed_gradient
        self.finite[places] = trained.finite
        self.accuracy[places], self.loss[places] = measured.accuracy, measured.loss
        self.shadow[places, :slots], self.contribution[places, :slots] = measured.shadow, measured.contribution


class StackedEngine:
    """N networks; `groups` are problems of one form each, with the places of their networks among the N."""

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[int], Problems]],
        *,
        rules: Rules | None = None,
        width: int | None = None,
        dtype: torch.dtype = torch.float32,
        bf16: bool = False,
    ) -> None:
        """`width` is the number of slots that the columns have room for; None is the most that a network has."""
        self.device = groups[0][1].train_x.device
        # The dearest first: on a GPU, what is queued later runs beside it.
        groups = sorted(groups, key=lambda group: -_weight(group[1]))
        self.stacks = [Stack(problems, dtype, bf16=bf16) for _, problems in groups]
        self._places_cpu = [np.array(places) for places, _ in groups]
        self.places = [torch.from_numpy(places).to(self.device) for places in self._places_cpu]
        self.networks = sum(len(stack) for stack in self.stacks)
        slots = [0] * self.networks
        for places, problems in groups:
            for place in places:
                slots[place] = problems.form.stages
        if max(slots) > (width or max(slots)):
            raise ValueError(f"a network has {max(slots)} slots, and observations have room for {width}: raise `slots`")
        self.columns = SlotColumns.empty(slots, [rules or Rules()] * self.networks, self.device, width)
        self.width = self.columns.present.shape[1]
        self.epoch = 0
        self.born = torch.zeros(self.networks, dtype=torch.int64, device=self.device)
        self._describe()

    def _describe(self) -> None:
        """What does not change: sizes, limits, layouts."""
        n, width, names = self.networks, self.width, len(blueprint_names())
        uses = [[head in HEADS_USED[op] for head in HEAD_NAMES] for op in Op]
        self._uses = torch.tensor(uses, device=self.device)
        """[operations, heads] bool"""
        real: Any = {"dtype": torch.float64, "device": self.device}
        self.seed_sizes = torch.full((n, width, names), math.nan, **real)
        self.gate_sizes = torch.zeros((n, width), dtype=torch.int64, device=self.device)
        self.layout = torch.zeros((n, width), dtype=torch.int64, device=self.device)
        self.channels = torch.zeros((n, width), **real)
        self.position = torch.zeros((n, width), **real)
        self.host_parameters = torch.zeros(n, **real)
        self.budget = torch.zeros(n, **real)
        self.max_seeds = torch.zeros(n, **real)
        self.horizon = torch.zeros(n, dtype=torch.int64, device=self.device)
        self.classes = torch.zeros(n, dtype=torch.int64, device=self.device)
        for stack, places in zip(self.stacks, self.places, strict=True):
            problems, stages = stack.problems, stack.slots
            self.seed_sizes[places, :stages], self.gate_sizes[places, :stages] = stack.costs()
            self.layout[places, :stages] = _LAYOUTS.index(problems.form.layout)
            self.channels[places, :stages] = problems.widths.double()
            self.position[places, :stages] = torch.arange(stages, **real) / max(1, stages - 1)
            self.host_parameters[places] = stack.hosts.table.sizes.double()
            self.budget[places], self.max_seeds[places] = problems.budget.double(), problems.max_seeds.double()
            self.horizon[places] = problems.horizon
            self.classes[places] = problems.form.classes

    @property
    def costs(self) -> Tensor:
        """[N, S, B] parameters that the budget must have room for: with a gate."""
        return self.seed_sizes + self.gate_sizes[..., None]

    def begin(self) -> tuple[Tensor, Tensor]:
        """Accuracy and loss [N] of the untrained networks: what chance looks like."""
        everyone = [np.arange(len(stack)) for stack in self.stacks]
        states = self._states()
        found = [self._measure_kept(i, rows, states) for i, rows in enumerate(everyone)]
        accuracy, loss = self._unknown(), self._unknown()
        for places, measured in zip(self.places, found, strict=True):
            accuracy[places], loss[places] = measured.accuracy, measured.loss
        self.governor = GovernorColumns(accuracy, loss)
        return accuracy, loss

    # -- one epoch -----------------------------------------------------------------------------------------------------

    def step(self, actions: Tensor, allowed: Tensor, active: Tensor) -> EpochColumns:
        """Act, train, measure, move on. `actions` [N, heads]; `allowed` [N] bool: the action is legal; networks that
        are not `active` [N] stay as they are."""
        changed = self._act(actions, allowed & active)
        self.columns.begin_epoch()
        stage, alpha = self.columns.stage.clone(), self.columns.alpha.clone()
        states, on = self._states(), active.cpu().numpy()
        grows = (changed & (actions[:, HEAD_NAMES.index("op")] == Op.GERMINATE)).cpu().numpy()
        parameters = self.host_parameters + self.columns.size.sum(1)
        try:
            epochs = self._train(states, on, actions, grows)
        finally:  # also after an error: what is freed then must not be in use on another stream
            for stack in self.stacks:
                stack.join()
        results = _Results(self.networks, self.width, self.device)
        for places, _, found in epochs:
            results.take(places, *found)
        fault, seen, limit = self.governor.check(
            results.train_loss, results.finite, results.loss, results.accuracy, alpha, self.columns.seed
        )
        fault = torch.where(active, fault, -1)
        seen, limit = (torch.where(active, one, math.nan) for one in (seen, limit))
        healthy = fault < 0
        for places, epoch, _ in epochs:
            epoch.commit(healthy[places])
        self.governor.keep(healthy & active, results.train_loss, results.loss, results.accuracy)
        self._undo(fault, results)
        parameters = torch.where(healthy, parameters, self.host_parameters + self.columns.size.sum(1))
        self._move_on(results, healthy, active)
        self.epoch += 1
        used = self._uses[actions[:, HEAD_NAMES.index("op")]] & active[:, None]  # [N, heads]
        slot, blueprint, blend, op = torch.where(used, actions, 0).unbind(1)
        return EpochColumns(
            played=active,
            op=torch.where(active, op, -1),
            slot=slot,
            blueprint=blueprint,
            blend=blend,
            changed=changed,
            train_loss=results.train_loss,
            host_gradient=results.host_gradient,
            seed_gradient=results.seed_gradient,
            accuracy=results.accuracy,
            loss=results.loss,
            shadow=results.shadow,
            contribution=results.contribution,
            stage=torch.where(active[:, None], stage, -1),
            alpha=torch.where(active[:, None], alpha, math.nan),
            parameters=torch.where(active, parameters, math.nan),
            fault=fault,
            fault_seen=seen,
            fault_limit=limit,
        )

    def _train(
        self, states: SeedStates, on: NDArray[np.bool_], actions: Tensor, grows: NDArray[np.bool_]
    ) -> list[tuple[Tensor, EpochOfUpdates, tuple[TrainedEpoch, Measured]]]:
        """Plant, train and measure those that are `on` [N]: for each stack that has some, their places among the N, the
        epoch, which is not kept yet, and what was found. On a GPU all of it is queued, on the stacks' own streams."""
        epochs = []
        for i, (stack, places) in enumerate(zip(self.stacks, self.places, strict=True)):
            local = np.flatnonzero(on[self._places_cpu[i]])
            if len(local) == 0:
                continue
            rows = torch.from_numpy(local).to(self.device)
            own = states.select(self._places_cpu[i][local]).cut(stack.slots)
            with stack.own_stream():
                self._plant(i, actions, grows)
                epoch, measuring = EpochOfUpdates(stack, rows, own, self.epoch), stack.prepare(rows, own)
                epoch.run()
                found = epoch.report(), stack.measure(measuring, epoch)
            epochs.append((places[rows], epoch, found))
        return epochs

    def _act(self, actions: Tensor, allowed: Tensor) -> Tensor:
        """Carry out what is legal; [N] bool: what had an effect."""
        slot, blueprint, blend, op = actions.unbind(1)
        here = (torch.arange(self.width, device=self.device) == slot[:, None]) & allowed[:, None]  # [N, S]
        grows = allowed & (op == Op.GERMINATE)
        self.born += grows
        size = self.seed_sizes.gather(2, blueprint.clamp(min=0)[:, None, None].expand(-1, self.width, 1)).squeeze(2)
        size = size.nan_to_num(0.0).long() + torch.where(blend == _GATED, 1, 0)[:, None] * self.gate_sizes
        values = (self.born[:, None], blueprint[:, None], blend[:, None], size)
        self.columns.germinate(here & grows[:, None], *values)
        self.columns.prune(here & (op == Op.PRUNE)[:, None])
        self.columns.fossilize(here & (op == Op.FOSSILIZE)[:, None])
        return allowed & (op != Op.WAIT)

    def _plant(self, stack: int, actions: Tensor, grows: NDArray[np.bool_]) -> None:
        """Seeds of those of a stack's networks that `grows` [N] on the CPU says."""
        local = np.flatnonzero(grows[self._places_cpu[stack]])
        if len(local) == 0:
            return
        rows = torch.from_numpy(local).to(self.device)
        slot, blueprint, _, _ = actions[self.places[stack][rows]].unbind(1)
        self.stacks[stack].plant(rows, slot, blueprint, self.born[self.places[stack][rows]])

    def _undo(self, fault: Tensor, results: _Results) -> None:
        """Networks whose epoch was undone lose their unfinished seeds, and are measured as they were before it."""
        broken = fault >= 0
        found = broken.cpu().numpy()
        if not found.any():
            return
        self.columns.prune(broken[:, None] & self.columns.within(LIVE), at_once=True)
        states = self._states()
        for i, places in enumerate(self.places):
            local = np.flatnonzero(found[self._places_cpu[i]])
            if len(local):
                measured = self._measure_kept(i, local, states)
                at = places[torch.from_numpy(local).to(self.device)]
                results.accuracy[at], results.loss[at] = measured.accuracy, measured.loss
                results.shadow[at], results.contribution[at] = math.nan, math.nan

    def _move_on(self, results: _Results, healthy: Tensor, active: Tensor) -> None:
        """The end of the epoch in the columns. What was measured in an undone epoch does not count, and in a run's last
        epoch the seeds stay what they were when the network was measured."""
        gradient = torch.where((healthy & active)[:, None], results.seed_gradient, math.nan)
        self.columns.measure(gradient, results.shadow, results.contribution)
        last = self.epoch + 1 >= self.horizon
        self.columns.end_epoch(active & (~healthy | ~last))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def evaluate_test(self) -> tuple[Tensor, Tensor]:
        """Accuracy and loss [N] on the test sets. For judging only: nothing that learns may look at it."""
        accuracy, loss, states = self._unknown(), self._unknown(), self._states()
        for i, places in enumerate(self.places):
            measured = self._measure_kept(i, np.arange(len(places)), states, test=True)
            accuracy[places], loss[places] = measured.accuracy, measured.loss
        return accuracy, loss

    def _measure_kept(self, stack: int, local: np.ndarray, states: SeedStates, *, test: bool = False) -> Measured:
        """Networks as they are kept, without contrasts."""
        own = states.select(self._places_cpu[stack][local]).cut(self.stacks[stack].slots)
        rows = torch.from_numpy(local).to(self.device)
        return self.stacks[stack].measure(self.stacks[stack].prepare(rows, own, contrasts=False), test=test)

    def _states(self) -> SeedStates:
        """Of all networks: one transfer."""
        c = self.columns
        together = torch.stack([c.stage.double(), c.blueprint.double(), c.blend.double(), c.alpha])
        stage, blueprint, blend, alpha = together.cpu().numpy()
        return SeedStates(stage.astype(np.int64), blueprint.astype(np.int64), blend == _GATED, alpha)

    def _unknown(self) -> Tensor:
        """[N] NaN"""
        return torch.full((self.networks,), math.nan, dtype=torch.float64, device=self.device)


def _weight(problems: Problems) -> int:
    """How much an epoch of some problems costs, roughly: numbers in the first stage's activations."""
    return int(problems.sizes.prod(1).sum() * problems.widths[:, 0].max())
