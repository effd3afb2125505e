"""The PPO update, in the order of the maths. Read `ppo_update` first, then `_losses`.

Minibatches are permutations of whole episodes. Every pass replays its episodes through the network from their first
step, so several epochs never see a stale state, and the values that clipping compares with are those of the same
replay at the weights the update began with: the first minibatch asserts it.

fp32 throughout. There is no autocast and so no gradient scaler to share or to isolate: a cached half-precision weight
once left every head of an earlier system without gradient, and this network is too small to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import isfinite, log
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from esper.agent.config import (
    FIRST_RATIO_TOLERANCE,
    FIRST_VALUE_TOLERANCE,
    KL_STOP_FACTOR,
    LEAST_ADVANTAGE_STD,
    LEAST_LIVE,
    LOG_RATIO_LIMIT,
    PPOConfig,
)
from esper.agent.diagnostics import NumericalStabilityReport, RatioExplosionDiagnostic
from esper.agent.gae import normalise_advantages
from esper.agent.metrics import GRADIENT_GROUPS, GRADIENT_NORMS, UpdateRecord, deciding_numbers, join_parts, measure
from esper.agent.normalisers import ValueNormaliser, moments
from esper.env.spaces import Observation
from esper.policy.distribution import FactoredPolicy
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput, RecurrentState
from esper.rollout.episodes import map_tensors, minibatches
from esper.telemetry.alarms import RATIO_HIGH, RATIO_LOW

Forward = Callable[..., NetworkOutput]


class RolloutMismatchError(RuntimeError):
    """Replaying the rollout does not give the probabilities or values that acting gave."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Episodes as the update reads them. Tensors start with [n, T]."""

    observation: Observation
    """As the policy saw it (normalised)."""
    policy: FactoredPolicy
    """The distributions that the actions were drawn from, and their masks."""
    action: Tensor
    log_prob: Tensor
    """[n, T, heads] recorded while acting."""
    value: Tensor
    """V while acting: in reward units, after `prepare_batch` in return-stds. So are `returns`."""
    valid: Tensor
    reward: Tensor
    advantage: Tensor
    returns: Tensor
    teacher: FactoredPolicy | None = None
    """What a teacher would have done at every step, if there is one."""

    def select(self, rows: Tensor) -> Batch:
        """The episodes that `rows` [n] names, in that order."""
        return map_tensors(self, lambda tensor: tensor[rows])

    def single_steps(self) -> Batch:
        """Every step as a row of its own, [N·T, 1, …]: shuffled minibatches for a policy without memory."""
        return map_tensors(self, lambda tensor: tensor.flatten(0, 1)[:, None])

    def chunks(self, size: int | None) -> Iterator[Batch]:
        """The rows in their order, `size` at a time; all of them if None."""
        rows = torch.arange(self.valid.shape[0], device=self.valid.device)
        if size is None or size >= rows.numel():
            yield self
            return
        for part in torch.split(rows, size):
            yield self.select(part)


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of a minibatch's means, known before its first part is evaluated."""

    steps: Tensor
    """[] valid steps."""
    effective: Tensor
    """[heads] valid steps on which the head took effect."""
    live: Tensor
    """[heads] expected valid steps on which the head is used with a choice."""


@dataclass(frozen=True, slots=True)
class EvaluatedChunk:
    """Some rows of a minibatch after their forward pass: what formulas of `metrics.METRICS` read."""

    out: NetworkOutput
    batch: Batch
    counts: Counts
    clip: float
    effective: Tensor
    """[n, T, heads]: valid steps on which the head took effect."""
    log_ratio: Tensor
    """[n, T, heads]; 0 without effect."""
    policy_loss: Tensor
    value_loss: Tensor
    entropy_bonus: Tensor
    teacher_kl: Tensor
    live_entropy: Tensor
    """[heads]"""
    kl: Tensor
    """[heads]: the head's part of KL(rollout policy ‖ current)."""

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    @property
    def joint_ratio(self) -> Tensor:
        return self.log_ratio.sum(-1).exp()

    def mean(self, x: Tensor) -> Tensor:
        """Over valid steps: [n, T, ...] -> [...]"""
        return _sum(x, self.batch.valid) / self.counts.steps

    @property
    def share(self) -> Tensor:
        """Of the minibatch's steps."""
        return self.batch.valid.sum() / self.counts.steps

    def where_effective(self, x: Tensor) -> Tensor:
        """Its sum over the steps where a head took effect, and their number: [n, T, heads] -> [2, heads]"""
        return torch.stack((_sum(x, self.effective), self.effective.sum((0, 1)).to(x.dtype)))


def prepare_batch(batch: Batch, values: ValueNormaliser, last: nn.Linear) -> tuple[Batch, dict[str, Tensor]]:
    """Normalise advantages over the rollout, and bring values and returns into the critic's units.

    Also gives the metrics of the rollout before.
    """
    valid = batch.valid
    _, mean, variance = moments(batch.advantage[..., None], valid)
    mean, std = mean.float(), variance.sqrt().float()
    seen = measure("rollout", batch)
    values.update(batch.returns, valid, last)
    ready = replace(
        batch,
        advantage=normalise_advantages(batch.advantage, valid, mean, std, LEAST_ADVANTAGE_STD),
        value=values.to_normalised(batch.value),
        returns=values.to_normalised(batch.returns),
    )
    return ready, seen


def ppo_update(
    network: FactoredRecurrentActorCritic,
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: PPOConfig,
    update: int,
    generator: torch.Generator,
) -> UpdateRecord:
    """Learn from a prepared rollout. `forward` is the network or its compiled form; names and norms come from
    `network` itself."""
    began = perf_counter()
    record = UpdateRecord(
        update, config.entropy_coefficient_at(update), config.learning_rate_at(update), config.max_grad_norm
    )
    teacher_kl = config.teacher_kl_at(update)
    for group in optimizer.param_groups:
        group["lr"] = record.learning_rate
    groups = network.parameters_by_head()
    parameters = list(network.parameters())
    rows = batch if network.recurrent else batch.single_steps()

    while record.epochs < config.epochs and not record.stopped_by_kl:
        record.epochs += 1
        for chosen in minibatches(rows.valid.shape[0], config.minibatches, generator):
            minibatch = rows.select(chosen)
            counts = _count(minibatch)
            optimizer.zero_grad(set_to_none=True)
            parts, log_ratios = [], []
            for part in minibatch.chunks(config.chunk_rows):
                state = network.initial_state(part.valid.shape[0])
                loss, made = _losses(forward, state, part, counts, record.entropy_coefficient, config, teacher_kl)
                torch.autograd.backward(loss)
                parts.append(measure("part", made))
                log_ratios.append(made.log_ratio)
            seen = reduce(join_parts, parts)
            seen[GRADIENT_NORMS] = _gradient_norms(groups)
            record.minibatches.append(seen)

            # The only wait for the device: may this step be taken?
            decided = deciding_numbers(seen)
            high, low, ratio_gap, value_gap, kl, norm = decided.tolist()
            if len(record.minibatches) == 1:
                _check_first(ratio_gap, value_gap)
            if not (high <= log(RATIO_HIGH) and low >= log(RATIO_LOW)):
                record.explosion = _worse(record.explosion, torch.cat(log_ratios), minibatch, chosen)
            if not isfinite(norm):
                record.skipped += 1
                record.instability = record.instability or NumericalStabilityReport.of(network, loss)
                continue
            if config.target_kl is not None and kl > KL_STOP_FACTOR * config.target_kl:
                record.stopped_by_kl = True
                break
            nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, decided[-1])
            optimizer.step()
            record.optimizer_steps += 1

    record.seconds = perf_counter() - began
    return record


def _losses(
    forward: Forward,
    state: RecurrentState,
    batch: Batch,
    counts: Counts,
    coefficient: float,
    config: PPOConfig,
    teacher_kl: float = 0.0,
) -> tuple[Tensor, EvaluatedChunk]:
    """The loss of some rows as their share of the whole minibatch's loss, so that parts simply add up."""
    out = forward(batch.observation, batch.policy.masks, state)
    valid, advantage = batch.valid, batch.advantage[..., None]  # [n, T], [n, T, 1]
    effective = out.policy.relevant(batch.action) & valid[..., None]  # [n, T, heads]

    # Policy: a ratio per head, clipped per head, on the steps where the head took effect.
    gap = out.policy.log_prob(batch.action) - batch.log_prob
    log_ratio = torch.where(effective, gap, torch.zeros_like(gap)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()  # [n, T, heads]
    clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    count = torch.maximum(counts.effective, config.rare_head_share * counts.steps)
    policy_loss = -(_sum(surrogate, effective) / count).sum()

    # Value: bounded gradient (Huber), and the worse of moved and clipped prediction.
    error = _value_error(out.value, batch.returns, config.huber_delta)
    if config.value_clip is not None:
        near = batch.value + (out.value - batch.value).clamp(-config.value_clip, config.value_clip)
        error = torch.maximum(error, _value_error(near, batch.returns, config.huber_delta))
    value_loss = _sum(error, valid) / counts.steps

    # Entropy: each head where it is live, then the mean over the heads that ever are.
    live_entropy = _sum(out.policy.live_entropy(batch.policy), valid) / counts.live.clamp(min=LEAST_LIVE)  # [heads]
    weights = counts.live.new_tensor(config.head_entropy_weights) * (counts.live > LEAST_LIVE)
    bonus = (live_entropy * weights).sum() / weights.sum().clamp(min=LEAST_LIVE)

    # Teacher: exact KL of whole decisions, covering what the teacher does.
    distance = torch.zeros_like(policy_loss)
    if batch.teacher is not None:
        distance = _sum(out.policy.kl_from(batch.teacher).sum(-1), valid) / counts.steps

    loss = policy_loss + config.value_coefficient * value_loss - coefficient * bonus + teacher_kl * distance
    with torch.no_grad():
        kl = _sum(out.policy.kl_from(batch.policy), valid) / counts.steps
    part = EvaluatedChunk(
        out=out,
        batch=batch,
        counts=counts,
        clip=config.clip,
        effective=effective,
        log_ratio=log_ratio.detach(),
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy_bonus=bonus,
        teacher_kl=distance,
        live_entropy=live_entropy,
        kl=kl,
    )
    return loss, part


def _only(x: Tensor, where: Tensor) -> Tensor:
    """x where it counts, 0 elsewhere; not a product, so that a NaN at a step that does not count stays out."""
    return torch.where(where if where.dim() == x.dim() else where[..., None], x, torch.zeros_like(x))


def _sum(x: Tensor, where: Tensor) -> Tensor:
    """Over rows and steps: [n, T, ...] -> [...]"""
    return _only(x, where).sum((0, 1))


def _value_error(value: Tensor, returns: Tensor, delta: float | None) -> Tensor:
    if delta is None:
        return 0.5 * (value - returns).square()
    return huber_loss(value, returns, reduction="none", delta=delta)


def _count(batch: Batch) -> Counts:
    effective = _sum((batch.policy.relevant(batch.action) & batch.valid[..., None]).float(), batch.valid)
    live = _sum(batch.policy.live_share(), batch.valid)
    return Counts(batch.valid.sum().float().clamp(min=1.0), effective.clamp(min=1.0), live)


def _gradient_norms(groups: dict[str, list[nn.Parameter]]) -> Tensor:
    """Before clipping, [len(GRADIENT_GROUPS)]; the clipper uses the norm of this vector."""
    device = next(parameter.device for group in groups.values() for parameter in group)
    norms = []
    for name in GRADIENT_GROUPS:
        gradients = [p.grad for p in groups[name] if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).float().to(device))  # of no gradients: 0 on the CPU
    return torch.stack(norms)


def _check_first(gap: float, value_gap: float) -> None:
    """Before any step nothing may have moved. This one assertion catches lost masks, drifting normalisers, misaligned
    recurrent states and forgotten train/eval switches."""
    if not gap < FIRST_RATIO_TOLERANCE:
        raise RolloutMismatchError(
            f"replaying the rollout gives other probabilities than acting did: |ratio − 1| = {gap:.2e} before the "
            f"first step (limit {FIRST_RATIO_TOLERANCE:.0e}). Masks, normaliser, recurrent state or weights changed."
        )
    if not value_gap < FIRST_VALUE_TOLERANCE:
        raise RolloutMismatchError(
            f"replaying the rollout gives other values than acting did: they differ by {value_gap:.2e} return-stds "
            f"before the first step (limit {FIRST_VALUE_TOLERANCE:.0e})."
        )


def _worse(
    known: RatioExplosionDiagnostic | None, log_ratio: Tensor, batch: Batch, rows: Tensor
) -> RatioExplosionDiagnostic | None:
    """The more extreme of two diagnostics: one is kept, however many minibatches explode."""
    effective = batch.policy.relevant(batch.action) & batch.valid[..., None]
    new = RatioExplosionDiagnostic.from_batch(log_ratio, effective, batch.action, rows)
    if known is None or new is None:
        return new or known
    return max(known, new, key=lambda diagnostic: diagnostic.largest_log_gap)
