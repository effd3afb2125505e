"""Seeds × settings: what a file asks for, runs in parts that equal whole runs, and the table of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from esper.agent.shipped import shipped_path
from esper.cli import main
from esper.config import ConfigError
from esper.env.rent import RENT_RATE
from esper.telemetry.store import open_readonly
from esper.training import sweep
from esper.training.loop import Trainer
from esper.training.run_folder import RunFolder, RunFolderError
from esper.training.statistics import bootstrap_table
from esper.training.sweep import Run, Sweep, judged_at, read_sweep, setting_rows
from esper.training.train_config import TrainConfig
from esper.training.workers import Processes

TINY = TrainConfig(task="digits", envs=2, updates=3, evaluate_every=0)
FILE = """
preset = "demo"
seeds = [0, 3]
[common]
envs = 8
[common.ppo]
siblings = 2
[settings.plain]
[settings.fast.ppo]
learning_rate = 0.5
"""


def test_a_file_is_every_setting_with_every_seed(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(FILE)
    runs = read_sweep(tmp_path / "s.toml")
    assert [run.name for run in runs] == ["plain-0", "plain-3", "fast-0", "fast-3"]
    assert [run.config.seed for run in runs] == [0, 3, 0, 3]
    assert {run.config.envs for run in runs} == {8}
    assert {run.config.ppo.siblings for run in runs} == {2}  # a table of a setting is added to that of all
    assert [run.config.ppo.learning_rate for run in runs] == [1e-3, 1e-3, 0.5, 0.5]  # of the preset, and its own
    assert runs[0].config.draws == 48  # of the preset


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("seeds = [0, 3]", ""), "seeds must be a list of different whole numbers"),
        (("[0, 3]", "[1, 1]"), "seeds must be a list of different whole numbers"),
        (("[0, 3]", '["a"]'), "a seed must be a whole number, not 'a'"),
        (('"demo"', '"nothing"'), "preset must be one of small, demo"),
        (("seeds", "seed"), "unknown 'seed'; did you mean 'seeds'"),
        (("learning_rate", "learning_rat"), "settings.fast: ppo: unknown setting 'learning_rat'"),
        (("siblings = 2", "siblings = 3"), "cannot be grouped into siblings"),
        (("[settings.plain]", '[settings."../up"]'), "a name is letters, digits, - and _"),
        (("[settings.plain]", '[settings.plain]\ntask = "digits"'), "all settings must have one task"),
        (("[settings.plain]", "[settings.plain]\nseed = 2"), "seeds are given by seeds ="),
        (("[common]", "["), "is not valid TOML"),
        (("envs = 8", "tensorboard = true"), "a sweep does nothing with tensorboard"),
        (("envs = 8", "compare-episodes = 3"), "--episodes is for its comparison"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    (tmp_path / "s.toml").write_text(FILE.replace(*change, 1))
    with pytest.raises((ConfigError, ValueError)) as refused:
        read_sweep(tmp_path / "s.toml")
    assert line in str(refused.value)


def test_a_setting_may_differ_from_what_follows_from_the_common_ones(tmp_path: Path) -> None:
    """The shaping follows the discount. That of `common` was kept beside the discount of a setting, and refused."""
    common = FILE.replace("siblings = 2", "discount = 0.9")
    (tmp_path / "s.toml").write_text(common.replace("learning_rate = 0.5", "discount = 0.95"))
    plain, _, fast, _ = (run.config for run in read_sweep(tmp_path / "s.toml"))
    assert (plain.ppo.discount, plain.reward.discount) == (0.9, 0.9)
    assert (fast.ppo.discount, fast.reward.discount) == (0.95, 0.95)


def test_runs_may_start_from_a_policy_by_its_name(tmp_path: Path) -> None:
    """It was looked for as a file of that name."""
    run = Run("one", 0, replace(TINY, init="small"))
    begun = Sweep(tmp_path / "sweep", [run])
    assert begun.of(run).start.read_bytes() == shipped_path("small").read_bytes()
    Sweep(tmp_path / "sweep", [run])  # goes on


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ('[settings.a]\n[settings.b]\ninit = "nothing"\n', "there is no checkpoint nothing"),
        ("[settings.a.ppo]\nteacher_kl = 0.5\n", "needs a teacher"),
        ('[settings.a]\nprecision = "bf16"\n', "is for GPUs"),
        ('[settings.a]\nengine = "graphs"\n', "needs a GPU"),
    ],
)
def test_what_a_run_cannot_have_is_refused_before_any_begins(
    tmp_path: Path, settings: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight of no teacher and the number formats of a GPU did nothing, without a word."""
    (tmp_path / "s.toml").write_text(f'seeds = [0]\n[common]\ntask = "digits"\nenvs = 2\n{settings}')
    words = ["sweep", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(words) in (1, 2)
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_are_judged_at_their_own_rent() -> None:
    """As `esper train` judges one; it was the usual rent, whatever they were trained for."""
    of_rents = [[Run(f"r{rent}", 0, replace(TINY, rent=rent)) for rent in rents] for rents in ((9.0,), (9.0, 2.0))]
    assert [judged_at(runs) for runs in of_rents] == [9.0, RENT_RATE]
    assert judged_at([Run("varied", 0, replace(TINY, rent="varied"))]) == RENT_RATE


def test_a_run_in_parts_is_the_run_and_a_killed_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "UPDATES_PER_JOB", 2)
    whole = Trainer(TINY, RunFolder.create(tmp_path / "whole", TINY))
    whole.run()
    whole.close()
    runs = [Run("one", 0, TINY)]
    begun = Sweep(tmp_path / "sweep", runs)
    parts: list[int] = []
    assert not begun.train(Processes(1), progress=lambda done, *_: parts.append(done), stop=lambda: bool(parts))
    assert parts == [2]
    again = Sweep(tmp_path / "sweep", runs)
    assert again.train(Processes(1), progress=lambda done, *_: parts.append(done))
    assert parts == [2, 3]
    ours, theirs = (RunFolder(tmp_path / name).latest() for name in ("whole", "sweep/one-0"))
    assert ours is not None
    assert theirs is not None
    assert ours.read_bytes() == theirs.read_bytes()
    with open_readonly(tmp_path / "sweep/one-0") as store:
        assert store.execute("SELECT count(*) FROM episodes").fetchone()[0] == 6  # each once
    with pytest.raises(RunFolderError, match="holds another sweep"):
        Sweep(tmp_path / "sweep", [Run("one", 0, replace(TINY, envs=4))])


def of(*scores: float) -> dict[int, Any]:
    return {number: SimpleNamespace(score=score) for number, score in enumerate(scores)}


def test_the_table_pairs_settings_by_seed_and_draw() -> None:
    runs = [Run(name, seed, TINY) for name in ("a", "b") for seed in (0, 1)]
    results = {"a-0": of(1.0, 5.0), "a-1": of(2.0, 8.0), "b-0": of(3.0, 7.0), "b-1": of(4.0, 10.0)}
    first, second = setting_rows(runs, results)
    assert (first.name, first.seeds, first.by_seed, first.vs_first) == ("a", 2, (3.0, 5.0), None)
    assert first.score.value == 4.0
    assert second.vs_first is not None
    # Two points better in every pair: whatever is drawn again, the difference is 2.
    assert (second.vs_first.value, second.vs_first.low, second.vs_first.high) == (2.0, 2.0, 2.0)


def test_intervals_of_a_table_contain_what_varies() -> None:
    runs_vary = bootstrap_table(np.array([[0.0] * 50, [10.0] * 50]))
    assert (runs_vary.low, runs_vary.high) == (0.0, 10.0)
    draws_vary = bootstrap_table(np.array([[0.0, 10.0] * 25] * 2))
    assert draws_vary.low is not None
    assert draws_vary.high is not None
    assert 0.0 < draws_vary.low < 5.0 < draws_vary.high < 10.0
    alone = bootstrap_table(np.array([[3.0]]))
    assert (alone.value, alone.low, alone.high) == (3.0, None, None)


def test_a_stopped_sweep_names_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It left --out away, so that the named command began another sweep elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text('seeds = [0]\n[common]\ntask = "digits"\nenvs = 2\nupdates = 1\n[settings.plain]\n')
    stopped = SimpleNamespace(requested=True)
    monkeypatch.setattr("esper.cli.sweep.interruptible", lambda: nullcontext(stopped))
    assert main(["sweep", "s.toml", "--out", "my runs", "--episodes", "2", "--workers", "1"]) == 130
    assert "esper sweep s.toml --out 'my runs' --episodes 2\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_ends_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text(
        'seeds = [0, 1]\n[common]\ntask = "digits"\nenvs = 2\nupdates = 2\nevaluate_every = 0\n'
        "[settings.plain]\n[settings.fast.ppo]\nlearning_rate = 1e-3\n"
    )
    words = ["sweep", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out"), "--episodes", "2", "--workers", "2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "vs plain" in said
    assert (tmp_path / "out/comparison.json").exists()
    assert main(words) == 0  # nothing is left to train
    assert "updates" not in capsys.readouterr().out


def test_a_log_that_a_killed_process_left_is_not_replayed_onto_another_store(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite-wal").write_bytes(b"changes of a store that is replaced")
    sweep._write(tmp_path, {"run.sqlite": b"the store"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sqlite"]
