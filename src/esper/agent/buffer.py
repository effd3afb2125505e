"""Storage of one rollout: pre-allocated tensors [N, T], rows are environments, filled one step of all at a time.

A row is a stretch of one environment's life, normally exactly one episode. Only the recurrent state before its first
step is kept: the update replays the row from there. The buffer stores what the policy saw (normalised observations,
masks, its log-probabilities) and computes nothing except which value follows which step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES
from esper.agent.gae import advantages
from esper.env.spaces import ActionMasks, Observation
from esper.policy.distribution import FactoredPolicy
from esper.policy.network import FactoredRecurrentActorCritic
from esper.policy.recurrence import Packing, RecurrentState

VIEWS_KEPT = 512
"""Steps whose places in memory are kept ready: a few megabytes of small objects, however long the rollout."""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """One step of all environments, as it happened. Every tensor starts with [N]."""

    observation: Observation
    """As the policy saw it (normalised)."""
    masks: ActionMasks
    policy: FactoredPolicy
    """The distribution that the action was drawn from."""
    action: Tensor
    """[N, heads] int64"""
    log_prob: Tensor
    """[N, heads]; 0 for heads without effect."""
    value: Tensor
    """[N] V of the observation, in reward units."""
    start: Tensor
    """[N] bool: the step starts an episode, so the recurrent state before it was zero."""
    reward: Tensor
    terminated: Tensor
    """[N] bool: nothing follows."""
    truncated: Tensor
    """[N] bool: cut short (unless terminated as well); `bootstrap` stands for what would have followed."""
    bootstrap: Tensor
    """[N] V of the post-action state where truncated, in reward units; NaN where it was not asked for."""
    valid: Tensor
    """[N] bool: False once the row's episode is over and the environment only idles along."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rows of a finished rollout, ready for the update. Tensors start with [n, T] unless noted."""

    observation: Observation
    masks: ActionMasks
    policy: FactoredPolicy
    action: Tensor
    log_prob: Tensor
    value: Tensor
    valid: Tensor
    start: Tensor
    reward: Tensor
    advantage: Tensor
    returns: Tensor
    state: RecurrentState
    """Before the rows' first steps, [layers, n, hidden]."""
    several_episodes: bool
    """Whether any row contains the start of another episode: then the LSTM needs a `Packing`."""
    teacher: FactoredPolicy | None = None
    """What a teacher would have done at every step, if there is one."""

    def select(self, rows: Tensor) -> RolloutBatch:
        """The rows that `rows` [n] names, in that order."""
        state = RecurrentState(self.state.hidden[:, rows], self.state.cell[:, rows])
        return self._map(lambda tensor: tensor[rows], state)

    def single_steps(self) -> RolloutBatch:
        """Every step as a row of its own, [N·T, 1, ...]: shuffled minibatches for a policy without memory."""
        nothing = self.state.hidden.new_zeros(0, self.valid.numel(), self.state.hidden.shape[-1])
        flat = self._map(lambda tensor: tensor.flatten(0, 1)[:, None], RecurrentState(nothing, nothing))
        return replace(flat, several_episodes=False)

    def parts(self, size: int | None) -> Iterator[RolloutBatch]:
        """The rows in their order, `size` at a time; all of them if None."""
        rows = torch.arange(self.valid.shape[0], device=self.valid.device)
        if size is None or size >= rows.numel():
            yield self
            return
        for part in torch.split(rows, size):
            yield self.select(part)

    @torch.no_grad()
    def with_teacher(self, teacher: FactoredRecurrentActorCritic) -> RolloutBatch:
        """The same rows with a teacher's probabilities beside them. Its memory of what came before is not stored."""
        if not bool(self.start[:, 0].all()):
            raise ValueError("a teacher can only follow rows that begin with an episode: its memory would be missing")
        state = teacher.initial_state(self.valid.shape[0])
        return replace(self, teacher=teacher(self.observation, self.masks, state, self.packing()).policy)

    def packing(self) -> Packing | None:
        return Packing.of(self.start & self.valid) if self.several_episodes else None

    def _map(self, f: Callable[[Tensor], Tensor], state: RecurrentState) -> RolloutBatch:
        masks = map_masks(self.masks, f)
        return RolloutBatch(
            observation=map_observation(self.observation, f),
            masks=masks,
            policy=map_policy(self.policy, masks, f),
            action=f(self.action),
            log_prob=f(self.log_prob),
            value=f(self.value),
            valid=f(self.valid),
            start=f(self.start),
            reward=f(self.reward),
            advantage=f(self.advantage),
            returns=f(self.returns),
            state=state,
            several_episodes=self.several_episodes,
            teacher=None if self.teacher is None else map_policy(self.teacher, masks, f),
        )


def map_observation(o: Observation, f: Callable[[Tensor], Tensor]) -> Observation:
    return Observation(f(o.overall), f(o.slots), f(o.blueprints), f(o.costs), f(o.present))


def map_masks(m: ActionMasks, f: Callable[[Tensor], Tensor]) -> ActionMasks:
    return ActionMasks(f(m.op), f(m.slot), f(m.blueprint), f(m.blend))


def map_policy(p: FactoredPolicy, masks: ActionMasks, f: Callable[[Tensor], Tensor]) -> FactoredPolicy:
    return FactoredPolicy(f(p.op), f(p.slot), f(p.blueprint), f(p.blend), masks, p.uses)


def _named(step: RolloutStep) -> dict[str, Tensor]:
    """Every stored tensor of a step, by name: the one list of what is stored."""
    o, m, p = step.observation, step.masks, step.policy
    return {
        "observation.overall": o.overall,
        "observation.slots": o.slots,
        "observation.blueprints": o.blueprints,
        "observation.costs": o.costs,
        "observation.present": o.present,
        "masks.op": m.op,
        "masks.slot": m.slot,
        "masks.blueprint": m.blueprint,
        "masks.blend": m.blend,
        "policy.op": p.op,
        "policy.slot": p.slot,
        "policy.blueprint": p.blueprint,
        "policy.blend": p.blend,
        "action": step.action,
        "log_prob": step.log_prob,
        "value": step.value,
        "start": step.start,
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "bootstrap": step.bootstrap,
        "valid": step.valid,
    }


class RolloutBuffer:
    """`rows` environments by `steps` steps; refuses what does not fit the network or the space that is left."""

    def __init__(
        self, network: FactoredRecurrentActorCritic, rows: int, steps: int, slots: int, blueprints: int
    ) -> None:
        config = network.config
        if config.encoder == "vector" and (slots, blueprints) != (config.slots, config.blueprints):
            raise ValueError(
                f"the buffer is for {slots} slots and {blueprints} blueprints, the network's heads have "
                f"{config.slots} and {config.blueprints}"
            )
        if blueprints > config.blueprints:
            raise ValueError(f"{blueprints} blueprints exceed the network's embedding capacity of {config.blueprints}")
        self.rows, self.steps, self.length = rows, steps, 0
        self._uses = network.uses
        self._state = network.initial_state(rows)
        self._store = self._allocate(network, slots, blueprints)
        certain = {name for name in _CERTAIN if self._store[name].shape[-1] == 1}
        self._views: list[list[Tensor]] = []
        self._written = {name: t for name, t in self._store.items() if t.numel() and name not in certain}

    def _allocate(self, network: FactoredRecurrentActorCritic, slots: int, blueprints: int) -> dict[str, Tensor]:
        config, ops = network.config, network.config.space.ops
        seen = slots if config.encoder == "slots" else 0
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "observation.overall": (torch.float32, (config.overall_features,)),
            "observation.slots": (torch.float32, (seen, config.slot_features)),
            "observation.blueprints": (torch.int64, (seen,)),
            "observation.costs": (torch.float32, (seen, blueprints)),
            "observation.present": (torch.bool, (seen,)),
            "action": (torch.int64, (len(HEAD_NAMES),)),
            "log_prob": (torch.float32, (len(HEAD_NAMES),)),
        }
        heads = {"op": (ops,), "slot": (ops, slots), "blueprint": (slots, blueprints), "blend": (slots, config.blends)}
        for head, shape in heads.items():
            shapes[f"masks.{head}"] = (torch.bool, shape)
            shapes[f"policy.{head}"] = (torch.float32, shape)
        shapes |= dict.fromkeys(("value", "reward", "bootstrap"), (torch.float32, ()))
        shapes |= dict.fromkeys(("start", "terminated", "truncated", "valid"), (torch.bool, ()))
        device = network.uses.device
        return {n: torch.zeros((self.rows, self.steps, *s), dtype=t, device=device) for n, (t, s) in shapes.items()}

    @property
    def full(self) -> bool:
        return self.length == self.steps

    def reset(self) -> None:
        """Forget the steps, keep the memory."""
        self.length = 0

    def add(self, step: RolloutStep, state_before: RecurrentState) -> None:
        """Store a step of all rows. The recurrent state before it is kept only for the first one."""
        if self.full:
            raise RuntimeError(f"the rollout buffer is full ({self.steps} steps): call update() before acting on")
        named = _named(step)
        if self.length == 0:
            self._check_shapes(named, state_before)
            self._state.hidden.copy_(state_before.hidden)
            self._state.cell.copy_(state_before.cell)
        # One call for all: with a call per tensor, Python would take longer than the copying.
        torch._foreach_copy_(self._places(self.length), [named[name] for name in self._written])
        self.length += 1

    def _places(self, step: int) -> list[Tensor]:
        """Where a step goes. Making these views takes as long as copying, so those of the first steps are kept."""
        while len(self._views) <= min(step, VIEWS_KEPT - 1):
            self._views.append([memory[:, len(self._views)] for memory in self._written.values()])
        return self._views[step] if step < VIEWS_KEPT else [memory[:, step] for memory in self._written.values()]

    def _check_shapes(self, named: dict[str, Tensor], state: RecurrentState) -> None:
        if state.hidden.shape != self._state.hidden.shape:
            raise ValueError(
                f"recurrent state {tuple(state.hidden.shape)} given, the buffer was made for "
                f"{tuple(self._state.hidden.shape)} [layers, rows, hidden]"
            )
        for name, tensor in named.items():
            expected = (self.rows, *self._store[name].shape[2:])
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, the buffer was made for {expected}")

    def finish(self, last_value: Tensor, discount: float, decay: float) -> RolloutBatch:
        """Advantages and returns of what was stored, with V [N] of the observation after the last step."""
        if self.length == 0:
            raise RuntimeError("the rollout buffer is empty: nothing to learn from")
        kept = {name: tensor[:, : self.length] for name, tensor in self._store.items()}
        truncated = kept["truncated"] & ~kept["terminated"]
        done = kept["terminated"] | truncated
        self._check_ends(kept["valid"], done, truncated & kept["bootstrap"].isnan())
        following = torch.cat((kept["value"][:, 1:], last_value[:, None]), dim=1)
        advantage = advantages(
            kept["reward"],
            kept["value"],
            torch.where(truncated, kept["bootstrap"], following),
            kept["terminated"],
            done,
            kept["valid"],
            discount,
            decay,
        )
        self._check_finite(advantage)
        masks = ActionMasks(kept["masks.op"], kept["masks.slot"], kept["masks.blueprint"], kept["masks.blend"])
        return RolloutBatch(
            observation=Observation(*(kept[f"observation.{name}"] for name in _OBSERVATION)),
            masks=masks,
            policy=FactoredPolicy(
                kept["policy.op"],
                kept["policy.slot"],
                kept["policy.blueprint"],
                kept["policy.blend"],
                masks,
                self._uses,
            ),
            action=kept["action"],
            log_prob=kept["log_prob"],
            value=kept["value"],
            valid=kept["valid"],
            start=kept["start"],
            reward=kept["reward"],
            advantage=advantage,
            returns=advantage + kept["value"],
            state=self._state,
            several_episodes=bool((kept["start"] & kept["valid"])[:, 1:].any()),
        )

    @staticmethod
    def _check_ends(valid: Tensor, done: Tensor, without_bootstrap: Tensor) -> None:
        missing = without_bootstrap & valid
        if bool(missing.any()):
            row, step = (int(i) for i in missing.nonzero()[0])
            raise ValueError(
                f"environment {row}, step {step}: a truncated step needs final_observation, because its return goes on "
                "from the post-action state"
            )
        loose = valid[:, :-1] & ~valid[:, 1:] & ~done[:, :-1]
        if bool(loose.any()):
            row, step = (int(i) for i in loose.nonzero()[0])
            raise ValueError(
                f"environment {row} stops being valid after step {step}, which neither terminated nor was truncated: "
                "its return would be made up"
            )

    @staticmethod
    def _check_finite(advantage: Tensor) -> None:
        bad = ~torch.isfinite(advantage)
        if bool(bad.any()):
            row, step = (int(i) for i in bad.nonzero()[-1])  # the recursion runs backwards: the last is the source
            raise ValueError(
                f"environment {row}, step {step}: reward or value is not finite; one such step would poison the return "
                "statistics for good"
            )


def minibatches(rows: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """One permutation of the rows, cut into at most `count` nearly equal parts."""
    order = torch.randperm(rows, generator=generator, device=generator.device)
    yield from torch.tensor_split(order, min(count, rows))


_CERTAIN = frozenset({"policy.slot", "policy.blueprint", "policy.blend"})
"""With a single choice these log-probabilities are 0, which is what the memory holds from the start."""
_OBSERVATION = ("overall", "slots", "blueprints", "costs", "present")
