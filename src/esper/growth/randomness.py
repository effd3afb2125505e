"""Random numbers of torch, Python and numpy: what is drawn beside the training must not move what the training draws.

Hosts draw from all three: dropout from torch, layer drop and augmentation often from Python's `random` or from numpy.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

GENERATOR = "MT19937"
"""numpy's global generator, unless somebody has exchanged it: another one is left alone."""


@dataclass(frozen=True, slots=True)
class OtherRngs:
    """Where the sequences of random numbers of Python and numpy are."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def now(cls) -> OtherRngs:
        return cls(random.getstate(), np.random.get_state(legacy=False))

    @classmethod
    def seeded(cls, seed: int) -> OtherRngs:
        return cls(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state(legacy=False))

    def set(self) -> None:
        random.setstate(self.python)
        with suppress(ValueError):  # of another generator, which somebody has put there meanwhile
            np.random.set_state(self.numpy)

    def same(self, other: OtherRngs) -> bool:
        """Whether nothing was drawn between the two."""
        return self.python == other.python and pickle.dumps(self.numpy) == pickle.dumps(other.numpy)

    def data(self) -> dict[str, Any]:
        """As plain data and tensors."""
        version, words, gauss = self.python
        found: dict[str, Any] = {"python": [version, torch.tensor(words), gauss]}
        if self.numpy["bit_generator"] == GENERATOR:
            own = self.numpy["state"]
            words = torch.from_numpy(own["key"].astype(np.int64))
            found["numpy"] = [words, own["pos"], self.numpy["has_gauss"], self.numpy["gauss"]]
        return found

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> OtherRngs:
        version, words, gauss = data["python"]
        python = (version, tuple(words.tolist()), gauss)
        if "numpy" not in data:
            return cls(python, np.random.get_state(legacy=False))
        key, position, has_gauss, number = data["numpy"]
        state = {"key": key.numpy().astype(np.uint32), "pos": position}
        return cls(python, {"bit_generator": GENERATOR, "state": state, "has_gauss": has_gauss, "gauss": number})


@contextmanager
def preserved_rng(device: torch.device, *, others: bool = True) -> Iterator[None]:
    """Random numbers drawn inside do not move the host's own sequences.

    A GPU's generator cannot be read while a CUDA graph is captured; there it moves on. `others`: those of Python and
    numpy as well, which takes 0.1 ms, a third of a small network's pass.
    """
    forked = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    kept = OtherRngs.now() if others else None
    try:
        with torch.random.fork_rng(devices=[device] if forked else []):
            yield
    finally:
        if kept is not None:
            kept.set()
