"""The agent: four verbs around a network, a buffer and an optimizer.

    act               decide for all environments (once: value, probabilities and action come from one pass)
    process_env_step  note what the decision led to
    compute_returns   close the rollout with the value of where it stopped
    update            learn from it, forget it

It keeps the recurrent state of the environments it acts for and nothing else about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.agent.actor import exact
from esper.agent.buffer import RolloutBatch, RolloutBuffer, RolloutStep
from esper.agent.checkpoints import (
    DamagedCheckpointError,
    check_same_network,
    check_state,
    config_data,
    save_checkpoint,
)
from esper.agent.compiled import CompiledForward
from esper.agent.config import ADAM_EPSILON, PPOConfig
from esper.agent.distributed import Reducer, SingleProcess
from esper.agent.gae import against_siblings
from esper.agent.metrics import UpdateMetrics, collect, measure_state
from esper.agent.normalisers import ObservationNormaliser, ValueNormaliser
from esper.agent.policies import load_policy_tensors, policy_tensors, read_policy, tensors_under
from esper.agent.update import Forward, ppo_update, prepare
from esper.env.spaces import ActionMasks, Observation
from esper.errors import first_line
from esper.policy.distribution import FactoredPolicy, validate_masks
from esper.policy.network import FactoredRecurrentActorCritic
from esper.policy.recurrence import RecurrentState
from esper.telemetry.gradients import one_device


@dataclass(frozen=True, slots=True)
class _Decision:
    """Between `act` and `process_env_step`."""

    seen: Observation
    raw: Observation
    masks: ActionMasks
    policy: FactoredPolicy
    action: Tensor
    log_prob: Tensor
    value: Tensor
    before: RecurrentState
    after: RecurrentState


class PPOAgent:
    """PPO for `environments` parallel environments and rollouts of at most `steps` steps."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        config: PPOConfig,
        environments: int,
        steps: int,
        slots: int,
        blueprints: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        observation_normaliser: ObservationNormaliser | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.network = network.to(self.device)
        """Always the plain module: for norms, names and state dicts. Only `_forward` may be compiled."""
        one_device([p.data for p in network.parameters()])
        self._compiled = CompiledForward(network) if config.compile else None
        self._forward: Forward = self._compiled or network
        self.config = config
        self.buffer = RolloutBuffer(network, environments, steps, slots, blueprints)
        self.observation_normaliser = observation_normaliser
        self.value_normaliser = ValueNormaliser(config.value_momentum, self.device)
        self.optimizer = make_optimizer(network, config)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.reducer: Reducer = reducer or SingleProcess()
        self.state = network.initial_state(environments)
        self.update_count = 0
        """Calls of `update`; epochs and gradient steps are counted in the metrics."""
        self._start = torch.ones(environments, dtype=torch.bool, device=self.device)
        self._everywhere = torch.ones_like(self._start)
        self._unknown = torch.full((environments,), torch.nan, device=self.device)
        self._acted = self.state
        """The memory of the last step, before the ends of episodes cleared it: what health is measured on."""
        self._decision: _Decision | None = None
        self._batch: RolloutBatch | None = None
        self.teacher: FactoredRecurrentActorCritic | None = None
        """A frozen policy for the same observations that the update stays close to, as far as `teacher_kl` asks."""

    @torch.inference_mode()
    def act(self, observation: Observation, masks: ActionMasks, taken: Tensor | None = None) -> Tensor:
        """A decision for each environment, [N, heads] int64, drawn once and remembered.

        `taken` [N, heads] is one that a copy of this very policy has drawn and carried out elsewhere.
        """
        if self.buffer.full:
            raise RuntimeError("the rollout is full: compute_returns() and update() before acting on")
        if self.config.validate_masks:
            validate_masks(masks, self.network.uses, self.buffer.length)
        seen = observation if self.observation_normaliser is None else self.observation_normaliser(observation)
        with exact(self.device):
            out = self._forward(seen, masks, self.state)
        assert out.state is not None
        action, log_prob = out.policy.sample(self.generator) if taken is None else (taken, out.policy.log_prob(taken))
        self._decision = _Decision(
            seen=seen,
            raw=observation,
            masks=masks,
            policy=out.policy,
            action=action,
            log_prob=log_prob,
            value=self.value_normaliser.to_returns(out.value),
            before=self.state,
            after=out.state,
        )
        return action

    @property
    def decided(self) -> tuple[Tensor, Tensor]:
        """Of the decision that waits for its outcome: log-probabilities [N, heads] and values [N], for the record."""
        if self._decision is None:
            raise RuntimeError("nothing is decided: act() first")
        return self._decision.log_prob, self._decision.value

    @torch.inference_mode()
    def process_env_step(
        self,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        valid: Tensor | None = None,
        final_observation: Observation | None = None,
    ) -> None:
        """Note what the last decision led to; all [N].

        `final_observation` is the post-action observation of environments that were truncated (other rows are not
        read): its value, under the state the policy would have had there, stands for the rest of the episode. A
        truncated step without it is refused by `compute_returns`, which need not wait for the device at every step.
        """
        decision = self._decision
        if decision is None:
            raise RuntimeError("process_env_step() without an act() before it")
        done = terminated | truncated
        step = RolloutStep(
            observation=decision.seen,
            masks=decision.masks,
            policy=decision.policy,
            action=decision.action,
            log_prob=decision.log_prob,
            value=decision.value,
            start=self._start,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            bootstrap=self._unknown if final_observation is None else self._value(final_observation, decision.after),
            valid=self._everywhere if valid is None else valid,
        )
        self.buffer.add(step, decision.before)
        if self.observation_normaliser is not None:
            self.observation_normaliser.gather(decision.raw, valid)
        self._start = done if valid is None else done | ~valid
        self._acted = decision.after
        self.state = decision.after.keep(~self._start)
        self._decision = None

    @torch.inference_mode()
    def compute_returns(self, observation: Observation) -> None:
        """Close the rollout; `observation` is the one after its last step (read where no episode ended there)."""
        last = self._value(observation, self.state)
        with torch.inference_mode(False):  # what the update differentiates through must be ordinary tensors
            batch = self.buffer.finish(last.clone(), self.config.discount, self.config.gae_decay)
            relative = against_siblings(batch.advantage, batch.valid, self.config.siblings)
            self._batch = replace(batch, advantage=relative)

    @property
    def rollout(self) -> RolloutBatch:
        """What the next `update` will learn from."""
        if self._batch is None:
            raise RuntimeError("there is no rollout: compute_returns() first")
        return self._batch

    def update(self) -> UpdateMetrics:
        """Learn from the rollout and clear it."""
        if self._batch is None:
            raise RuntimeError("update() without compute_returns() before it")
        if self.observation_normaliser is not None:
            # Before the update, for the next rollout. This rollout's observations are stored as the policy saw them.
            self.observation_normaliser.commit(self.reducer)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.update_count += 1
        batch, rollout = prepare(self._batch, self.value_normaliser, self.network.value_output, self.reducer)
        with exact(self.device):
            if self.teacher is not None and self.config.teacher_kl_at(self.update_count) > 0.0:
                batch = batch.with_teacher(self.teacher)
            record = ppo_update(
                self.network,
                self._forward,
                self.optimizer,
                batch,
                self.config,
                self.update_count,
                self.generator,
                self.reducer,
            )
        self.optimizer.zero_grad(set_to_none=True)
        self._batch = None
        self.buffer.reset()
        return collect(record, rollout | measure_state(self._acted))

    def take_compile_failure(self) -> str | None:
        """Why the network runs uncompiled although `config.compile` asked for it; told once, for the record."""
        return None if self._compiled is None else self._compiled.take_failure()

    def _value(self, observation: Observation, state: RecurrentState) -> Tensor:
        seen = observation if self.observation_normaliser is None else self.observation_normaliser(observation)
        with exact(self.device):
            return self.value_normaliser.to_returns(self.network.value(seen, state))

    def reset_state(self) -> None:
        """Start all environments afresh: their next step begins an episode."""
        self.state = self.network.initial_state(self.buffer.rows)
        self._start = torch.ones_like(self._start)
        self._decision = None

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that determines the agent's future, as named tensors. Only between rollouts."""
        if self.buffer.length or self._decision is not None:
            raise RuntimeError("the agent can be saved between rollouts only: after update(), before act()")
        tensors = policy_tensors(self.network, self.observation_normaliser, self.value_normaliser)
        # A parameter that no gradient has reached (the slot head, where there is one slot) has no moments yet: zeros.
        for index, parameter in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            slots = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros_like(parameter)) | {"step": torch.zeros(())}
            slots |= self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer/{index}/{name}": t for name, t in slots.items()}
        tensors["recurrent/hidden"], tensors["recurrent/cell"] = self.state.hidden, self.state.cell
        tensors["start"] = self._start
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
        self.buffer.reset()
        self.reset_state()
        self._batch = None
        self.state = RecurrentState(
            tensors["recurrent/hidden"].to(self.device), tensors["recurrent/cell"].to(self.device)
        )
        self._start = tensors["start"].to(self.device)
        self.generator.set_state(tensors["generator"].cpu())

    def _check_same_purpose(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse the whole state of an agent that was made otherwise, in words that say how."""
        observed = any(name.startswith("observations/") for name in tensors)
        if observed != (self.observation_normaliser is not None):
            has, lacks = ("an", "none") if observed else ("no", "one")
            raise ValueError(f"the saved agent has {has} observation normaliser, this one has {lacks}")
        hidden = tensors.get("recurrent/hidden", self.state.hidden)
        if hidden.dim() == self.state.hidden.dim() and hidden.shape[1] != self.buffer.rows:
            raise ValueError(
                f"the saved agent acted for {hidden.shape[1]} environments, this one for {self.buffer.rows}: use as "
                "many to continue exactly, or load_policy() to take the network alone"
            )

    def save(self, path: str | Path, data: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; `data` is JSON that the caller wants back."""
        network = config_data(self.network.config)
        save_checkpoint(path, self.state_dict(), {"network": network, "caller": dict(data or {})})

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`; gives back the caller's data."""
        checkpoint = read_policy(path, self.device, values=True)
        check_same_network(checkpoint.data["network"], self.network.config)
        try:
            self.load_state_dict(checkpoint.tensors)
        except (DamagedCheckpointError, RuntimeError) as error:
            raise DamagedCheckpointError(
                f"{path} is damaged: a run cannot go on from it ({first_line(error)})"
            ) from error
        return dict(checkpoint.data.get("caller", {}))


def make_optimizer(network: FactoredRecurrentActorCritic, config: PPOConfig) -> torch.optim.Optimizer:
    """AdamW whose decay touches the critic only: decaying actor or trunk would pull the policy towards uniform."""
    critic = network.parameters_by_head()["value"]
    ours = {id(p) for p in critic}
    others = [p for p in network.parameters() if id(p) not in ours]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": critic, "weight_decay": config.weight_decay}]
    # The fused kernel on CPU as well: 1.7 ms a step under the profiler where foreach takes 2.7 (docs/agent.md).
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=ADAM_EPSILON, fused=True)
