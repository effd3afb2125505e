"""Run a host again from one of its slots on, re-using what came before.

Leave-one-out measurements and shadow passes change one slot; everything that finished before that slot has the same
value as in the pass just made. A `PassRecorder` keeps what each part of the host returned ("taps": the largest
submodules that contain no slot, and the slots' own modules), and in a replay those parts return it again. This works
for any module, and the host need not be cut into segments; code between the taps runs again.

A value that the host changed in place after it was recorded is noticed by its version counter and computed afresh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, slots=True)
class Recorded:
    """A module's output, and the versions of its tensors when it returned."""

    output: Any
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, output: Any) -> Recorded | None:
        """None if the output is not made of tensors in plain containers: changes in place would not be noticed."""
        tensors = _tensors_in(output)
        if tensors is None or any(tensor.is_inference() for tensor in tensors):  # those have no version counter
            return None
        return cls(output, tensors, tuple(tensor._version for tensor in tensors))

    @property
    def intact(self) -> bool:
        return all(t._version == v for t, v in zip(self.tensors, self.versions, strict=True))

    def detached(self) -> Any:
        return _detach(self.output)


class PassRecorder:
    """Notes the outputs of a host's taps, in the order in which they finish."""

    def __init__(self, taps: Sequence[nn.Module]) -> None:
        self.taps = taps
        self._outputs: dict[nn.Module, Recorded | None] = {}
        self._handles: list[RemovableHandle] = []
        self._replaying = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record every forward pass made inside (the last one counts)."""
        if self._handles:
            raise RuntimeError("the host is being recorded already")
        try:
            # Before any hook of a slot: a slot's record is what its module gave, not what its seed made of it.
            self._handles = [tap.register_forward_hook(self._note, prepend=True) for tap in self.taps]
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._outputs.clear()

    @property
    def is_active(self) -> bool:
        return bool(self._handles)

    def start_pass(self) -> None:
        if self._handles and not self._replaying:
            self._outputs.clear()

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._replaying:
            # Called again within one pass, unlike in the probe: one output cannot stand for both.
            self._outputs[module] = None if module in self._outputs else Recorded.of(output)

    @contextmanager
    def up_to(self, slot_module: nn.Module) -> Iterator[None]:
        """Within, every tap that finished no later than `slot_module` returns its recorded output."""
        if self.taps and not self._outputs:
            raise RuntimeError("replay needs a recorded forward pass")
        # A pass may leave a slot out (layer drop); then nothing is known to come before it.
        before = self._outputs if slot_module in self._outputs else {}
        own_forwards: list[tuple[nn.Module, Any]] = []
        self._replaying = True
        try:
            for module, recorded in before.items():
                if recorded is not None and recorded.intact:
                    # An instance attribute shadows the class's forward; hooks still run around it.
                    own_forwards.append((module, vars(module).get("forward")))
                    module.__dict__["forward"] = _constant(recorded.detached())
                if module is slot_module:
                    break
            yield
        finally:
            self._replaying = False
            for module, forward in own_forwards:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


def find_taps(host: nn.Module, slot_modules: set[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """The largest submodules that hold no slot, and the slots; only those called exactly once per forward pass."""
    holders = {
        module for module in host.modules() if any(m in slot_modules for m in module.modules() if m is not module)
    }
    taps: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if calls[child] == 1 and (child in slot_modules or child not in holders):
                taps[child] = None
            if child in holders or calls[child] == 0:
                walk(child)

    walk(host)
    return list(taps)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _tensors_in(value: Any) -> tuple[Tensor, ...] | None:
    if isinstance(value, Tensor):
        return (value,)
    if value is None or isinstance(value, bool | int | float | str):
        return ()
    if type(value) in (tuple, list, dict):
        parts = [_tensors_in(item) for item in (value.values() if isinstance(value, dict) else value)]
        if all(part is not None for part in parts):
            return tuple(tensor for part in parts if part is not None for tensor in part)
    return None


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(_detach(item) for item in value)
    if isinstance(value, dict):
        return {key: _detach(item) for key, item in value.items()}
    return value
