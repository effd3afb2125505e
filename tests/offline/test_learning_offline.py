"""Cloning and implicit Q-learning learn what their data hold, and what they save is an ordinary controller.

Covers: R083, R085
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_recordings import record_toy, toy_mixture, toy_network, toy_score

from esper.actions import Op
from esper.agent.policies import LearnedController, growth_network_config, load_policy, save_policy
from esper.growth.blueprints import blueprint_names
from esper.offline.cloning import CloneConfig, clone
from esper.offline.fitting import Learned
from esper.offline.iql import IQLConfig, iql
from esper.offline.recording import check, growth_schema
from esper.policy.controller import Controller, NoGrowth, RandomLegal
from esper.policy.heuristic import Heuristic
from esper.rollout.episodes import Episodes, join
from esper.training.evaluation import Job, jobs_for, record_job

QUICK = CloneConfig(epochs=6, batch_episodes=32, discount=0.0)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_clone_does_what_its_teacher_decided_not_what_noise_did() -> None:
    """The teacher always waits; half of the recorded actions are random. Waiting for ever is worth 3.75."""
    learned = clone(record_toy("waits", 120, 0.5, 0), toy_network(32), QUICK)
    assert learned.agreement.heads["op"].accuracy == 1.0
    assert learned.agreement.decisions == 1.0
    assert learned.agreement.episodes == 18
    assert mean(toy_score(learned)) == pytest.approx(3.75, abs=0.2)


def test_the_same_seed_gives_the_same_policy() -> None:
    episodes = toy_mixture(20, 0.2, 0)

    def weights(seed: int) -> list[torch.Tensor]:
        learned = clone(episodes, toy_network(32), CloneConfig(epochs=2, seed=seed))
        return list(learned.network.parameters())

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_q_learning_does_what_paid() -> None:
    """Two teachers in equal shares, neither of them good: one waits for ever, one half knows what to grow. Neither
    reaches 4.1 on average; what paid, put together, gets beyond 4.3. 5 is perfect."""
    episodes = join([record_toy("waits", 300, 0.0, 1), record_toy("half knows", 300, 0.3, 2)])
    improved = iql(episodes, toy_network(), IQLConfig(epochs=12, discount=0.0))
    assert max(mean(episodes.returns()[episodes.controller == i].tolist()) for i in (0, 1)) < 4.1
    assert mean(toy_score(improved)) > 4.3


def test_the_conservative_term_lowers_what_nobody_did() -> None:
    from esper.offline.fitting import new_network
    from esper.offline.iql import Values, value_losses
    from esper.offline.rows import prepare_rows, units_of

    episodes = record_toy("waits", 30, 0.0, 0)
    units = units_of(episodes, new_network(toy_network(32), 0), 0.0)
    rows = prepare_rows(episodes, units, 0.0, action="action")

    def waiting_over_the_best_rest(conservative: float) -> float:
        values = Values(toy_network(32), 0)
        optimizer = torch.optim.Adam(values.q.parameters(), lr=3e-3)
        config = IQLConfig(conservative=conservative, discount=0.0)
        for _ in range(40):
            optimizer.zero_grad()
            value_losses(values, rows, units, config).backward()
            optimizer.step()
        with torch.no_grad():
            judged = values.q.first.action_values(rows.observation, rows.masks, values.v.initial_state(len(rows)))
            return float((judged.of(rows.action) - judged.soft_maximum()).mean())  # at most 0

    assert waiting_over_the_best_rest(1.0) > waiting_over_the_best_rest(0.0) + 0.5


# -- the growth environment ---------------------------------------------------------------------------------------


def recorded(name: str, controller: Controller, draws: tuple[int, ...], noise: float = 0.0) -> Episodes:
    return record_job(Job(name, "digits", controller, draws, held_out=False, noise=noise))


@pytest.fixture(scope="module")
def noisy() -> Episodes:
    """The heuristic on digits, a third of its decisions overruled."""
    return recorded("heuristic", Heuristic(), (0, 1, 2), noise=0.3)


def test_recorded_episodes_are_whole_and_legal(noisy: Episodes) -> None:
    check(noisy, growth_schema())
    assert noisy.lengths.tolist() == [25, 25, 25]
    assert noisy.terminated[:, -1].all()
    assert noisy.draw.tolist() == [0, 1, 2]
    assert noisy.controllers == ("heuristic",)
    different = (noisy.label != noisy.action).any(-1).float().mean()
    assert 0.02 < float(different) < 0.3  # most random decisions are WAIT, as the heuristic's are


def test_an_episode_depends_on_its_problem_and_its_seed_alone(noisy: Episodes) -> None:
    alone = recorded("heuristic", Heuristic(), (1,), noise=0.3)
    for name, tensor in noisy.tensors().items():
        assert torch.equal(tensor[1:2], alone.tensors()[name]), name


def test_without_noise_what_was_decided_was_done() -> None:
    quiet = recorded("random", RandomLegal(), (0,))
    assert torch.equal(quiet.label, quiet.action)
    assert set(quiet.action[..., 3].flatten().tolist()) > {int(Op.WAIT)}
    with pytest.raises(ValueError, match="noise is a probability"):
        recorded("none", NoGrowth(), (0,), noise=1.5)


def test_the_heuristic_judges_what_really_happened() -> None:
    """Overruled, it still names the planting that has not been tried: it does not believe its own words."""
    episodes = recorded("heuristic", Heuristic(), (0,), noise=1.0)
    germinated = episodes.action[0][episodes.action[0, :, 3] == Op.GERMINATE]
    wished = episodes.label[0][episodes.label[0, :, 3] == Op.GERMINATE]
    assert len(wished) > 0
    first = [(int(a[0]), int(a[1])) for a in germinated]
    assert all((int(a[0]), int(a[1])) not in first[:1] for a in wished[1:]), (first, wished)


def test_every_controller_plays_every_problem() -> None:
    jobs = jobs_for("digits", {"a": NoGrowth(), "b": RandomLegal()}, range(6), held_out=False, noise=0.1)
    assert [(job.label, job.draws) for job in jobs] == [
        ("a", (0, 1, 2, 3)),
        ("b", (0, 1, 2, 3)),
        ("a", (4, 5)),
        ("b", (4, 5)),
    ]


def test_what_is_learnt_is_an_ordinary_controller(tmp_path: Path, noisy: Episodes) -> None:
    """Saved and loaded, it decides in the growth environment exactly as the network that was trained."""
    seven = join([noisy, *(_moved(noisy, 10 * i) for i in (1, 2))])
    learned = clone(seven, growth_network_config(), CloneConfig(epochs=1))
    path = tmp_path / "clone.safetensors"
    _save(path, learned)
    network, normaliser = load_policy(path)
    assert normaliser is not None
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), learned.network.parameters(), strict=True))
    controller = LearnedController.load(path)
    played = recorded("clone", controller, (5,))
    check(played, growth_schema())
    seen = learned.units.observations(played.observation)
    out = learned.network(seen, played.masks, learned.network.initial_state(1))
    assert torch.equal(out.policy.mode(), played.action)


def _moved(episodes: Episodes, by: int) -> Episodes:
    from dataclasses import replace

    return replace(episodes, draw=episodes.draw + by)


def _save(path: Path, learned: Learned) -> None:
    data = {"blueprints": list(blueprint_names())}
    save_policy(path, learned.network, learned.units.observations, learned.units.values, data)


@pytest.mark.slow
def test_q_learning_beats_cloning_of_the_same_mixture() -> None:
    """Three teachers with noise; four recordings, each learnt from by both (docs/offline.md has eight)."""
    differences = []
    for seed in range(4):
        episodes = toy_mixture(300, 0.2, seed)
        cloned = clone(episodes, toy_network(), CloneConfig(seed=seed, discount=0.0))
        improved = iql(episodes, toy_network(), IQLConfig(seed=seed, discount=0.0))
        differences.append(mean(toy_score(improved)) - mean(toy_score(cloned)))
    assert mean(differences) > 0.1, differences
    assert min(differences) > 0, differences
