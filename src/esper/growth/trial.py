"""Try a model as it will be trained and measured, before it is: a seed costs further passes over the same batch.

In each of them the host must be what it was in its own pass. Buffers, random numbers and what modules note on
themselves are kept apart; what cannot be kept apart is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.growth.graft import first_tensor, with_first
from esper.growth.model import GrowingModel
from esper.growth.plain import ExportError, allowed_gap, copied, output_gap
from esper.growth.probe import AttachError, arguments, call_on_copies, untouched, with_batch
from esper.growth.randomness import OtherRngs, preserved_rng
from esper.growth.slot import SlotMode


def trial_copy(model: nn.Module) -> nn.Module:
    """The same parameters and buffers in modules of its own: what a model notes in objects of its own (a list, running
    statistics) is not to be moved by passes that only try it. The model itself, where it cannot be copied."""
    try:
        return copied(model, [*model.parameters(), *model.buffers()])
    except ExportError:  # refused where a copy is needed
        return model


def check_state_stays(model: nn.Module, example: Any) -> None:
    """Refuse a model whose pass in training changes its parameters, or writes into tensors that are no buffers."""
    example = with_batch(example, 2)
    if written := _written_attribute(model, example):
        raise AttachError(
            f"the forward pass of {type(model).__name__} writes into the tensor {written!r}, which is no buffer, and "
            "the passes in which seeds learn would write into it, too: make it a buffer (register_buffer)"
        )
    if moved := _moved_parameter(model, example):
        raise AttachError(
            f"the forward pass of {type(model).__name__} itself changes the parameter {moved!r}, and the passes in "
            "which seeds learn would change it once more: make it a buffer (register_buffer), or change it outside of "
            "forward"
        )


def _written_attribute(model: nn.Module, example: Any) -> str:
    """The first tensor in a plain attribute that a pass in training changes in place."""
    held = {
        f"{path}.{name}" if path else name: (value, value._version)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_inference()
    }
    if not held:
        return ""
    with untouched(model):
        model.train()
        try:
            call_on_copies(model, example)
        except AttachError:
            raise
        except Exception:  # whatever fails in training says so then
            return ""
    return next((name for name, (value, version) in held.items() if value._version != version), "")


def _moved_parameter(model: nn.Module, example: Any) -> str:
    """The first parameter that every pass in training changes anew.

    A pass may bring parameters in order (a limit on their norms): the second time, nothing changes.
    """
    own = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
    values = [(name, parameter, parameter.data) for name, parameter in model.named_parameters()]
    with untouched(model):
        model.train()
        try:
            for _, parameter, value in values:
                # With noise, for one may follow another that it equals at first. Frozen ones may be masks.
                noisy = parameter.requires_grad and value.is_floating_point()
                parameter.data = torch.randn_like(value).mul_(0.1).add_(value) if noisy else value.clone()
            moved = ""
            for _ in range(2):  # with one copy at a time: a network may take half of the memory
                before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
                call_on_copies(model, example)
                after = dict(model.named_parameters())
                moved = next((name for name, value in before.items() if not _same(after[name], value)), "")
                if not moved:
                    break
                del before
            return moved
        except AttachError:
            raise
        except Exception:  # whatever fails in training says so then
            return ""
        finally:
            for module, parameters in own:
                module._parameters.update(parameters)
            for _, parameter, value in values:
                parameter.data = value


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)


def uses_other_rngs(model: nn.Module, example: Any) -> bool:
    """Whether a pass in training draws random numbers of Python or numpy."""
    with untouched(model):
        model.train()
        before = OtherRngs.now()
        try:
            call_on_copies(model, with_batch(example, 2))
        except AttachError:
            raise
        except Exception:  # whatever fails in training says so then
            return True
        return not before.same(OtherRngs.now())


def slots_without_gradient(growing: GrowingModel, example: Any) -> list[str]:
    """The slots that are called and that the outputs do not follow, as autograd sees it: no seed could learn there."""
    added: dict[str, Tensor] = {}

    def adding(path: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            h = first_tensor(output)
            added[path] = torch.zeros_like(h, requires_grad=True)
            return with_first(output, h + added[path])

        return hook

    handles = [slot.module.register_forward_hook(adding(slot.path)) for slot in growing.slots]
    try:
        with untouched(growing.host), torch.enable_grad():
            growing.host.train()
            outputs = tree_leaves(call_on_copies(growing.host, with_batch(example, 2)))
            sums = [o.abs().sum().double() for o in outputs if isinstance(o, Tensor) and o.requires_grad]
            if not sums:
                return list(added)
            found = torch.autograd.grad(torch.stack(sums).sum(), list(added.values()), allow_unused=True)
    except AttachError:
        raise
    except Exception as error:  # whatever else fails in training says so then
        return list(added) if "use_reentrant" in str(error) else []
    finally:
        for handle in handles:
            handle.remove()
    return [path for path, gradient in zip(added, found, strict=True) if gradient is None]


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
