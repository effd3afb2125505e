"""Try a model as it will be trained and measured, before it is: a seed costs further passes over the same batch.

In each of them the host must be what it was in its own pass. Buffers, random numbers and what modules note on
themselves are kept apart; what cannot be kept apart is found here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingModel
from esper.growth.plain import allowed_gap, output_gap
from esper.growth.probe import AttachError, arguments, call_on_copies, untouched, with_batch
from esper.growth.randomness import preserved_rng
from esper.growth.slot import SlotMode


def check_training_pass(model: nn.Module, example: Any) -> None:
    """Refuse a model whose pass in training changes its inputs, or its parameters each time anew.

    A pass may bring parameters in order (a limit on their norms): the second time, nothing changes.
    """
    example = with_batch(example, 2)
    own = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
    values = [(p, p.data) for p in model.parameters()]
    with untouched(model):
        model.train()
        try:
            for parameter, value in values:
                parameter.data = value.clone()
            call_on_copies(model, example)
            first = {
                name: now.detach().clone()
                for name, now in model.named_parameters()
                if not any(now is parameter and torch.equal(now, value) for parameter, value in values)
            }
            if first:
                call_on_copies(model, example)
            moved = [n for n, now in model.named_parameters() if n in first and not _same(now, first[n])]
        except AttachError:
            raise
        except Exception:  # whatever fails in training says so then
            return
        finally:
            for module, parameters in own:
                module._parameters.update(parameters)
            for parameter, value in values:
                parameter.data = value
    if moved:
        raise AttachError(
            f"the forward pass of {type(model).__name__} itself changes the parameter {moved[0]!r}, and the passes in "
            "which seeds learn would change it once more: make it a buffer (register_buffer)"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)


def replays_agree(growing: GrowingModel, example: Any) -> bool:
    """Whether a pass from any slot on gives what a whole pass gives.

    It does not where modules hand on values by other ways than their outputs, such as a list of skip connections.
    """
    args, kwargs = arguments(with_batch(example, 2))
    with untouched(growing.host), growing.recording():
        with preserved_rng(growing.device):
            expected = growing(*args, **kwargs)
        try:
            for slot in growing.slots:
                with preserved_rng(growing.device):
                    found = growing.replay({slot: SlotMode.OFF}, *args, **kwargs)
                if output_gap(expected, found) > allowed_gap(growing):
                    return False
        except Exception:  # of the person's code, which misses what was not handed on
            return False
    return True
