"""What a person sees of a run, and how it may end: progress, summary, picture, patience, the best epoch, Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import esper
from esper.actions import Action, Op
from esper.engine.eager import EpochRecord
from esper.growth.costs import flops_per_example
from esper.lifecycle import Rules, Stage
from esper.tables import quantity
from esper.training.own.best import Best
from esper.training.own.grown import Grown
from esper.training.own.stepper import StateError

torch.manual_seed(0)
X = torch.randn(300, 2)
Y = (X.norm(dim=1) * 1.5).long().clamp(max=2)  # which of three rings
TRAIN, VAL, TEST = (X[:150], Y[:150]), (X[150:230], Y[150:230]), (X[230:], Y[230:])
RULES = Rules(training_epochs=1, blending_epochs=2, gradient_activity=0.0, shadow_benefit=-100.0, contribution=-100.0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def fast(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def grow(**settings: Any) -> Grown:
    given = {"slots": ["1"], "controller": "schedule", "epochs": 10, "rules": RULES, "optimizer": fast} | settings
    return esper.grow(net(), TRAIN, VAL, **given)


@pytest.fixture(scope="module")
def grown() -> Grown:
    return grow(slots="auto", control=True, test_data=TEST, controller="heuristic", epochs=20)


# -- slots="auto" -------------------------------------------------------------------------------------------------


def test_what_auto_chose_is_a_remark_and_no_warning(grown: Grown) -> None:
    """A warning would be an error in this suite."""
    assert grown.history.slots == ("0", "2")
    assert grown.remarks[0] == "slots='auto' chose 0, 2; esper.slots(model, example) lists every possible slot."


def test_auto_is_the_default_of_grow_and_of_an_own_loop() -> None:
    model = net()
    growth = esper.Growth(model, torch.optim.SGD(model.parameters(), lr=0.1), validate=VAL, epochs=9)
    assert [slot.path for slot in growth.learner.model.slots] == ["0", "2"]
    found = esper.slots(model, X[:2])
    assert esper.grow(net(), TRAIN, VAL, epochs=1, controller="none").history.slots == ("0", "2")
    assert esper.grow(net(), TRAIN, VAL, epochs=1, controller="none", slots=found["3"]).history.slots == ("3",)


# -- summary, picture, HTML, costs --------------------------------------------------------------------------------


def test_the_summary_has_what_was_measured(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = str(grown.summary())
    assert grown.test is not None
    assert grown.control is not None
    row = next(line for line in text.splitlines() if line.startswith(" grown "))
    assert row.split() == [
        "grown",
        *f"{grown.validation.accuracy:.1f} %".split(),
        *f"{grown.test.accuracy:.1f} %".split(),
        f"{grown.score:.1f}",
        f"{grown.parameters:,}",
        quantity(grown.flops or 0),
    ]
    assert grown.control_validation is not None
    ungrown = " ".join(next(line for line in text.splitlines() if "not grown" in line).split())
    assert f"{grown.control_validation.accuracy:.1f} % {grown.control.accuracy:.1f} %" in ungrown
    assert f"{grown.history.untrained:.1f} %" in next(line for line in text.splitlines() if "before training" in line)
    for story in grown.history.seeds():
        assert any(line.split()[:2] == [story.slot, story.blueprint] for line in text.splitlines())
    assert all(f"note: {remark.split()[0]}" in text for remark in grown.remarks)
    assert repr(grown.summary()) == text


@pytest.mark.parametrize("columns", [40, 80])
def test_the_summary_fits_narrow_terminals(grown: Grown, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(grown.summary())
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text


def test_without_test_data_there_is_no_column_for_them() -> None:
    quick = grow(epochs=2, controller="none")
    assert "test" not in str(quick.summary())
    assert "Nothing was grown." in str(quick.summary())
    assert "not trained" in str(quick.summary())


def test_flops_are_those_of_the_model(grown: Grown) -> None:
    """Host and seeds by themselves sum to what the exported model needs."""
    assert any(story.fate is Stage.FOSSILIZED for story in grown.history.seeds())
    assert grown.flops == flops_per_example(grown.model, grown.example)
    assert grown.history.host_flops == 2 * (2 * 6 + 6 * 6 + 6 * 3) == flops_per_example(net(), X[:2])
    told = grown.history.to_json()
    assert told["host_flops_per_example"] == grown.history.host_flops
    assert told["epochs"][0]["flops_per_example"] == grown.history.host_flops
    assert told["epochs"][-1]["flops_per_example"] == grown.flops
    first = told["seeds"][0]
    assert (first["parameters"], first["flops"]) == (330, 576)  # 6·24 + 24 + 24·6 + 6 + 12, and 2·(6·24 + 24·6)


def test_latency_is_a_time_of_the_batch_that_is_given(grown: Grown) -> None:
    calls: list[int] = []
    handle = grown.model.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    try:
        assert 0.0 < grown.latency() < 1000.0
        assert 0.0 < grown.latency(X) < 1000.0
    finally:
        handle.remove()
    assert set(calls[: len(calls) // 2]) == {2}
    assert set(calls[len(calls) // 2 :]) == {300}


def test_the_picture(grown: Grown, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'esper[plot]'")
    figure = grown.plot(tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    curves = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert any(values == list(grown.history.control) for values in curves.values())
    assert len(grown.history.control) == len(grown.history.records)
    assert grown.plot() is not None


def test_without_matplotlib_it_is_one_line(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"^the plot needs matplotlib: pip install 'esper\[plot\]'$"):
        grown.plot()


def test_html_is_escaped_and_the_repr_is_a_line(grown: Grown) -> None:
    class Mine:
        name = "<b onload=x>"

        def reset(self, seeds: object) -> None: ...

        def decide(self, situations: list[Any]) -> list[Action]:
            return [Action(Op.WAIT, reason="<script>alert(1)</script>")]

    html = grow(controller=Mine(), epochs=9)._repr_html_()
    assert "<script>" not in html
    assert "<b " not in html
    assert "&lt;b onload=x&gt;" in html
    assert "&lt;script&gt;" in html
    assert set(re.findall(r"<(\w+)", grown._repr_html_())) == {
        *("table", "caption", "thead", "tbody", "tr", "th", "td", "p", "small")
    }
    assert "\n" not in repr(grown)
    assert f"{grown.parameters:,} parameters (81 before)" in repr(grown)


# -- progress -----------------------------------------------------------------------------------------------------


def test_progress_where_nobody_watches_is_lines_on_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    grow(epochs=12, controller="none", progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["epoch 10/12", "epoch 12/12"]


def test_progress_in_a_terminal_is_live() -> None:
    seen: list[EpochRecord] = []
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    grow(epochs=3, controller="none", progress=console, on_epoch=lambda record, control: seen.append(record))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "growing Sequential" in said
    assert "3/3" in said
    assert len(seen) == 3


def test_progress_in_a_notebook_is_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    class Shown:
        def update(self, page: str) -> None:
            pages.append(page)

    def display(page: str, display_id: bool) -> Shown:
        pages.append(page)
        return Shown()

    ipython = SimpleNamespace(display=SimpleNamespace(HTML=str, display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    grow(progress=Console(force_jupyter=True), control=True)
    assert len(pages) == 11
    assert "<progress value='10' max='10'>" in pages[-1]
    assert "not grown" in pages[-1]
    assert "1 fossilized 1.00" in pages[-1]


# -- patience and the best epoch ----------------------------------------------------------------------------------


class Metric:
    """Whatever the network does: these figures, one per measurement of the validation data."""

    def __init__(self, *figures: float) -> None:
        self.figures, self.measured = list(figures), 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        self.measured += 1
        return self.figures[min(self.measured, len(self.figures)) - 1]


def test_patience_counts_epochs_without_a_better_figure() -> None:
    #                untrained  1     2     3     4     5 …
    figures = Metric(20.0, 20.0, 30.0, 50.0, 50.0, 40.0, 50.0, 90.0)
    found = grow(controller="none", metric=figures, metric_scale="percent", patience=3, epochs=30, slots=["1"])
    assert len(found.history.records) < 10
    best = max(range(len(found.history.records)), key=lambda i: found.history.records[i].measured.accuracy)
    assert len(found.history.records) == best + 1 + 3
    assert not found.interrupted
    count = len(found.history.records)
    assert found.remarks == (
        f"The run ended after {count} of 30 epochs: 3 in a row had no better validation accuracy (patience).",
    )


def test_a_run_does_not_stop_while_a_seed_is_on_its_way() -> None:
    """The schedule plants in the third epoch; one epoch of incubation, two of blending."""
    flat = grow(metric=Metric(50.0), metric_scale="percent", patience=1, epochs=30)
    assert len(flat.history.records) == 2  # nothing was planted yet
    rules = Rules(training_epochs=1, blending_epochs=5, gradient_activity=0.0, shadow_benefit=-100.0, contribution=-1.0)
    late = grow(metric=Metric(50.0), metric_scale="percent", patience=3, epochs=30, rules=rules)
    stages = [record.stages[0] for record in late.history.records]
    assert len(stages) > 1 + 3
    assert stages[-1] not in (Stage.GERMINATED, Stage.TRAINING)
    assert late.history.seeds()[0].fate is Stage.FOSSILIZED


def test_the_best_epoch_is_what_comes_back() -> None:
    """A rate below zero, which unlearns in the end: without keep_best the last epoch comes back."""
    weights: list[list[Tensor]] = []
    held: list[nn.Module] = []

    def made(parameters: Any, model: nn.Module) -> torch.optim.Optimizer:
        held.append(model)
        return torch.optim.AdamW(parameters, lr=0.02)

    def note(record: EpochRecord, control: EpochRecord | None) -> None:
        weights.append([tensor.clone() for tensor in held[0].state_dict().values()])

    settings: dict[str, Any] = {"optimizer": made, "epochs": 14, "scheduler": _unlearning, "controller": "none"}
    settings["updates_per_epoch"] = 8
    found = grow(**settings, keep_best=True, control=True, on_epoch=note)
    accuracies = [record.measured.accuracy for record in found.history.records]
    best = max(range(14), key=lambda i: accuracies[i])
    assert found.history.kept == best + 1 < 14
    assert accuracies[-1] < accuracies[best] - 5.0
    assert found.validation.accuracy == pytest.approx(accuracies[best])
    for tensor, expected in zip(found.model.state_dict().values(), weights[best], strict=True):
        assert torch.equal(tensor, expected)
    assert found.control is not None
    assert found.control.accuracy == pytest.approx(max(found.history.control))  # it has the same right
    assert f"Kept is the network after epoch {best + 1} of 14" in found.remarks[-1]
    assert "pass test_data=" in found.remarks[-1]
    held.clear()
    assert grow(**settings).validation.accuracy == pytest.approx(accuracies[-1])


def _unlearning(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 if update < 80 else -0.6)


def test_the_best_epoch_with_seeds_is_a_network_that_was_measured() -> None:
    for seed in range(3):
        found = grow(keep_best=True, epochs=16, seed=seed, slots=["1", "3"], control=True)
        accuracies = [record.measured.accuracy for record in found.history.records]
        kept = found.history.kept or len(accuracies)
        assert found.validation.accuracy == pytest.approx(accuracies[kept - 1])
        assert len(found.history.kept_records) == kept
        assert all(story.born < kept for story in found.history.seeds())
        acting = [story for story in found.history.seeds() if story.fate is not Stage.PRUNED]
        assert found.parameters == 81 + sum(story.parameters or 0 for story in acting)
        assert found.flops == flops_per_example(found.model, found.example)


def test_a_seed_of_the_best_epoch_that_the_end_removes_is_named() -> None:
    rules = Rules(
        training_epochs=1, blending_epochs=1, gradient_activity=0.0, shadow_benefit=-100.0, contribution=1000.0
    )
    settings: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02), "epochs": 14}
    settings |= {"scheduler": _unlearning, "updates_per_epoch": 8, "controller": "schedule", "slots": ["1"]}
    found = grow(keep_best=True, rules=rules, **settings)
    assert found.history.kept is not None
    assert found.history.kept_records[-1].alphas == (1.0,)
    assert [story.fate for story in found.history.seeds()] == [Stage.PRUNED]
    assert "unfinished seeds acted (1)" in found.remarks[-1]


def test_an_epoch_after_which_a_seed_has_another_strength_is_no_candidate() -> None:
    lifecycle = SimpleNamespace(alphas=[0.0], stages=[Stage.DORMANT])
    stepper: Any = SimpleNamespace(learner=SimpleNamespace(model=SimpleNamespace(lifecycle=lifecycle)))
    stepper.network_state = lambda: {"alphas": list(lifecycle.alphas)}
    returned: list[object] = []
    stepper.return_to = returned.append
    best = Best(stepper, keep=True)

    def epoch(accuracy: float, during: float, after: float, stage: Stage) -> None:
        lifecycle.alphas, lifecycle.stages = [after], [stage]
        best.note(SimpleNamespace(alphas=(during,), measured=SimpleNamespace(accuracy=accuracy)))  # type: ignore[arg-type]

    epoch(40.0, 0.0, 0.0, Stage.TRAINING)
    epoch(95.0, 0.0, 0.5, Stage.BLENDING)
    epoch(96.0, 0.5, 1.0, Stage.BLENDING)
    assert (best.epoch, best.accuracy) == (1, 40.0)
    assert not best.exhausted(1)  # a seed is on its way
    epoch(50.0, 1.0, 1.0, Stage.HOLDING)
    assert (best.epoch, best.accuracy) == (4, 50.0)
    epoch(50.0, 1.0, 1.0, Stage.HOLDING)  # as good is not better
    assert best.exhausted(1)
    assert not best.exhausted(2)
    assert not best.exhausted(None)
    assert best.restore() == 4
    assert returned == [{"alphas": [1.0]}]


@pytest.mark.parametrize("patience", [0, -1, 1.5, "3", True])
def test_patience_must_be_a_number_of_epochs(patience: object) -> None:
    with pytest.raises(ValueError, match=r"^patience must be "):
        grow(patience=patience)


# -- stopped and killed -------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_is_there_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    def interrupt(record: EpochRecord, control: EpochRecord | None) -> None:
        if record.epoch == 5:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = grow(checkpoint=tmp_path, on_epoch=interrupt)
    assert stopped.interrupted
    assert len(stopped.history.records) == 6
    assert stopped.remarks[-1] == (
        "The run was interrupted after 6 of 10 epochs; what was grown so far is kept; the same call goes on from there."
    )
    stopped.save(tmp_path / "kept")
    whole, resumed = grow(), grow(checkpoint=tmp_path)
    assert not resumed.interrupted
    for one, other in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_at_a_terminal_is_answered_at_once(
    terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda stream: terminal)
    grow(on_epoch=lambda record, control: os.kill(os.getpid(), signal.SIGINT))
    assert ("Ctrl-C once more stops at once" in capfd.readouterr().err) is terminal


def test_a_killed_run_with_patience_and_best_epoch_goes_on_exactly(tmp_path: Path) -> None:
    """In a process of its own, which gets no chance to tidy up."""
    settings: dict[str, Any] = {"slots": ["1", "3"], "epochs": 40, "control": True, "patience": 6, "keep_best": True}

    def die(record: EpochRecord, control: EpochRecord | None) -> None:
        if record.epoch + 1 == last:
            os.kill(os.getpid(), signal.SIGKILL)

    whole = grow(**settings)
    assert whole.history.kept is not None
    assert whole.history.kept < len(whole.history.records) < 40
    last = whole.history.kept + 2  # what is kept was made by the process that is killed
    process = os.fork()
    if process == 0:
        try:
            grow(**settings, checkpoint=tmp_path, on_epoch=die)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    torch.manual_seed(77)  # what a new process has is not what the old one had
    resumed = grow(**settings, checkpoint=tmp_path)
    assert resumed.history.kept == whole.history.kept
    assert resumed.history.records[1:] == whole.history.records[1:]  # in the first, nan is not nan
    assert resumed.history.control == whole.history.control
    assert resumed.control == whole.control
    assert resumed.remarks == whole.remarks
    ends = [found.model.state_dict() for found in (whole, resumed)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_checkpoint_of_a_run_with_other_options_is_refused(tmp_path: Path) -> None:
    grow(epochs=9, checkpoint=tmp_path, controller="none")
    with pytest.raises(StateError, match="is of a run without keep_best"):
        grow(epochs=9, checkpoint=tmp_path, controller="none", keep_best=True)
