"""Optimizer surgery: parameters come and go during training, and nothing else notices.

A seed's parameters join as a group of their own, with a warm-up; a pruned seed's group leaves with its state; every
other parameter keeps its state object, untouched. Learning-rate schedulers hold per-group lists beside the optimizer,
and those are kept in step.

An engine that replays updates needs the learning rates of many updates at once (`plan`) and an update whose rates are
read from tensors (`step_with`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Iterator

# The lists with one entry per group that torch's schedulers keep. Everything else they need is in the group itself.
_PER_GROUP_LISTS = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "lr_lambdas", "base_momentums", "max_momentums")
_RATES_IN_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
"""The learning rates in a group: its own, and those between which OneCycleLR moves it."""


class GrowingOptimizer:
    """Owns an optimizer and its schedulers, and changes them together when the model grows or shrinks.

    Works with any torch optimizer whose state is per parameter (SGD, Adam, AdamW, …), fused or not.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler] = (),
        *,
        warmup_updates: int = 25,
        decay: Callable[[int], float] | None = None,
        followed: Sequence[LRScheduler] = (),
    ) -> None:
        """`followed` are schedulers that other code steps: only their lists of groups are kept in step."""
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ValueError("ReduceLROnPlateau waits for a metric at each step; use a scheduler of the step count")
        self.optimizer = optimizer
        self.schedulers = list(schedulers)
        self.warmup_updates = warmup_updates
        """Updates over which a new seed's learning rate rises to its full value."""
        self.decay = decay
        """The share of its rate with which every group makes update number 0, 1, …: a schedule that costs nothing."""
        self.updates = 0
        self._lists_of = [*schedulers, *followed]
        self._own_rates: list[float] | None = None
        self._nested = 0
        self._hooks: list[RemovableHandle] = []

    def hook(self, updated: Callable[[], None]) -> None:
        """From now on an update has its rates whoever makes it (a scaler, a Trainer), and `updated` is called."""

        def before(*_: Any) -> None:
            if self._own_rates is not None:  # torch hooks the step of a subclass, and the one that it calls, too
                self._nested += 1
                return
            groups = self.optimizer.param_groups
            self._own_rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, self._next_rates(), strict=True):
                group["lr"] = rate

        def after(*_: Any) -> None:
            if self._nested:
                self._nested -= 1
                return
            self._restore()
            updated()

        first = self.optimizer.register_step_pre_hook(before)
        hooks: Any = self.optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first.id, last=False)  # others see the rates in use
        self._hooks = [first, self.optimizer.register_step_post_hook(after)]

    def unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    def _restore(self) -> None:
        if self._own_rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._own_rates, strict=True):
                group["lr"] = rate
            self._own_rates, self._nested = None, 0

    def add(self, slot: int, parameters: Iterable[Tensor], near: Iterable[Sequence[Tensor]] = ()) -> str:
        """Take a seed's parameters in, as the group of `slot`. Gives a line that says whose settings they got.

        `near` are the host's parameters around the slot, the nearest first: the seed takes the settings of their group.
        """
        index = self._group_of(near)
        host = self.optimizer.param_groups[index]
        # A group starts as a copy of the host's, because schedulers keep settings of their own in there.
        group = {key: value for key, value in host.items() if key != "params"}
        # Rates that are tensors are written into by whoever changes them: the seed has its own.
        group |= {key: rate.clone() for key in _RATES_IN_GROUP if isinstance(rate := host.get(key), Tensor)}
        group |= {"params": list(parameters), "slot": slot, "updates": 0}
        if "param_names" in host:  # the optimizer was given named parameters, and requires names for all
            group["params"] = [(f"seeds.{slot}.{i}", parameter) for i, parameter in enumerate(group["params"])]
        self.optimizer.add_param_group(group)
        for values in _per_group_lists(self._lists_of):
            values.append(values[index])
        known = [f"{key} {host[key]:g}" for key in ("lr", "weight_decay") if isinstance(host.get(key), float | int)]
        return f"as optimizer group {index} ({', '.join(known)})"

    def _group_of(self, near: Iterable[Sequence[Tensor]]) -> int:
        """The group that holds most of the nearest parameters that any group holds."""
        owner = {id(p): i for i, g in enumerate(self.optimizer.param_groups) if "slot" not in g for p in g["params"]}
        for parameters in near:
            sizes: Counter[int] = Counter()
            for parameter in parameters:
                if id(parameter) in owner:
                    sizes[owner[id(parameter)]] += parameter.numel()
            if sizes:
                return sizes.most_common(1)[0][0]
        return 0

    def drop(self, slot: int) -> None:
        """Drop a seed: its group, its parameters' state, and its place in the schedulers."""
        groups = self.optimizer.param_groups
        index = next(i for i, group in enumerate(groups) if group.get("slot") == slot)
        for parameter in groups[index]["params"]:
            self.optimizer.state.pop(parameter, None)
        for values in _per_group_lists(self._lists_of):
            del values[index]
        del groups[index]

    def release(self, kept: Collection[int]) -> None:
        """Growth is over: the groups of these slots are ordinary ones, for whoever trains on, and the others go."""
        for slot in [group["slot"] for group in self.optimizer.param_groups if "slot" in group]:
            if slot not in kept:
                self.drop(slot)
        for group in self.optimizer.param_groups:
            group.pop("slot", None)
            group.pop("updates", None)

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self._lists_of],
            "updates": self.updates,
            "warmup_updates": self.warmup_updates,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Of an optimizer with the same groups."""
        self.optimizer.load_state_dict(state["optimizer"])
        for scheduler, saved in zip(self._lists_of, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.updates, self.warmup_updates = state["updates"], state["warmup_updates"]

    def reset(self) -> None:
        """Drop moments and step counts, and gradients; groups, learning rates and schedules stay."""
        self.optimizer.state.clear()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One update with the gradients as they are."""
        if self._hooks:
            try:
                self.optimizer.step()
            finally:
                self._restore()
        else:
            with self._rates(self._next_rates()):
                self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def plan(self, updates: int) -> list[list[float]]:
        """The rate of every group in each of the next updates, which from here on count as made."""
        rates = []
        for _ in range(updates):
            rates.append(self._next_rates())
            for scheduler in self.schedulers:
                scheduler.step()
        return rates

    def step_with(self, rates: Sequence[Tensor]) -> None:
        """One update that `plan` has counted, with rates from tensors, so that a CUDA graph can read new ones."""
        groups = self.optimizer.param_groups
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        with self._rates(rates):
            for group in groups:  # torch requires the flag during a capture, and warns of it otherwise
                group["capturable"] = capturing
            self.optimizer.step()

    def _next_rates(self) -> list[float]:
        share = 1.0 if self.decay is None else self.decay(self.updates)
        self.updates += 1
        rates = []
        for group in self.optimizer.param_groups:
            rate = group["lr"] * share
            if group.get("updates", self.warmup_updates) < self.warmup_updates:  # a young seed
                group["updates"] += 1
                rate = rate * group["updates"] / self.warmup_updates
            rates.append(rate)
        return rates

    @contextmanager
    def _rates(self, rates: Sequence[float] | Sequence[Tensor]) -> Iterator[None]:
        """Step with these. Each group's own `lr` is restored: schedulers compute from it."""
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate


def _flatten(schedulers: Iterable[LRScheduler]) -> Iterator[LRScheduler]:
    """The schedulers, and those inside of sequential and chained ones."""
    for scheduler in schedulers:
        yield scheduler
        yield from _flatten(vars(scheduler).get("_schedulers", ()))


def _per_group_lists(schedulers: Iterable[LRScheduler]) -> list[list[Any]]:
    """Each list once: a sequential scheduler holds the very `_last_lr` of the scheduler that it runs."""
    held = [vars(scheduler).get(name) for scheduler in _flatten(schedulers) for name in _PER_GROUP_LISTS]
    return list({id(values): values for values in held if isinstance(values, list)}.values())
