"""Reports rendered from the columns of played episodes are those of the engine; columns can be joined and chosen.

Covers: R115
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_family import TinyFamily

from esper.actions import Action
from esper.engine.governor import Fault
from esper.engine.learner import Learner
from esper.env.growth_env import GrowthEnv
from esper.env.reward.suspicion import SUSPICION_KINDS
from esper.env.situation import Situation
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import StepInfo
from esper.lifecycle import Rules, Stage
from esper.policy.controller import RandomLegal
from esper.rollout.episodes import Episodes, join, map_tensors, named_tensors
from esper.rollout.facts import Facts
from esper.rollout.play import ControllerActor, Decisions, play
from esper.rollout.render import fault_message, render, reports_of
from esper.tasks.mixed import Mixed

QUICK = Rules(training_epochs=1, blending_epochs=2, prune_age=1, ramp_out_epochs=2, embargo_epochs=1)


class Silent(ControllerActor):
    """Random legal play that gives tensors, as a policy does: without reasons."""

    def __init__(self) -> None:
        super().__init__(RandomLegal())

    def act(self, situations: Sequence[Situation], observation: Observation, masks: ActionMasks) -> Decisions:
        return replace(super().act(situations, observation, masks), records=None)


class Breaking(Silent):
    """After nine epochs the last network is broken."""

    def __init__(self, env: GrowthEnv) -> None:
        super().__init__()
        self.env = env

    def act(self, situations: Sequence[Situation], observation: Observation, masks: ActionMasks) -> Decisions:
        if int(self.env.world.epoch.max()) == 9:
            break_weights(self.env.learners[-1])
        return super().act(situations, observation, masks)


def break_weights(learner: Learner) -> None:
    with torch.no_grad():
        next(learner.model.host.parameters()).fill_(float("nan"))


@pytest.fixture(scope="module")
def tiny() -> Episodes:
    """Short lives, long episodes of two lengths, and one network that breaks."""
    env = GrowthEnv(TinyFamily(horizon=24), 6, rules=QUICK)
    return play(env, Breaking(env), range(6))


@pytest.fixture(scope="module")
def mixed() -> Episodes:
    """Hosts of several forms, the usual rules."""
    return play(GrowthEnv(Mixed(kinds=("vector channel @1", "series motif @1")), 2), Silent(), range(2))


def facts_in(episodes: Episodes) -> Facts:
    """Columns of what happened, which tests may change."""
    assert episodes.facts is not None
    return map_tensors(episodes.facts, torch.clone)


def without_verdicts(row: Sequence[StepInfo], message: str) -> list[StepInfo]:
    """Reports with the governor's text replaced, and without what columns do not hold."""
    found = []
    for info in row:
        record = info.record
        said = "" if record.verdict is None else record.verdict.message
        found.append(
            replace(
                info,
                record=replace(
                    record,
                    verdict=None if record.verdict is None else replace(record.verdict, seen=0.0, message=message),
                    effect=replace(record.effect, settings=""),
                    trained=replace(record.trained, shadow_losses={}, finite=True)
                    if record.verdict is None
                    else replace(record.trained, loss=0.0, host_gradient=0.0, shadow_losses={}, seed_gradients={}),
                    transitions=tuple(
                        replace(t, reason=t.reason.replace(said, message) if said else t.reason)
                        for t in record.transitions
                    ),
                ),
            )
        )
    return found


def test_reports_come_back_from_columns(tiny: Episodes) -> None:
    """Every transition with the reason of its gate, every effect, every number; only the governor's text is shorter."""
    again = render(facts_in(tiny))
    assert [len(row) for row in again] == tiny.lengths.tolist()
    seen = Counter(t.target for row in tiny.reports for info in row for t in info.record.transitions)
    assert {Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED, Stage.EMBARGOED, Stage.DORMANT} <= set(seen), seen
    for row, rendered in zip(tiny.reports, again, strict=True):
        assert without_verdicts(rendered, "broken") == without_verdicts(row, "broken")
    reasons = {t.reason for row in again for info in row for t in info.record.transitions}
    assert any("shadow benefit" in reason for reason in reasons)
    assert "ramping out: " in reasons


def test_suspicions_come_back_from_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slot, seed and blueprint; here every measured seed is suspected."""
    everyone = lambda contribution, *_: torch.ones(*contribution.shape, len(SUSPICION_KINDS), dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr("esper.env.reward.reward.suspicious", everyone)
    episodes = play(GrowthEnv(TinyFamily(horizon=14), 3, rules=QUICK), Silent(), range(3))
    found = [info.reward.events for row in episodes.reports for info in row]
    assert any(found)
    assert [info.reward.events for row in render(facts_in(episodes)) for info in row] == found


def test_a_verdict_is_shorter_and_true(tiny: Episodes) -> None:
    (row,) = render(facts_in(tiny), torch.tensor([5]))
    verdict, before = row[-1].record.verdict, tiny.reports[5][-1].record.verdict
    assert verdict is not None
    assert before is not None
    assert (verdict.kind, verdict.limit) == (before.kind, before.limit)
    assert verdict.message == "the training or the validation loss became nan"
    assert fault_message(Fault.NON_FINITE, 0.5, float("inf")) == "a weight or a running statistic is no longer finite"
    assert fault_message(Fault.DIVERGENCE, 9.0, 3.0) == "the loss diverged: validation loss 9 (limit 3)"


def test_counts_are_those_of_the_records(tiny: Episodes) -> None:
    facts = facts_in(tiny)
    seen = Counter(t.target for row in tiny.reports for info in row for t in info.record.transitions)
    assert facts.entered().tolist() == [seen[stage] for stage in Stage]
    returns = [sum(info.reward.total for info in row) for row in tiny.reports]
    assert facts.rewards().sum(1).tolist() == pytest.approx(returns, abs=1e-9)


def test_joined_columns_are_those_of_each_part(tiny: Episodes, mixed: Episodes) -> None:
    """Parts of other lengths, numbers of slots and hosts; kinds are numbered anew."""
    first = replace(facts_in(tiny), kinds=("tiny",), kind=torch.zeros(6, dtype=torch.int64))
    other = replace(facts_in(mixed), kinds=("b", "tiny"), kind=torch.tensor([1, -1]))
    both = join([replace(tiny, facts=first), replace(mixed, facts=other)])
    facts = both.facts
    assert facts is not None
    assert [facts.kinds[i] if i >= 0 else None for i in facts.kind.tolist()] == ["tiny"] * 7 + [None]
    assert [info for row in render(facts) for info in row if info.record.verdict is None] == [
        info for one in (first, other) for row in render(one) for info in row if info.record.verdict is None
    ]
    assert not any(name.startswith(("facts", "steps", "epoch")) for name in both.tensors())
    chosen = both.select(torch.tensor([7, 1]))
    assert isinstance(chosen.facts, Facts)
    assert render(chosen.facts) == (render(other)[1], render(first)[1])
    assert join([replace(tiny, facts=None), mixed]).facts is None  # what one lacks, all lose
    assert all(t.device.type == "cpu" for t in named_tensors(both.to("cpu").facts).values())


def test_reports_are_rendered_only_where_an_engine_gave_none(mixed: Episodes) -> None:
    assert reports_of(mixed) is mixed.reports
    assert reports_of(replace(mixed, reports=(), facts=None)) == ()
    for row, rendered in zip(mixed.reports, reports_of(replace(mixed, reports=())), strict=True):
        assert without_verdicts(rendered, "") == without_verdicts(row, "")


def test_a_refused_action_names_the_stage_of_its_slot(mixed: Episodes) -> None:
    facts = facts_in(mixed)
    epoch = facts.steps.epoch
    epoch.op[0, 0], epoch.slot[0, 0], epoch.changed[0, 0] = 2, 1, False
    first = render(facts)[0][0].record.effect
    assert first.action == Action(first.action.op, 1)
    assert first.message == f"no effect: slot {mixed.reports[0][0].slots[1]} is DORMANT"
