"""`GrowthCallback` for the Trainer of Hugging Face: `Trainer(…, callbacks=[GrowthCallback(slots=…, validate=…)])`.

A callback of the Trainer sees neither batches nor losses. So a hook on the model notes the inputs of each training
pass, and a hook on its loss what the Trainer makes of it (a share of an accumulated batch). Before each update the
callback makes the same pass again for each incubating seed; at the end of an epoch it measures and decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError('transformers is not installed: pip install "esper[huggingface]"') from error

from esper.errors import RefusedError
from esper.growth.attach import SlotChoice
from esper.growth.plain import plain_model
from esper.growth.seeds import save_seeds
from esper.training.own.checkpoint import STATE_FILE, read_state, write_state
from esper.training.own.data import Data
from esper.training.own.grown import Grown
from esper.training.own.growth import NO_VALIDATION, Growth

__all__ = ["GrowthCallback"]


class GrowthCallback(TrainerCallback):  # type: ignore[misc]
    """Grows the Trainer's model at `slots` while the Trainer trains it.

    After `trainer.train()` the model is the plain grown model, and `grown` says how it came to be.
    """

    grown: Grown | None = None
    """What `esper.grow` gives, after the training. Its `.model` is the Trainer's model itself."""
    averaged: nn.Module | None = None
    """After the training, the same with averaged weights, if `average=` was given."""

    def __init__(
        self,
        slots: SlotChoice = "auto",
        validate: Data | None = None,
        *,
        resume_from: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """`resume_from` is the checkpoint folder that the Trainer goes on from, where it does not lie in `output_dir`.
        The rest is as in `esper.Growth`."""
        if validate is None:
            raise TypeError(f"GrowthCallback: {NO_VALIDATION}")
        self.growth: Growth | None = None
        self._resume_from = resume_from
        self._settings = {**settings, "slots": slots, "validate": validate}
        self._hook: RemovableHandle | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._loss: Tensor | None = None
        self._share: Tensor | None = None
        """The gradient of what is minimised with respect to the model's loss: 1 / the number of accumulated batches."""

    # -- the training, in the order of the events -------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        _check(args)
        model, scheduler = given["model"], given["lr_scheduler"]
        self.growth = Growth(
            model,
            getattr(given["optimizer"], "optimizer", given["optimizer"]),  # Accelerate's wrapper
            epochs=state.num_train_epochs,
            schedulers=[scheduler if isinstance(scheduler, LRScheduler) else scheduler.scheduler],
            autocast=torch.bfloat16 if args.bf16 else None,
            **self._settings,
        )
        if state.global_step > 0:
            self._resume(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._hook = model.register_forward_hook(self._note, with_kwargs=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._growth.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._growth.before_gradients()

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """After a pass of the model: what is needed to make it again."""
        if not (model.training and torch.is_grad_enabled()):
            return
        self._inputs, self._share = (args, kwargs), None
        self._loss = _loss_of(outputs)
        if self._loss.requires_grad:
            self._loss.register_hook(self._note_share)  # type: ignore[no-untyped-call]

    def _note_share(self, gradient: Tensor | None) -> None:
        self._share = None if gradient is None else gradient.detach()  # None where only other outputs were used

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._shadow_backward()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._shadow_backward()
        if args.max_grad_norm > 0:
            self._clip(args.max_grad_norm)

    def _shadow_backward(self) -> None:
        loss, share, (args, kwargs) = self._loss, self._share, self._inputs
        model = self._growth.model
        if loss is None or (share is None and loss.requires_grad):
            raise RefusedError(
                "the Trainer minimised something else than the model's own loss (compute_loss, compute_loss_func), "
                "which a seed cannot learn by: let the model compute it, or use esper.Growth in a loop of your own"
            )
        assert self._hook is not None
        self._hook.remove()  # these passes are the seeds'
        try:
            self._growth.shadow_backward(
                lambda: _loss_of(model(*args, **kwargs)),
                loss.detach(),
                scale=None if share is None else lambda found: found * share,
            )
        finally:
            self._hook = model.register_forward_hook(self._note, with_kwargs=True)
            self._loss = self._share = None

    def _clip(self, most: float) -> None:
        """The Trainer has clipped the host: acting seeds as one, and each incubating seed by itself, follow."""
        model = self._growth.learner.model
        acting = [p for slot in model.joined for p in model.seed_parameters(slot)]
        for parameters in (acting, *(model.seed_parameters(slot) for slot in model.incubating)):
            nn.utils.clip_grad_norm_(parameters, most)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._growth.updates_made:
            self._growth.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert self._hook is not None
        self._hook.remove()
        self.grown = self._growth.finish(in_place=True)
        self.averaged = None if self._settings.get("average") is None else self._growth.averaged
        self.growth = None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The Trainer has saved its model, whose keys are the host's. Seeds, and what goes on with them, lie beside."""
        if self.growth is None:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save_seeds(plain_model(self.growth.learner.model, share=True), folder)
        self.growth.save_state(folder / STATE_FILE)
        # The Trainer loads these before there are seeds again.
        slots = [group.get("slot") for group in self.growth.learner.optimizer.optimizer.param_groups]
        for name in ("optimizer.pt", "scheduler.pt"):
            if (folder / name).exists():
                write_state(folder / name, _without_seeds(read_state(folder / name), slots))

    def _resume(self, folder: Path) -> None:
        path = Path(self._resume_from or folder) / STATE_FILE
        if not self._growth.load_state(path):
            raise RefusedError(
                f"the Trainer goes on from a checkpoint, and there is no {path}, which GrowthCallback writes into each "
                "of its own: pass GrowthCallback(resume_from=folder), or begin anew"
            )

    @property
    def _growth(self) -> Growth:
        assert self.growth is not None, "the Trainer calls on_train_begin first"
        return self.growth


def _loss_of(outputs: Any) -> Tensor:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0] if isinstance(outputs, tuple) else None
    if not isinstance(found, Tensor):
        raise RefusedError(
            "the model gave no loss, because its inputs had no labels (label smoothing, compute_loss): GrowthCallback "
            "needs the model's own loss"
        )
    return found


def _without_seeds(state: dict[str, Any], slots: Sequence[int | None]) -> dict[str, Any]:
    """The state of an optimizer, or of a scheduler, without the groups that are those of a slot."""
    host = [i for i, slot in enumerate(slots) if slot is None]
    if "param_groups" not in state:
        return {
            name: [value[i] for i in host] if isinstance(value, list) and len(value) == len(slots) else value
            for name, value in state.items()
        }
    groups = [state["param_groups"][i] for i in host]
    numbers = {number for group in groups for number in group["params"]}
    return {"state": {n: v for n, v in state["state"].items() if n in numbers}, "param_groups": groups}


def _check(args: Any) -> None:
    """Refuse what growth cannot follow."""
    if args.deepspeed or args.fsdp:
        raise RefusedError("GrowthCallback cannot grow a model that DeepSpeed or FSDP holds in parts: train without")
    if args.world_size > 1 or args.n_gpu > 1:
        raise RefusedError(
            f"GrowthCallback trains on one device, and the Trainer uses {max(args.world_size, args.n_gpu)}: gradients "
            "of seeds are not exchanged; set CUDA_VISIBLE_DEVICES to one"
        )
    if args.fp16:
        raise RefusedError("GrowthCallback cannot train with fp16=True (a loss scaler): use bf16=True")
    if args.torch_compile:
        raise RefusedError(
            "GrowthCallback cannot grow a compiled model: leave torch_compile out, and compile afterwards"
        )
    if args.label_smoothing_factor:
        raise RefusedError(
            "GrowthCallback needs the model's own loss: leave label_smoothing_factor out, or use esper.Growth in a "
            "loop of your own"
        )
    if args.save_strategy not in ("no", "epoch"):
        raise RefusedError(
            f"a model that grows can be saved between epochs only, and save_strategy is {args.save_strategy.value!r}: "
            'use "epoch" or "no"'
        )
    if args.load_best_model_at_end:
        raise RefusedError(
            "load_best_model_at_end would load the host of one epoch beside the seeds of another: leave it out, and "
            "load the checkpoint that you want with esper.load_seeds"
        )
    if args.auto_find_batch_size:
        raise RefusedError("auto_find_batch_size begins the training again, with a model that has grown: leave it out")
