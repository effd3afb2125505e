"""What an update reports: one table of named numbers, each with its meaning and its formula; a new metric is one entry.

A formula reads one of five things (`Metric`). What is on the device is evaluated there: the few numbers that decide
about a step cross to the host once a minibatch (`deciding_numbers`), all others once an update (`collect`). Nothing
here changes what is learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES
from esper.agent.config import LEAST_LIVE
from esper.agent.diagnostics import NumericalStabilityReport, RatioExplosionDiagnostic
from esper.policy.network import RecurrentState
from esper.telemetry.records import Event

if TYPE_CHECKING:
    from esper.agent.update import Batch, EvaluatedChunk

HEADS = len(HEAD_NAMES)
GRADIENT_GROUPS = (*HEAD_NAMES, "value", "trunk")
GRADIENT_NORMS = "gradient_norms"
"""Of one minibatch, [len(GRADIENT_GROUPS)] before clipping: beside the metrics' own entries, which derive from it."""


# -- an update as its metrics see it -----------------------------------------------------------------------------------


@dataclass(slots=True)
class UpdateRecord:
    """What `ppo_update` notes while it goes on: plain numbers, and tensors that stay on the device until `collect`."""

    update: int
    entropy_coefficient: float
    learning_rate: float
    max_grad_norm: float
    epochs: int = 0
    optimizer_steps: int = 0
    skipped: int = 0
    stopped_by_kl: bool = False
    seconds: float = 0.0
    minibatches: list[dict[str, Tensor]] = field(default_factory=list)
    """By metric, with GRADIENT_NORMS. A few dozen numbers each; epochs × minibatches, so bounded."""
    explosion: RatioExplosionDiagnostic | None = None
    """The worst of all minibatches."""
    instability: NumericalStabilityReport | None = None
    """Of the first minibatch that was skipped."""
    norms: Tensor = field(default_factory=lambda: torch.zeros(0, len(GRADIENT_GROUPS)))
    """[M, len(GRADIENT_GROUPS)] on the host, once collected."""

    @property
    def total_norms(self) -> Tensor:
        """[M], on the host."""
        return self.norms.square().sum(1).sqrt()

    def norm(self, group: str) -> Tensor:
        return self.norms[:, GRADIENT_GROUPS.index(group)].mean()


class UpdateMetrics(dict[str, float]):
    """Every number of an update by its logged name (`head/…` of METRICS once for each head), and its diagnostics."""

    explosion: RatioExplosionDiagnostic | None = None
    instability: NumericalStabilityReport | None = None

    def events(self, update: int) -> list[Event]:
        """The diagnostics, for the record of a run."""
        return [found.event(update) for found in (self.explosion, self.instability) if found is not None]


# -- the table ---------------------------------------------------------------------------------------------------------


def explained_variance(returns: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """1 − Var(returns − value) / Var(returns) over valid steps; 0 when the returns do not vary."""
    target, error = returns[valid], (returns - value)[valid]
    spread = target.var(correction=0)
    share = 1.0 - error.var(correction=0) / spread.clamp(min=1e-8)
    return torch.where(spread > 1e-8, share, torch.zeros_like(share))


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(0)


def _highest(rows: Tensor) -> Tensor:
    return rows.amax(0)


def _weighted(rows: Tensor) -> Tensor:
    """Of sums and their weights, [M, 2, heads]: one mean over all minibatches, 0 where nothing has weight.

    The mean of the minibatches' own means would take one in which a head has no step for a 0.
    """
    total, weight = rows.sum(0).unbind()
    return total / weight.clamp(min=LEAST_LIVE)


def _used(values: Mapping[str, float], name: str) -> list[tuple[float, float]]:
    """A metric of the heads that took effect, each with the share of steps on which it did."""
    pairs = [(values[f"{head}/{name}"], values[f"{head}/live_fraction"]) for head in HEAD_NAMES]
    return [(value, share) for value, share in pairs if share > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a logged number means and how it is computed: exactly one formula. One of `head/…` gives a number a head."""

    meaning: str
    part: Callable[[EvaluatedChunk], Tensor] | None = None
    """Of some rows of a minibatch, as their share of the whole minibatch's number."""
    parts: Callable[[Tensor, Tensor], Tensor] = torch.add
    """How the numbers of two parts become one."""
    over: Callable[[Tensor], Tensor] = _mean
    """From the numbers of all minibatches, [M, …] on the host, to the update's."""
    rollout: Callable[[Batch], Tensor] | None = None
    """Of the rollout before advantages and values are normalised."""
    state: Callable[[RecurrentState], Tensor] | None = None
    """Of the recurrent state after the last step; nothing is logged where there is none."""
    record: Callable[[UpdateRecord], float | Tensor] | None = None
    """Of the update, on the host."""
    derived: Callable[[Mapping[str, float]], float] | None = None
    """Of all those above, by logged name."""


METRICS = {
    "update": Metric(
        meaning="number of this update, counted from 1; an update that the KL stop cut short counts",
        record=lambda u: u.update,
    ),
    "steps": Metric(meaning="valid environment steps in the rollout", rollout=lambda b: b.valid.sum()),
    "epochs": Metric(meaning="passes over the rollout that were begun", record=lambda u: u.epochs),
    "minibatches": Metric(
        meaning="minibatches that were evaluated, including one that the KL stop rejected",
        record=lambda u: len(u.minibatches),
    ),
    "optimizer_steps": Metric(meaning="gradient steps really taken", record=lambda u: u.optimizer_steps),
    "skipped": Metric(
        meaning="minibatches skipped because loss or gradient was not finite", record=lambda u: u.skipped
    ),
    "stopped_by_kl": Metric(
        meaning="1 if the KL of a minibatch exceeded 1.5 × target_kl, tested before its step",
        record=lambda u: u.stopped_by_kl,
    ),
    "policy_loss": Metric(
        meaning="clipped surrogate, per head a mean over the steps where it took effect, summed over heads",
        part=lambda p: p.policy_loss,
    ),
    "value_loss": Metric(
        meaning="Huber (or squared) error of the normalised value, clipped form where configured",
        part=lambda p: p.value_loss,
    ),
    "entropy_bonus": Metric(
        meaning="weighted mean over heads of their normalised entropy where live, in [0, 1]",
        part=lambda p: p.entropy_bonus,
    ),
    "teacher_kl": Metric(
        meaning="exact KL(teacher ‖ current) of whole decisions; 0 without a teacher, or once its weight is 0",
        part=lambda p: p.teacher_kl,
    ),
    "entropy": Metric(
        meaning="entropy of whole decisions in nats, exact by the chain rule",
        part=lambda p: p.mean(p.out.policy.entropy().sum(-1)),
    ),
    "kl": Metric(
        meaning="exact KL(rollout policy ‖ current) of whole decisions by the chain rule, mean over minibatches",
        derived=lambda values: sum(values[f"{head}/kl"] for head in HEAD_NAMES),
    ),
    "kl_max": Metric(meaning="the same, highest minibatch", part=lambda p: p.kl.sum(), over=_highest),
    "approximate_kl": Metric(
        meaning="mean of (r − 1) − log r with the joint ratio r",
        part=lambda p: p.mean(p.joint_ratio - 1.0 - p.log_ratio.sum(-1)),
    ),
    "effective_sample_size": Metric(
        meaning="(Σr)² / (n·Σr²) of the joint ratio; 1 is on-policy",
        part=lambda p: p.mean(torch.stack((p.joint_ratio, p.joint_ratio.square()), dim=-1)),
        over=lambda rows: (rows[:, 0].square() / rows[:, 1].clamp(min=1e-12)).mean(),
    ),
    "clip_fraction": Metric(
        meaning="share of (step, head) pairs that took effect whose ratio is outside 1 ± clip",
        derived=lambda values: (
            sum(clipped * share for clipped, share in _used(values, "clip_fraction"))
            / (sum(share for _, share in _used(values, "clip_fraction")) or 1.0)
        ),
    ),
    "ratio_max": Metric(
        meaning="highest ratio of any head",
        derived=lambda values: max((ratio for ratio, _ in _used(values, "ratio_max")), default=1.0),
    ),
    "ratio_min": Metric(
        meaning="lowest ratio of any head",
        derived=lambda values: min((ratio for ratio, _ in _used(values, "ratio_min")), default=1.0),
    ),
    "first_ratio_gap": Metric(
        meaning="largest |ratio − 1| / max(1, |log-probability|) before the first step; must be below 1e-5",
        # A log-probability of −12 has a rounding error twelve times that of −1: the gap is relative to its size.
        part=lambda p: (torch.expm1(p.log_ratio).abs() / p.batch.log_prob.abs().clamp(min=1.0)).amax(),
        parts=torch.maximum,
        over=lambda rows: rows[0],
    ),
    "first_value_gap": Metric(
        meaning="largest |value − value of the rollout| in standard deviations of returns before the first step",
        part=lambda p: torch.where(p.batch.valid, p.out.value - p.batch.value, 0.0).abs().amax(),
        parts=torch.maximum,
        over=lambda rows: rows[0],
    ),
    "explained_variance": Metric(
        meaning="1 − Var(return − value) / Var(return) of the rollout's own values",
        rollout=lambda b: explained_variance(b.returns, b.value, b.valid),
    ),
    "reward_mean": Metric(meaning="mean reward per step", rollout=lambda b: b.reward[b.valid].mean()),
    "return_mean": Metric(
        meaning="mean of the λ-returns, in reward units", rollout=lambda b: b.returns[b.valid].mean()
    ),
    "return_std": Metric(meaning="their standard deviation", rollout=lambda b: b.returns[b.valid].std(correction=0)),
    "value_mean": Metric(
        meaning="mean value during the rollout, in reward units", rollout=lambda b: b.value[b.valid].mean()
    ),
    "advantage_mean": Metric(
        meaning="mean advantage before normalisation", rollout=lambda b: b.advantage[b.valid].double().mean()
    ),
    "advantage_std": Metric(
        meaning="standard deviation of advantages before normalisation",
        rollout=lambda b: b.advantage[b.valid].double().std(correction=0),
    ),
    "gradient_norm": Metric(
        meaning="global gradient norm before clipping, mean over minibatches: the number that clipping uses",
        record=lambda u: u.total_norms.mean(),
    ),
    "gradient_norm_max": Metric(meaning="the same, highest minibatch", record=lambda u: u.total_norms.max()),
    "gradient_clipped": Metric(
        meaning="share of minibatches whose gradient was clipped",
        record=lambda u: (u.total_norms > u.max_grad_norm).double().mean(),
    ),
    "value_gradient_norm": Metric(
        meaning="norm of the value head's gradient before clipping", record=lambda u: u.norm("value")
    ),
    "trunk_gradient_norm": Metric(
        meaning="norm of the shared trunk's gradient before clipping", record=lambda u: u.norm("trunk")
    ),
    "entropy_coefficient": Metric(
        meaning="weight of the entropy bonus in this update", record=lambda u: u.entropy_coefficient
    ),
    "learning_rate": Metric(meaning="step size in this update", record=lambda u: u.learning_rate),
    "seconds": Metric(meaning="wall-clock time of the update", record=lambda u: u.seconds),
    "peak_memory": Metric(
        meaning="highest device memory during the update in bytes (CUDA; 0 elsewhere)",
        record=lambda u: _peak_memory(u.minibatches[0][GRADIENT_NORMS].device),
    ),
    "ratio_explosions": Metric(
        meaning="(step, head) pairs whose ratio left [0.1, 5] in the worst minibatch",
        record=lambda u: 0 if u.explosion is None else u.explosion.count,
    ),
    "head/entropy": Metric(
        meaning="normalised entropy of the head where it is live (used, with more than one legal choice)",
        part=lambda p: torch.stack((p.live_entropy * p.counts.live, p.counts.live * p.share)),
        over=_weighted,
    ),
    "head/kl": Metric(meaning="the head's part of `kl`", part=lambda p: p.kl),
    "head/clip_fraction": Metric(
        meaning="share of the head's effective steps whose ratio is outside 1 ± clip",
        part=lambda p: p.where_effective(((p.ratio - 1.0).abs() > p.clip).float()),
        over=_weighted,
    ),
    "head/ratio_mean": Metric(
        meaning="mean ratio on the head's effective steps, 0 if there are none",
        part=lambda p: p.where_effective(p.ratio),
        over=_weighted,
    ),
    # As log-ratios until the end. A step without effect counts as a log-ratio of 0.
    "head/ratio_max": Metric(
        meaning="its highest ratio",
        part=lambda p: p.log_ratio.amax((0, 1)),
        parts=torch.maximum,
        over=lambda rows: rows.amax(0).exp(),
    ),
    "head/ratio_min": Metric(
        meaning="its lowest ratio",
        part=lambda p: p.log_ratio.amin((0, 1)),
        parts=torch.minimum,
        over=lambda rows: rows.amin(0).exp(),
    ),
    "head/live_fraction": Metric(
        meaning="share of valid steps on which the head took effect",
        rollout=lambda b: b.policy.relevant(b.action)[b.valid].float().mean(0),
    ),
    "head/gradient_norm": Metric(
        meaning="norm of the head's gradient before clipping", record=lambda u: u.norms.mean(0)[:HEADS]
    ),
    "lstm/hidden_rms": Metric(
        meaning="root mean square of the hidden state at the end of the longest episodes",
        state=lambda s: s.hidden.square().mean().sqrt(),
    ),
    "lstm/cell_rms": Metric(meaning="the same for the cell state", state=lambda s: s.cell.square().mean().sqrt()),
    "lstm/largest": Metric(
        meaning="largest absolute entry of either", state=lambda s: torch.stack((s.hidden, s.cell)).abs().max()
    ),
    "lstm/finite": Metric(
        meaning="1 if all entries are finite", state=lambda s: torch.isfinite(torch.stack((s.hidden, s.cell))).all()
    ),
}
"""By logged name; `head/…` stands for each of HEAD_NAMES."""


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


# -- evaluating it -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    formula: Literal["part", "rollout", "state"], subject: EvaluatedChunk | Batch | RecurrentState
) -> dict[str, Tensor]:
    """The numbers of every metric with this formula, on the device."""
    formulas = ((name, getattr(metric, formula)) for name, metric in METRICS.items())
    return {name: evaluate(subject).detach() for name, evaluate in formulas if evaluate is not None}


def measure_state(state: RecurrentState | None) -> dict[str, Tensor]:
    """Of the recurrent state; nothing without one (no memory, or no step yet)."""
    return {} if state is None or state.hidden.numel() == 0 else measure("state", state)


def join_parts(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two parts of a minibatch as one."""
    return {name: METRICS[name].parts(number, other[name]) for name, number in one.items()}


def deciding_numbers(minibatch: Mapping[str, Tensor]) -> Tensor:
    """What decides about a step: highest and lowest log-ratio, the gaps of ratio and value, KL, gradient norm."""
    norm = minibatch[GRADIENT_NORMS].square().sum().sqrt()
    high, low = minibatch["head/ratio_max"].amax(), minibatch["head/ratio_min"].amin()
    return torch.stack(
        (high, low, minibatch["first_ratio_gap"], minibatch["first_value_gap"], minibatch["kl_max"], norm)
    )


def collect(record: UpdateRecord, measured: Mapping[str, Tensor]) -> UpdateMetrics:
    """All metrics of an update, with one transfer. `measured` is what `measure` gave of rollout and state."""
    on_device = {name: torch.stack([m[name] for m in record.minibatches]) for name in record.minibatches[0]}
    on_device |= measured
    flat = torch.cat([tensor.double().flatten() for tensor in on_device.values()]).cpu()
    sizes = [tensor.numel() for tensor in on_device.values()]
    numbers = {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(on_device.items(), torch.split(flat, sizes), strict=True)
    }
    record.norms = numbers.pop(GRADIENT_NORMS)
    values = UpdateMetrics()
    for name, metric in METRICS.items():
        if name in numbers:
            values |= _named(name, numbers[name] if metric.part is None else metric.over(numbers[name]))
        elif metric.record is not None:
            values |= _named(name, metric.record(record))
    values |= {name: metric.derived(values) for name, metric in METRICS.items() if metric.derived is not None}
    values.explosion, values.instability = record.explosion, record.instability
    return values


def _named(name: str, number: float | Tensor) -> dict[str, float]:
    if name.startswith("head/") and isinstance(number, Tensor):
        return {name.replace("head", head, 1): value for head, value in zip(HEAD_NAMES, number.tolist(), strict=True)}
    return {name: float(number)}
