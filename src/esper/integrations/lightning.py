"""`GrowthCallback` for Lightning: `Trainer(callbacks=[GrowthCallback(slots=…, validate=…)])`.

The trainer makes the updates; the callback adds the gradients of incubating seeds after each backward pass, and
measures and decides when the last batch of an epoch is done, before the trainer validates and saves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torchmetrics import Metric as Torchmetric
except ImportError as error:
    raise ImportError('Lightning is not installed: pip install "esper[lightning]"') from error

from esper.errors import RefusedError, did_you_mean
from esper.growth.attach import SlotChoice
from esper.growth.graft import SEEDS
from esper.growth.plain import plain_model
from esper.growth.seeds import IN_CHECKPOINT, seed_state
from esper.training.own.data import Data
from esper.training.own.grown import Grown
from esper.training.own.growth import NO_VALIDATION, Growth

__all__ = ["GrowthCallback"]

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
"""Those without a loss scaler."""


class GrowthCallback(Callback):  # type: ignore[misc]
    """Grows the LightningModule, or the part of it called `model`, at `slots` while the trainer trains it.

    After the fit, that module is the plain grown model, and `grown` says how it came to be.
    """

    grown: Grown | None = None
    """What `esper.grow` gives, after the fit. Its `.model` is the trained module itself."""
    averaged: nn.Module | None = None
    """After the fit, the same with averaged weights, if `average=` was given."""

    def __init__(
        self, slots: SlotChoice = "auto", validate: Data | None = None, *, model: str = "", **settings: Any
    ) -> None:
        """`model` is the path of the network within the LightningModule, such as "net"; "" is the whole module, whose
        `forward` then makes the predictions. The rest is as in `esper.Growth`."""
        if validate is None:
            raise TypeError(f"GrowthCallback: {NO_VALIDATION}")
        self.growth: Growth | None = None
        self._path, self._settings = model, {**settings, "slots": slots, "validate": validate}
        self._state: dict[str, Any] | None = None
        self._batch: tuple[Any, ...] = ()
        self._loss: Tensor | None = None
        self._clip: Callable[..., None] | None = None

    # -- the fit, in the order of the hooks -------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module)
        self.growth = Growth(
            _part(pl_module, self._path),
            trainer.optimizers[0],
            epochs=trainer.max_epochs,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            autocast=torch.bfloat16 if trainer.precision == "bf16-mixed" else None,
            **self._settings,
        )
        if self._state:
            # Seeds and their groups first: the trainer restores its optimizer into them after this hook.
            self.growth.load_state_dict(self._state)
            self._state = None
        self._clip = pl_module.configure_gradient_clipping
        vars(pl_module)["configure_gradient_clipping"] = self._clip_apart

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Before the optimizer's step begins: the controller may plant a seed, which changes its groups.
        self._growth.before_gradients()
        taken = inspect.signature(pl_module.training_step).parameters
        variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.values())
        self._batch = (batch, batch_idx) if len(taken) > 1 or variadic else (batch,)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = trainer.accumulate_grad_batches
        assert self._loss is not None

        def training_step() -> Tensor:
            with _unnoticed(pl_module):
                found = trainer.strategy.training_step(*self._batch)
            loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
            return loss

        self._growth.shadow_backward(training_step, self._loss * parts, scale=lambda loss: loss / parts)

    def _clip_apart(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """The module's clipping, of host and acting seeds; then the same of each incubating seed, by itself."""
        assert self._clip is not None
        model = self._growth.learner.model
        groups = [model.seed_parameters(slot) for slot in model.incubating]
        others = [p for group in optimizer.param_groups for p in group["params"]]
        apart = {id(p) for group in groups for p in group}
        for chosen in ([p for p in others if id(p) not in apart], *groups):
            with _only(chosen, others):
                self._clip(optimizer, *args, **kwargs)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_last_batch:
            self._growth.end_epoch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._set_mode(training=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._set_mode(training=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growth.updates_made:  # max_steps ended the fit within an epoch
            self._growth.end_epoch()
        self.grown = self._growth.finish(in_place=True)
        self.averaged = None if self._settings.get("average") is None else self._growth.averaged
        self.growth = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._clip is not None:
            vars(pl_module).pop("configure_gradient_clipping", None)
            self._clip = None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self.growth is None:
            return {}
        if not self.growth.between_epochs:
            raise RefusedError(
                "a model that grows can be saved between epochs only: leave every_n_train_steps, train_time_interval "
                "and a val_check_interval within epochs out"
            )
        return self.growth.state_dict()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """`state_dict` has the host's keys alone, so that it loads as ever; the seeds lie beside it."""
        state = checkpoint["state_dict"]
        seeds = {key: state.pop(key) for key in list(state) if f".{SEEDS}." in f".{key}"}
        if self.growth is not None:
            now = seed_state(plain_model(self.growth.learner.model, share=True))
            prefix = f"{self._path}." if self._path else ""
            seeds = {f"{prefix}{key}": value for key, value in now.items()}
        checkpoint[IN_CHECKPOINT] = seeds

    # -- internals --------------------------------------------------------------------------------------------------

    @property
    def _growth(self) -> Growth:
        assert self.growth is not None, "the trainer calls on_fit_start first"
        return self.growth

    def _set_mode(self, *, training: bool) -> None:
        if self.growth is not None:  # a seed is no part of the module yet, so the trainer does not reach it
            self.growth.learner.model.seeds.train(training)


def _part(pl_module: LightningModule, path: str) -> nn.Module:
    """The network that grows."""
    names = [name for name, _ in pl_module.named_modules()]
    if path not in names:
        known = ", ".join(name for name, _ in pl_module.named_children())
        hint = did_you_mean(path, names, f"its parts are {known}")
        raise RefusedError(f"model={path!r} is no module of {type(pl_module).__name__}: {hint}")
    found: nn.Module = pl_module.get_submodule(path)
    return found


def _check(trainer: Trainer, pl_module: LightningModule) -> None:
    """Refuse what growth cannot follow."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy) or trainer.world_size > 1:
        raise RefusedError(
            f"GrowthCallback trains on one device, and the strategy is {type(trainer.strategy).__name__}: gradients of "
            "seeds are not exchanged between processes (DDP, FSDP, DeepSpeed); use devices=1"
        )
    if not pl_module.automatic_optimization:
        raise RefusedError(
            "GrowthCallback needs automatic optimization: with automatic_optimization = False use esper.Growth in "
            "training_step"
        )
    if len(trainer.optimizers) != 1:
        raise RefusedError(
            f"GrowthCallback needs one optimizer, and configure_optimizers gives {len(trainer.optimizers)}"
        )
    if str(trainer.precision) not in PRECISIONS:
        raise RefusedError(
            f"GrowthCallback cannot train with precision={trainer.precision!r} (a loss scaler): use bf16-mixed or 32"
        )
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        raise RefusedError(
            "GrowthCallback needs Trainer(max_epochs=…): the controller plans with the length of the run"
        )
    if averaging := [c for c in trainer.callbacks if "WeightAveraging" in type(c).__name__]:
        raise RefusedError(
            f"{type(averaging[0]).__name__} would average the host without its seeds: use GrowthCallback(average=0.999)"
        )
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise RefusedError(
            "GrowthCallback cannot repeat a training_step that takes dataloader_iter: let it take a batch"
        )


@contextmanager
def _unnoticed(pl_module: LightningModule) -> Iterator[None]:
    """Within, nothing is logged, and metrics are afterwards what they were: the step is made again for a seed."""
    before = [(module, _values(module)) for module in pl_module.modules() if isinstance(module, Torchmetric)]
    muted = vars(pl_module)
    own = {name: muted[name] for name in ("log", "log_dict") if name in muted}
    muted["log"] = muted["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del muted[name]
        muted.update(own)
        for metric, values in before:
            for name, value in values.items():
                setattr(metric, name, value)


def _values(metric: Any) -> dict[str, Any]:
    """What a metric has gathered so far; its `update` may change tensors in place, and lists."""
    gathered = {name: getattr(metric, name) for name in metric._defaults}
    copies = {name: v.detach().clone() if isinstance(v, Tensor) else list(v) for name, v in gathered.items()}
    more = ("_update_count", "_computed", "_forward_cache")
    return copies | {name: vars(metric)[name] for name in more if name in vars(metric)}


@contextmanager
def _only(chosen: Sequence[nn.Parameter | Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within, only these have gradients."""
    kept = {id(parameter) for parameter in chosen}
    hidden = [(p, p.grad) for p in parameters if id(p) not in kept]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient
