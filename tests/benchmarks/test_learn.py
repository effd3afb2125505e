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
from esper.agent.checkpoints import load_checkpoint
from esper.agent.policies import LearnedController
from esper.agent.shipped import shipped_path
from esper.growth.blueprints import blueprint_names
from esper.offline.episodes import Episodes, check, growth_schema, join
from esper.offline.fitting import imitation_losses, losses_of
from esper.offline.recording import append
from esper.policy.distribution import GROWTH_ACTIONS, FactoredPolicy
from esper.policy.schedule import FixedSchedule
from esper.training.evaluation import Job

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "recipe"))
import extend
import judge
import learn
import own_plays
import planner
import playing
import portfolio
import rounds
import seen
from planner import Promises
from portfolio import NONE


def test_a_portfolio_a_round_and_the_teacher_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few problems, whose draws must be training ones; labels are possible whatever was done."""
    monkeypatch.setattr(playing, "in_processes", by_hand.at_once)
    first, second, out = (str(tmp_path / name) for name in ("portfolio", "round1", "labelled"))
    of = ["--family", "disguised/vector", "--problems", "3"]
    assert portfolio.main([*of, "--first", "6", "--others", "1", "--out", first]) == 0
    assert own_plays.main([*of, "--policy", "small-conv", "--known", first, "--noise", "0.5", "--out", second]) == 0
    assert learn.main(["--taught", second, "--portfolios", first, "--plays", second, "--seeds", "3", "--out", out]) == 0
    labelled, _ = planner.lessons(learn.read_all([Path(first), Path(second)]))
    assert set(labelled.draw.tolist()) == {rounds.FIRST_PLAYED + number for number in range(6, 9)}
    assert {NONE, "sibling 0"} <= set(labelled.controllers)
    assert LearnedController.load(Path(out) / "3.safetensors").name
    with pytest.raises(SystemExit):
        portfolio.main([*of, "--out", first])
    last = str(rounds.FIRST_JUDGED - rounds.FIRST_PLAYED - 2)
    with pytest.raises(SystemExit):  # these are left for judge.py
        portfolio.main([*of, "--first", last, "--out", str(tmp_path / "new")])


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


@pytest.fixture(scope="module")
def portfolio_lessons() -> tuple[Episodes, Promises]:
    return planner.lessons(join(portfolio_of(gain_of)))


def other_plays() -> Episodes:
    """Of hosts with less to see than those of the portfolio: shorter, so that padding is among the rows."""
    return join(
        [episode(*(State(20 - step, accuracy=55.0) for step in range(4)), number=number) for number in range(60)]
    )


def test_a_policy_that_exists_learns_what_portfolios_promise_and_keeps_the_rest(
    portfolio_lessons: tuple[Episodes, Promises], monkeypatch: pytest.MonkeyPatch
) -> None:
    faithful, free = (extend.Extended(shipped_path("small-conv")) for _ in range(2))
    first = {name: weights.clone() for name, weights in faithful.before.state_dict().items()}
    report = extend.extend(faithful, other_plays(), *portfolio_lessons, seed=0)
    assert report.before > 3.0
    assert report.after < 1.0
    monkeypatch.setattr(extend, "FAITH", 0.0)
    without = extend.extend(free, other_plays(), *portfolio_lessons, seed=0)
    assert report.drift < 0.5 * without.drift
    assert all(torch.equal(weights, first[name]) for name, weights in faithful.before.state_dict().items())
    shipped = LearnedController.load(shipped_path("small-conv"))
    assert shipped.normaliser is not None
    for name, tensor in shipped.normaliser.state().items():  # it goes on reading what it has always read
        assert torch.equal(faithful.units.observations.state()[name], tensor)


def test_faith_is_the_divergence_from_what_it_was_and_padding_is_no_part_of_it() -> None:
    plays = join([*portfolio_of(gain_of, 4), other_plays()])  # of six and of four steps
    policy = extend.Extended(shipped_path("small-conv"))
    nothing = policy.lessons(plays, Promises.none_for(plays))
    assert not nothing.rows.valid.all()
    _, values = losses_of(policy.output(nothing), nothing.rows)
    assert policy.loss(nothing).item() == pytest.approx(values.item(), rel=1e-5)  # nothing has changed yet
    with torch.no_grad():
        for weights in policy.network.parameters():
            weights.mul_(1.1)
    out = policy.output(nothing)
    was = policy.before(nothing.rows.observation, nothing.rows.masks, policy.before.initial_state(len(plays))).policy
    apart = sum(
        out.policy.kl_from(was).sum(-1)[row, : int(plays.lengths[row])].sum() for row in range(len(plays))
    ) / len(plays)
    assert apart > 0.1
    _, values = losses_of(out, nothing.rows)
    assert policy.loss(nothing).item() == pytest.approx((extend.FAITH * apart + values).item(), rel=1e-5)
    nothing.rows.observation.overall[~nothing.rows.valid] = torch.inf  # of padding, anything
    assert policy.loss(nothing).isfinite()


def test_promises_are_of_the_last_episodes_whatever_came_before() -> None:
    told_plays, promises = planner.lessons(join(portfolio_of(gain_of, 8)))
    longer = episode(*(State(20 - step) for step in range(9)))
    found = promises.after(join([longer, told_plays]))
    assert found.wait.shape == (1 + len(told_plays), 9)
    assert found.wait[0].isnan().all()
    steps = promises.wait.shape[1]
    assert torch.equal(found.wait[1:, :steps].nan_to_num(-99.0), promises.wait.nan_to_num(-99.0))
    assert torch.equal(found.plant[1:, :steps].nan_to_num(-99.0), promises.plant.nan_to_num(-99.0))
    assert found.wait[:, steps:].isnan().all()
    assert promises.select(torch.arange(0)).after(longer).wait.isnan().all()


def test_some_problems_must_be_left_to_judge_by() -> None:
    told_plays, promises = planner.lessons(join(portfolio_of(gain_of, 15)))
    known, asked = learn.kept_apart(told_plays, promises)
    assert set(told_plays.draw[asked].tolist()) == {0, 7, 14}
    assert not set(told_plays.draw[known].tolist()) & {0, 7, 14}
    for rows in (known, asked):
        with pytest.raises(SystemExit, match="too few problems to learn from some and judge by others"):
            learn.kept_apart(told_plays.select(rows), promises.select(rows))


def test_a_policy_is_extended_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, kept, out = tmp_path / "known", tmp_path / "kept", tmp_path / "policies"
    append(known, join(portfolio_of(gain_of, 20)), growth_schema(), {"command": "test", "task": "made up"})
    append(kept, other_plays(), growth_schema(), {"command": "test", "task": "made up"})
    folders = ["--portfolios", str(known), "--kept", str(kept)]
    assert extend.main(["--policy", "small-conv", *folders, "--seeds", "5", "--out", str(out)]) == 0
    assert "nats an episode from what it was" in capsys.readouterr().out
    made, shipped = (load_checkpoint(path).tensors for path in (out / "5.safetensors", shipped_path("small-conv")))
    assert made.keys() == shipped.keys()
    same = {name for name in made if torch.equal(made[name].float(), shipped[name].float())}
    assert {name for name in made if not name.startswith("network/")} <= same
    assert len(same) < len(made)
    for wrong, said in (
        (["--policy", "smal", *folders], "no checkpoint smal"),
        (["--policy", "small-conv", "--portfolios", str(known), "--kept", str(tmp_path / "nothing")], "nothing"),
    ):
        with pytest.raises(SystemExit):
            extend.main([*wrong, "--out", str(tmp_path / "others")])
        assert said in capsys.readouterr().err


def test_a_problem_whose_host_has_changed_is_refused(tmp_path: Path) -> None:
    one, two = (episode(State(20), State(19), number=3) for _ in range(2))
    two.observation.costs[0, 0, 1, 2] = 0.5
    append(tmp_path / "then", one, growth_schema(), {"command": "test", "task": "varied"})
    append(tmp_path / "now", two, growth_schema(), {"command": "test", "task": "varied"})
    with pytest.raises(SystemExit, match="problem 3 was recorded with two hosts"):
        learn.read_all([tmp_path / "then", tmp_path / "now"])


# -- which one is best -------------------------------------------------------------------------------------------------


class Jobs:
    """Stands for `run_jobs`: says which were asked for, and knows a score for each player."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.asked: list[Job] = []
        self.workers, self.now, self.seconds = 0, 0.0, seconds

    def __call__(self, jobs: Sequence[Job], *, workers: int, progress: Any, stop: Any) -> dict[str, dict[int, Any]]:
        self.workers, found = workers, {job.label: {} for job in jobs}
        for job in jobs:
            if stop():
                break
            self.now += self.seconds
            self.asked.append(job)
            found[job.label][job.numbers[0]] = SimpleNamespace(score=50.0 + 10.0 * (job.label == "heuristic"))
            progress(job, [])
        return found


PLAYERS = ["none", "heuristic", "plan:norm@*"]


def test_policies_are_judged_on_training_draws_and_against_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_jobs = Jobs()
    monkeypatch.setattr(judge, "run_jobs", run_jobs)
    assert judge.main([*PLAYERS, "--families", "mixed/vector", "--problems", "3", "--workers", "5"]) == 0
    numbers = [(judge.FIRST_JUDGED + i,) for i in range(3)]
    assert [(job.label, job.numbers) for job in run_jobs.asked] == [(who, n) for n in numbers for who in PLAYERS]
    assert {(job.family, job.held_out) for job in run_jobs.asked} == {("mixed/vector", False)}
    assert isinstance(run_jobs.asked[2].controller, FixedSchedule)
    assert run_jobs.workers == 5
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["mixed/vector, 3 training draws", "  none: 50.0"]
    assert said[2].startswith("  heuristic: 60.0, +10.0 (+10.0 to +10.0)")
    assert said[3].startswith("  plan:norm@*: 50.0, +0.0")


def test_judging_stops_when_time_is_up_with_the_draws_that_all_have_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_jobs = Jobs(seconds=10.0)
    monkeypatch.setattr(judge, "run_jobs", run_jobs)
    monkeypatch.setattr(judge, "time", SimpleNamespace(perf_counter=lambda: run_jobs.now))
    arguments = [*PLAYERS, "--families", "mixed/vector", "--problems", "9", "--seconds"]
    assert judge.main([*arguments, "71"]) == 0  # eight plays: the third draw lacks a player
    assert "2 training draws" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        judge.main([*arguments, "5"])
    assert "no draw of mixed/vector was played by all in time" in capsys.readouterr().err


def test_families_of_the_transfer_part_can_be_judged_by_name() -> None:
    deep = judge.family_of("very deep vectors")
    assert not isinstance(deep, str)
    assert len(deep.draw(rounds.FIRST_JUDGED).task.slots) == 8
    assert judge.family_of("mixed/vector") == "mixed/vector"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["none", "--problems", "0"], "must be at least 1"),
        (["none", "none"], "named twice"),
        (["none", "plan:nrom@*"], "is no seed at a slot"),
        (["none", "plan:norm"], "is no seed at a slot"),
        (["none", "nobody.safetensors"], "nobody.safetensors"),
        (["none", "--families", "mixed", "mixt"], "mixt"),
    ],
)
def test_what_cannot_be_judged_is_said_before_anything_is_played(
    wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "run_jobs", None)
    with pytest.raises(SystemExit):
        judge.main(wrong)
    assert said in capsys.readouterr().err
