"""`esper.grow` with CUDA graphs, compiled regions and bfloat16: the same growth, whatever trains it.

On a CPU nothing is captured, but everything else of the graph engine is the same; with a GPU the same tests run on
CUDA graphs. `test_refused_without_a_gpu` is for CPUs alone.

Covers: R143, R141
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from test_growing import plant, quick_grow, rings, small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.engine.eager import EpochRecord
from esper.engine.graphs import GraphEngine
from esper.policy.schedule import FixedSchedule, Planting
from esper.training.own import gpu

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU is taken for a GPU."""
    monkeypatch.setattr(gpu, "DEVICES", frozenset({"cpu", "cuda"}))
    return str(request.param)


def two_seeds() -> FixedSchedule:
    return FixedSchedule("test", [Planting(1, 0, {"dense": "mlp"}), Planting(2, 1, {"dense": "norm"})])


def seeds_of(grown: esper.Grown) -> list[tuple[object, ...]]:
    return [(story.slot, story.blueprint, story.fate) for story in grown.history.seeds()]


def difference(one: nn.Module, other: nn.Module) -> float:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    tensors = [name for name, value in mine.items() if isinstance(value, torch.Tensor)]
    return max(float((mine[name].cpu() - theirs[name].cpu()).abs().max()) for name in tensors)


def grow(device: str, **settings: object) -> esper.Grown:
    return quick_grow(controller=two_seeds(), optimizer=FUSED, device=device, control=True, **settings)


def test_captured_epochs_grow_what_single_updates_grow(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[object] = []
    run = GraphEngine.run
    monkeypatch.setattr(GraphEngine, "run", lambda self, learners: (replayed.append(self), run(self, learners))[1])
    eager, captured = grow(device), grow(device, cuda_graphs=True)
    assert len(replayed) == 12  # 6 epochs of the growing network, and of the control
    assert seeds_of(eager) == seeds_of(captured)
    assert seeds_of(captured)
    tolerance = 1e-6 if device == "cpu" else 1e-3
    assert difference(eager.model, captured.model) <= tolerance
    assert eager.ungrown is not None
    assert captured.ungrown is not None
    assert difference(eager.ungrown, captured.ungrown) <= tolerance
    assert captured.remarks == eager.remarks


def test_what_cannot_be_captured_is_trained_all_the_same_and_a_remark_says_why(device: str) -> None:
    loaders = {
        "train": DataLoader(TensorDataset(*rings(256, 0)), batch_size=32),
        "val": DataLoader(TensorDataset(*rings(128, 1)), batch_size=64),
    }
    grown = quick_grow(controller=plant(), device=device, cuda_graphs=True, **loaders)
    assert any("Without CUDA graphs, and slower: minibatches come from a LoaderFeed" in line for line in grown.remarks)
    slow = quick_grow(controller=plant(), device=device, cuda_graphs=True, optimizer=torch.optim.RMSprop)
    assert any("the optimizer is RMSprop" in line for line in slow.remarks)


def test_a_stopped_run_goes_on_exactly(device: str, tmp_path: Path) -> None:
    """Ctrl-C after the third epoch, and the same call again."""

    def stop(record: EpochRecord, control: EpochRecord | None) -> None:
        if record.epoch == 2:
            raise KeyboardInterrupt

    whole = grow(device, cuda_graphs=True)
    with pytest.raises(KeyboardInterrupt):
        grow(device, cuda_graphs=True, checkpoint=tmp_path, on_epoch=stop)
    resumed = grow(device, cuda_graphs=True, checkpoint=tmp_path)
    assert len(resumed.history.records) == 6
    assert difference(whole.model, resumed.model) <= (0.0 if device == "cpu" else 1e-3)


def test_the_best_epoch_is_kept(device: str) -> None:
    eager, captured = grow(device, keep_best=True), grow(device, keep_best=True, cuda_graphs=True)
    assert eager.history.kept == captured.history.kept
    assert difference(eager.model, captured.model) <= (1e-6 if device == "cpu" else 1e-3)


def test_a_host_that_stays_the_users_own_is_plain_afterwards(device: str) -> None:
    model = small_net()
    before = {name: type(module) for name, module in model.named_modules()}
    quick_grow(model=model, device=device, optimizer=FUSED, cuda_graphs=True, in_place=True)
    assert {name: type(module) for name, module in model.named_modules() if name in before} == before
    assert not any("forward" in vars(module) for module in model.modules())
    loss = model(rings(8, 3)[0].to(device)).square().sum()
    loss.backward()  # its tensors are its own: it can be trained on
    assert all(p.grad is not None for p in model.parameters())


def test_a_task_and_bfloat16(device: str) -> None:
    """On a CPU bfloat16 changes nothing: `engine/precision.py`."""
    from esper.tasks import load_task
    from esper.training.own.grow import grow_task

    task = load_task("digits", seed=0).to(torch.device(device))
    grown = grow_task(task, controller="none", epochs=2, precision="bf16", cuda_graphs=True)
    assert all(value.dtype is torch.float32 for value in grown.model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "bf16"}, "precision= is for GPUs, and cpu is none"),
        ({"compiled": True}, "compiled= is for GPUs, and cpu is none"),
        ({"cuda_graphs": True}, "cuda_graphs= is for GPUs, and cpu is none"),
        ({"precision": "bf61"}, "there is no precision 'bf61'; did you mean 'bf16'?"),
    ],
)
def test_refused_without_a_gpu(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=r"precision|compiled|cuda_graphs") as error:
        quick_grow(**settings)
    assert words in str(error.value)
