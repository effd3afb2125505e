"""Rollouts too large for a record of every step: rows of all episodes, counts over all steps, a sample in detail."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_render import Silent
from tiny_family import TinyFamily

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from esper.actions import Op
from esper.cli import main
from esper.engine.governor import FAULTS
from esper.env.growth_env import GrowthEnv
from esper.env.reward.config import TERMS
from esper.env.reward.reward import shaping_share
from esper.env.reward.suspicion import SUSPICION_KINDS
from esper.lifecycle import TRANSITIONS, Stage
from esper.rollout.episodes import Episodes, join
from esper.rollout.play import play
from esper.rollout.render import render
from esper.telemetry.recorder import RunRecorder, StoreRecorder
from esper.telemetry.records import Decision, EpisodeColumns, Event, Level
from esper.telemetry.schema import VIEWS
from esper.telemetry.sinks import ScalarSink
from esper.telemetry.store import RunStore, open_readonly
from esper.training import bulk, journal
from esper.training.bulk import BULK, EPISODES_IN_FULL, sample
from esper.training.journal import Journal, RolloutSummary
from esper.training.loop import Trainer
from esper.training.progress import progress_of
from esper.training.train_config import TrainConfig
from synthetic_rollout import synthetic_rollout


class Kept(RunRecorder):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Decision | Event] = []
        self.columns: list[EpisodeColumns] = []
        self.numbers: dict[str, float] = {}

    def decision(self, decision: Decision) -> None:
        self.records.append(decision)

    def event(self, event: Event) -> None:
        self.records.append(event)

    def episodes(self, episodes: EpisodeColumns) -> None:
        self.columns.append(episodes)

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self.numbers |= values


@pytest.fixture(scope="module")
def played() -> Episodes:
    """With probabilities, as a policy gives them, and facts of two kinds of problems beside the reports."""
    episodes = play(GrowthEnv(TinyFamily(horizon=16), 12), Silent(), range(12))
    log_prob = torch.rand(*episodes.action.shape, generator=torch.Generator().manual_seed(1)).log()
    assert episodes.facts is not None
    assert episodes.facts.kinds == ()  # of a family that names none
    facts = replace(episodes.facts, kinds=("even", "odd one @0", "odd one @1"), kind=torch.tensor([0, 1, 0, 2] * 3))
    return replace(episodes, log_prob=log_prob, facts=facts)


def noted(episodes: Episodes, recorder: RunRecorder, update: int = 1) -> RolloutSummary:
    return Journal(recorder, update).note(
        episodes, values=torch.arange(episodes.reward.numel()).view_as(episodes.reward)
    )


def rows_of(episodes: Episodes) -> list[dict[str, Any]]:
    """What is recorded of each episode, by the reports of its steps."""
    return [
        {
            "draw": draw,
            "episode_return": sum(info.reward.total for info in row),
            "score": row[-1].reward.score,
            "accuracy": row[-1].record.measured.accuracy,
            "parameters": row[-1].parameters,
            "host_parameters": row[-1].host_parameters,
            "length": len(row),
            "governor": None if row[-1].record.verdict is None else row[-1].record.verdict.message,
            "rewards": [sum(info.reward.terms[term] for info in row) for term in TERMS],
        }
        for draw, row in zip(episodes.draw.tolist(), episodes.reports, strict=True)
    ]


def check_columns(columns: EpisodeColumns, episodes: Episodes) -> None:
    rows = rows_of(episodes)
    for name in ("draw", "score", "accuracy", "parameters", "host_parameters", "length", "governor"):
        assert list(getattr(columns, name)) == [row[name] for row in rows], name
    assert columns.episode_return == pytest.approx([row["episode_return"] for row in rows], abs=1e-9)
    assert tuple(columns.terms) == TERMS
    for row, rewards in zip(rows, columns.rewards, strict=True):
        assert rewards == pytest.approx(row["rewards"], abs=1e-9)


def test_a_small_rollout_is_recorded_step_by_step(played: Episodes) -> None:
    """The rows are the same whether they come from the reports of an engine or from columns."""
    whole, half = Kept(), Kept()
    first = noted(played, whole)
    second = noted(replace(played, reports=()), half)
    assert whole.records == half.records
    assert whole.columns == half.columns
    assert whole.numbers == {}
    check_columns(whole.columns[0], played)
    ends = [row[-1].record.stages for row in played.reports]
    assert first.stages == tuple(map(Counter, zip(*ends, strict=True)))
    assert first.governed == sum(row[-1].record.verdict is not None for row in played.reports)
    changes = [change.target for row in played.reports for info in row for change in info.record.transitions]
    assert +first.lifecycle == Counter(changes)
    assert first.growth == [row[-1].parameters / row[-1].host_parameters for row in played.reports]
    by_term = [value for name, value in first.metrics().items() if name.startswith("reward/")]
    assert sum(by_term) == pytest.approx(sum(first.returns) / 12)
    assert first.stages == second.stages
    assert first.metrics() == pytest.approx(second.metrics(), abs=1e-9)
    assert first.lifecycle == second.lifecycle


def test_the_share_of_shaping_is_recorded(played: Episodes) -> None:
    """Covers: R121. Two steps, by hand: |2| of |2| + |−2| is shaping, and nothing of |5|."""
    steps = [{"score_shaping": 2.0, "action_cost": -2.0}, {"objective": 5.0}]
    terms = torch.tensor([[step.get(name, 0.0) for name in TERMS] for step in steps])
    assert shaping_share(terms).mean().item() == pytest.approx(0.25)
    every = [[info.reward.terms[name] for name in TERMS] for row in played.reports for info in row]
    share = noted(played, Kept()).metrics()["episode/shaping_share"]
    assert share == pytest.approx(shaping_share(torch.tensor(every, dtype=torch.float64)).mean().item())
    assert 0.1 < share <= 1.0


@pytest.fixture
def small_bulk(monkeypatch: pytest.MonkeyPatch) -> int:
    """Twelve episodes count as many, and three are a sample."""
    monkeypatch.setattr(journal, "BULK", 10)
    monkeypatch.setattr(journal, "sample", lambda draws, count=3: sample(draws, count))
    return 3


def test_a_large_rollout_has_all_episodes_and_a_sample_of_the_rest(played: Episodes, small_bulk: int) -> None:
    full, kept = Kept(), Kept()
    steps = torch.arange(played.reward.numel()).view_as(played.reward)
    Journal(full, 1)._steps(played, played.reports, range(12), steps)
    summary = noted(played, kept)
    chosen = sample(played.draw, small_bulk).tolist()
    assert kept.records == [r for r in full.records if r.env in chosen]
    assert kept.records
    (columns,) = kept.columns
    check_columns(columns, played)
    assert summary.metrics() == pytest.approx(RolloutSummary.of(played).metrics(), abs=1e-9)


def test_counts_are_over_all_episodes(played: Episodes, small_bulk: int) -> None:
    full, kept = Kept(), Kept()
    noted(played, kept)
    Journal(full, 1)._steps(played, played.reports, range(12), None)
    decisions = [r for r in full.records if isinstance(r, Decision)]
    events = [r for r in full.records if isinstance(r, Event)]
    numbers = kept.numbers
    assert numbers["sampled_episodes"] == 3
    for op in Op:
        own = [d for d in decisions if d.op == op.name]
        assert numbers[f"actions/{op.name}"] == len(own)
        assert numbers[f"effective/{op.name}"] == sum(d.changed for d in own)
        if own:
            mean = sum(d.probabilities["op"] for d in own) / len(own)
            assert numbers[f"probability/{op.name}"] == pytest.approx(mean, abs=1e-6)
    planted = Counter(
        f"effective/GERMINATE/slot {str(d.slot)[-1]}/{d.blueprint}" for d in decisions if d.op == "GERMINATE"
    )
    assert planted == {name: n for name, n in numbers.items() if name.startswith("effective/GERMINATE/")}
    entered = Counter(e.data["target"] for e in events if e.kind == "lifecycle")
    assert entered == +Counter({name[12:]: n for name, n in numbers.items() if name.startswith("transitions/")})
    for kind, offset in (("even", 0), ("odd one", 1)):
        scores = [row["score"] for row in rows_of(played)[offset::2]]
        assert numbers[f"score/{kind}"] == pytest.approx(sum(scores) / len(scores))


def test_everything_that_reads_a_store_reads_one_of_samples(
    played: Episodes, small_bulk: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Views count all episodes, not the sample; evaluations beside them are in full."""
    with RunStore(tmp_path / "run.sqlite") as store:
        recorder = StoreRecorder(store, Level.DETAILED)
        for update in (1, 2):
            summary = noted(played, recorder, update)
            recorder.metrics(update, summary.metrics())
            Journal(recorder, update, "evaluation").note(played.select(torch.arange(4)))
            recorder.flush()
        assert store.rewind(2) == 0
    with open_readonly(tmp_path) as connection:
        ask = lambda sql: connection.execute(sql).fetchall()  # noqa: E731
        for view in VIEWS:
            ask(f"SELECT * FROM {view}")
        assert ask("SELECT count(*) FROM episodes WHERE arm = 'train'") == [(24,)]
        sampled = set(sample(played.draw, 3).tolist())
        assert {env for (env,) in ask("SELECT DISTINCT env FROM decisions WHERE arm = 'train'")} == sampled
        assert {env for (env,) in ask("SELECT DISTINCT env FROM step_rewards WHERE arm = 'train'")} == sampled
        ((steps,),) = ask("SELECT sum(times) FROM v_actions WHERE arm = 'train' AND update_number = 1")
        assert steps == played.steps
        ((share,),) = ask("SELECT sum(share) FROM v_actions WHERE arm = 'train' AND update_number = 1")
        assert share == pytest.approx(1.0)
        ((steps,),) = ask("SELECT sum(times) FROM v_actions WHERE arm = 'evaluation' AND update_number = 1")
        assert steps == int(played.lengths[:4].sum())
        seen = dict(ask("SELECT target, transitions FROM v_lifecycle_counts WHERE arm='train' AND update_number=2"))
        assert seen == {stage.name: n for stage, n in summary.lifecycle.items() if n}
        ((gap,),) = ask(
            "SELECT max(abs(episode_return - total)) FROM (SELECT episode_return, sum(value) AS total "
            "FROM v_episode_rewards GROUP BY update_number, arm, env)"
        )
        assert gap < 1e-9
    assert main(["query", str(tmp_path), "SELECT op, times FROM v_actions", "--csv"]) == 0
    assert "GERMINATE" in capsys.readouterr().out
    progress = progress_of(tmp_path)
    assert progress is not None


def test_sinks_average_columns_like_records(played: Episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = ScalarSink(), ScalarSink()
    noted(played, one)
    monkeypatch.setattr(journal, "BULK", 10)
    noted(played, many)
    assert one.with_means(1, {}) == pytest.approx(many.with_means(1, {}))


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=300), st.integers(0, 300))
def test_a_sample_depends_on_draws_alone(draws: list[int], count: int) -> None:
    rows = sample(torch.tensor(draws), count)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert len(rows) == min(count, len(draws))
    assert torch.equal(rows, sample(torch.tensor(draws), count))


def test_samples_are_spread() -> None:
    """Over the rows of a rollout, also when siblings share their draws."""
    rows = torch.cat([sample(torch.arange(first, first + 1024) // 4) for first in range(0, 1024 * 100, 1024)])
    assert len(rows) == 100 * EPISODES_IN_FULL
    quarters = torch.bincount(rows // 256, minlength=4)
    assert quarters.min() > 150
    assert len(rows.unique()) > 450


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_any_columns_can_be_recorded(networks: int, steps: int, slots: int, seed: int) -> None:
    """Counts over columns equal those over the rendered records."""
    episodes = synthetic_rollout(networks, steps, slots, seed, faults=0.05)
    facts = episodes.facts
    assert facts is not None
    columns = bulk.episode_columns(episodes, facts, bulk.verdicts(facts), 1, "train")
    found = bulk.counts(episodes, facts)
    assert len(columns) == networks
    assert sum(found[f"actions/{op.name}"] for op in Op) == int(facts.played.sum())
    for op in Op:
        names = [name for name in found if name.startswith(f"effective/{op.name}/")]
        assert found[f"effective/{op.name}"] == sum(found[name] for name in names)
    rows = render(facts)
    entered = Counter(t.target for row in rows for info in row for t in info.record.transitions)
    assert facts.entered().tolist() == [entered[stage] for stage in Stage]
    assert all(t.target in TRANSITIONS[t.source] for row in rows for info in row for t in info.record.transitions)
    faults = sum(info.record.verdict is not None for row in rows for info in row)
    assert sum(found[f"faults/{fault}"] for fault in FAULTS) == faults
    assert sum(found[f"suspicions/{kind}"] for kind in SUSPICION_KINDS) == sum(
        len(i.reward.events) for row in rows for i in row
    )


def test_no_tensor_is_made_on_another_device(played: Episodes, small_bulk: int) -> None:
    """On a GPU such a tensor would fail or copy; here what names no device lands on one that cannot be mixed."""
    episodes, kept = replace(played, reports=()), Kept()
    with torch.device("meta"):
        Journal(kept, 1).note(episodes)
    assert kept.records


def test_a_run_of_many_environments_says_once_that_it_records_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Trainer(TrainConfig(task="tiny", envs=BULK, evaluate_every=0), family=TinyFamily())
        assert not caplog.messages
        Trainer(TrainConfig(task="tiny", envs=BULK + 1, evaluate_every=0), family=TinyFamily())
    (message,) = caplog.messages
    assert "decisions and events only of 8" in message


def test_a_run_is_recorded_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole loop: its metrics are beside the counts, and what the agent learns is that of a run in full."""
    config = TrainConfig(task="tiny", envs=4, updates=1, evaluate_every=0)
    weights, numbers = [], []
    for limit in (BULK, 3):
        monkeypatch.setattr(journal, "BULK", limit)
        kept = Kept()
        trainer = Trainer(config, recorder=kept, family=TinyFamily())
        assert trainer.run()
        weights.append(trainer.agent.network.state_dict())
        numbers.append(kept.numbers)
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))
    full, many = numbers
    assert {"kl", "episode/score", "env_steps"} <= set(many)
    assert sum(many[f"actions/{op.name}"] for op in Op) == many["env_steps"]
    for name in ("episode/return", "episode/score", "episode/growth", "episode/germinated", "env_steps"):
        assert many[name] == pytest.approx(full[name], abs=1e-9)


def test_joined_facts_are_recorded_like_one_rollout(played: Episodes, small_bulk: int) -> None:
    apart = [played.select(torch.arange(start, start + 6)) for start in (0, 6)]
    one, two = Kept(), Kept()
    noted(played, one)
    noted(join(apart), two)
    assert one.columns == two.columns
    assert one.numbers == two.numbers
