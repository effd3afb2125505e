"""The controller's network: set of slots -> recurrent core -> four heads and a value.

                      slots [.., S, F] ─ slot encoder (shared) ─┬─ mean and max over present slots ─┐
    blueprint embedding ──────┘                                 │            overall [.., G] ───────┴─ features
                                                                │                                    │
                                       slot encodings [.., S, E]│                      LayerNorm ─ LSTM ─ LayerNorm
                                                                │                                    │
                     slot, blueprint, blend scores  ────────────┴──── core [.., H] ──┬── op ──┬── value

Every slot goes through the same weights (a pointer scores them), so one network serves any number of slots, and of
blueprints up to the capacity of its embedding. Recurrent state is an argument and a result, never an attribute.
The value is a function of observation and state only. Legality enters the distribution, not the network: a bootstrap
value cannot be taken under the wrong masks.

LayerNorm stands on both sides of the LSTM on purpose: before it, so that bounded inputs keep the cell state bounded;
after it, because LSTM outputs are small after a reset and the heads should see one scale throughout an episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.config import AT_LEAST_0, SHARE, WHOLE_AT_LEAST_0, WHOLE_AT_LEAST_1, check_ranges
from esper.env.spaces import ActionMasks, Observation
from esper.errors import shown
from esper.policy.distribution import (
    BLEND,
    BLUEPRINT,
    GROWTH_ACTIONS,
    SLOT,
    ActionSpace,
    FactoredLogits,
    FactoredPolicy,
)

HIDDEN_GAIN = sqrt(2.0)
"""Orthogonal gain of layers followed by a ReLU."""
VALUE_GAIN = 0.0
"""The critic starts at 0 everywhere: any other start is a guess in reward units, and with small rewards it drowns the
returns until the value loss has removed it (measured, docs/agent.md)."""
FORGET_BIAS = 1.0
"""Initial bias of the forget gate: the cell remembers until it learns to forget."""


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """What fixes the shapes of the weights. Numbers of slots and environments are not among them."""

    overall_features: int
    """Width of `Observation.overall`."""
    slot_features: int = 0
    """Width of `Observation.slots`; unused by the vector encoder."""
    encoder: Literal["slots", "vector"] = "slots"
    """A set of slots with pointer heads, or a plain vector with heads of fixed sizes (`slots`, `blueprints`)."""
    space: ActionSpace = field(default=GROWTH_ACTIONS)
    """Which heads each operation uses."""
    blueprints: int = 16
    """Capacity of the blueprint embedding (slots), or exact number of blueprints (vector)."""
    blends: int = len(BLENDS)
    """Number of blends."""
    slots: int = 1
    """Exact number of slots for the vector encoder; the slot encoder takes any number."""
    hidden: int = 128
    """Width of features, LSTM state and core."""
    layers: int = 1
    """LSTM layers; 0 is a memoryless policy with a feed-forward layer in its place."""
    feature_layers: int = 2
    """Depth of the feature net; layers after the first are residual."""
    slot_width: int = 64
    """Width of a slot's encoding."""
    embedding: int = 16
    """Width of the blueprint embedding."""
    policy_gain: float = 0.01
    """Orthogonal gain of the policy outputs: near-uniform at birth."""
    floor: float = 0.0
    """Least probability of a legal choice, in every head, in rollout and update alike."""
    layout: str = ""
    """Version of the observation's fields; a checkpoint made for another layout is refused."""

    def __post_init__(self) -> None:
        if self.encoder not in ("slots", "vector"):
            raise ValueError(f"encoder must be 'slots' or 'vector', not {self.encoder!r}")
        check_ranges(self, _RANGES)
        if not (self.layout.isprintable() and len(self.layout) <= 200):  # messages show it
            raise ValueError(f"layout must be a line of text, not {shown(self.layout)}")
        if self.encoder == "slots" and self.slot_features < 1:
            raise ValueError("the slot encoder needs slot_features >= 1; use encoder='vector' for plain vectors")

    @property
    def head_width(self) -> int:
        return max(32, self.hidden // 2)


_WIDTHS = ("overall_features", "blueprints", "blends", "slots", "hidden", "feature_layers", "slot_width", "embedding")
_RANGES = {
    **dict.fromkeys(_WIDTHS, WHOLE_AT_LEAST_1),
    "slot_features": WHOLE_AT_LEAST_0,
    "layers": WHOLE_AT_LEAST_0,
    "policy_gain": AT_LEAST_0,
    "floor": SHARE,
}


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of the core: hidden and cell, each [layers, N, hidden]. A memoryless policy has 0 layers."""

    hidden: Tensor
    cell: Tensor


@dataclass(frozen=True, slots=True)
class NetworkOutput:
    """Leading dimensions as in the observation: [N] for a step, [N, T] for rows."""

    policy: FactoredPolicy
    value: Tensor
    """In the value normaliser's units."""
    state: RecurrentState
    """After the last step."""


def _linear(inputs: int, outputs: int, gain: float = HIDDEN_GAIN) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Layer(nn.Module):
    """Linear, LayerNorm, ReLU. One call instead of four: at this size calling modules costs as much as computing."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = _linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.linear.weight, self.linear.bias)
        return torch.relu(F.layer_norm(x, self.norm.normalized_shape, self.norm.weight, self.norm.bias, self.norm.eps))


class Head(nn.Module):
    """hidden -> head width -> outputs."""

    def __init__(self, config: NetworkConfig, outputs: int, gain: float) -> None:
        super().__init__()
        self.inner = _linear(config.hidden, config.head_width)
        self.out = _linear(config.head_width, outputs, gain)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(F.linear(x, self.inner.weight, self.inner.bias))
        return F.linear(inner, self.out.weight, self.out.bias)


class FeatureNet(nn.Module):
    """A first layer, then residual ones; each ends in LayerNorm and ReLU."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.first = Layer(inputs, width)
        self.rest = nn.ModuleList(Layer(width, width) for _ in range(depth - 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = x + layer(x)
        return x


class SlotEncoder(nn.Module):
    """Each slot on its own, with the same weights: [..., S, F] and what grows there -> [..., S, slot_width]."""

    def __init__(self, config: NetworkConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        inputs = config.slot_features + config.embedding
        self.net = nn.Sequential(Layer(inputs, config.slot_width), _linear(config.slot_width, config.slot_width))

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """The slots' encodings, and mean and max over the present ones, [..., 2·slot_width]."""
        what = self.embedding(observation.blueprints)
        slots = self.net(torch.cat((observation.slots, what), dim=-1))
        present = observation.present[..., None]
        count = present.sum(-2).clamp(min=1)
        mean = (slots * present).sum(-2) / count
        highest = slots.masked_fill(~present, -torch.inf).amax(-2)
        highest = torch.where(present.any(-2), highest, torch.zeros_like(highest))  # a model without any slot
        return slots, torch.cat((mean, highest), dim=-1)


class JointScore(nn.Module):
    """Scores of a slot in the light of the core: ReLU(A·core + B·slot) -> outputs, [..., S, outputs]."""

    def __init__(self, config: NetworkConfig, outputs: int) -> None:
        super().__init__()
        width = config.head_width
        self.core = _linear(config.hidden, width)
        self.slot = nn.Linear(config.slot_width, width, bias=False)
        nn.init.orthogonal_(self.slot.weight, HIDDEN_GAIN)
        self.out = _linear(width, outputs, config.policy_gain)

    def forward(self, core: Tensor, slots: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.core(core)[..., None, :] + self.slot(slots)))
        return scores


class BlueprintScore(nn.Module):
    """A query per slot against every blueprint's embedding, plus a learned price on the relative parameter cost."""

    def __init__(self, config: NetworkConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.query = JointScore(config, config.embedding + 1)

    def forward(self, core: Tensor, slots: Tensor, costs: Tensor) -> Tensor:
        query = self.query(core, slots)  # [..., S, E + 1]
        known = self.embedding.weight[1 : costs.shape[-1] + 1]  # row 0 is the empty slot
        scores: Tensor = query[..., :-1] @ known.T - query[..., -1:] * costs
        return scores


class Unused(nn.Module):
    """In the place of a head that no operation uses: no weights, nothing to compute."""


class FactoredRecurrentActorCritic(nn.Module):
    """Shared trunk, one head per part of a decision, and a V(s) critic. About 0.2 M parameters at the defaults."""

    uses: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("uses", config.space.table(), persistent=False)
        ops, hidden = config.space.ops, config.hidden
        if config.encoder == "slots":
            self.embedding = nn.Embedding(config.blueprints + 1, config.embedding)
            self.slot_encoder = SlotEncoder(config, self.embedding)
            self.slot_head: nn.Module = JointScore(config, ops)
            self.blueprint_head: nn.Module = BlueprintScore(config, self.embedding)
            self.blend_head: nn.Module = JointScore(config, config.blends)
            inputs = config.overall_features + 2 * config.slot_width
        else:
            sizes = {SLOT: ops, BLUEPRINT: config.blueprints, BLEND: config.blends}
            self.slot_head, self.blueprint_head, self.blend_head = (
                Head(config, config.slots * size, config.policy_gain) if config.space.uses_head(head) else Unused()
                for head, size in sizes.items()
            )
            inputs = config.overall_features
        self.features = FeatureNet(inputs, hidden, config.feature_layers)
        self.before_core = nn.LayerNorm(hidden)
        self.lstm = nn.LSTM(hidden, hidden, config.layers, batch_first=True) if config.layers else None
        self.feed_forward = None if config.layers else nn.Sequential(_linear(hidden, hidden), nn.ReLU())
        self.after_core = nn.LayerNorm(hidden)
        self.op_head = Head(config, ops, config.policy_gain)
        self.value_head = Head(config, 1, VALUE_GAIN)
        if self.lstm is not None:
            _initialise_lstm(self.lstm)

    @property
    def value_output(self) -> nn.Linear:
        """The critic's last layer, which the value normaliser rescales when its units move."""
        return self.value_head.out

    @property
    def recurrent(self) -> bool:
        return self.lstm is not None

    def initial_state(self, batch: int) -> RecurrentState:
        zeros = self.uses.new_zeros((self.config.layers, batch, self.config.hidden), dtype=torch.float32)
        return RecurrentState(zeros, zeros.clone())

    def forward(self, observation: Observation, masks: ActionMasks, state: RecurrentState) -> NetworkOutput:
        """A step [N, ...] or whole rows [N, T, ...] from the state before their first step."""
        slots, features = self._encode(observation)
        core, after = self._core(features, state)
        policy = FactoredPolicy.from_logits(
            self._logits(core, slots, observation, masks), masks, self.uses, self.config.floor
        )
        return NetworkOutput(policy, self.value_head(core).squeeze(-1), after)

    def value(self, observation: Observation, state: RecurrentState) -> Tensor:
        """V of a state that will not be acted upon, [N]: a bootstrap. Disturbs nothing."""
        core, _ = self._core(self._encode(observation)[1], state)
        value: Tensor = self.value_head(core).squeeze(-1)
        return value

    def _encode(self, observation: Observation) -> tuple[Tensor | None, Tensor]:
        if self.config.encoder == "vector":
            return None, self.features(observation.overall)
        slots, pooled = self.slot_encoder(observation)
        return slots, self.features(torch.cat((observation.overall, pooled), dim=-1))

    def _core(self, features: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        x = self.before_core(features)
        if self.lstm is None:
            assert self.feed_forward is not None
            return self.after_core(self.feed_forward(x)), state
        if x.dim() == 2 and x.device.type == "cpu":
            out, after = self._step(self.lstm, x, state)
            return self.after_core(out), after
        steps = x if x.dim() == 3 else x[:, None]  # [N, T, H]; on a GPU acting and replay share cuDNN's rounding
        out, (hidden, cell) = self.lstm(steps, (state.hidden, state.cell))
        out = out if x.dim() == 3 else out[:, 0]
        return self.after_core(out), RecurrentState(hidden, cell)

    @staticmethod
    def _step(lstm: nn.LSTM, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """One step with the same weights, [N, H]: the cell alone takes half the time of a sequence of length one."""
        hidden, cell = [], []
        for layer, layer_weights in enumerate(lstm.all_weights):
            x, memory = torch.lstm_cell(x, (state.hidden[layer], state.cell[layer]), *layer_weights)
            hidden.append(x)
            cell.append(memory)
        if len(hidden) == 1:
            return x, RecurrentState(hidden[0][None], cell[0][None])
        return x, RecurrentState(torch.stack(hidden), torch.stack(cell))

    def _logits(
        self, core: Tensor, slots: Tensor | None, observation: Observation, masks: ActionMasks
    ) -> FactoredLogits:
        op = self.op_head(core)
        if slots is None:
            heads = (
                (self.slot_head, masks.slot),
                (self.blueprint_head, masks.blueprint),
                (self.blend_head, masks.blend),
            )
            scores = (core.new_zeros(m.shape) if isinstance(h, Unused) else h(core).view_as(m) for h, m in heads)
            return FactoredLogits(op, *scores)
        return FactoredLogits(
            op,
            self.slot_head(core, slots).transpose(-1, -2),  # [..., S, O] -> [..., O, S]
            self.blueprint_head(core, slots, observation.costs),
            self.blend_head(core, slots),
        )

    def parameters_by_head(self) -> dict[str, list[nn.Parameter]]:
        """Every parameter once: those of each head, of the value, and of the trunk that they share."""
        heads = {
            "slot": self.slot_head,
            "blueprint": self.blueprint_head,
            "blend": self.blend_head,
            "op": self.op_head,
            "value": self.value_head,
        }
        shared = [] if self.config.encoder == "vector" else [self.embedding.weight]
        owned = {id(p) for p in shared}
        groups = {name: [p for p in head.parameters() if id(p) not in owned] for name, head in heads.items()}
        in_heads = {id(p) for group in groups.values() for p in group}
        groups["trunk"] = [p for p in self.parameters() if id(p) not in in_heads]
        return groups


def _initialise_lstm(lstm: nn.LSTM) -> None:
    """Orthogonal matrices, zero biases, and a forget gate that starts open."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
        if name.startswith("bias_ih"):  # in one of the two biases only: they add up
            forget_gate = slice(lstm.hidden_size, 2 * lstm.hidden_size)  # PyTorch's order: input, forget, cell, output
            with torch.no_grad():
                parameter[forget_gate].fill_(FORGET_BIAS)
