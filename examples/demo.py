"""`make demo`: grow a small network on three seeds, beside the same network without growth, and keep the last one."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from esper.tasks import load_task
from esper.training.growing import grow_task
from esper.training.plot import plot_history

OUT = Path("grown/demo")
SEEDS = (0, 1, 2)


def main() -> None:
    torch.set_num_threads(1)  # small nets: threads that spin cost several times the work
    console = Console()
    started = time.perf_counter()
    table = Table("seed", "not grown", "grown", "gain", "parameters", title="mnist1d: test accuracy")
    gains, grown_accuracies, control_accuracies = [], [], []
    for seed in SEEDS:
        task = load_task("mnist1d", seed=seed)
        curve: list[float] = []
        with console.status(f"growing seed {seed} …"):
            grown = grow_task(
                task, seed=seed, control=True, on_epoch=lambda _, c, to=curve: to.append(c.measured.accuracy)
            )
        assert grown.test is not None
        assert grown.control is not None
        grown_accuracies.append(grown.test.accuracy)
        control_accuracies.append(grown.control.accuracy)
        gains.append(grown.test.accuracy - grown.control.accuracy)
        size = f"{grown.history.host_parameters:,} → {grown.parameters:,}"
        table.add_row(
            str(seed), f"{grown.control.accuracy:.1f} %", f"{grown.test.accuracy:.1f} %", f"{gains[-1]:+.1f}", size
        )
        if seed == SEEDS[0]:
            grown.save(OUT)
            plot_history(OUT / "growth.png", grown.history, curve, title=f"mnist1d, seed {seed}, heuristic controller")
    table.add_section()
    table.add_row(
        f"mean of {len(SEEDS)}",
        f"{statistics.mean(control_accuracies):.1f} %",
        f"{statistics.mean(grown_accuracies):.1f} %",
        f"{statistics.mean(gains):+.1f}",
        "",
    )
    console.print(table)
    console.print(f"The model of seed {SEEDS[0]} is in {OUT}; it loads without Esper: python {OUT}/model.py")
    console.print(f"The picture of how it grew: {OUT}/growth.png   ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
