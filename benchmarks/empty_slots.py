"""What empty slots cost: a training step of a bare host against the same host with slots in which nothing grows.

    python benchmarks/empty_slots.py [--repeats 20] [--steps 40]

Both take turns step by step within one process, so that a busy machine slows both alike, and it is the processor's time
that counts. A repeat gives the ratio of the two median steps; the figure is the median over repeats, and the promise
is that it stays below 1.02.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.growth.attach import attach
from esper.tasks.hosts import Conv1dHost, Conv2dHost, GPTHost, MLPHost
from esper.tasks.registry import cross_entropy

LIMIT = 1.02


def make_worlds() -> dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]]:
    """Hosts with a batch each; the smallest show most overhead."""
    labels = torch.randint(10, (100,))
    symbols = torch.randint(50, (16, 33))
    return {
        "mlp": (lambda: MLPHost(64, [32, 32], 10), torch.randn(100, 64), labels),
        "conv1d": (lambda: Conv1dHost(1, [8, 8, 8], [5, 3, 3], 10), torch.randn(100, 1, 40), labels),
        "conv2d": (lambda: Conv2dHost(3, [8, 16, 32], [3, 3, 3], 10), torch.randn(50, 3, 16, 16), labels[:50]),
        "gpt": (lambda: GPTHost(50, 32, 32, 4, 3, dropout=0.1), symbols[:, :-1], symbols[:, 1:]),
    }


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One ordinary training step, written as a user would."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(make_host: Callable[[], nn.Module], x: Tensor, y: Tensor, repeats: int, steps: int) -> list[float]:
    """The ratio attached / bare of every repeat."""
    torch.manual_seed(0)
    bare = make_host()
    torch.manual_seed(0)
    host = make_host()
    grown = attach(host, list(host.default_slots), x)  # type: ignore[arg-type, call-overload]
    bare_step, grown_step = stepper(bare, x, y), stepper(grown, x, y)
    ratios = []
    for _ in range(repeats + 1):
        pairs = [(seconds(bare_step), seconds(grown_step)) for _ in range(steps)]
        bare_times, grown_times = zip(*pairs, strict=True)
        ratios.append(statistics.median(grown_times) / statistics.median(bare_times))
    return ratios[1:]  # the first warms up


def main() -> int:
    parser = argparse.ArgumentParser(description="What empty slots cost in a training step.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for name, (make_host, x, y) in make_worlds().items():
        ratios = measure(make_host, x, y, options.repeats, options.steps)
        median = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"{name:8} attached / bare {median:.4f}  (middle half {low:.4f} to {high:.4f}, {len(ratios)} repeats)")
        worst = max(worst, median)
    print(f"worst    {worst:.4f}  (limit {LIMIT})")
    return int(worst >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
