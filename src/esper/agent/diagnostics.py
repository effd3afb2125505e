"""Health measures of the agent, and the thresholds that its alarms share. Nothing here changes what is learnt.

Each measure is a small tensor until someone wants numbers: the update collects them all and crosses to the host once.
Both directions are alarming: a ratio that explodes, and a KL of 1e-9 that says nothing is being learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.actions import HEAD_NAMES
from esper.policy.network import RecurrentState

RATIO_HIGH, RATIO_LOW = 5.0, 0.1
"""A probability ratio outside this range is an explosion."""
ENTROPY_COLLAPSED, ENTROPY_LOW = 0.1, 0.3
"""Normalised entropy of a head where it is live."""
KL_SPIKE, KL_EXTREME = 0.1, 0.5
KL_STALLED = 1e-7
"""An update that moves the policy less than this learns nothing: dead gradients read as health otherwise."""
GRADIENT_DRIFT = 0.5
"""Of a gradient norm above its moving average, relative to it."""
LSTM_RMS_LOW, LSTM_RMS_HIGH = 1e-6, 10.0
VANISHING_SHARE, EXPLODING_FACTOR = 1e-6, 100.0
"""Gradient norms below or above these multiples of the clip norm are vanishing or exploding."""
EXAMPLES = 32
"""At most so many offending steps are kept: a diagnostic must not grow with the batch."""


def explained_variance(returns: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """1 − Var(returns − value) / Var(returns) over valid steps; 0 when the returns do not vary."""
    target, error = returns[valid], (returns - value)[valid]
    spread = target.var(correction=0)
    share = 1.0 - error.var(correction=0) / spread.clamp(min=1e-8)
    return torch.where(spread > 1e-8, share, torch.zeros_like(share))


@dataclass(frozen=True, slots=True)
class LSTMHealth:
    """Size of the recurrent state over all environments."""

    hidden_rms: float
    cell_rms: float
    largest: float
    finite: bool

    @property
    def healthy(self) -> bool:
        return self.finite and all(LSTM_RMS_LOW < rms < LSTM_RMS_HIGH for rms in (self.hidden_rms, self.cell_rms))

    @staticmethod
    def measure(state: RecurrentState | None) -> Tensor | None:
        """The four numbers as one tensor; None without a state (no memory, or no step yet)."""
        if state is None or state.hidden.numel() == 0:
            return None
        both = torch.stack((state.hidden, state.cell)).flatten(1)  # [2, layers·N·hidden]
        rms = both.square().mean(1).sqrt()
        finite = torch.isfinite(both).all().to(both.dtype)
        return torch.stack((rms[0], rms[1], both.abs().max(), finite))

    @staticmethod
    def of(state: RecurrentState | None) -> LSTMHealth | None:
        """With one transfer to the host."""
        measured = LSTMHealth.measure(state)
        if measured is None:
            return None
        hidden, cell, largest, finite = measured.tolist()
        return LSTMHealth(hidden, cell, largest, finite == 1.0)


@dataclass(frozen=True, slots=True)
class RatioExplosionDiagnostic:
    """Which steps and which head left the range of sane ratios, worst first."""

    worst_head: str
    worst_ratio: float
    count: int
    """Offending (step, head) pairs in the batch, of which at most EXAMPLES are listed."""
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
        order = gap[wild].argsort(descending=True)[:EXAMPLES]
        listed = where[order]
        row, step, head = listed.unbind(1)
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

    @property
    def stable(self) -> bool:
        return self.loss_finite and not self.bad_weights and not self.bad_gradients

    @staticmethod
    def of(network: nn.Module, loss: Tensor | None = None) -> NumericalStabilityReport:
        """With one transfer to the host. Parameters without gradient count as zero gradient."""
        names = [name for name, _ in network.named_parameters()]
        weights = [p.detach() for p in network.parameters()]
        one_device(weights)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in network.parameters()]
        rows = [torch.stack([t.abs().max() for t in tensors]) for tensors in (weights, gradients)]
        squares = torch.stack([g.square().sum() for g in gradients])
        ok = torch.ones(1, device=squares.device) if loss is None else torch.isfinite(loss.detach()).float().view(1)
        flat = torch.cat((*rows, squares.sum().sqrt().view(1), ok)).tolist()  # max propagates NaN and infinity
        count = len(names)
        w, g, norm, loss_ok = flat[:count], flat[count : 2 * count], flat[-2], flat[-1]
        return NumericalStabilityReport(
            bad_weights=tuple(n for n, x in zip(names, w, strict=True) if not _finite(x)),
            bad_gradients=tuple(n for n, x in zip(names, g, strict=True) if not _finite(x)),
            largest_weight=max(w, key=_nan_last),
            largest_gradient=max(g, key=_nan_last),
            gradient_norm=norm,
            loss_finite=loss_ok == 1.0,
        )


def _finite(x: float) -> bool:
    return x - x == 0.0


def _nan_last(x: float) -> float:
    return float("inf") if x != x else x


def one_device(tensors: list[Tensor]) -> torch.device:
    """The device they share. Norms over tensors on several devices would need a transfer for each: refused."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"parameters lie on several devices ({', '.join(sorted(map(str, devices)))}): one agent lives on one"
        )
    return devices.pop()


@dataclass(frozen=True, slots=True)
class GradientLimits:
    """What counts as vanishing or exploding, in multiples of the clip norm unless given outright."""

    vanishing: float
    exploding: float

    @staticmethod
    def from_clip(
        clip: float, vanishing_share: float = VANISHING_SHARE, exploding_factor: float = EXPLODING_FACTOR
    ) -> GradientLimits:
        return GradientLimits(clip * vanishing_share, clip * exploding_factor)

    def judge(self, norm: float) -> str:
        if not _finite(norm) or norm > self.exploding:
            return "exploding"
        return "vanishing" if norm < self.vanishing else "healthy"


class GradientDrift:
    """How far a gradient norm is above its moving average, relative to that average; negative below it."""

    def __init__(self, momentum: float = 0.99) -> None:
        if not 0.0 < momentum < 1.0:
            raise ValueError(f"momentum must lie between 0 and 1, not {momentum}")
        self.momentum = momentum
        self.average: float | None = None

    def update(self, norm: float) -> float:
        """The drift of `norm` against the average so far (0 for the first), then take it in."""
        if not _finite(norm):
            raise ValueError(f"gradient norm {norm} is not finite: report it as instability, not as drift")
        if self.average is None:
            self.average = norm
            return 0.0
        drift = (norm - self.average) / (self.average + 1e-8)
        self.average = self.momentum * self.average + (1.0 - self.momentum) * norm
        return drift
