"""`GrowthCallback` in a real `lightning.Trainer`: seeds train, incubation does not show, checkpoints go on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.errors import RefusedError
from esper.growth.graft import SEEDS
from esper.growth.plain import grafted
from esper.lifecycle import Rules, Stage
from esper.policy.schedule import FixedSchedule, Planting

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from esper.integrations.lightning import GrowthCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
Y = (X.norm(dim=1) * 1.5).long().clamp(max=2)  # which of three rings
VAL = (X[150:], Y[150:])
QUICK = Rules(training_epochs=1, blending_epochs=1, gradient_activity=0.0, shadow_benefit=-100.0, contribution=-100.0)
LONG = Rules(training_epochs=99)
"""A seed that incubates to the end."""


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """DDP leaves variables behind by which other libraries believe that they are one process of several."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Dropout and a norm: random numbers and statistics that a seed's passes must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
        )
        self.accuracy = MulticlassAccuracy(3)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        out = self.net(x)
        self.accuracy.update(out, y)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.accuracy.compute()))
        self.accuracy.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LitVal(Lit):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


def loader(shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[:150], Y[:150]), batch_size=30, shuffle=shuffle)


def callback(rules: Rules = QUICK, **settings: Any) -> GrowthCallback:
    schedule = FixedSchedule("all", [Planting(1, "*", {"dense": "mlp"})])
    given = {"slots": ["2", "5"], "validate": VAL, "model": "net", "controller": schedule, "rules": rules, **settings}
    return GrowthCallback(**given)


def trainer(*callbacks: Any, epochs: int = 6, **settings: Any) -> Any:
    given: dict[str, Any] = {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), **settings}
    return lightning.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, **given,
    )  # fmt: skip


def fitted(*callbacks: Any, data: Any = None, kind: type[Lit] = Lit, ckpt_path: Any = None, **settings: Any) -> Lit:
    torch.manual_seed(1)
    module = kind()
    val = DataLoader(TensorDataset(*VAL), batch_size=50) if kind is LitVal else None
    trainer(*callbacks, **settings).fit(module, data or loader(), val, ckpt_path=ckpt_path)
    return module


class Watch(Callback):  # type: ignore[misc, valid-type]
    """Weights of the first seed, and the optimizer's groups, after every epoch."""

    def __init__(self, growth: GrowthCallback) -> None:
        self.growth = growth
        self.weights: list[list[Tensor]] = []
        self.groups: list[int] = []
        self.stages: list[Stage] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.growth.growth is not None
        slot = self.growth.growth.learner.model.slots[0]
        self.stages.append(slot.stage)
        self.weights.append([p.detach().clone() for p in slot.trained])
        self.groups.append(len(trainer.optimizers[0].param_groups))


def test_seeds_are_planted_trained_and_kept_while_the_trainer_trains() -> None:
    grows = callback()
    watch = Watch(grows)
    module = fitted(grows, watch)
    assert watch.stages[:2] == [Stage.DORMANT, Stage.BLENDING]  # planted as epoch 1 began, measured as it ended
    assert watch.groups[0] == 1
    assert max(watch.groups) == 3  # one more for each seed
    assert all(not torch.equal(a, b) for a, b in zip(watch.weights[1], watch.weights[3], strict=True))
    assert grows.grown is not None
    assert {story.fate for story in grows.grown.history.seeds()} == {Stage.FOSSILIZED}
    assert [path for path, _ in grafted(module)] == ["net.2", "net.5"]
    assert grows.grown.model is module.net
    with torch.no_grad():
        right = (module.eval()(VAL[0]).argmax(1) == VAL[1]).float().mean().item()
    assert 100 * right == pytest.approx(grows.grown.validation.accuracy, abs=1e-3)
    assert "configure_gradient_clipping" not in vars(module)


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
def test_incubation_does_not_show(settings: dict[str, Any]) -> None:
    """Weights, statistics, metrics: bit for bit those of a fit without the callback, with clipping that always acts."""
    plain = fitted(epochs=4, **settings)
    grows = callback(LONG)
    watch = Watch(grows)
    grown = fitted(grows, watch, epochs=4, **settings)
    assert watch.stages[-1] is Stage.TRAINING
    assert not torch.equal(watch.weights[1][0], watch.weights[3][0])  # it learns all the same
    assert grown.seen == plain.seen
    assert not grafted(grown)
    for (name, ours), theirs in zip(grown.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_incubating_seed_is_clipped_by_itself_and_learns_over_accumulated_batches() -> None:
    norms: list[float] = []

    class Norms(GrowthCallback):
        def _clip_apart(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super()._clip_apart(optimizer, *args, **kwargs)
            model = self._growth.learner.model
            for slot in model.incubating:
                found = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.seed_parameters(slot)]))
                norms.append(float(found))

    schedule = FixedSchedule("all", [Planting(0, "2", {"dense": "mlp"})])
    grows = Norms(["2"], VAL, model="net", controller=schedule, rules=LONG)
    fitted(grows, epochs=2, gradient_clip_val=1e-3, accumulate_grad_batches=2)
    assert len(norms) == 6
    assert norms == pytest.approx([1e-3] * 6, rel=1e-3)


def test_the_shadow_gradient_is_that_of_the_accumulated_batch() -> None:
    """Two batches of half the size with accumulation give the seed the gradient of one whole batch."""

    def seed_after(batch: int, accumulate: int) -> list[Tensor]:
        class Plain(Lit):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        schedule = FixedSchedule("all", [Planting(0, "1", {"dense": "mlp"})])
        grows = GrowthCallback(["1"], VAL, model="net", controller=schedule, rules=LONG)
        watch = Watch(grows)
        data = DataLoader(TensorDataset(X[:120], Y[:120]), batch_size=batch)
        fitted(grows, watch, kind=Plain, data=data, epochs=2, accumulate_grad_batches=accumulate)
        return watch.weights[-1]

    for ours, theirs in zip(seed_after(20, 2), seed_after(40, 1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Keep(Callback):  # type: ignore[misc, valid-type]
    """What the growing network says when its checkpoint is taken."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        pl_module.eval()
        grows = next(c for c in trainer.callbacks if isinstance(c, GrowthCallback))
        grows._set_mode(training=False)
        with torch.no_grad():
            self.outputs.append(pl_module(X))
        pl_module.train()
        grows._set_mode(training=True)


@pytest.mark.parametrize("kind", [Lit, LitVal])
def test_checkpoints_reload_the_network_and_the_fit_goes_on(kind: type[Lit], tmp_path: Path) -> None:
    def saves(folder: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, filename="{epoch}", save_top_k=-1)

    keep = Keep()
    whole = fitted(callback(), keep, saves("whole"), kind=kind)
    for epoch in range(6):
        path = tmp_path / "whole" / f"epoch={epoch}.ckpt"
        host = kind.load_from_checkpoint(path, map_location="cpu").eval()  # strictly: the host's keys are as ever
        with torch.no_grad():
            if epoch > 0:  # a seed was planted, and acts a little when that epoch has ended
                esper.load_seeds(host, path)
            torch.testing.assert_close(host(X), keep.outputs[epoch], rtol=0, atol=1e-6)
    again = callback()
    resumed = fitted(again, saves("again"), kind=kind, ckpt_path=tmp_path / "whole" / "epoch=2.ckpt")
    assert again.grown is not None
    assert len(again.grown.history.records) == 6
    assert [path for path, _ in grafted(resumed)] == ["net.2", "net.5"]
    for (name, ours), theirs in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_after_the_fit_has_the_hosts_keys_and_the_seeds_beside_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, fit = Lit(), trainer(callback())
    fit.fit(module, loader())
    fit.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(Lit().state_dict())
    assert all(SEEDS in key for key in saved[SEEDS])
    again = esper.load_seeds(Lit.load_from_checkpoint(tmp_path / "end.ckpt"), tmp_path / "end.ckpt").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(X), module.eval()(X), rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match=f"Missing.*{SEEDS}"):  # never silently the host of one and seeds of another
        fit.predict(module, DataLoader(X), ckpt_path=tmp_path / "end.ckpt")


def test_max_steps_may_end_a_fit_within_an_epoch() -> None:
    grows = callback()
    fitted(grows, max_steps=13)
    assert grows.grown is not None
    assert grows.grown.interrupted


def test_bfloat16() -> None:
    grows = callback()
    module = fitted(grows, precision="bf16-mixed")
    assert len(grafted(module)) == 2


# -- what is refused --------------------------------------------------------------------------------------------------


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Lit):
    """Lightning itself wants manual optimization for these."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:3].parameters(), 0.1), torch.optim.SGD(self.net[3:].parameters(), 0.1)]


class FromIterator(Lit):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (Manual, {}, "needs automatic optimization: .* use esper.Growth in training_step"),
        (TwoOptimizers, {}, "needs automatic optimization"),
        (FromIterator, {}, "cannot repeat a training_step that takes dataloader_iter"),
        (Lit, {"precision": "16-true"}, "cannot train with precision='16-true'"),
        (Lit, {"epochs": -1, "max_steps": 3}, r"needs Trainer\(max_epochs=…\)"),
        (Lit, {"strategy": "ddp"}, "trains on one device, and the strategy is DDPStrategy"),
    ],
)
def test_what_growth_cannot_follow_is_refused_before_the_first_update(
    kind: type[Lit], settings: dict[str, Any], match: str
) -> None:
    try:
        with pytest.raises(RefusedError, match=match) as caught:
            fitted(callback(), kind=kind, **settings)
        assert "\n" not in str(caught.value)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_slots_are_chosen_where_none_are_named_and_a_wrong_part_is_refused() -> None:
    grows = GrowthCallback(validate=VAL, model="net", controller="none")
    fitted(grows, epochs=1)
    assert grows.grown is not None
    assert any(remark.startswith("slots='auto' chose ") for remark in grows.grown.remarks)
    with pytest.raises(TypeError, match="GrowthCallback: validate= is missing: pass data"):
        GrowthCallback(["2"])
    with pytest.raises(RefusedError, match="model='nett' is no module of Lit: did you mean 'net'"):
        fitted(GrowthCallback(validate=VAL, model="nett"))


@pytest.mark.parametrize("kind", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averages_of_the_host_alone_are_refused(kind: str) -> None:
    averaging = getattr(lightning.callbacks, kind, None)
    if averaging is None:
        pytest.skip(f"this Lightning has no {kind}")
    with pytest.raises(RefusedError, match=rf"{kind} would average the host without its seeds: use .*average=0.999"):
        fitted(callback(), averaging(swa_lrs=0.01) if kind.startswith("Stoch") else averaging())


def test_an_average_of_the_growing_network_early_stopping_and_the_monitor_of_rates(tmp_path: Path) -> None:
    callbacks = lightning.callbacks
    grows = callback(average=0.9)
    stop = callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, check_on_train_epoch_end=True)
    logger = lightning.loggers.CSVLogger(tmp_path)
    torch.manual_seed(1)
    module = Lit()
    fit = lightning.Trainer(
        max_epochs=6, callbacks=[grows, stop, callbacks.LearningRateMonitor()], logger=logger, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, min_epochs=4,
        log_every_n_steps=1,
    )  # fmt: skip
    fit.fit(module, loader())
    assert grows.grown is not None
    assert grows.grown.interrupted
    assert grows.averaged is not None
    assert [path for path, _ in grafted(grows.averaged)] == [path for path, _ in grafted(module.net)]
    assert not torch.equal(grows.averaged[0].weight, module.net[0].weight)  # type: ignore[index, union-attr]


def test_a_checkpoint_within_an_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="can be saved between epochs only: leave every_n_train_steps"):
        fitted(callback(), ModelCheckpoint(tmp_path, every_n_train_steps=2))
