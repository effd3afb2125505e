"""A user's own optimizer and schedule: made anew for every network that is trained, and checked before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

MakeOptimizer = Callable[..., Optimizer]
"""Makes an optimizer from (parameters), or from (parameters, model): the model is the one that will be trained."""
MakeScheduler = Callable[[Optimizer], LRScheduler]


def make_optimizer(factory: MakeOptimizer | None, model: nn.Module) -> Optimizer:
    """An optimizer for this very model. Whatever of it would stay untrained, or is not its own, is refused."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Of a frozen host nothing is trained; but seeds take over the settings of a group, and a group is never empty.
    given = list(trained.values()) or [nn.Parameter(torch.zeros(0, device=next(model.parameters()).device))]
    if factory is None:  # fused: one call for all parameters; a call for each costs a fifth of a small host's update
        usual = torch.optim.AdamW(given, lr=1e-3, fused=all(_may_be_fused(p) for p in given))
        _refuse_unfit(usual, model)
        return usual
    if isinstance(factory, Optimizer):
        raise ValueError(
            f"optimizer= is an optimizer that exists already ({type(factory).__name__}): pass a function that makes "
            "one, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1), because the control needs one of its "
            "own"
        )
    if not callable(factory):
        raise ValueError(f"optimizer= must be a function that makes an optimizer from parameters, not {factory!r:.60}")
    made = factory(given, model) if _takes_a_model(factory) else factory(given)
    if not isinstance(made, Optimizer):
        raise ValueError(f"optimizer= must make a torch.optim.Optimizer, and made a {type(made).__name__}")
    _refuse_unfit(made, model)
    _check_groups(made, trained, {id(p) for p in (*given, *model.parameters())})
    return made


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse an optimizer of a person's own loop that cannot train this very model while it grows."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    _refuse_unfit(optimizer, model)
    _check_missing(optimizer, {name: p for name, p in model.named_parameters() if p.requires_grad})


def make_scheduler(factory: MakeScheduler | None, optimizer: Optimizer) -> list[LRScheduler]:
    if factory is None:
        return []
    if not callable(factory):
        raise ValueError(
            f"scheduler= is a {type(factory).__name__}: pass a function that makes one from an optimizer, such as "
            "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"
        )
    made = factory(optimizer)
    if not isinstance(made, LRScheduler):
        raise ValueError(
            f"scheduler= must make a scheduler of torch.optim.lr_scheduler, and made a {type(made).__name__}"
        )
    return [made]


def _takes_a_model(factory: MakeOptimizer) -> bool:
    """Two arguments that must be given, or a second one that is called model."""
    try:
        parameters: list[Any] = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # something built in
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].default is places[1].empty or places[1].name == "model")


_UNFIT: dict[type[Optimizer], str] = {
    LBFGS: "it needs closures, and all parameters in one group",
    SparseAdam: "it takes sparse gradients alone, and those of seeds are dense",
}


def _refuse_unfit(optimizer: Optimizer, model: nn.Module) -> None:
    for kind, why in _UNFIT.items():
        if isinstance(optimizer, kind):
            raise ValueError(f"{kind.__name__} cannot train a network that grows: {why}")
    tables = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse = [path for path, table in tables if table.sparse and table.weight.requires_grad]
    if sparse and isinstance(optimizer, Adam | AdamW):
        raise ValueError(
            f"the table {sparse[0]!r} gives sparse gradients, which {type(optimizer).__name__} does not take: build it "
            "with sparse=False, or train with torch.optim.SGD"
        )


def _check_groups(made: Optimizer, trained: dict[str, nn.Parameter], own: set[int]) -> None:
    foreign = [p for group in made.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise ValueError(
            f"the optimizer holds a tensor of shape {list(foreign[0].shape)} that is none of the network in training, "
            "which is a copy of your model: let optimizer= take (parameters, model), and use these two alone"
        )
    _check_missing(made, trained)


def _check_missing(optimizer: Optimizer, trained: dict[str, nn.Parameter]) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trained.items() if id(p) not in held]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if missing:
        raise ValueError(
            f"no group of the optimizer has the parameter {missing[0]!r}{more}, which would stay untrained: put it "
            "into a group, or freeze it with requires_grad_(False)"
        )


def _may_be_fused(parameter: nn.Parameter) -> bool:
    dense = parameter.layout is torch.strided and torch.empty_like(parameter).stride() == parameter.stride()
    return dense and parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")  # no view with gaps
