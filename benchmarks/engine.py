"""CUDA graphs against the eager loop, in one run; whole environments; and a long run that must not grow in memory.

    python benchmarks/engine.py [--json FILE] [--device cuda] [--soak 20000] [--parts steps,images]

On a GPU: environment-steps a second with a live seed in every network, images a second of bare hosts. On a CPU: the
environment-steps of two kinds of hosts, and the share of the time that is not spent in torch's operators; it has no
--parts. The file is written after each result, so that an interruption loses one at most.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch

from esper.engine.gc_control import deferred_gc
from esper.engine.precision import Precision
from esper.training.speed import UNIT, Images, Steps, Work, measure_images, measure_steps, share_outside_torch

LARGE, LARGE_BATCH = Work(channels=(32, 64, 128)), Work(channels=(32, 64, 128), batch=512)
TINY = Work(channels=(8, 16, 16), size=8, batch=64, updates=8)
WAYS = ((Precision.FP32, False), (Precision.BF16, False), (Precision.BF16, True))
"""Of replaying graphs: precision, and whether regions are compiled."""
FASTEST = (Precision.BF16, True)
PARTS = ("steps", "images")


def show(result: Images | Steps, base: float | None = None) -> None:
    count = result.hosts if isinstance(result, Images) else result.envs
    ratio = "" if base is None else f"  {result.per_second / base:6.1f}×"
    speed = f"{result.per_second:10,.0f} /s ({result.slowest:,.0f} … {result.fastest:,.0f})"
    more = "" if isinstance(result, Images) else f"  with resets {result.with_resets:,.0f}  live {result.live:.0%}"
    print(f"{count:4d} × {result.work:44s} {result.engine:17s} {result.precision:5s} {speed}{ratio}{more}", flush=True)


def images(device: torch.device) -> Iterator[Images]:
    for work, hosts in ((LARGE, 64), (LARGE_BATCH, 16), (TINY, 64)):
        base = measure_images(work, hosts, device, graphs=False, epochs=5)
        show(base)
        yield base
        for precision, compiled in WAYS:
            result = measure_images(work, hosts, device, graphs=True, precision=precision, compiled=compiled)
            show(result, base.per_second)
            yield result


def steps(device: torch.device, soak: int) -> Iterator[Steps]:
    """The fastest way first, so long that memory would show if it grew; then the others."""
    base = measure_steps(UNIT, 4, device, graphs=False, episodes=1)
    show(base)
    yield base
    for precision, compiled in (FASTEST, (Precision.BF16, False)):
        for envs in (64, 16):
            long = envs == 64 and (precision, compiled) == FASTEST
            episodes = math.ceil(soak / (64 * 20)) if long else 8
            result = measure_steps(
                UNIT, envs, device, graphs=True, precision=precision, compiled=compiled, episodes=episodes
            )
            show(result, base.per_second)
            if long:
                show_memory(result, episodes)
            yield result


def show_memory(result: Steps, episodes: int) -> None:
    print(
        f"     {episodes * 64 * 20:,} environment-steps on end: allocated {result.allocated_mb:,.0f} MB "
        f"({result.growth_mb:+.1f} MB since the start), reserved {result.reserved_mb:,.0f} MB",
        flush=True,
    )


def on_cpu() -> list[dict[str, object]]:
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
    parser.add_argument("--parts", help="on a GPU: steps, images, or both with a comma between them (the default)")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device(chosen.device)
    parts = PARTS if chosen.parts is None else chosen.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if chosen.parts is not None and device.type != "cuda":
        parser.error(f"--parts is for a GPU, and the device is {device}")
    torch.set_num_threads(1)  # as `esper train` does: threads that spin disturb the one that launches
    report: dict[str, object] = {"torch": torch.__version__}
    if device.type == "cuda":
        report["device"] = torch.cuda.get_device_name(device)
        measures: dict[str, Callable[[], Iterator[Steps | Images]]] = {
            "steps": partial(steps, device, chosen.soak),
            "images": partial(images, device),
        }
        with deferred_gc(device):
            for name in parts:
                found: list[dict[str, object]] = []
                report[name] = found
                for one in measures[name]():
                    found.append(asdict(one))
                    save(report, chosen.json)
    else:
        report["cpu"] = on_cpu()
        save(report, chosen.json)
    return 0


def save(report: dict[str, object], path: str | None) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    raise SystemExit(main())
