"""Policies from portfolios: what they lose by what they plant, new ones and ones that are taught more.

Covers: R149 (growth under control: what a policy learns to plant, and what it keeps)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plays_by_hand as by_hand
import pytest
import torch
from plays_by_hand import BETTER, BOTH, GOOD, SLOTS, Seed, State, episode, gain_of, kind_number, portfolio_of, told

from esper.actions import BLENDS, Op
from esper.agent.controller import LearnedController
from esper.agent.shipped import shipped_path
from esper.growth.blueprints import blueprint_names
from esper.offline.episodes import check, growth_schema, join
from esper.offline.fitting import imitation_losses
from esper.offline.recording import append
from esper.policy.distribution import GROWTH_ACTIONS, FactoredPolicy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
import extend
import judge
import learn
import own_plays
import planner
import playing
import portfolio
import seen
from planner import Promises
from portfolio import NONE


def test_a_portfolio_a_round_and_the_teacher_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few problems, whose draws must be training ones; labels are possible whatever was done."""
    monkeypatch.setattr(playing, "in_processes", by_hand.at_once)
    first, second, out = (str(tmp_path / name) for name in ("portfolio", "round1", "labelled"))
    of = ["--family", "disguised/vector", "--problems", "3"]
    assert portfolio.main([*of, "--first", "6", "--others", "1", "--out", first]) == 0
    assert own_plays.main([*of, "--policy", "small", "--known", first, "--noise", "0.5", "--out", second]) == 0
    assert learn.main(["--taught", second, "--portfolios", first, "--plays", second, "--seeds", "3", "--out", out]) == 0
    labelled, _ = planner.lessons(learn.read_all([Path(first), Path(second)]))
    assert set(labelled.draw.tolist()) == {portfolio.FIRST_DRAW + number for number in range(6, 9)}
    assert {NONE, "sibling 0"} <= set(labelled.controllers)
    assert LearnedController.load(Path(out) / "3.safetensors").name
    with pytest.raises(SystemExit):
        portfolio.main([*of, "--out", first])


def test_one_number_cannot_be_a_problem_of_two_families(tmp_path: Path) -> None:
    for family in ("mixed", "varied"):
        append(tmp_path / family, join(portfolio_of(gain_of, 2)), growth_schema(), {"command": "test", "task": family})
    folders = [str(tmp_path / family) for family in ("mixed", "varied")]
    with pytest.raises(SystemExit, match=r"problem 0 of varied in .* is one of mixed, too"):
        learn.read_all([Path(folder) for folder in folders])


@pytest.mark.parametrize("measured", ["gain", "promise"])
@pytest.mark.parametrize("may", [BOTH, (Op.PRUNE,)], ids=["permanent or not", "not yet"])
@pytest.mark.parametrize(
    ("points", "size", "helps"),
    [
        (0.6, 0.0, True),
        (0.4, 0.0, False),
        (-1.0, 0.0, False),
        (None, 0.0, False),
        (2.6, 0.4, True),
        (2.4, 0.4, False),
        (8.0, 1.6, False),
        (9.0, 1.6, True),
    ],
)
def test_nothing_is_removed_whatever_the_first_teacher_said_and_what_earns_its_rent_becomes_permanent(
    points: float | None, size: float, helps: bool, may: tuple[Op, ...], measured: str
) -> None:
    shown: Any = {measured: points, "size": size}
    taught = episode(State(20, (Seed("norm", 1, may=may, **shown),)), State(19))
    said = ("fossilize", 1) if helps and Op.FOSSILIZE in may else "wait"
    label = taught.label.clone()
    label[0, 0] = seen.action(Op.PRUNE, 1)
    changed = learn.without_removals(replace(taught, label=label))
    check(changed, growth_schema())
    assert told(changed.label[0, 0]) == said
    assert told(label[0, 0]) == ("prune", 1)  # the recording stays as it was


# -- learning to lose little -------------------------------------------------------------------------------------------


def promised(plant: dict[tuple[str, int], float], wait: float) -> Promises:
    table = torch.full((1, 1, SLOTS, len(blueprint_names())), torch.nan)
    for (blueprint, slot), points in plant.items():
        table[0, 0, slot, kind_number(blueprint)] = points
    return Promises(table, torch.tensor([[wait]]))


def policy_of(growing: float, slots: Sequence[float], blueprints: dict[str, float]) -> FactoredPolicy:
    """With these probabilities of planting, of slots, and of blueprints in each of them."""
    one = episode(State(20))
    op = torch.full((1, 1, len(Op)), 1e-12)
    op[..., Op.GERMINATE], op[..., Op.WAIT] = growing, 1.0 - growing
    chosen = torch.full((1, 1, SLOTS, len(blueprint_names())), 1e-12)
    for name, probability in blueprints.items():
        chosen[..., kind_number(name)] = probability
    slot = torch.tensor(slots).expand(1, 1, len(Op), SLOTS)
    blend = torch.full((1, 1, SLOTS, len(BLENDS)), 1 / len(BLENDS))
    logs = [x.log() for x in (op, slot, chosen, blend)]
    return FactoredPolicy(*logs, masks=one.masks, uses=GROWTH_ACTIONS.table())


def test_regret_is_what_is_promised_less_than_by_the_best_choice() -> None:
    promises = promised({GOOD: 3.0, BETTER: 8.0, ("norm", 0): -40.0}, wait=1.0)
    policy = policy_of(0.5, [0.5, 0.5, 1e-12], {"norm": 0.25, "mlp": 0.75})
    # Half of the time it waits and loses 7. Of the rest: mlp@0 loses nothing, norm@1 five points, norm@0 the most that
    # counts, and mlp@1, which no plan has, 8 - STRANGE.
    quarter = 0.5 * 0.5
    expected = 0.5 * 7.0 + quarter * (0.75 * 0.0 + 0.25 * learn.MOST) + quarter * (0.25 * 5.0 + 0.75 * 11.0)
    assert learn.expected_regret(policy, promises).item() == pytest.approx(expected, abs=1e-4)
    assert learn.greedy_regret(policy_of(0.4, [1.0, 1e-12, 1e-12], {"mlp": 1.0}), promises).item() == 7.0
    assert learn.greedy_regret(policy_of(0.6, [1.0, 1e-12, 1e-12], {"mlp": 1.0}), promises).item() == 0.0
    assert learn.greedy_regret(policy_of(0.6, [1e-12, 1.0, 1e-12], {"norm": 1.0}), promises).item() == 5.0
    best_is_to_wait = promised({GOOD: -3.0}, wait=0.5)
    assert learn.greedy_regret(policy_of(0.4, [1e-12, 1.0, 1e-12], {"norm": 1.0}), best_is_to_wait).item() == 0.0
    assert learn.greedy_regret(policy_of(0.6, [1e-12, 1.0, 1e-12], {"norm": 1.0}), best_is_to_wait).item() == 3.5


def test_where_nothing_is_to_be_decided_regret_leaves_no_trace_in_the_gradient() -> None:
    plays = join(portfolio_of(gain_of, 20))
    learner = learn.Learner(plays, seed=0)
    nothing = learner.lessons(Promises.none_for(plays))
    assert not nothing.decided.any()
    (some,) = list(nothing.shuffled(len(plays), torch.Generator().manual_seed(0)))
    loss = learner.loss(some)
    loss.backward()
    gradients = [p.grad for p in learner.network.parameters() if p.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert loss.item() == pytest.approx(sum(imitation_losses(learner.network, some.rows)).item(), rel=1e-5)


def test_a_policy_learns_to_plant_where_it_pays_and_to_wait_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labels teach nothing here: all of them say to wait. What is promised must be enough."""
    monkeypatch.setattr(learn, "IMITATED", 0.0)
    told_plays, promises = planner.lessons(join(portfolio_of(gain_of)))
    taught = replace(told_plays, label=torch.zeros_like(told_plays.label))
    learner, regret = learn.learn(taught.select(torch.arange(3)), taught, promises, seed=0)
    assert regret < 0.5
    always_waiting = learn.losses(promises)[1][~promises.wait.isnan()].mean().item()
    assert always_waiting > 3.0
    assert "epoch 8 of 8" in capsys.readouterr().out
    assert learner.network.training


# -- more for a policy that exists -------------------------------------------------------------------------------------


def taught_more(monkeypatch: pytest.MonkeyPatch, faith: float) -> tuple[extend.Extended, float, float]:
    """The shipped policy after a portfolio of made-up problems, with half of these plays to be faithful to."""
    monkeypatch.setattr(extend, "FAITH", faith)
    monkeypatch.setattr(extend, "EPOCHS", 6)
    told_plays, promises = planner.lessons(join(portfolio_of(gain_of)))
    return extend.extend(shipped_path("small"), told_plays.select(torch.arange(40)), told_plays, promises, seed=0)


def test_a_policy_that_exists_learns_what_portfolios_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, before, after = taught_more(monkeypatch, faith=0.1)
    assert before > 3.0
    assert after < 0.5
    assert policy.network.training
    assert not any(p.requires_grad for p in policy.before.parameters())
    shipped = LearnedController.load(shipped_path("small"))
    assert shipped.normaliser is not None
    for name, tensor in shipped.normaliser.state().items():  # it goes on reading what it has always read
        assert torch.equal(policy.units.observations.state()[name], tensor)


def test_faith_holds_a_policy_to_what_it_was() -> None:
    """Before anything is learnt there is nothing to lose: the loss is that of the values alone."""
    plays = join(portfolio_of(gain_of, 8))
    policy = extend.Extended(shipped_path("small"))
    nothing = policy.lessons(plays, Promises.none_for(plays))
    rows = nothing.rows
    out = policy.network(rows.observation, rows.masks, policy.network.initial_state(len(rows)))
    error = torch.nn.functional.huber_loss(out.value, rows.value, reduction="none")
    values = extend.VALUE_COEFFICIENT * extend.mean_where(error, rows.valid)
    assert policy.loss(nothing).item() == pytest.approx(values.item(), rel=1e-5)
    with torch.no_grad():
        for weights in policy.network.parameters():
            weights.mul_(1.1)
    out = policy.network(rows.observation, rows.masks, policy.network.initial_state(len(rows)))
    was = policy.before(rows.observation, rows.masks, policy.network.initial_state(len(rows)))
    error = torch.nn.functional.huber_loss(out.value, rows.value, reduction="none")
    apart = (out.policy.kl_from(was.policy).sum(-1) * rows.valid).sum() / len(rows)
    assert apart > 0.1
    expected = extend.FAITH * apart + extend.VALUE_COEFFICIENT * extend.mean_where(error, rows.valid)
    assert policy.loss(nothing).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_policy_is_extended_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, kept, out = tmp_path / "known", tmp_path / "kept", tmp_path / "policies"
    append(known, join(portfolio_of(gain_of, 20)), growth_schema(), {"command": "test", "task": "made up"})
    append(kept, join(portfolio_of(gain_of, 4)), growth_schema(), {"command": "test", "task": "made up"})
    folders = ["--portfolios", str(known), "--kept", str(kept)]
    assert extend.main(["--policy", "small", *folders, "--seeds", "5", "--out", str(out)]) == 0
    assert "points given away in a decision" in capsys.readouterr().out
    assert LearnedController.load(out / "5.safetensors").name
    with pytest.raises(ValueError, match="smal"):
        extend.main(["--policy", "smal", *folders, "--out", str(tmp_path / "others")])


# -- which one is best -------------------------------------------------------------------------------------------------


def test_policies_are_judged_on_training_draws_and_against_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run_jobs(jobs: Sequence[Any], **_: Any) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = {job.label: {} for job in jobs}
        for job in jobs:
            asked.append((job.label, job.family, job.numbers, job.held_out))
            found[job.label][job.numbers[0]] = SimpleNamespace(score=50.0 + 10.0 * (job.label == "heuristic"))
        del found["heuristic"][judge.FIRST_DRAW + 2]  # time was up
        return found

    monkeypatch.setattr(judge, "run_jobs", run_jobs)
    players = ["none", "heuristic", "plan:norm@*"]
    assert judge.main([*players, "--families", "mixed/vector", "--problems", "3"]) == 0
    numbers = [(judge.FIRST_DRAW + i,) for i in range(3)]
    assert asked == [(who, "mixed/vector", number, False) for number in numbers for who in players]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "mixed/vector, 2 training draws"
    assert said[1] == "  none: 50.0"
    assert said[2].startswith("  heuristic: 60.0, +10.0 (+10.0 to +10.0)")
    assert said[3].startswith("  plan:norm@*: 50.0, +0.0")
