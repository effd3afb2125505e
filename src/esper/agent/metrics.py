"""What an update reports: per-minibatch numbers as tensors on the device, the aggregate as plain floats.

`MinibatchMetrics` exists a few times inside an update (epochs × minibatches, so bounded); `UpdateMetrics` is what a
caller gets. `GLOSSARY` explains every name that `UpdateMetrics.flat` logs; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES
from esper.agent.diagnostics import LSTMHealth, RatioExplosionDiagnostic

HEADS = len(HEAD_NAMES)
GRADIENT_GROUPS = (*HEAD_NAMES, "value", "trunk")
SUMS = (
    "policy_loss",
    "value_loss",
    "entropy_bonus",
    "teacher_kl",
    "entropy",
    "approximate_kl",
    "weight",
    "weight_squared",
)
HEAD_SUMS = ("kl", "clip_fraction", "ratio_mean", "entropy")
ROLLOUT = (
    "steps",
    "reward_mean",
    "return_mean",
    "return_std",
    "value_mean",
    "explained_variance",
    "advantage_mean",
    "advantage_std",
)


@dataclass(frozen=True, slots=True)
class ChunkMetrics:
    """Of a part of a minibatch: sums add up over the parts, highest values compare."""

    sums: Tensor
    """[len(SUMS) + HEADS · len(HEAD_SUMS)], already divided by the whole minibatch's counts."""
    highest: Tensor
    """[2·HEADS + 2]: per head the highest log-ratio and the highest negative log-ratio (both at least 0 if a step is
    without effect), then the largest |ratio − 1| (relative to the log-probability) and |value − old value|."""
    log_ratio: Tensor
    """[n, T, heads], for the explosion diagnostic."""

    def __add__(self, other: ChunkMetrics) -> ChunkMetrics:
        return ChunkMetrics(
            self.sums + other.sums,
            torch.maximum(self.highest, other.highest),
            torch.cat((self.log_ratio, other.log_ratio)),
        )


@dataclass(frozen=True, slots=True)
class MinibatchMetrics:
    """Of one minibatch, still on the device; a few dozen numbers each."""

    sums: Tensor
    highest: Tensor
    gradient_norms: Tensor
    """[len(GRADIENT_GROUPS)] before clipping."""

    @property
    def kl(self) -> Tensor:
        """Exact KL of whole decisions: the sum over heads, each already weighed by how often it is used."""
        at = len(SUMS) + HEAD_SUMS.index("kl") * HEADS
        return self.sums[at : at + HEADS].sum()

    @property
    def gradient_norm(self) -> Tensor:
        return self.gradient_norms.square().sum().sqrt()

    def decision(self) -> Tensor:
        """What decides about the step: highest log-ratio, highest negative one, the two gaps, KL, gradient norm."""
        high, low = self.highest[:HEADS].amax(), self.highest[HEADS : 2 * HEADS].amax()
        return torch.stack((high, low, self.highest[-2], self.highest[-1], self.kl, self.gradient_norm))

    def vector(self) -> Tensor:
        return torch.cat((self.sums, self.highest, self.gradient_norms))


@dataclass(frozen=True, slots=True)
class HeadMetrics:
    """Of one head. Means over minibatches, extremes over all of them."""

    entropy: float
    kl: float
    clip_fraction: float
    ratio_mean: float
    ratio_max: float
    ratio_min: float
    live_fraction: float
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Everything one update reports. See GLOSSARY."""

    update: int
    steps: int
    epochs: int
    minibatches: int
    optimizer_steps: int
    skipped: int
    stopped_by_kl: bool
    policy_loss: float
    value_loss: float
    entropy_bonus: float
    teacher_kl: float
    entropy: float
    kl: float
    kl_max: float
    approximate_kl: float
    effective_sample_size: float
    clip_fraction: float
    ratio_max: float
    ratio_min: float
    first_ratio_gap: float
    explained_variance: float
    reward_mean: float
    return_mean: float
    return_std: float
    value_mean: float
    advantage_mean: float
    advantage_std: float
    gradient_norm: float
    gradient_norm_max: float
    gradient_clipped: float
    value_gradient_norm: float
    trunk_gradient_norm: float
    entropy_coefficient: float
    learning_rate: float
    seconds: float
    peak_memory: int
    heads: dict[str, HeadMetrics]
    lstm: LSTMHealth | None
    explosion: RatioExplosionDiagnostic | None

    @property
    def worst_head(self) -> str:
        """The head whose ratio strayed furthest from 1, as a factor."""
        return max(self.heads, key=lambda h: max(self.heads[h].ratio_max, 1.0 / max(self.heads[h].ratio_min, 1e-30)))

    def flat(self) -> dict[str, float]:
        """Every number by its logged name; the names are the keys of GLOSSARY, with a head's own under `head/name`."""
        values = asdict(self)
        heads, lstm = values.pop("heads"), values.pop("lstm")
        values["ratio_explosions"] = (values.pop("explosion") or {"count": 0})["count"]
        named = {name: float(value) for name, value in values.items()}
        for head, metrics in heads.items():
            named |= {f"{head}/{name}": float(value) for name, value in metrics.items()}
        if lstm is not None:
            named |= {f"lstm/{name}": float(value) for name, value in lstm.items()}
        return named


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """What the update knows on the host without asking the device."""

    update: int
    epochs: int
    optimizer_steps: int
    skipped: int
    stopped_by_kl: bool
    first_ratio_gap: float
    entropy_coefficient: float
    learning_rate: float
    max_grad_norm: float
    seconds: float
    explosion: RatioExplosionDiagnostic | None


def collect(
    facts: UpdateFacts,
    minibatches: Sequence[MinibatchMetrics],
    rollout: Tensor,
    live: Tensor,
    lstm: Tensor | None,
    peak_memory: int,
) -> UpdateMetrics:
    """The aggregate, with one transfer for all of it.

    `rollout` [len(ROLLOUT)] and `live` [HEADS] describe the batch; `lstm` is LSTMHealth.measure or None.
    """
    parts = [rollout, live] + ([] if lstm is None else [lstm]) + [m.vector() for m in minibatches]
    numbers = torch.cat([part.double() for part in parts]).cpu()
    batch, live_share, rest = numbers[: len(ROLLOUT)], numbers[len(ROLLOUT) :][:HEADS], numbers[len(ROLLOUT) + HEADS :]
    health = None
    if lstm is not None:
        hidden, cell, largest, finite = rest[:4].tolist()
        health, rest = LSTMHealth(hidden, cell, largest, finite == 1.0), rest[4:]
    table = rest.view(len(minibatches), -1)  # [M, numbers of a minibatch]
    sums, head_sums, highest, norms = torch.split(
        table, [len(SUMS), HEADS * len(HEAD_SUMS), 2 * HEADS + 2, len(GRADIENT_GROUPS)], dim=1
    )
    total_norm = norms.square().sum(1).sqrt()
    kl = head_sums.view(-1, len(HEAD_SUMS), HEADS)[:, HEAD_SUMS.index("kl")].sum(1)
    mean = dict(zip(SUMS, sums.mean(0).tolist(), strict=True))
    described = dict(zip(ROLLOUT, batch.tolist(), strict=True))
    heads = _heads(head_sums, highest, live_share, norms)
    used = [heads[h] for h in HEAD_NAMES if heads[h].live_fraction > 0]
    weight = sum(h.live_fraction for h in used) or 1.0
    return UpdateMetrics(
        update=facts.update,
        steps=int(described.pop("steps")),
        **described,
        epochs=facts.epochs,
        minibatches=len(minibatches),
        optimizer_steps=facts.optimizer_steps,
        skipped=facts.skipped,
        stopped_by_kl=facts.stopped_by_kl,
        policy_loss=mean["policy_loss"],
        value_loss=mean["value_loss"],
        entropy_bonus=mean["entropy_bonus"],
        teacher_kl=mean["teacher_kl"],
        entropy=mean["entropy"],
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        approximate_kl=mean["approximate_kl"],
        effective_sample_size=float((sums[:, -2].square() / sums[:, -1].clamp(min=1e-12)).mean()),
        clip_fraction=sum(h.clip_fraction * h.live_fraction for h in used) / weight,
        ratio_max=max((h.ratio_max for h in used), default=1.0),
        ratio_min=min((h.ratio_min for h in used), default=1.0),
        first_ratio_gap=facts.first_ratio_gap,
        gradient_norm=float(total_norm.mean()),
        gradient_norm_max=float(total_norm.max()),
        gradient_clipped=float((total_norm > facts.max_grad_norm).double().mean()),
        value_gradient_norm=float(norms[:, GRADIENT_GROUPS.index("value")].mean()),
        trunk_gradient_norm=float(norms[:, GRADIENT_GROUPS.index("trunk")].mean()),
        entropy_coefficient=facts.entropy_coefficient,
        learning_rate=facts.learning_rate,
        seconds=facts.seconds,
        peak_memory=peak_memory,
        heads=heads,
        lstm=health,
        explosion=facts.explosion,
    )


def _heads(head_sums: Tensor, highest: Tensor, live: Tensor, norms: Tensor) -> dict[str, HeadMetrics]:
    means = head_sums.mean(0).view(len(HEAD_SUMS), HEADS).tolist()
    extremes = highest.max(0).values.tolist()
    norm = norms.mean(0).tolist()
    return {
        name: HeadMetrics(
            **{key: means[k][h] for k, key in enumerate(HEAD_SUMS)},
            ratio_max=exp(extremes[h]),
            ratio_min=exp(-extremes[HEADS + h]),
            live_fraction=float(live[h]),
            gradient_norm=norm[h],
        )
        for h, name in enumerate(HEAD_NAMES)
    }


GLOSSARY = {
    "update": "number of this update, counted from 1; an update that the KL stop cut short counts",
    "steps": "valid environment steps in the rollout",
    "epochs": "passes over the rollout that were begun",
    "minibatches": "minibatches that were evaluated, including one that the KL stop rejected",
    "optimizer_steps": "gradient steps really taken",
    "skipped": "minibatches skipped because loss or gradient was not finite",
    "stopped_by_kl": "1 if the KL of a minibatch exceeded 1.5 × target_kl, tested before its step",
    "policy_loss": "clipped surrogate, per head a mean over the steps where it took effect, summed over heads",
    "value_loss": "Huber (or squared) error of the normalised value, clipped form where configured",
    "entropy_bonus": "weighted mean over heads of their normalised entropy where live, in [0, 1]",
    "teacher_kl": "exact KL(teacher ‖ current) of whole decisions; 0 without a teacher, or once its weight is 0",
    "entropy": "entropy of whole decisions in nats, exact by the chain rule",
    "kl": "exact KL(rollout policy ‖ current) of whole decisions by the chain rule, mean over minibatches",
    "kl_max": "the same, highest minibatch",
    "approximate_kl": "mean of (r − 1) − log r with the joint ratio r",
    "effective_sample_size": "(Σr)² / (n·Σr²) of the joint ratio; 1 is on-policy",
    "clip_fraction": "share of (step, head) pairs that took effect whose ratio is outside 1 ± clip",
    "ratio_max": "highest ratio of any head",
    "ratio_min": "lowest ratio of any head",
    "first_ratio_gap": "largest |ratio − 1| / max(1, |log-probability|) before the first step; must be below 1e-5",
    "explained_variance": "1 − Var(return − value) / Var(return) of the rollout's own values",
    "reward_mean": "mean reward per step",
    "return_mean": "mean of the λ-returns, in reward units",
    "return_std": "their standard deviation",
    "value_mean": "mean value during the rollout, in reward units",
    "advantage_mean": "mean advantage before normalisation",
    "advantage_std": "standard deviation of advantages before normalisation",
    "gradient_norm": "global gradient norm before clipping, mean over minibatches: the number the clipper sees",
    "gradient_norm_max": "the same, highest minibatch",
    "gradient_clipped": "share of minibatches whose gradient was clipped",
    "value_gradient_norm": "norm of the value head's gradient before clipping",
    "trunk_gradient_norm": "norm of the shared trunk's gradient before clipping",
    "entropy_coefficient": "weight of the entropy bonus in this update",
    "learning_rate": "step size in this update",
    "seconds": "wall-clock time of the update",
    "peak_memory": "highest device memory during the update in bytes (CUDA; 0 elsewhere)",
    "ratio_explosions": "(step, head) pairs whose ratio left [0.1, 5] in the worst minibatch",
    "head/entropy": "normalised entropy of the head where it is live (used, with more than one legal choice)",
    "head/kl": "the head's part of `kl`",
    "head/clip_fraction": "share of the head's effective steps whose ratio is outside 1 ± clip",
    "head/ratio_mean": "mean ratio on the head's effective steps",
    "head/ratio_max": "its highest ratio",
    "head/ratio_min": "its lowest ratio",
    "head/live_fraction": "share of valid steps on which the head took effect",
    "head/gradient_norm": "norm of the head's gradient before clipping",
    "lstm/hidden_rms": "root mean square of the hidden state at the end of the rollout",
    "lstm/cell_rms": "the same for the cell state",
    "lstm/largest": "largest absolute entry of either",
    "lstm/finite": "1 if all entries are finite",
}
"""Every logged name; `head/…` stands for each of HEAD_NAMES."""
