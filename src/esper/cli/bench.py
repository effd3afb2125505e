"""`esper bench`: how fast growing is on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch

from esper.config import COUNTS
from esper.engine.gc_control import deferred_gc
from esper.engine.precision import Precision
from esper.training.engines import check_gpu_options
from esper.training.own.grow import pick_device
from esper.training.speed import WORKS, Speed, measure_images, measure_steps

WorkName = Literal["small", "large", "large-batch", "tiny"]


@dataclass(frozen=True)
class Bench:
    """Environment-steps a second on generated images, with a live seed in every network.

    One step trains every network on 4 minibatches of 128 images of 32×32 and measures it, with and without its seed. On
    a GPU the eager loop and CUDA graphs are measured in the same run.
    """

    work: WorkName = "small"
    """The hosts: of 8-16-32 channels, large ones of 32-64-128 (batches of 128, or of 512), tiny ones of 8×8 images."""
    bare: bool = False
    """Measure training images a second of hosts without slots, governor and rewards instead."""
    device: str = "auto"
    """Where to measure: cpu, cuda:0, or auto."""
    envs: str = "1,4,16"
    """How many networks at a time: numbers with commas between them."""
    precision: Precision = Precision.FP32
    """How precisely a GPU calculates."""
    compiled: bool = False
    """Compile what CUDA graphs replay with torch.compile: about a minute more to warm up, and faster after it."""
    epochs: int = 12
    """Length of an episode."""
    episodes: int = 3
    """Episodes that are measured; with --bare, epochs."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        sizes = _sizes(self.envs)
        device = pick_device(self.device)
        check_gpu_options(self.precision, self.compiled, device)
        torch.set_num_threads(1)  # as `esper train` does
        episodes = partial(measure_steps, horizon=self.epochs, episodes=self.episodes)
        measure = partial(measure_images, epochs=self.episodes) if self.bare else episodes
        results: list[Speed] = []
        with deferred_gc(device):
            for graphs, envs in product((False, True) if device.type == "cuda" else (False,), sizes):
                one = measure(
                    WORKS[self.work],
                    envs,
                    device,
                    graphs=graphs,
                    precision=self.precision,
                    compiled=graphs and self.compiled,
                )
                results.append(one)
                if not self.json:
                    _print_line(one, results[0], first=len(results) == 1)
        if self.json:
            print(json.dumps([asdict(one) for one in results], indent=2))
        return 0


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(COUNTS["envs"].least <= size <= COUNTS["envs"].most for size in sizes):
        most = f"{COUNTS['envs'].most:,}"
        raise ValueError(
            f"--envs takes numbers from 1 to {most} with commas between them, such as 1,4,16; got {text!r}"
        )
    return sizes


def _print_line(result: Speed, base: Speed, *, first: bool) -> None:
    """A line at once: the next one may take a while."""
    if first:
        what = "bare hosts: training images" if result.with_resets is None else "a live seed in every network: steps"
        print(f"{result.work}; {what} a second\n")
        numbers = f"{'networks':>9s}{'a second':>13s}{'spread':>24s}{'with resets':>13s}{'×':>7s}"
        print(f"{'engine':17s}{numbers}  where the time goes")
    spread = f"{result.slowest:,.1f} … {result.fastest:,.1f}"
    with_resets = "" if result.with_resets is None else f"{result.with_resets:,.1f}"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result.shares.items())
    if result.growth_mb is not None and result.reserved_mb:
        shares += f"; {result.reserved_mb:,.0f} MB reserved, {result.growth_mb:+.1f} MB since the first episode"
    print(
        f"{result.engine:17s}{result.envs:9d}{result.per_second:13,.1f}{spread:>24s}{with_resets:>13s}"
        f"{result.per_second / base.per_second:7.1f}  {shares}",
        flush=True,
    )


COMMAND = Bench
