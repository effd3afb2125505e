"""The live view of `esper train` in a terminal: sparklines, and where the seeds of each slot are."""

from __future__ import annotations

import io
from collections import Counter
from types import SimpleNamespace

from rich.console import Console

from esper.cli.train_view import BAR, TrainWatch, slot_bars, sparkline
from esper.lifecycle import Stage
from esper.training.journal import RolloutSummary
from esper.training.loop import UpdateReport
from esper.training.train_config import TrainConfig


def report(update: int, evaluation: float | None = None) -> UpdateReport:
    stages = (Counter({Stage.FOSSILIZED: 9, Stage.DORMANT: 3}), Counter({Stage.TRAINING: 1, Stage.PRUNED: 11}))
    rollout = RolloutSummary((0,), [10.0], [50.0 + update], [80.0], [1.5], 25, Counter(), 0, stages)
    seeds = {"episode/germinated": 40.0, "episode/fossilized": 18.0, "episode/pruned": 15.0}
    learning = {"entropy": 0.9, "kl": 0.0111, "explained_variance": -0.51, "steps_per_second": 52.0}
    return UpdateReport(update, rollout, rollout.metrics() | seeds | learning, (), evaluation, False)


def test_a_sparkline_spans_its_range_and_shows_gaps() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, None, 3.0]) == "▁ █"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == sparkline([None]) == ""
    assert len(sparkline([float(i) for i in range(100)], width=20)) == 20


def test_the_bar_of_a_slot_has_its_length_and_names_every_stage() -> None:
    (first, second) = slot_bars(report(1).rollout.stages)
    assert first.plain == f"slot 0  {'·' * 6}{'█' * 18}  9 kept, 3 empty"  # a quarter and three quarters of 24 cells
    assert second.plain == f"slot 1  {'▒' * 2}{'×' * 22}  11 removed, 1 training"
    thirds = Counter({Stage.DORMANT: 1, Stage.TRAINING: 1, Stage.BLENDING: 1, Stage.HOLDING: 1, Stage.PRUNED: 3})
    (line,) = slot_bars([thirds])
    assert len(line.plain.split("  ")[1]) == BAR
    assert slot_bars([Counter()]) == []


def test_the_view_fits_eighty_columns_and_says_what_matters() -> None:
    console = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    trainer = SimpleNamespace(update=0, config=TrainConfig(updates=20), cluster=None)
    watch = TrainWatch(console, trainer)  # type: ignore[arg-type]
    watch.reports = [report(update, 60.5 if update == 4 else None) for update in range(1, 7)]
    console.print(watch.view())
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, said.splitlines())) <= 80
    for part in (
        "update 6 of 20",
        "52 steps/s",
        "56.0",
        "60.5",
        "▁▂▄▅▇█",
        "1.50",
        "0.0111",
        "40/18/15",
        "9 kept, 3 empty",
    ):
        assert part in said, (part, said)
