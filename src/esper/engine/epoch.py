"""One epoch of N networks as columns: what was done, what was trained, what was measured, what was undone.

Every engine gives these; per-network engines fill them from their records, the stacked engine computes them in place.
Rows that were not played are NaN, -1 or False. NaN is what was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class EpochColumns:
    """Columns of networks are [N], those of slots [N, S]; numbers are float64."""

    played: Tensor
    """bool"""
    op: Tensor
    """int64: an `Op`, -1 where nothing was played. What was asked for; `changed` says whether it happened."""
    slot: Tensor
    """int64: 0 where the operation uses none; so are the next two."""
    blueprint: Tensor
    """int64"""
    blend: Tensor
    """int64"""
    changed: Tensor
    """bool: the action had an effect."""
    train_loss: Tensor
    """Mean over the epoch's updates."""
    host_gradient: Tensor
    """Norm at the last update."""
    seed_gradient: Tensor
    """[N, S] root-mean-square gradient of the seed's parameters at the last update."""
    accuracy: Tensor
    """Of the validation set, in percent, at the end of the epoch; after a rollback, of the restored network."""
    loss: Tensor
    """The same of the validation loss."""
    shadow: Tensor
    """[N, S, 3] shadow benefit as measured in this very epoch, in the order of `slot_columns.CONTRAST`."""
    contribution: Tensor
    """[N, S, 3] the same of the contribution."""
    stage: Tensor
    """[N, S] int64: of each slot while the epoch was trained."""
    alpha: Tensor
    """[N, S] while the epoch was trained and measured."""
    parameters: Tensor
    """Size of the network that was measured."""
    fault: Tensor
    """int64: why the governor undid the epoch, index into `governor.FAULTS`; -1 for a healthy one."""
    fault_seen: Tensor
    """The loss that was judged; NaN for a healthy epoch."""
    fault_limit: Tensor
    """The loss from which on this is a fault."""

    @property
    def undone(self) -> Tensor:
        """[N] bool"""
        return self.fault >= 0
