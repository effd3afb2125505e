"""`esper.integrations.accelerate.Growth` in a loop with a real Accelerator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.errors import RefusedError
from esper.growth.plain import grafted
from esper.lifecycle import Rules
from esper.policy.schedule import FixedSchedule, Planting

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate.utils import DistributedType  # noqa: E402

from esper.integrations.accelerate import Growth, _check  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
Y = (X.norm(dim=1) * 1.5).long().clamp(max=2)
QUICK = Rules(training_epochs=1, blending_epochs=1, gradient_activity=0.0, shadow_benefit=-100.0, contribution=-100.0)
LONG = Rules(training_epochs=99)
EPOCHS = 5


def prepared(accumulate: int = 1, precision: str = "no") -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30)
    loader = DataLoader(TensorDataset(X[:150], Y[:150]), batch_size=25, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def grow(setup: Any, rules: Rules = QUICK, resume: Path | None = None, save: Path | None = None) -> Growth:
    accelerator, model, optimizer, loader, scheduler = setup
    schedule = FixedSchedule("all", [Planting(1, "*", {"dense": "mlp"})])
    growth = Growth(
        accelerator, model, optimizer, slots=["1"], validate=(X[150:], Y[150:]), epochs=EPOCHS, controller=schedule,
        schedulers=[scheduler], rules=rules,
    )  # fmt: skip
    if resume is not None:
        accelerator.load_state(str(resume))
    while not growth.over:
        for batch in loader:
            with accelerator.accumulate(model):
                growth.backward(batch)
                growth.clip_grad_norm_(0.5)
                growth.step()
                scheduler.step()
        growth.end_epoch()
        if save is not None:
            accelerator.save_state(str(save / str(growth.epoch)))
    return growth


def plain(setup: Any) -> None:
    accelerator, model, optimizer, loader, scheduler = setup
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_incubation_does_not_show(accumulate: int) -> None:
    ours = prepared(accumulate)
    growth = grow(ours, LONG)
    assert growth.learner.model.incubating
    growth.finish()
    plain(theirs := prepared(accumulate))
    for name, tensor in ours[1].state_dict().items():
        assert torch.equal(tensor, theirs[1].state_dict()[name]), name


def test_a_state_of_accelerate_goes_on_exactly(tmp_path: Path) -> None:
    whole = prepared()
    grown = grow(whole, save=tmp_path).finish()
    assert len(grafted(grown.model)) == 1
    again = grow(prepared(), resume=tmp_path / "3").finish()
    assert len(again.history.records) == EPOCHS
    for (name, ours), theirs in zip(grown.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert len(grafted(esper.load_seeds(prepared()[1], tmp_path / "3"))) == 1


def test_bfloat16() -> None:
    assert grow(prepared(precision="bf16")).finish().parameters > 60


def test_what_is_refused(tmp_path: Path) -> None:
    setup = prepared()
    setup[0].save_state(str(tmp_path / "before"))
    with pytest.raises(RefusedError, match="this is no checkpoint of a model that grew"):
        grow(prepared(), resume=tmp_path / "before")
    for kind, processes in ((DistributedType.MULTI_CPU, 2), (DistributedType.FSDP, 1), (DistributedType.DEEPSPEED, 1)):
        fake = SimpleNamespace(num_processes=processes, distributed_type=kind, mixed_precision="no")
        with pytest.raises(RefusedError, match=f"needs one process, and this is {kind.value}"):
            _check(fake)
    with pytest.raises(RefusedError, match="cannot use fp16"):
        _check(SimpleNamespace(num_processes=1, distributed_type=DistributedType.NO, mixed_precision="fp16"))


def test_a_state_that_is_saved_after_finish_has_the_seeds_of_the_model(tmp_path: Path) -> None:
    setup = prepared()
    growth = grow(setup)
    setup[0].save_state(str(tmp_path))  # while it grows; the same folder is used again below
    grown = growth.finish(in_place=True)
    assert len(grafted(grown.model)) == 1
    setup[0].save_state(str(tmp_path))
    assert not (tmp_path / "growth.pt").exists()
    host = prepared()[1]
    host.load_state_dict(grown.model.state_dict(), strict=False)
    again = esper.load_seeds(host, tmp_path).eval()
    assert torch.equal(again(X), grown.model.eval()(X))
    setup[0].load_state(str(tmp_path))
