"""The loop behind everything that is learnt offline: minibatches of whole episodes, and weights that generalise.

Recorded episodes are few, and a network that is trained on them long enough memorises them. Two remedies: what is
judged and kept is a running average of the weights (cloning some 450 episodes, the op head's held-out accuracy was
94.4 % without it and 95.2 to 95.6 % with it), and of these averages the one that was best on problems that were not
learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from esper.config import WHOLE_AT_LEAST_1, check_ranges
from esper.env.reward import DISCOUNT
from esper.offline.agreement import Agreement
from esper.offline.rows import EpisodeRows, Units
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig, NetworkOutput

OnEpoch = Callable[[str, int, int, float], None]
"""(what is learnt, epochs done, epochs in all, loss on the problems to stop by)"""
MAX_GRADIENT = 1.0
AVERAGED_STEPS = 100
"""How far back the running average reaches once there are enough steps."""
VALUE_COEFFICIENT = 0.1
"""Of a critic beside a policy: low, because a few hundred returns are soon memorised, and the trunk is shared."""


class BrokenLearningError(RuntimeError):
    """Nothing that could be kept was learnt."""


def silent(what: str, done: int, of: int, loss: float) -> None:
    """The default: nothing is shown."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A policy from recorded episodes, and how it was judged."""

    network: FactoredRecurrentActorCritic
    units: Units
    agreement: Agreement
    """On the problems to judge by, against the teachers' labels."""


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How to learn from episodes, by any method."""

    epochs: int = 25
    """Passes over the episodes, for the policy and before it for critics; the step size falls to zero over them."""
    batch_episodes: int = 16
    """Episodes per minibatch."""
    learning_rate: float = 2e-3
    """Adam's step size."""
    discount: float = DISCOUNT
    """γ of the returns that critics learn."""
    seed: int = 0
    """Decides the first weights and which problems are held out."""

    def __post_init__(self) -> None:
        check_ranges(self, {"epochs": WHOLE_AT_LEAST_1, "batch_episodes": WHOLE_AT_LEAST_1})


def fit(
    what: str,
    modules: nn.Module,
    rows: EpisodeRows,
    loss: Callable[[EpisodeRows], Tensor],
    judge: Callable[[], Tensor],
    config: FitConfig,
    on_epoch: OnEpoch,
    after_step: Callable[[], None] = lambda: None,
) -> int:
    """Minimise `loss`; give `modules` the averaged weights for which `judge` was lowest, and say after which epoch."""
    optimizer = torch.optim.Adam([p for p in modules.parameters() if p.requires_grad], lr=config.learning_rate)
    generator = torch.Generator().manual_seed(config.seed)
    live = [p.data for p in modules.parameters()]
    average = [tensor.clone() for tensor in live]
    best, best_epoch, kept, steps = float("inf"), 0, _copy(average), 0
    for epoch in range(1, config.epochs + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1.0 - (epoch - 1) / config.epochs)
        for part in rows.shuffled(config.batch_episodes, generator):
            optimizer.zero_grad(set_to_none=True)
            loss(part).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(modules.parameters(), MAX_GRADIENT)
            optimizer.step()
            after_step()
            steps += 1
            torch._foreach_lerp_(average, live, newest_share(steps))
        if not all(bool(torch.isfinite(tensor).all()) for tensor in live):  # a held-out share of errors stays finite
            raise BrokenLearningError(f"the weights of the {what} became NaN or infinite in epoch {epoch}")
        trained = _copy(live)
        torch._foreach_copy_(live, average)
        with torch.no_grad():
            judged = float(judge())
        torch._foreach_copy_(live, trained)
        if judged < best:
            best, best_epoch, kept = judged, epoch, _copy(average)
        on_epoch(what, epoch, config.epochs, judged)
    if best_epoch == 0:
        raise BrokenLearningError(f"nothing was learnt of the {what}: its held-out loss was never a number")
    torch._foreach_copy_(live, kept)
    return best_epoch


def newest_share(step: int) -> float:
    """Of the running average, after so many steps. It reaches back about a tenth of the way, so that a short training
    is not judged by the weights it began with, and at most `AVERAGED_STEPS`."""
    return max(1.0 / AVERAGED_STEPS, 10.0 / (9.0 + step))


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def imitation_losses(network: FactoredRecurrentActorCritic, rows: EpisodeRows) -> tuple[Tensor, Tensor]:
    """Of the decisions, and of the values."""
    return losses_of(network(rows.observation, rows.masks, network.initial_state(len(rows))), rows)


def losses_of(out: NetworkOutput, rows: EpisodeRows) -> tuple[Tensor, Tensor]:
    """Of the decisions: weighted cross-entropy of each head where the action uses it, averaged there, summed over the
    heads. And of the values."""
    used = out.policy.relevant(rows.action) & rows.valid[..., None]  # [E, T, heads]
    surprise = -out.policy.log_prob(rows.action) * rows.weight
    heads = [mean_where(surprise[..., h], used[..., h]) for h in range(used.shape[-1])]
    error = huber_loss(out.value, rows.value, reduction="none")
    return torch.stack(heads).sum(), VALUE_COEFFICIENT * mean_where(error, rows.valid)


def imitate(
    network: FactoredRecurrentActorCritic,
    rows: EpisodeRows,
    judge: Callable[[], Tensor],
    config: FitConfig,
    on_epoch: OnEpoch,
) -> int:
    """Teach the network the rows' weighted actions and their values."""

    def loss(part: EpisodeRows) -> Tensor:
        decisions, values = imitation_losses(network, part)
        return decisions + values

    return fit("policy", network, rows, loss, judge, config, on_epoch)


def new_network(config: NetworkConfig, seed: int) -> FactoredRecurrentActorCritic:
    """First weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return FactoredRecurrentActorCritic(config)


def mean_where(x: Tensor, where: Tensor) -> Tensor:
    """Over the steps that count; 0 if there are none. Not a product: what padding holds may be anything."""
    return torch.where(where, x, torch.zeros_like(x)).sum() / where.sum().clamp(min=1)
