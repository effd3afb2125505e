"""CUDA graphs against the eager loop, in one run; whole environments; and a long run that must not grow in memory.

    python benchmarks/engine.py [--json FILE] [--device cuda] [--soak 20000]

On a GPU: images a second of bare hosts, environment-steps a second with a live seed in every network. On a CPU: the
environment-steps of two kinds of hosts, and the share of the time that is not spent in torch's operators.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: more queues for the streams

import torch

from esper.engine.precision import Precision
from esper.training.speed import UNIT, Images, Steps, Work, measure_images, measure_steps, share_outside_torch

LARGE, LARGE_BATCH = Work(channels=(32, 64, 128)), Work(channels=(32, 64, 128), batch=512)
TINY = Work(channels=(8, 16, 16), size=8, batch=64, updates=8)
WAYS = ((Precision.FP32, False), (Precision.TF32, False), (Precision.BF16, False), (Precision.BF16, True))
"""Of replaying graphs: precision, and whether regions are compiled."""


def show(result: Images | Steps, base: float | None = None) -> None:
    count = result.hosts if isinstance(result, Images) else result.envs
    ratio = "" if base is None else f"  {result.per_second / base:6.1f}×"
    speed = f"{result.per_second:10,.0f} /s ({result.slowest:,.0f} … {result.fastest:,.0f})"
    more = "" if isinstance(result, Images) else f"  with resets {result.with_resets:,.0f}  live {result.live:.0%}"
    print(f"{count:4d} × {result.work:44s} {result.engine:17s} {result.precision:5s} {speed}{ratio}{more}", flush=True)


def images(device: torch.device) -> list[Images]:
    found = []
    for work, hosts in ((LARGE, 64), (LARGE_BATCH, 16), (TINY, 64)):
        base = measure_images(work, hosts, device, graphs=False, epochs=5)
        show(base)
        found.append(base)
        for precision, compiled in WAYS:
            found.append(measure_images(work, hosts, device, graphs=True, precision=precision, compiled=compiled))
            show(found[-1], base.per_second)
    return found


def steps(device: torch.device) -> list[Steps]:
    base = measure_steps(UNIT, 4, device, graphs=False, episodes=1)
    show(base)
    found = [base]
    for envs in (16, 64):
        for precision, compiled in WAYS:
            found.append(measure_steps(UNIT, envs, device, graphs=True, precision=precision, compiled=compiled))
            show(found[-1], base.per_second)
    return found


def soak(device: torch.device, count: int) -> Steps:
    """So many environment-steps on end."""
    episodes = math.ceil(count / (64 * 20))
    result = measure_steps(UNIT, 64, device, graphs=True, precision=Precision.BF16, episodes=episodes)
    show(result)
    print(
        f"     {episodes * 64 * 20:,} environment-steps: allocated {result.allocated_mb:,.0f} MB "
        f"({result.growth_mb:+.1f} MB since the start), reserved {result.reserved_mb:,.0f} MB"
    )
    return result


def on_cpu() -> list[dict[str, object]]:
    torch.set_num_threads(1)
    found = []
    for name, speed, outside in share_outside_torch():
        print(f"{name:30s} {speed:8.1f} environment-steps/s on one core, {outside:.0%} outside of torch's operators")
        found.append({"work": name, "per_second": speed, "outside_torch": outside})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--soak", type=int, default=20_000)
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device(chosen.device)
    report: dict[str, object] = {"torch": torch.__version__}
    if device.type == "cuda":
        report["device"] = torch.cuda.get_device_name(device)
        report["images"] = [asdict(one) for one in images(device)]
        report["steps"] = [asdict(one) for one in steps(device)]
        report["soak"] = asdict(soak(device, chosen.soak))
    else:
        report["cpu"] = on_cpu()
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
