"""Two diagnostics of an update that went wrong: which ratios exploded, and where numbers stopped being finite.

They are made only when it happens, cost a few transfers to the host, and become events of the run, of the same name as
the alarm whose details they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, isfinite, isnan

import torch
from torch import Tensor, nn

from esper.actions import HEAD_NAMES
from esper.telemetry.alarms import RATIO_HIGH, RATIO_LOW
from esper.telemetry.gradients import one_device
from esper.telemetry.records import Event

MOST_EXAMPLES = 32
"""At most so many offending steps are kept: a diagnostic must not grow with the batch."""


@dataclass(frozen=True, slots=True)
class RatioExplosionDiagnostic:
    """Which steps and which head left the range of sane ratios, worst first."""

    worst_head: str
    worst_ratio: float
    count: int
    """Offending (step, head) pairs in the batch, of which at most MOST_EXAMPLES are listed."""
    rows: tuple[int, ...]
    steps: tuple[int, ...]
    heads: tuple[str, ...]
    ratios: tuple[float, ...]
    actions: tuple[tuple[int, ...], ...]
    """The whole decision at each listed step."""
    mean_log_gap: float
    largest_log_gap: float
    """|log-probability now − then| over all relevant heads."""

    @staticmethod
    def from_batch(
        log_ratio: Tensor, relevant: Tensor, action: Tensor, rows: Tensor | None = None
    ) -> RatioExplosionDiagnostic | None:
        """From [n, T, heads] log-ratios, relevance (and validity) and actions; None if all ratios are sane.

        `rows` [n] are the rollout's own numbers of the rows, where the batch is a selection of them.
        """
        ratio = log_ratio.exp()
        wild = relevant & ~((ratio <= RATIO_HIGH) & (ratio >= RATIO_LOW))  # NaN counts as wild
        where = wild.nonzero()
        if where.shape[0] == 0:
            return None
        gap = torch.nan_to_num(log_ratio.abs(), nan=torch.inf, posinf=torch.inf)
        row, step, head = where[gap[wild].argsort(descending=True)[:MOST_EXAMPLES]].unbind(1)
        ratios = ratio[row, step, head].tolist()
        heads = tuple(HEAD_NAMES[h] for h in head.tolist())
        return RatioExplosionDiagnostic(
            worst_head=heads[0],
            worst_ratio=ratios[0],
            count=where.shape[0],
            rows=tuple((row if rows is None else rows[row]).tolist()),
            steps=tuple(step.tolist()),
            heads=heads,
            ratios=tuple(ratios),
            actions=tuple(tuple(a) for a in action[row, step].tolist()),
            mean_log_gap=float(gap[relevant].mean()),
            largest_log_gap=float(gap[relevant].max()),
        )

    def event(self, update: int) -> Event:
        message = (
            f"{self.count} probability ratios left [{RATIO_LOW}, {RATIO_HIGH}] in one minibatch; the worst is "
            f"{self.worst_ratio:.3g}, of head {self.worst_head} in row {self.rows[0]} at step {self.steps[0]}, whose "
            f"decision ({', '.join(HEAD_NAMES)}) is {self.actions[0]}"
        )
        return Event("ratio_explosion", update, message, data=asdict(self))


@dataclass(frozen=True, slots=True)
class NumericalStabilityReport:
    """Where a network stopped being numbers, and how large its weights and gradients are before clipping."""

    bad_weights: tuple[str, ...]
    """Names of parameters with NaN or infinity."""
    bad_gradients: tuple[str, ...]
    largest_weight: float
    largest_gradient: float
    gradient_norm: float
    """Global norm, before clipping if called before it."""
    loss_finite: bool

    @staticmethod
    def of(network: nn.Module, loss: Tensor) -> NumericalStabilityReport:
        """With one transfer to the host. Parameters without gradient count as zero gradient."""
        names = [name for name, _ in network.named_parameters()]
        weights = [p.detach() for p in network.parameters()]
        one_device(weights)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in network.parameters()]
        rows = [torch.stack([t.abs().max() for t in tensors]) for tensors in (weights, gradients)]
        squares = torch.stack([g.square().sum() for g in gradients])
        rest = torch.stack((squares.sum().sqrt(), torch.isfinite(loss.detach()).to(squares)))
        flat = torch.cat((*rows, rest)).tolist()  # max propagates NaN and infinity
        w, g, (norm, loss_ok) = flat[: len(names)], flat[len(names) : -2], flat[-2:]
        return NumericalStabilityReport(
            bad_weights=tuple(n for n, x in zip(names, w, strict=True) if not isfinite(x)),
            bad_gradients=tuple(n for n, x in zip(names, g, strict=True) if not isfinite(x)),
            largest_weight=max(w, key=lambda x: inf if isnan(x) else x),
            largest_gradient=max(g, key=lambda x: inf if isnan(x) else x),
            gradient_norm=norm,
            loss_finite=loss_ok == 1.0,
        )

    def event(self, update: int) -> Event:
        parts = (("gradient of", self.bad_gradients), ("weights of", self.bad_weights))
        named = [f"{what} {', '.join(names[:5])}{' …' * (len(names) > 5)}" for what, names in parts if names]
        named += [] if self.loss_finite else ["the loss"]
        message = f"a minibatch was skipped; not finite: {'; '.join(named) or 'the norm of the gradient'}"
        return Event("skipped_steps", update, message, "error", data=asdict(self))
