"""What each anomaly is called, how long it must last, what it usually means, and what to try. Texts and waiting times;
the limits are in `anomalies.Limits` and the comparisons in `readings`."""

from __future__ import annotations

from dataclasses import dataclass

from esper.telemetry.records import Severity


@dataclass(frozen=True, slots=True)
class Symptom:
    """One kind of anomaly."""

    severity: Severity
    patience: int
    """Updates in a row that must show it: one is enough where one update can do the damage."""
    meaning: str
    remedy: str


SYMPTOMS = {
    "non_finite": Symptom(
        "error",
        1,
        "a number of the update is NaN or infinite; if weights are, nothing learnt after this is real",
        "look at `skipped` and the per-head gradient norms, lower the learning rate, resume from before this update",
    ),
    "skipped_steps": Symptom(
        "error",
        1,
        "the gradient of some minibatches was not finite, and their steps were not taken",
        "lower the learning rate; check rewards and observations for infinities",
    ),
    "ratio_explosion": Symptom(
        "warning",
        1,
        "an action became many times more (or less) likely within one update: steps are too large, or the replay does "
        "not match the rollout",
        "lower the learning rate or the number of epochs; `first_ratio_gap` tells a mismatch from a large step",
    ),
    "entropy_collapse": Symptom(
        "warning",
        3,
        "a head of the policy has all but stopped exploring although the run is no better than it began, and its "
        "entropy bonus has no gradient left there",
        "raise entropy_coefficient (or that head's weight in head_entropy_weights), or set --floor, the least "
        "probability of a legal choice",
    ),
    "head_starved": Symptom(
        "warning",
        5,
        "a head takes effect on so few steps that next to nothing is learnt about it: the policy has all but stopped "
        "choosing the operations that use it",
        "raise entropy_coefficient (or the weight of op in head_entropy_weights), or set --floor, the least "
        "probability of a legal choice",
    ),
    "kl_spike": Symptom(
        "warning",
        1,
        "one update moved the policy far from the one that gathered its data",
        "lower the learning rate or the number of epochs, or set target_kl",
    ),
    "kl_extreme": Symptom(
        "error",
        1,
        "one update replaced the policy: what was learnt before is probably lost",
        "resume from before this update with a lower learning rate",
    ),
    "kl_stalled": Symptom(
        "error",
        3,
        "updates do not change the policy at all: gradients do not reach it, weights are frozen, or every step is "
        "skipped. Small is not healthy",
        "look at the gradient norm per head, at `optimizer_steps` and at the learning rate",
    ),
    "clip_stalled": Symptom(
        "warning",
        10,
        "no ratio ever reaches the clip range: steps are so small that the data of a rollout is not used up",
        "raise the learning rate or the number of epochs",
    ),
    "value_collapse": Symptom(
        "warning",
        5,
        "the critic predicts returns worse than a constant would: advantages are mostly its own error",
        "look at the scale of the returns (`return_std`), raise the value coefficient, or lower the learning rate",
    ),
    "value_stuck": Symptom(
        "warning",
        15,
        "the critic explains nothing of the returns after a good part of the run",
        "look at `value_gradient_norm`; raise the value coefficient or the number of epochs; returns may be pure noise",
    ),
    "gradient_vanishing": Symptom(
        "error",
        2,
        "a part of the network gets no gradient: it is cut off, saturated, or its loss is constant",
        "look at which part it is; check masks, detached tensors and the loss's coefficient",
    ),
    "gradient_exploding": Symptom(
        "warning",
        1,
        "the gradient is far above the clip norm, so that its direction is that of a few steps",
        "look at the scale of rewards and returns; lower the learning rate",
    ),
    "gradient_drift": Symptom(
        "warning",
        5,
        "the gradient norm is above its usual level for several updates: the problem that the agent solves has changed",
        "compare `return_std`, `value_loss` and the entropies before and after",
    ),
    "lstm_not_finite": Symptom(
        "error",
        1,
        "the recurrent state holds NaN or infinity: every later decision of those environments is made of it",
        "resume from before this update; check the observations for infinities",
    ),
    "lstm_saturated": Symptom(
        "warning",
        2,
        "the recurrent state has grown so large that its gates are stuck",
        "check that observations are bounded; lower the learning rate",
    ),
    "lstm_dead": Symptom(
        "warning",
        2,
        "the recurrent state is all but zero: the policy has no memory",
        "look at `trunk_gradient_norm`; check that states are not reset at every step",
    ),
    "return_collapse": Symptom(
        "warning",
        3,
        "returns have fallen far below the best level of this run, by more than their usual spread",
        "look at the anomalies just before; resume from the best checkpoint with a lower learning rate",
    ),
}
"""By name."""
