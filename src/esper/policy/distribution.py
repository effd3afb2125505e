"""The masked, factored policy as plain functions on padded logits.

A decision is drawn in causal order: the operation, then a slot among those legal for it, then a blueprint and a blend
for that slot. A head that the operation does not use has log-probability 0, no entropy and no KL, so no number below
is diluted or inflated by choices that did nothing.

This file must not know the network, the environment or PPO. It uses no `torch.distributions`: those objects cost ten
times the arithmetic at this size; the tests compare with them instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, HEADS_USED, Op
from esper.env.spaces import ActionMasks

MASK_VALUE = -1e4
"""Logit of an illegal choice. Finite, so that 0 · log 0 is 0 and not NaN; exp(−1e4) is exactly 0 in every precision."""

SLOT, BLUEPRINT, BLEND, OP = (HEAD_NAMES.index(name) for name in ("slot", "blueprint", "blend", "op"))

_SMALLEST = torch.finfo(torch.float32).tiny


class InvalidMaskError(ValueError):
    """A choice that can be reached has nothing legal to choose from."""


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Which heads each operation uses: one row per operation, one column per head in the order of `HEAD_NAMES`."""

    uses: tuple[tuple[bool, bool, bool, bool], ...]

    def __post_init__(self) -> None:
        if not self.uses:
            raise ValueError("an action space must have an operation")
        for op, row in enumerate(self.uses):
            if not row[OP]:
                raise ValueError(f"operation {op} must use the op head: it is how it is chosen")
            if (row[BLUEPRINT] or row[BLEND]) and not row[SLOT]:
                raise ValueError(f"operation {op} uses a blueprint or a blend without a slot to put it in")

    @property
    def ops(self) -> int:
        return len(self.uses)

    def uses_head(self, head: int) -> bool:
        return any(row[head] for row in self.uses)

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """[O, heads] bool."""
        return torch.tensor(self.uses, dtype=torch.bool, device=device)

    @staticmethod
    def uniform(ops: int, heads: tuple[str, ...] = HEAD_NAMES) -> ActionSpace:
        """Every operation uses the same heads: a plain MultiDiscrete (or, with only "op", a plain Discrete) task."""
        row = tuple(name in heads or name == "op" for name in HEAD_NAMES)
        return ActionSpace(((row[0], row[1], row[2], row[3]),) * ops)


def _growth_row(op: Op) -> tuple[bool, bool, bool, bool]:
    slot, blueprint, blend, operation = (name in HEADS_USED[op] for name in HEAD_NAMES)
    return slot, blueprint, blend, operation


GROWTH_ACTIONS = ActionSpace(tuple(_growth_row(op) for op in Op))
"""Esper's own: op always, slot unless WAIT, blueprint and blend only on GERMINATE. Derived from `HEADS_USED`."""


# --- one head ---------------------------------------------------------------------------------------------------------


def masked_log_softmax(logits: Tensor, mask: Tensor, floor: float = 0.0) -> Tensor:
    """Log-probabilities over the last axis, MASK_VALUE (or close to it) where illegal.

    A row with nothing legal comes out uniform: finite and without gradient; whoever weighs it by the probability of
    reaching it (0) gets 0. With a `floor` every legal choice keeps at least that probability, min(floor, 0.99 / legal):
    p' = floor + (1 − legal·floor)·p. Smooth, unlike raising and rescaling, and the only place where it is done, so
    rollout and update cannot differ.
    """
    if logits.shape[-1] == 1:  # a single choice is certain
        return torch.zeros_like(logits)
    log_p = torch.log_softmax(logits.masked_fill(~mask, MASK_VALUE), dim=-1)
    if floor <= 0.0:
        return log_p
    legal = mask.sum(-1, keepdim=True).clamp(min=1).to(log_p.dtype)
    least = (0.99 / legal).clamp(max=floor)
    mixed = torch.logaddexp(least.log(), torch.log1p(-legal * least) + log_p)
    return torch.where(mask, mixed, torch.full_like(mixed, MASK_VALUE))


def entropy_of(log_p: Tensor) -> Tensor:
    """Entropy in nats over the last axis. [..., n] -> [...]"""
    return -(log_p.exp() * log_p).sum(-1)


def normalised_entropy_of(log_p: Tensor, mask: Tensor) -> Tensor:
    """Entropy as a share of the most that the legal choices allow, in [0, 1]; exactly 0 with a single legal choice."""
    legal = mask.sum(-1)
    share = entropy_of(log_p) / legal.clamp(min=2).to(log_p.dtype).log()
    return torch.where(legal > 1, share, torch.zeros_like(share))


def kl_of(old: Tensor, new: Tensor) -> Tensor:
    """KL(old ‖ new) over the last axis from log-probabilities under the same mask. [..., n] -> [...]"""
    return (old.exp() * (old - new)).sum(-1)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform noise. At most 17, so it never lifts MASK_VALUE over a legal choice."""
    return -torch.log(-torch.log(uniform.clamp(min=_SMALLEST)))


def choose(log_p: Tensor, noise: Tensor | None) -> Tensor:
    """Sample by the Gumbel-max trick, or take the likeliest when `noise` is None. [..., n] -> int64 [...]"""
    return (log_p if noise is None else log_p + noise).argmax(-1)


def row_at(table: Tensor, index: Tensor) -> Tensor:
    """The row of [..., n, m] that `index` [...] names: [..., m]."""
    where = index[..., None, None].expand(*index.shape, 1, table.shape[-1])
    return table.gather(-2, where).squeeze(-2)


def _pick(row: Tensor, index: Tensor) -> Tensor:
    return row.gather(-1, index[..., None]).squeeze(-1)


# --- all heads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FactoredLogits:
    """What a network puts out, padded; the shapes of `ActionMasks`."""

    op: Tensor
    """[..., O]"""
    slot: Tensor
    """[..., O, S]: slot given the operation."""
    blueprint: Tensor
    """[..., S, B]: blueprint given the slot."""
    blend: Tensor
    """[..., S, K]: blend given the slot."""


@dataclass(frozen=True, slots=True)
class FactoredPolicy:
    """A distribution over whole decisions. The fields are log-probabilities with the shapes of `FactoredLogits`."""

    op: Tensor
    slot: Tensor
    blueprint: Tensor
    blend: Tensor
    masks: ActionMasks
    uses: Tensor
    """[O, heads] bool: the action space's table."""

    @staticmethod
    def from_logits(logits: FactoredLogits, masks: ActionMasks, uses: Tensor, floor: float = 0.0) -> FactoredPolicy:
        return FactoredPolicy(
            op=masked_log_softmax(logits.op, masks.op, floor),
            slot=masked_log_softmax(logits.slot, masks.slot, floor),
            blueprint=masked_log_softmax(logits.blueprint, masks.blueprint, floor),
            blend=masked_log_softmax(logits.blend, masks.blend, floor),
            masks=masks,
            uses=uses,
        )

    def sample(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A decision per row, [..., heads] int64, and its log-probabilities, [..., heads]. Unused heads are 0."""
        sizes = [self.op.shape[-1], self.slot.shape[-1], self.blueprint.shape[-1], self.blend.shape[-1]]
        noise = torch.rand((*self.op.shape[:-1], sum(sizes)), generator=generator, device=self.op.device)
        return self._choose(torch.split(gumbel(noise), sizes, dim=-1))

    def mode(self) -> Tensor:
        """The likeliest choice of each head in causal order, [..., heads]."""
        return self._choose((None, None, None, None))[0]

    def _choose(self, noise: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
        op = choose(self.op, noise[0])
        if self.slot.shape[-1] == self.blueprint.shape[-1] == self.blend.shape[-1] == 1:  # a plain Discrete task
            nothing = torch.zeros_like(op)
            action = torch.stack((nothing, nothing, nothing, op), dim=-1)
            return action, torch.nn.functional.pad(_pick(self.op, op)[..., None], (len(HEAD_NAMES) - 1, 0))
        to_slot = row_at(self.slot, op)
        slot = choose(to_slot, noise[1])
        to_blueprint, to_blend = row_at(self.blueprint, slot), row_at(self.blend, slot)
        blueprint, blend = choose(to_blueprint, noise[2]), choose(to_blend, noise[3])
        picked = (_pick(to_slot, slot), _pick(to_blueprint, blueprint), _pick(to_blend, blend), _pick(self.op, op))
        used = self.uses[op]
        return torch.stack((slot, blueprint, blend, op), dim=-1) * used, torch.stack(picked, dim=-1) * used

    def relevant(self, action: Tensor) -> Tensor:
        """Which heads took effect, [..., heads] bool: the one definition behind advantages, loss, entropy and KL."""
        return self.uses[action[..., OP]]

    def log_prob(self, action: Tensor) -> Tensor:
        """Per head, 0 where the head was not used; the joint log-probability is the sum. [..., heads]"""
        op, slot = action[..., OP], action[..., SLOT]
        per_head = torch.stack(
            (
                _pick(row_at(self.slot, op), slot),
                _pick(row_at(self.blueprint, slot), action[..., BLUEPRINT]),
                _pick(row_at(self.blend, slot), action[..., BLEND]),
                _pick(self.op, op),
            ),
            dim=-1,
        )
        return torch.where(self.relevant(action), per_head, torch.zeros_like(per_head))

    def joint(self) -> Tensor:
        """Log-probability of every whole decision, [..., O, S, B, K]; their probabilities sum to 1.

        Each decision has one place: where an operation does not use a head, choice 0 is certain.
        """
        sizes = [self.slot.shape[-1], self.blueprint.shape[-1], self.blend.shape[-1]]
        certain = torch.nn.functional.pad(self.op.new_zeros(1), (0, max(sizes) - 1), value=MASK_VALUE)
        slot = torch.where(self.uses[:, SLOT, None], self.slot, certain[: sizes[0]])  # [..., O, S]
        blueprint, blend = (
            torch.where(self.uses[:, head, None, None], log_p[..., None, :, :], certain[:size])  # [..., O, S, size]
            for head, log_p, size in ((BLUEPRINT, self.blueprint, sizes[1]), (BLEND, self.blend, sizes[2]))
        )
        return ((self.op[..., None] + slot)[..., None] + blueprint)[..., None] + blend[..., None, :]

    def _reach(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probability that each conditional is used: slot given op [..., O]; blueprint, blend given slot [..., S]."""
        uses = self.uses.to(self.op.dtype)
        op = self.op.exp()
        choosing_slot = op * uses[:, SLOT]
        slot = self.slot.exp()  # [..., O, S]
        choosing_blueprint = ((op * uses[:, BLUEPRINT])[..., None] * slot).sum(-2)
        choosing_blend = ((op * uses[:, BLEND])[..., None] * slot).sum(-2)
        return choosing_slot, choosing_blueprint, choosing_blend

    def entropy(self) -> Tensor:
        """Exact, in nats, by the chain rule: head h's share is E[H(h | choices before it)], and the shares sum to the
        entropy of the whole decision. [..., heads]"""
        to_slot, to_blueprint, to_blend = self._reach()
        return torch.stack(
            (
                (to_slot * entropy_of(self.slot)).sum(-1),
                (to_blueprint * entropy_of(self.blueprint)).sum(-1),
                (to_blend * entropy_of(self.blend)).sum(-1),
                entropy_of(self.op),
            ),
            dim=-1,
        )

    def live_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Probability that each conditional is used *and* leaves a choice: [..., O], [..., S], [..., S], [..., 1].

        Where a head is used but only one choice is legal there is no entropy to speak of; counting such a step would
        make a healthy head look collapsed.
        """
        to_slot, to_blueprint, to_blend = (reach.detach() for reach in self._reach())
        return (
            to_slot * (self.masks.slot.sum(-1) > 1),
            to_blueprint * (self.masks.blueprint.sum(-1) > 1),
            to_blend * (self.masks.blend.sum(-1) > 1),
            (self.masks.op.sum(-1, keepdim=True) > 1).to(self.op.dtype),
        )

    def live_share(self) -> Tensor:
        """The sum of `live_weights` per head, [..., heads]: the denominator of a mean over live steps."""
        return torch.stack([weight.sum(-1) for weight in self.live_weights()], dim=-1)

    def live_entropy(self, behaviour: FactoredPolicy) -> Tensor:
        """Normalised entropy of each head, weighted by how likely `behaviour` was to use it, [..., heads].

        Summed over steps and divided by the sum of `behaviour.live_share()` this is the mean over live steps: what the
        masked mean over sampled live steps estimates, without its noise, and defined when no live step was sampled.
        The weights carry no gradient: a bonus must not favour an operation because its sub-heads are undecided.
        """
        masks = self.masks
        slot, blueprint, blend, op = behaviour.live_weights()
        return torch.stack(
            (
                (slot * normalised_entropy_of(self.slot, masks.slot)).sum(-1),
                (blueprint * normalised_entropy_of(self.blueprint, masks.blueprint)).sum(-1),
                (blend * normalised_entropy_of(self.blend, masks.blend)).sum(-1),
                op.squeeze(-1) * normalised_entropy_of(self.op, masks.op),
            ),
            dim=-1,
        )

    def kl_from(self, old: FactoredPolicy) -> Tensor:
        """Exact KL(old ‖ this) by the chain rule, [..., heads]. Each head's KL is weighed by the old probability that
        it is used; the heads sum to the KL of the whole decision."""
        to_slot, to_blueprint, to_blend = old._reach()
        return torch.stack(
            (
                (to_slot * kl_of(old.slot, self.slot)).sum(-1),
                (to_blueprint * kl_of(old.blueprint, self.blueprint)).sum(-1),
                (to_blend * kl_of(old.blend, self.blend)).sum(-1),
                kl_of(old.op, self.op),
            ),
            dim=-1,
        )


def validate_masks(masks: ActionMasks, uses: Tensor, valid: Tensor | None = None) -> None:
    """Refuse masks [N, ...] under which a decision could get stuck: only what can be reached must have a way on.

    Masks of whole episodes [N, T, ...] come with the steps that happened, `valid` [N, T]. It waits for the device, so
    what is compiled (the network's forward pass) never calls it.
    """
    legal_op = masks.op
    on_slot = legal_op[..., None] & masks.slot  # [N, O, S]: operation and slot both possible
    problems = {
        "op": ~legal_op.any(-1),
        "slot": (legal_op & uses[:, SLOT] & ~masks.slot.any(-1)).any(-1),
        "blueprint": ((on_slot & uses[:, BLUEPRINT, None]).any(-2) & ~masks.blueprint.any(-1)).any(-1),
        "blend": ((on_slot & uses[:, BLEND, None]).any(-2) & ~masks.blend.any(-1)).any(-1),
    }
    stuck = torch.stack(list(problems.values()), dim=-1)  # [N, heads] or [N, T, heads]
    if valid is not None:
        stuck &= valid[..., None]
    if not bool(stuck.any()):
        return
    environment, *step, head = stuck.nonzero()[0].tolist()
    at = f" at step {step[0]}" if step else ""
    affected = int(stuck.flatten(1).any(1).sum())
    raise InvalidMaskError(
        f"environment {environment}{at}: the {list(problems)[head]} head can be reached but has no legal choice "
        f"({affected} of {stuck.shape[0]} environments are affected). Forbid the operation instead."
    )
