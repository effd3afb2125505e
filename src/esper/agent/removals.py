"""Which removals a frozen policy may not choose: of seeds that clearly earn their rent.

On hosts unlike those it learned on, a policy can misjudge a price and remove what was just measured to help. By the
score that is right at most where a better seed takes the place, so it is not left to the network: the removal is
masked, and the policy chooses among the rest. Training is not masked, so a policy still learns when to remove; the
figures are in docs/controllers.md.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from esper.actions import Op
from esper.env.rent import seed_rent
from esper.env.spaces import ActionMasks
from esper.env.world import World

CLEARLY = 2.0
"""Standard errors above the rent."""


def pays(world: World) -> Tensor:
    """[N, S] bool: what the seed was last measured to add, less its rent, is clearly above 0.

    Its contribution where it takes part in the output; else its shadow benefit. What was not measured does not count.
    """
    slots = world.slots
    measured = slots.contribution.where(slots.contribution_points[..., None].isfinite(), slots.shadow)
    points, _, error = measured.unbind(-1)
    due = seed_rent(slots.size, world.host_parameters[:, None], world.rent[:, None])
    return points - due > CLEARLY * error


def without_costly_removals(masks: ActionMasks, world: World) -> ActionMasks:
    """The masks with PRUNE illegal where a seed pays."""
    slot, op = masks.slot.clone(), masks.op.clone()
    slot[:, Op.PRUNE] &= ~pays(world)
    op[:, Op.PRUNE] &= slot[:, Op.PRUNE].any(-1)
    return replace(masks, slot=slot, op=op)
