"""Folders that earlier versions saved load into today's modules: weights are found under the names of then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from esper.growth.export import load
from esper.growth.graft import SEEDS
from esper.growth.plain import grafted

BEFORE = Path(__file__).parent / "saved_before"
"""Format 3, in which a grown module was wrapped: `stages.0.host.…` and `stages.0.seed.…`."""


class Inner(nn.Module):
    """Its children have the names of a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.seed = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.seed(torch.relu(self.host(x)))


class Twice(nn.Module):
    """Was grown twice at the same module, which has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.alias = self.inner
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.alias(x))


@pytest.mark.parametrize("name", ["nested", "twice"])
def test_a_folder_of_format_3_gives_the_outputs_of_then(name: str) -> None:
    folder = BEFORE / name
    assert json.loads((folder / "architecture.json").read_text())["version"] == 3
    check = load_file(folder / "check.safetensors")
    model = load(folder, host=Twice() if name == "twice" else None)
    torch.testing.assert_close(model(check["x"]), check["y"])  # recorded on another processor
    if name == "twice":
        # The later seed (gated) acts on what the earlier one gave.
        assert [seed.grown["blend"] for _, seed in grafted(model)] == ["linear", "gated"]
        assert set(Twice().state_dict()) == {key for key in model.state_dict() if SEEDS not in key}
