"""Growing a model of one's own on a GPU: images a second of `esper.grow` against a plain loop, in one run.

    python benchmarks/own_gpu.py --device cuda      # ResNet-20, batch 128, fp32 and bf16: several minutes
    python benchmarks/own_gpu.py --device cpu       # a small one, to see that it runs: half a minute

The plain loop is what a person writes: examples by index from tensors on the device, autocast, a fused AdamW, one pass
over the validation examples an epoch. Images and weights are channels last in all arms. Every arm runs twice, in turns.
An arm's time is the median of its last epochs, in which nothing is planted, compiled or captured. Exit code 1 where a
goal is missed (GPU only).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

import esper
from esper.engine.precision import Precision, arithmetic
from esper.policy.controller import Controller
from esper.policy.schedule import FixedSchedule, Planting
from page_text import table
from resnet import resnet_20

PLAIN = "plain loop"
GOALS = {"no seeds": 0.95, "grown, graphs": 2.0}
"""Least images a second, of those of the plain loop: the first in fp32, the second in bf16."""
EPOCHS, LAST = 14, 5
Pair = tuple[Tensor, Tensor]


class Work(NamedTuple):
    width: int
    size: int
    batch: int
    train: int
    val: int


LARGE, SMALL = Work(16, 32, 128, 6_400, 640), Work(4, 8, 32, 256, 64)


def examples(count: int, work: Work, device: torch.device, seed: int) -> Pair:
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 3, work.size, work.size, generator=rng), torch.randint(10, (count,), generator=rng)
    return x.to(device, memory_format=torch.channels_last), y.to(device)


def fused(device: torch.device, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=device.type == "cuda")


def plain_loop(work: Work, train: Pair, val: Pair, precision: Precision) -> list[float]:
    """Seconds of each epoch."""
    torch.manual_seed(0)
    device = train[0].device
    model = resnet_20(work.width).to(device, memory_format=torch.channels_last)
    optimizer = fused(device, model.parameters())
    cast = partial(torch.autocast, device.type, torch.bfloat16) if precision is Precision.BF16 else nullcontext
    found = []
    for _ in range(EPOCHS):
        began = time.perf_counter()
        model.train()
        for rows in torch.randint(work.train, (work.train // work.batch, work.batch), device=device):
            optimizer.zero_grad()
            with cast():
                loss = F.cross_entropy(model(train[0][rows]), train[1][rows])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad(), cast():
            right = [(model(x).argmax(1) == y).sum() for x, y in zip(val[0].split(512), val[1].split(512), strict=True)]
        torch.stack(right).tolist()  # the only wait for the device
        found.append(time.perf_counter() - began)
    return found


def grow(
    work: Work, train: Pair, val: Pair, precision: Precision, controller: Controller | str, **options: bool
) -> list[float]:
    torch.manual_seed(0)
    times = [time.perf_counter()]
    grown = esper.grow(
        resnet_20(work.width).to(memory_format=torch.channels_last),
        train,
        val,
        slots=["5", "8", "11"],  # the last block of each width
        controller=controller,
        epochs=EPOCHS,
        optimizer=partial(fused, train[0].device),
        batch_size=work.batch,
        updates_per_epoch=work.train // work.batch,
        device=train[0].device,
        precision=precision.value,
        on_epoch=lambda *records: times.append(time.perf_counter()),
        **options,
    )
    for remark in grown.remarks:
        if "CUDA graphs" in remark:
            print(f"  ({remark})")
    return [later - earlier for earlier, later in pairwise(times)]


def two_early_seeds() -> FixedSchedule:
    return FixedSchedule("two early seeds", [Planting(0, 0, {"conv2d": "conv"}), Planting(1, 1, {"conv2d": "conv"})])


def arms(device: torch.device) -> dict[str, Callable[..., list[float]]]:
    found: dict[str, Callable[..., list[float]]] = {
        PLAIN: plain_loop,
        "no seeds": partial(grow, controller="none"),
        "grown": lambda *given: grow(*given, controller=two_early_seeds()),
    }
    if device.type == "cuda":
        graphs: dict[str, bool] = {"cuda_graphs": True}
        found["no seeds, graphs"] = partial(grow, controller="none", **graphs)
        found["grown, graphs"] = lambda *given: grow(*given, controller=two_early_seeds(), **graphs)
        found["grown, graphs, compiled"] = lambda *given: grow(
            *given, controller=two_early_seeds(), compiled=True, **graphs
        )
    return found


def measure(device: torch.device, work: Work, precision: Precision) -> list[str]:
    """Print one table; gives the goals that were missed."""
    train, val = (examples(count, work, device, seed) for seed, count in enumerate((work.train, work.val)))
    seconds: dict[str, list[float]] = {}
    for _ in range(2):
        for name, arm in arms(device).items():
            # The plain loop rounds products as `esper.grow` does in this precision.
            with arithmetic(precision if precision is Precision.TF32 else Precision.FP32, device):
                seconds.setdefault(name, []).extend(arm(work, train, val, precision)[-LAST:])
            print(f"{precision}: {name}: {work.train / median(seconds[name]):,.0f} images/s", flush=True)
    plain = median(seconds[PLAIN])
    rows = [
        [
            name,
            f"{work.train / median(t):,.0f}",
            f"{plain / median(t):.2f}×",
            f"{plain / max(t):.2f} to {plain / min(t):.2f}",
        ]
        for name, t in seconds.items()
    ]
    print(f"\nResNet of width {work.width}, batch {work.batch}, {precision}, {device}, torch {torch.__version__}\n")
    print("\n".join(table(["arm", "images/s", "of the plain loop", "slowest and fastest epoch"], rows)), flush=True)
    name = "no seeds" if precision is Precision.FP32 else "grown, graphs"
    if name not in seconds or plain / median(seconds[name]) >= GOALS[name]:
        return []
    return [f"{precision}: {name} should make {GOALS[name]}× the images/s of the plain loop"]


def main(device: str) -> int:
    torch.set_num_threads(1)
    where = torch.device(device)
    if where.type != "cuda":
        measure(where, SMALL, Precision.FP32)
        return 0
    missed = measure(where, LARGE, Precision.FP32) + measure(where, LARGE, Precision.BF16)
    print("\n".join(missed) or "All goals are reached.")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))
