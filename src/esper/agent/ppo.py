"""The agent: a network, an optimizer, and what turns episodes into a PPO update.

    actor     decides with the agent's network, for `play`
    replay    episodes as the update reads them: the policy's distributions again, advantages and returns
    update    learn from episodes

Every episode begins with an empty memory, so between two updates the agent holds nothing about an environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.agent.actor import PolicyActor, exact
from esper.agent.checkpoints import (
    DamagedCheckpointError,
    check_same_network,
    check_state,
    config_data,
    save_checkpoint,
)
from esper.agent.compiled import CompiledForward
from esper.agent.config import ADAM_EPSILON, PPOConfig
from esper.agent.gae import advantages, against_siblings
from esper.agent.metrics import UpdateMetrics, collect, measure_state
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.policies import load_policy_tensors, policy_tensors, read_policy, tensors_under
from esper.agent.update import Batch, Forward, ppo_update, prepare_batch
from esper.env.spaces import ActionMasks, Observation
from esper.errors import first_line
from esper.policy.distribution import FactoredPolicy, validate_masks
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput, RecurrentState
from esper.rollout.episodes import Episodes, map_tensors
from esper.telemetry.gradients import one_device

NO_LONGER_KEPT = ("recurrent/hidden", "recurrent/cell", "start")
"""What older checkpoints hold of environments in the middle of an episode; rollouts are whole episodes now."""


class PPOAgent:
    """PPO for one network, on one device."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        config: PPOConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        observation_normaliser: ObservationNormaliser | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.network = network.to(self.device)
        """Always the plain module: for norms, names and state dicts. Only `_forward` may be compiled."""
        one_device([p.data for p in network.parameters()])
        self._compiled = CompiledForward(network) if config.compile else None
        self._forward: Forward = self._compiled or network
        self.config = config
        self.observation_normaliser = observation_normaliser
        self.value_normaliser = ValueNormaliser(config.value_momentum, self.device)
        self.optimizer = make_agent_optimizer(network, config)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        """Of the permutations that minibatches are made by."""
        self.update_count = 0
        """Calls of `update`; epochs and gradient steps are counted in the metrics."""
        self.teacher: FactoredRecurrentActorCritic | None = None
        """A frozen policy for the same observations that the update stays close to, as far as `teacher_kl` asks."""

    def actor(self, seed: int | None = None) -> PolicyActor:
        """What `play` needs. `seed` of the draws from the policy; None takes the most probable action."""
        return PolicyActor(self.network, self.observation_normaliser, seed)

    def update(self, episodes: Episodes) -> UpdateMetrics:
        """Learn from episodes that this policy has just played."""
        episodes = episodes.to(self.device)
        batch, memory = self.replay(episodes)
        if self.observation_normaliser is not None:
            # For the next rollout. The batch holds these observations as the policy saw them.
            self.observation_normaliser.update(episodes.observation, episodes.valid)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.update_count += 1
        batch, rollout = prepare_batch(batch, self.value_normaliser, self.network.value_output)
        with exact(self.device):
            if self.teacher is not None and self.config.teacher_kl_at(self.update_count) > 0.0:
                state = self.teacher.initial_state(len(episodes))
                with torch.no_grad():
                    batch = replace(batch, teacher=self.teacher(batch.observation, batch.policy.masks, state).policy)
            record = ppo_update(
                self.network, self._forward, self.optimizer, batch, self.config, self.update_count, self.generator
            )
        self.optimizer.zero_grad(set_to_none=True)
        return collect(record, rollout | measure_state(memory))

    @torch.no_grad()
    def replay(self, episodes: Episodes) -> tuple[Batch, RecurrentState]:
        """One pass over whole episodes: the policy's distributions, advantages and returns; and the memory at the end
        of the longest ones (that of the others has gone through padding).

        Log-probabilities and values are those of acting; that they are the replay's, too, the update checks.
        """
        self._check(episodes)
        assert episodes.log_prob is not None
        assert episodes.value is not None
        value = self.value_normaliser.to_returns(episodes.value)
        cut_short = episodes.last & ~episodes.terminated
        longer = bool(cut_short.any())
        raw, masks = _with_final(episodes) if longer else (episodes.observation, episodes.masks)
        seen = raw if self.observation_normaliser is None else self.observation_normaliser(raw)
        with exact(self.device):
            out = self._forward(seen, masks, self.network.initial_state(len(episodes)))
        policy, following = out.policy, torch.roll(value, -1, dims=1)
        if longer:
            seen, policy = map_tensors(seen, _all_but_one_step), map_tensors(policy, _all_but_one_step)
            after = self.value_normaliser.to_returns(out.value).gather(1, episodes.lengths[:, None])  # [N, 1]
            following = torch.where(cut_short, after, following)
        advantage = advantages(
            episodes.reward,
            value,
            following,
            episodes.terminated,
            episodes.last,
            episodes.valid,
            self.config.discount,
            self.config.gae_decay,
        )
        _check_finite(advantage)
        batch = Batch(
            observation=seen,
            policy=policy,
            action=episodes.action,
            log_prob=episodes.log_prob,
            value=value,
            valid=episodes.valid,
            reward=episodes.reward,
            advantage=against_siblings(advantage, episodes.valid, self.config.siblings),
            returns=advantage + value,
        )
        whole = episodes.lengths == episodes.lengths.max()
        return batch, map_tensors(out.state, lambda tensor: tensor[:, whole])

    @torch.no_grad()
    def policy_of(self, episodes: Episodes) -> FactoredPolicy:
        """The probabilities of every choice in each step, of episodes that the policy as it is now has played."""
        episodes = episodes.to(self.device)
        raw = episodes.observation
        seen = raw if self.observation_normaliser is None else self.observation_normaliser(raw)
        with exact(self.device):  # never compiled: the number of episodes is another one than in updates
            out: NetworkOutput = self.network(seen, episodes.masks, self.network.initial_state(len(episodes)))
        return out.policy

    def _check(self, episodes: Episodes) -> None:
        if episodes.log_prob is None or episodes.value is None:
            raise ValueError("episodes without log-probabilities and values: let a PolicyActor with a seed play them")
        blueprints, room = episodes.masks.blueprint.shape[-1], self.network.config.blueprints
        if blueprints > room:
            raise ValueError(f"{blueprints} blueprints exceed the network's embedding capacity of {room}")
        if self.config.validate_masks:
            validate_masks(episodes.masks, self.network.uses, episodes.valid)

    def take_compile_failure(self) -> str | None:
        """Why the network runs uncompiled although `config.compile` is set; given once, for the record."""
        return None if self._compiled is None else self._compiled.take_failure()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that determines the agent's future, as named tensors."""
        tensors = policy_tensors(self.network, self.observation_normaliser, self.value_normaliser)
        # A parameter that no gradient has reached (the slot head, where there is one slot) has no moments yet: zeros.
        for index, parameter in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            slots = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros_like(parameter)) | {"step": torch.zeros(())}
            slots |= self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer/{index}/{name}": t for name, t in slots.items()}
        tensors["generator"] = self.generator.get_state()
        tensors["update_count"] = torch.tensor(self.update_count)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken. The network must have the same configuration.

        What does not fit is refused before anything is taken over.
        """
        self._check_same_purpose(tensors)
        check_state(self, tensors)
        load_policy_tensors(tensors, self.network, self.observation_normaliser, self.value_normaliser)
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors_under("optimizer/", tensors).items():
            index, key = name.split("/")
            slots.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.update_count = int(tensors["update_count"])
        self.generator.set_state(tensors["generator"].cpu())

    def _check_same_purpose(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse the whole state of an agent that was made otherwise, in words that say how."""
        observed = any(name.startswith("observations/") for name in tensors)
        if observed != (self.observation_normaliser is not None):
            has, lacks = ("an", "none") if observed else ("no", "one")
            raise ValueError(f"the saved agent has {has} observation normaliser, this one has {lacks}")

    def save(self, path: str | Path, data: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; `data` is JSON that the caller wants back."""
        network = config_data(self.network.config)
        save_checkpoint(path, self.state_dict(), {"network": network, "caller": dict(data or {})})

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`; gives back the caller's data."""
        checkpoint = read_policy(path, self.device, values=True)
        check_same_network(checkpoint.data["network"], self.network.config)
        try:
            self.load_state_dict({n: t for n, t in checkpoint.tensors.items() if n not in NO_LONGER_KEPT})
        except (DamagedCheckpointError, RuntimeError) as error:
            raise DamagedCheckpointError(
                f"{path} is damaged: a run cannot go on from it ({first_line(error)})"
            ) from error
        return dict(checkpoint.data.get("caller", {}))


def _with_final(episodes: Episodes) -> tuple[Observation, ActionMasks]:
    """[N, T + 1, …]: behind each episode's last step the observation that followed it, for its value alone (R113). The
    critic reads no masks, so those of that step may be any."""
    final = episodes.final
    if final is None:
        row, step = (int(i) for i in (episodes.last & ~episodes.terminated).nonzero()[0])
        raise ValueError(
            f"episode {row} was cut short at step {step}: it needs the observation after it (`final`), because its "
            "return goes on from there"
        )
    rows = torch.arange(len(episodes), device=episodes.lengths.device)
    seen, masks = map_tensors(episodes.observation, _one_more_step), map_tensors(episodes.masks, _one_more_step)
    for field in fields(seen):
        getattr(seen, field.name)[rows, episodes.lengths] = getattr(final, field.name)
    return seen, masks


def _one_more_step(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor[:, :1]), 1)


def _all_but_one_step(tensor: Tensor) -> Tensor:
    return tensor[:, :-1]


def _check_finite(advantage: Tensor) -> None:
    bad = ~torch.isfinite(advantage)
    if bool(bad.any()):
        row, step = (int(i) for i in bad.nonzero()[-1])  # the recursion runs backwards: the last is the source
        raise ValueError(
            f"environment {row}, step {step}: reward or value is not finite; one such step would poison the return "
            "statistics for good"
        )


def make_agent_optimizer(network: FactoredRecurrentActorCritic, config: PPOConfig) -> torch.optim.Optimizer:
    """AdamW whose decay touches the critic only: decaying actor or trunk would pull the policy towards uniform."""
    critic = network.parameters_by_head()["value"]
    ours = {id(p) for p in critic}
    others = [p for p in network.parameters() if id(p) not in ours]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": critic, "weight_decay": config.weight_decay}]
    # The fused kernel on CPU as well: 1.7 ms a step under the profiler where foreach takes 2.7 (docs/agent.md).
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=ADAM_EPSILON, fused=True)
