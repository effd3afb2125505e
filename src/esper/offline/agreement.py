"""How often a policy decides as its teacher did: accuracy and confusion per head, where the head mattered.

A head counts on the steps where the teacher's operation uses it, and is asked under the teacher's own earlier
choices: which slot, given the teacher's operation; which blueprint, given the teacher's slot. `decisions` is stricter:
the policy's whole decision, made on its own, equals the teacher's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES
from esper.offline.rows import EpisodeRows
from esper.policy.distribution import OP, SLOT, FactoredPolicy, row_at
from esper.policy.network import FactoredRecurrentActorCritic


@dataclass(frozen=True, slots=True)
class HeadAgreement:
    """One head on the steps where it mattered."""

    confusion: tuple[tuple[int, ...], ...]
    """[what the teacher chose][what the policy chooses]: counts."""

    @property
    def count(self) -> int:
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float | None:
        """None where the head never mattered."""
        right = sum(row[i] for i, row in enumerate(self.confusion))
        return right / self.count if self.count else None

    @property
    def balanced_accuracy(self) -> float | None:
        """Mean over the teacher's choices of how often each is met: a policy that always waits does not shine here."""
        met = [row[i] / sum(row) for i, row in enumerate(self.confusion) if sum(row)]
        return sum(met) / len(met) if met else None


@dataclass(frozen=True, slots=True)
class Agreement:
    """A policy against the labels of some episodes."""

    heads: dict[str, HeadAgreement]
    decisions: float
    """Share of the steps on which the whole decision is the teacher's."""
    episodes: int


@torch.inference_mode()
def agreement_with_teacher(network: FactoredRecurrentActorCritic, rows: EpisodeRows) -> Agreement:
    """With the rows' actions, which are the teacher's."""
    out = network(rows.observation, rows.masks, network.initial_state(len(rows)))
    used = out.policy.relevant(rows.action) & rows.valid[..., None]  # [E, T, heads]
    said = choices_given(out.policy, rows.action)
    sizes = {"slot": out.policy.slot, "blueprint": out.policy.blueprint, "blend": out.policy.blend, "op": out.policy.op}
    heads = {
        name: HeadAgreement(
            _confusion(rows.action[..., h][used[..., h]], said[..., h][used[..., h]], sizes[name].shape[-1])
        )
        for h, name in enumerate(HEAD_NAMES)
    }
    same = (out.policy.mode() == rows.action * used).all(-1)
    return Agreement(heads, float(same[rows.valid].float().mean()), len(rows))


def choices_given(policy: FactoredPolicy, label: Tensor) -> Tensor:
    """The likeliest choice of each head under the label's earlier choices, [..., heads]."""
    slot = row_at(policy.slot, label[..., OP]).argmax(-1)
    blueprint = row_at(policy.blueprint, label[..., SLOT]).argmax(-1)
    blend = row_at(policy.blend, label[..., SLOT]).argmax(-1)
    return torch.stack((slot, blueprint, blend, policy.op.argmax(-1)), dim=-1)


def _confusion(truth: Tensor, said: Tensor, classes: int) -> tuple[tuple[int, ...], ...]:
    counts = torch.bincount(truth * classes + said, minlength=classes * classes).view(classes, classes)
    return tuple(tuple(row) for row in counts.tolist())
