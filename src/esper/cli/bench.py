"""`esper bench`: how fast growing is on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING

from esper.cli.options import check_gpu_options
from esper.config import COUNTS
from esper.engine.precision import Precision

if TYPE_CHECKING:
    from esper.training.speed import Steps


@dataclass(frozen=True)
class Bench:
    """Environment-steps a second on generated images, with a live seed in every network.

    One step trains every network on 4 minibatches of 128 images of 32×32 and measures it, with and without its seed. On
    a GPU the eager loop and CUDA graphs are measured in the same run.
    """

    device: str = "auto"
    """Where to measure: cpu, cuda:0, or auto."""
    envs: str = "1,4,16"
    """How many networks at a time: numbers with commas between them."""
    precision: Precision = Precision.FP32
    """How precisely a GPU calculates."""
    compiled: bool = False
    """Compile what CUDA graphs replay with torch.compile: about a minute more to warm up, and faster after it."""
    epochs: int = 12
    """Length of an episode; three are measured."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        import torch

        from esper.engine.gc_control import deferred_gc
        from esper.training.own.grow import pick_device
        from esper.training.speed import UNIT, measure_steps

        sizes = _sizes(self.envs)
        device = pick_device(self.device)
        check_gpu_options(self.precision, self.compiled, device)
        torch.set_num_threads(1)  # as `esper train` does
        results = []
        ways = (False, True) if device.type == "cuda" else (False,)
        with deferred_gc(device):
            for graphs, envs in product(ways, sizes):
                one = measure_steps(
                    UNIT,
                    envs,
                    device,
                    graphs=graphs,
                    precision=self.precision,
                    compiled=graphs and self.compiled,
                    horizon=self.epochs,
                )
                results.append(one)
                if not self.json:
                    _say(one, results[0], first=len(results) == 1)
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


def _say(result: Steps, base: Steps, *, first: bool) -> None:
    """A line at once: the next one may take a while."""
    if first:
        print(f"{result.work}; 4 updates and one evaluation a step, a live seed in every network\n")
        numbers = f"{'networks':>9s}{'steps/s':>9s}{'spread':>16s}{'with resets':>13s}{'×':>7s}"
        print(f"{'engine':17s}{numbers}  where the time goes")
    spread = f"{result.slowest:,.1f} … {result.fastest:,.1f}"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result.shares.items())
    print(
        f"{result.engine:17s}{result.envs:9d}{result.per_second:9,.1f}{spread:>16s}{result.with_resets:13,.1f}"
        f"{result.per_second / base.per_second:7.1f}  {shares}",
        flush=True,
    )


COMMAND = Bench
