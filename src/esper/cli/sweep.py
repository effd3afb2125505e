"""`esper sweep`: many training runs, seeds × settings; safe to interrupt and to repeat; ends with one table."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from esper.cli.clusters import ActorOption, ClusterOption, DeviceOption, chosen_executor, device_of_jobs
from esper.cli.options import by_default, claim
from esper.cli.terminal import ProgressDisplay, styled, wide_console, with_interval
from esper.files import write_whole
from esper.training.interrupt import INTERRUPTED, interruptible

if TYPE_CHECKING:
    import torch

    from esper.training.pools import Executor
    from esper.training.sweep import SettingRow, Sweep


@dataclass(frozen=True)
class SweepCommand:
    """Train every setting with every seed, and compare the settings on held-out draws. Repeated, it goes on."""

    path: Annotated[Path, tyro.conf.Positional]
    """TOML: `seeds = [0, 1]`, optional `preset = "demo"`, a table `[common]` and one `[settings.NAME]` for each."""
    out: Annotated[Path | None, by_default("runs/NAME of the file")] = None
    """Folder of the runs. One that holds this sweep already is continued."""
    episodes: int = 32
    """Held-out draws on which the settings are compared at the end."""
    workers: Annotated[int | None, by_default("one per CPU core; one with a GPU")] = None
    """Processes that share the runs. The results do not change."""
    device: DeviceOption = "auto"
    cluster: ClusterOption = None
    actors: ActorOption = "cpu"

    def run(self) -> int:
        from esper.training.catalogue import with_start
        from esper.training.engines import check_gpu_options
        from esper.training.loop import engine_of
        from esper.training.run_folder import RunFolder
        from esper.training.sweep import Sweep, read_sweep

        runs = read_sweep(self.path)
        device = device_of_jobs(self.device, self.cluster, self.actors)
        out = self.out or Path("runs") / self.path.stem
        for run in runs:  # find out now, not in a worker, what cannot be had
            family = run.config.family()
            family.draw(run.config.draw_ids(1)[0])
            check_gpu_options(run.config.precision, run.config.compiled, device)
            engine_of(run.config, family, str(device))
            if not (out / run.name).exists():  # one that has begun keeps what it starts from
                with_start(run.config)
        claim(out)
        console = wide_console(stderr=False)
        chosen = chosen_executor(self.cluster, self.actors, self.workers, device.type, console)
        with RunFolder(out).lock(), chosen as executor:
            sweep = Sweep(out, runs)
            with interruptible() as interrupt, ProgressDisplay(console, "updates") as watch:
                finished = sweep.train(
                    executor, device=str(device), progress=watch.note, stop=lambda: interrupt.requested
                )
            if not finished:
                again = ["esper", "sweep", str(self.path), "--out", str(out), "--episodes", str(self.episodes)]
                console.print(f"Stopped; continue with: {shlex.join(again)}", soft_wrap=True)
                return INTERRUPTED
            rows = self._judge(console, sweep, executor, device)
        _show(console, rows, self.episodes)
        kept = {"draws": self.episodes, "settings": [asdict(row) for row in rows]}
        write_whole(out / "comparison.json", json.dumps(kept, indent=1))
        console.print(f"Written: {out / 'comparison.json'}; the runs are in {out}", soft_wrap=True)
        return 0

    def _judge(self, console: Console, sweep: Sweep, executor: Executor, device: torch.device) -> list[SettingRow]:
        from esper.tasks.draws import comparison_draws
        from esper.training.comparison import compare
        from esper.training.sweep import judged_at, setting_rows

        config = sweep.runs[0].config
        with ProgressDisplay(console) as watch:
            found = compare(
                config.family() if config.data_dir or config.text_file else config.task,
                {run.name: str(sweep.of(run).path) for run in sweep.runs},
                comparison_draws(self.episodes),
                controls=False,
                executor=executor,
                device=device,
                rent=judged_at(sweep.runs),
                progress=watch.note,
            )
        return setting_rows(sweep.runs, found.controllers)


def _show(console: Console, rows: list[SettingRow], draws: int) -> None:
    table = Table("setting", "seeds", "score", f"vs {rows[0].name}", "by seed", title_justify="left")
    table.title = f"On {draws} held-out draws, the same for all"
    for row in rows:
        cells = (styled(with_interval(row.score)), styled(with_interval(row.vs_first, "+.1f")))
        table.add_row(row.name, str(row.seeds), *cells, ", ".join(f"{score:.1f}" for score in row.by_seed))
    console.print(table)
    console.print("score: test accuracy − rent; intervals: bootstrap over seeds and draws, 95 %", style="dim")


COMMAND = SweepCommand
