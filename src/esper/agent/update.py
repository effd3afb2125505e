"""The PPO update, in the order of the maths. Read `ppo_update` first, then `_losses`.

Minibatches are permutations of whole rows. Every pass replays its rows through the network from their first recurrent
state, so several epochs never see a stale state, and the values that clipping compares with are those of the same
replay at the weights the update began with: the first minibatch asserts it.

fp32 throughout. There is no autocast and so no gradient scaler to share or to isolate: a cached half-precision weight
once left every head of an earlier system without gradient, and this network is too small to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from esper.actions import HEAD_NAMES
from esper.agent.buffer import RolloutBatch, minibatches
from esper.agent.config import FIRST_RATIO_TOLERANCE, KL_STOP_FACTOR, LOG_RATIO_LIMIT, PPOConfig
from esper.agent.diagnostics import RATIO_HIGH, RATIO_LOW, RatioExplosionDiagnostic, explained_variance, one_device
from esper.agent.distributed import Reducer
from esper.agent.metrics import GRADIENT_GROUPS, HEADS, ChunkMetrics, MinibatchMetrics, UpdateFacts, UpdateMetrics, collect
from esper.agent.normalisers import ValueNormaliser
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput

Forward = Callable[..., NetworkOutput]


class RolloutMismatchError(RuntimeError):
    """Replaying the rollout does not give the probabilities or values that acting gave."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of a minibatch's means, known before its first chunk is evaluated. Averages over ranks."""

    steps: Tensor
    """[] valid steps."""
    effective: Tensor
    """[heads] valid steps on which the head took effect."""
    live: Tensor
    """[heads] expected valid steps on which the head is used with a choice."""


def ppo_update(
    network: FactoredRecurrentActorCritic,
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    config: PPOConfig,
    update: int,
    generator: torch.Generator,
    reducer: Reducer,
    lstm_health: Tensor | None,
    rollout: Tensor,
) -> UpdateMetrics:
    """Learn from one rollout. `batch` has normalised advantages, and values and returns in the critic's units.

    `forward` is the network or its compiled form; norms and names always come from `network` itself.
    """
    began = perf_counter()
    coefficient = config.entropy_coefficient_at(update)
    groups = network.parameters_by_head()
    parameters = [p for group in GRADIENT_GROUPS for p in groups[group]]
    rows = batch if network.recurrent else batch.single_steps()
    seen: list[MinibatchMetrics] = []
    explosion: RatioExplosionDiagnostic | None = None
    first_gap, steps_taken, skipped, stopped, epoch = 0.0, 0, 0, False, 0

    while epoch < config.epochs and not stopped:
        epoch += 1
        for chosen in minibatches(rows.valid.shape[0], config.minibatches, generator):
            minibatch = rows.select(chosen)
            counts = _counts(minibatch, config, reducer)
            optimizer.zero_grad(set_to_none=True)
            parts = [_backward(forward, chunk, counts, coefficient, config) for chunk in _chunks(minibatch, config)]
            metrics = _combine(parts, groups, parameters, reducer)
            seen.append(metrics)

            # The only wait for the device: may this step be taken at all?
            gap, widest, kl, norm = _decision(metrics)
            if len(seen) == 1:
                first_gap = gap
                _check_first(metrics, gap, minibatch)
            if widest > RATIO_HIGH or widest < 0.0:
                explosion = _worse(explosion, forward, minibatch)
            if not norm < float("inf"):
                skipped += 1
                continue
            if config.target_kl is not None and kl > KL_STOP_FACTOR * config.target_kl:
                stopped = True
                break
            nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, metrics.gradient_norms.norm())
            optimizer.step()
            steps_taken += 1
    raise NotImplementedError
