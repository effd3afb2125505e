"""Small worlds that a host really learns within a few epochs, and faults to break it with. For the governor's tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.engine.learner import Learner
from esper.engine.optimizer import GrowingOptimizer
from esper.growth.attach import attach
from esper.lifecycle import Rules
from esper.tasks.data import Split
from esper.tasks.feed import Batch, TensorFeed
from esper.tasks.hosts import Conv1dHost, MLPHost
from esper.tasks.registry import cross_entropy, percent_correct

CLASSES = 4
HOSTS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLPHost(16, [12, 12], CLASSES),
    "conv with batch norm": lambda: Conv1dHost(1, [6, 8], [5, 3], CLASSES),
}


def waves(count: int, seed: int) -> Split:
    """Noisy sines; the class is the frequency."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    x = torch.sin(phase * 0.3 + (1 + y[:, None]) * torch.arange(16) / 3)
    return Split((x + 0.8 * torch.randn(count, 16, generator=generator))[:, None], y)


class BreakableFeed(TensorFeed):
    """Can give one minibatch with a NaN in it."""

    poisoned = False

    def next_batch(self) -> Batch:
        x, y = super().next_batch()
        if self.poisoned:
            self.poisoned = False
            x = x.clone()
            x[0, 0, 3] = math.nan
        return x, y


class BreakableLoss:
    """Can give NaN once."""

    broken = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(outputs, targets)
        if self.broken and loss.requires_grad:
            self.broken = False
            loss = loss * math.nan
        return loss


def breakable_learner(host: str = "mlp", seed: int = 0, rules: Rules | None = None) -> Learner:
    """A learner that reaches about 90 % in five epochs of eight updates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = HOSTS[host]()
    model = attach(made, ["stages.*"], waves(4, 0).x, rules=rules, rng_seed=seed)
    feed = BreakableFeed(waves(512, 1), waves(256, 2), batch_size=64, updates_per_epoch=8, seed=seed)
    optimizer = GrowingOptimizer(torch.optim.AdamW(made.parameters(), lr=0.01), warmup_updates=8)
    return Learner(model, optimizer, feed, BreakableLoss(), percent_correct, seed=seed)


def resident_bytes() -> int:
    """Memory that this process really occupies."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
