"""A policy trained with three slots runs with 1, 5 and 12, and is right there too.

Covers: R001, R048, R130
"""

import torch

from esper.agent.config import PPOConfig
from esper.agent.ppo import PPOAgent
from esper.env.spaces import ActionMasks, Observation
from esper.env.steps import EnvStep
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.rollout.play import play

BLUEPRINTS = 3


def grow_step(
    environments: int, slots: int, generator: torch.Generator | None = None
) -> tuple[Observation, ActionMasks]:
    """One slot is marked, with the blueprint that it wants; germinating exactly that is right."""
    marked = torch.randint(0, slots, (environments,), generator=generator)
    wanted = torch.randint(0, BLUEPRINTS, (environments,), generator=generator)
    features = torch.zeros(environments, slots, 1 + BLUEPRINTS)
    rows = torch.arange(environments)
    features[rows, marked, 0] = 1.0
    features[rows, marked, 1 + wanted] = 1.0
    observation = Observation(
        overall=torch.zeros(environments, 1),
        slots=features,
        blueprints=torch.zeros(environments, slots, dtype=torch.int64),
        costs=torch.zeros(environments, slots, BLUEPRINTS),
        present=torch.ones(environments, slots, dtype=torch.bool),
    )
    shapes = ((4,), (4, slots), (slots, BLUEPRINTS), (slots, 3))
    masks = ActionMasks(*(torch.ones(environments, *shape, dtype=torch.bool) for shape in shapes))
    return observation, masks


def score(observation: Observation, action: torch.Tensor) -> torch.Tensor:
    """A third each for germinating, at the marked slot, what it wants there. [N]"""
    rows = torch.arange(action.shape[0])
    slot, blueprint, _, op = action.unbind(-1)
    chosen = observation.slots[rows, slot]
    right_slot = (op == 1) & (chosen[:, 0] == 1)
    right_blueprint = right_slot & (chosen[rows, 1 + blueprint] == 1)
    return torch.stack((op == 1, right_slot, right_blueprint)).float().mean(0)


class Growing:
    """Episodes of one step."""

    situations = ()

    def __init__(self, environments: int, slots: int, generator: torch.Generator) -> None:
        self.sizes, self.generator, self.over = (environments, slots), generator, True

    def reset(self, draws: object, *, held_out: bool) -> tuple[Observation, ActionMasks]:
        self.now, self.over = grow_step(*self.sizes, self.generator), False
        return self.now

    def step(self, action: torch.Tensor) -> EnvStep:
        self.over, yes = True, torch.ones(len(action), dtype=torch.bool)
        return EnvStep(*self.now, score(self.now[0], action), yes, yes, (None,) * len(action))


def slots_agent() -> PPOAgent:
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(NetworkConfig(1, 1 + BLUEPRINTS, blueprints=BLUEPRINTS, hidden=64))
    config = PPOConfig(discount=0.0, learning_rate=2e-3, target_kl=0.05)
    return PPOAgent(network, config)


def test_trained_with_three_slots_right_with_1_5_and_12():
    agent, generator = slots_agent(), torch.Generator().manual_seed(0)
    env = Growing(256, 3, generator)
    for update in range(30):
        agent.update(play(env, agent.actor(update), range(256)))
    for slots in (1, 3, 5, 12):
        played = play(Growing(200, slots, generator), agent.actor(), range(200))
        assert played.returns().mean().item() > 0.9, slots


def test_an_agent_for_one_slot_continues_from_its_checkpoint(tmp_path):
    """The only slot is certain, so no gradient reaches the slot head, and the optimizer has no moments for it."""
    agent, generator = slots_agent(), torch.Generator().manual_seed(0)
    agent.update(play(Growing(16, 1, generator), agent.actor(0), range(16)))
    agent.save(tmp_path / "a")
    resumed = slots_agent()
    resumed.load(tmp_path / "a")
    ours, theirs = agent.state_dict(), resumed.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
