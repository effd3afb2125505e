"""What docs/scaling.md shows: its sweep is one that can be read, and its search with Optuna runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.training.sweep import read_sweep

PAGE = (Path(__file__).resolve().parents[2] / "docs/scaling.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_sweep_is_read(tmp_path: Path) -> None:
    (tmp_path / "rates.toml").write_text(block("toml"))
    runs = read_sweep(tmp_path / "rates.toml")
    assert [run.name for run in runs] == [f"{name}-{seed}" for name in ("plain", "fast") for seed in (0, 1, 2)]
    assert runs[-1].config.ppo.learning_rate == 3e-3


@pytest.mark.slow
def test_the_search_runs() -> None:
    optuna = pytest.importorskip("optuna", reason="an example of another library, which no extra has")
    code = block("python").replace("n_trials=20", "n_trials=2")
    short = "envs=2, updates=1, evaluation_episodes=2, evaluate_every=1"
    changed = code.replace("evaluate_every=5", short)
    assert changed != code
    names: dict[str, object] = {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    exec(compile(changed, "scaling.md", "exec"), names)
    study = names["study"]
    assert isinstance(study, optuna.Study)
    assert len(study.trials) == 2
