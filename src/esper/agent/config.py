"""The agent's settings and named constants."""

from __future__ import annotations

from dataclasses import dataclass

from esper.actions import HEAD_NAMES
from esper.config import (
    ABOVE_0,
    AT_LEAST_0,
    SHARE,
    WHOLE_AT_LEAST_0,
    WHOLE_AT_LEAST_1,
    WITHIN_0_AND_1,
    check_number,
    check_ranges,
    or_none,
)
from esper.env.reward import DISCOUNT

ADAM_EPSILON = 1e-5
KL_STOP_FACTOR = 1.5
"""The update stops before a step whose KL exceeds this multiple of target_kl."""
LEAST_ADVANTAGE_STD = 1e-3
"""In reward units (percentage points): below it a rollout's advantages are noise."""
FIRST_RATIO_TOLERANCE = 1e-5
"""Before the first step of an update |ratio − 1| must be below this (times |log-probability| where that is above 1)."""
FIRST_VALUE_TOLERANCE = 1e-2
"""The same for values, in return-stds: looser, because a value of 100 ± 0.01 has few digits left in float32."""
LEAST_LIVE = 1e-6
"""A head whose expected live steps in a minibatch are fewer has no entropy to speak of."""
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before exp: e^20 is far outside any clip range and far inside float32."""


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """How the agent learns. The network's shape is in `NetworkConfig`."""

    learning_rate: float = 3e-4
    """Adam's step size."""
    learning_rate_end: float | None = None
    """Where the step size arrives, linearly, after `anneal_updates`; None keeps it."""
    discount: float = DISCOUNT
    """γ. The shaping of the reward uses the same one."""
    gae_decay: float = 0.97
    """λ of generalised advantage estimation."""
    epochs: int = 4
    """Passes over each rollout; every pass replays the rows from their first state, so several are safe."""
    minibatches: int = 4
    """Parts that each pass cuts the (permuted) rows into; 1 is the whole rollout at once."""
    siblings: int = 1
    """Rows that play the same problem, next to each other: their mean advantage is what each is measured against."""
    clip: float = 0.2
    """Ratios are clipped to 1 ± this, per head."""
    rare_head_share: float = 0.25
    """A head's loss is the mean over the steps where it took effect, their count taken as at least this share of all
    steps: a mean over three steps must not outweigh a hundred decisions of the op head (measured, docs/agent.md)."""
    target_kl: float | None = 0.02
    """Stop before a step beyond 1.5 × this; None never stops."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    huber_delta: float | None = 1.0
    """Value errors beyond this many return-stds count linearly, which bounds their gradient; None is squared error."""
    value_clip: float | None = 10.0
    """Range, in return-stds, in which an update may move a value before the pessimistic loss; None turns it off."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus, whose size is 1 for a uniform policy whatever the number of heads."""
    entropy_coefficient_end: float | None = None
    """Where the coefficient arrives, linearly, after `anneal_updates`; None keeps it."""
    anneal_updates: int = 0
    """Updates over which step size and entropy coefficient move."""
    head_entropy_weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Relative weight of slot, blueprint, blend and op in the entropy bonus."""
    teacher_kl: float = 0.0
    """Weight of KL(teacher ‖ policy) in the first update of an agent that has a teacher."""
    teacher_updates: int = 20
    """Updates over which that weight falls to 0, linearly."""
    max_grad_norm: float = 0.5
    """Global gradient norm; logged before clipping, per head."""
    weight_decay: float = 0.0
    """On the value head's weights only."""
    value_momentum: float | None = 0.9
    """How much of the return statistics survives an update; None averages over the whole run."""
    chunk_rows: int | None = None
    """Evaluate minibatches in parts of so many rows, adding up gradients: less memory, same result."""
    validate_masks: bool = True
    """Check every mask while acting; costs a device synchronisation a step."""
    compile: bool = False
    """torch.compile the network (mode "default", dynamic shapes, graph breaks allowed at the LSTM). What cannot be
    compiled runs as it is, and the run's record says why."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if len(self.head_entropy_weights) != len(HEAD_NAMES):
            raise ValueError(f"head_entropy_weights must be four numbers, not {self.head_entropy_weights!r}")
        for weight in self.head_entropy_weights:
            check_number("head_entropy_weights", weight, AT_LEAST_0)
        if not any(self.head_entropy_weights):
            raise ValueError("head_entropy_weights must have one of them above 0; entropy_coefficient = 0 is no bonus")
        ends = {name: getattr(self, name) for name in ("learning_rate_end", "entropy_coefficient_end")}
        for name, end in ends.items():
            if end is not None and self.anneal_updates == 0:
                raise ValueError(f"{name} is never reached: set anneal_updates, the updates that it takes to get there")
        if self.anneal_updates > 0 and set(ends.values()) == {None}:
            raise ValueError(f"anneal_updates = {self.anneal_updates} anneals nothing: set {' or '.join(ends)}")

    def entropy_coefficient_at(self, update: int) -> float:
        """For update number `update`, counted from 1."""
        return self._annealed(self.entropy_coefficient, self.entropy_coefficient_end, update)

    def learning_rate_at(self, update: int) -> float:
        return self._annealed(self.learning_rate, self.learning_rate_end, update)

    def teacher_kl_at(self, update: int) -> float:
        return self.teacher_kl * max(0.0, 1.0 - (update - 1) / self.teacher_updates)

    def _annealed(self, start: float, end: float | None, update: int) -> float:
        if end is None:
            return start
        return start + min(1.0, (update - 1) / self.anneal_updates) * (end - start)


_RANGES = {
    "learning_rate": AT_LEAST_0,
    "discount": SHARE,
    "gae_decay": SHARE,
    "epochs": WHOLE_AT_LEAST_1,
    "minibatches": WHOLE_AT_LEAST_1,
    "siblings": WHOLE_AT_LEAST_1,
    "clip": ABOVE_0,
    "rare_head_share": SHARE,
    "value_coefficient": AT_LEAST_0,
    "entropy_coefficient": AT_LEAST_0,
    "anneal_updates": WHOLE_AT_LEAST_0,
    "teacher_kl": AT_LEAST_0,
    "teacher_updates": WHOLE_AT_LEAST_1,
    "max_grad_norm": ABOVE_0,  # below 0 the clipper would turn every gradient round
    "weight_decay": AT_LEAST_0,
    "learning_rate_end": or_none(AT_LEAST_0),
    "target_kl": or_none(ABOVE_0),
    "huber_delta": or_none(ABOVE_0),
    "value_clip": or_none(ABOVE_0),
    "entropy_coefficient_end": or_none(AT_LEAST_0),
    "value_momentum": or_none(WITHIN_0_AND_1),
    "chunk_rows": or_none(WHOLE_AT_LEAST_1),
}
