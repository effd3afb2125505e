"""The learned policy as a controller: it reads the same situations as the rules, through the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from esper.actions import Action
from esper.agent.actor import PolicyActor
from esper.agent.checkpoints import CheckpointError, config_data, inspect_checkpoint, shown
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.ppo import load_policy, load_value_units
from esper.agent.reasons import with_reasons
from esper.env.observation import OVERALL_FIELDS, SCHEMA_VERSION, SLOT_FIELDS, encode
from esper.env.situation import Situation
from esper.growth.blueprints import blueprint_names
from esper.policy.network import FactoredRecurrentActorCritic, NetworkConfig

LAYOUT = f"growth observation {SCHEMA_VERSION}"
"""What a policy was trained to read; a checkpoint for another layout is refused."""
SPARE_BLUEPRINTS = 8
"""Room in a new network's blueprint embedding for blueprints that people add."""


def growth_network_config(**changes: object) -> NetworkConfig:
    """The network for growing: its widths follow from the observation's fields."""
    settings: dict[str, object] = {
        "overall_features": len(OVERALL_FIELDS),
        "slot_features": len(SLOT_FIELDS),
        "blueprints": len(blueprint_names()) + SPARE_BLUEPRINTS,
        "layout": LAYOUT,
    }
    return NetworkConfig(**{**settings, **changes})  # type: ignore[arg-type]


def check_blueprints(path: Path) -> None:
    """Refuse a policy whose kinds of seed have other numbers here: it would plant one and mean another.

    Kinds that came later are no matter, nor are kinds that it knows and that are not registered here.
    """
    known = inspect_checkpoint(path).data.get("caller", {}).get("blueprints", [])
    if not isinstance(known, list):
        raise CheckpointError(f"{path} is damaged: the kinds of seed that it knows must be a list, not {shown(known)}")
    for number, (then, now) in enumerate(zip(known, blueprint_names(), strict=False)):
        if then != now:
            raise ValueError(
                f"{path} was trained when seed kind {number} was {shown(then)}; here it is {now!r}: register your own "
                "blueprints in the same order as then"
            )


class LearnedController:
    """A frozen policy. It takes the most probable action, so an episode depends on nothing but its problem."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        normaliser: ObservationNormaliser | None,
        name: str = "learned",
        value_units: ValueNormaliser | None = None,
    ) -> None:
        self.name = name
        self.network = network.eval()
        self.normaliser = normaliser
        self.value_units = value_units
        """What turns the critic's output into points of reward; without it nothing is said of what is expected."""
        self._actor: PolicyActor | None = None

    @classmethod
    def load(cls, path: Path) -> LearnedController:
        """From a training checkpoint."""
        network, normaliser = load_policy(path)
        if network.config.layout != LAYOUT:
            raise ValueError(
                f"{path} holds a policy for {shown(network.config.layout or 'other observations')}; "
                f"this version of Esper shows its controllers {LAYOUT}"
            )
        ours, theirs = config_data(growth_network_config()), config_data(network.config)
        for name in ("encoder", "overall_features", "slot_features", "space", "blends"):
            if ours[name] != theirs[name]:
                raise CheckpointError(
                    f"{path} holds a policy for other observations or decisions than Esper's: {name} is "
                    f"{shown(theirs[name])}, and should be {shown(ours[name])}"
                )
        check_blueprints(path)
        return cls(network, normaliser, value_units=load_value_units(path))

    def reset(self, seeds: Sequence[int]) -> None:
        room, needed = self.network.config.blueprints, len(blueprint_names())
        if needed > room:
            raise ValueError(
                f"this policy has room for {room} kinds of seed and {needed} are registered: train one with them"
            )
        self._actor = PolicyActor(self.network, self.normaliser)
        self._actor.reset(seeds)

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        if self._actor is None:
            raise RuntimeError("reset the controller before it decides")
        observation, masks = encode(situations, finished=[s.remaining <= 0 for s in situations])
        out = self._actor.forward(observation, masks)
        returns = None if self.value_units is None else self.value_units.to_returns(out.value)
        return with_reasons(out.policy.mode(), out.policy, returns, situations)
