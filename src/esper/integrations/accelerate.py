"""`Growth` for a loop with Accelerate: with its wrappers, its accumulation and its checkpoints, in one process.

growth = Growth(accelerator, model, optimizer, slots=…, validate=…, epochs=…)     # what accelerator.prepare gave
with accelerator.accumulate(model):
    growth.backward(batch)          # in place of accelerator.backward(loss)
    growth.clip_grad_norm_(1.0)     # both wait for the last batch of an update
    growth.step()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError('Accelerate is not installed: pip install "esper[huggingface]"') from error

from esper.errors import RefusedError
from esper.growth.plain import plain_model
from esper.growth.seeds import save_seeds
from esper.training.own.checkpoint import STATE_FILE
from esper.training.own.grown import Grown
from esper.training.own.growth import Growth as OwnGrowth

__all__ = ["Growth"]


class Growth(OwnGrowth):
    """`esper.Growth` over what `accelerator.prepare` gave. `accelerator.save_state` and `load_state` include it."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        schedulers: Sequence[Any] = (),
        **given: Any,
    ) -> None:
        _check(accelerator)
        self.accelerator = accelerator
        self._finished = False
        super().__init__(
            accelerator.unwrap_model(model),
            getattr(optimizer, "optimizer", optimizer),
            schedulers=[one if isinstance(one, LRScheduler) else one.scheduler for one in schedulers],
            autocast=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
            **given,
        )
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def backward(self, batch: Any) -> Tensor:  # type: ignore[override]
        """As `esper.Growth.backward`; accumulation is the accelerator's."""
        return super().backward(batch, accumulate=self.accelerator.gradient_accumulation_steps)

    def clip_grad_norm_(self, most: float) -> Tensor | None:  # type: ignore[override]
        return super().clip_grad_norm_(most) if self.accelerator.sync_gradients else None

    def step(self) -> None:  # type: ignore[override]
        if self.accelerator.sync_gradients:
            super().step()

    def finish(self, *, in_place: bool = False) -> Grown:
        """As `esper.Growth.finish`. What `save_state` writes from now on has the plain model, and no growth."""
        grown = super().finish(in_place=in_place)
        self._finished = True
        return grown

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        if self._finished:
            (Path(folder) / STATE_FILE).unlink(missing_ok=True)  # of an epoch before, in a folder that is used again
            save_seeds(self.model, folder)
            return
        self.save_state(Path(folder) / STATE_FILE)
        save_seeds(plain_model(self.learner.model, share=True), folder)

    def _load(self, models: Any, folder: str) -> None:
        """Seeds and their groups first: Accelerate then loads its optimizer into them."""
        if self._finished:
            return
        if not self.load_state(Path(folder) / STATE_FILE):
            raise RefusedError(f"there is no {Path(folder) / STATE_FILE}: this is no checkpoint of a model that grew")


def _check(accelerator: Accelerator) -> None:
    """Refuse what growth cannot follow."""
    if accelerator.num_processes > 1 or accelerator.distributed_type is not DistributedType.NO:
        raise RefusedError(
            f"growth with Accelerate needs one process, and this is {accelerator.distributed_type.value}: gradients of "
            "seeds are not exchanged"
        )
    if accelerator.mixed_precision == "fp16":
        raise RefusedError("growth with Accelerate cannot use fp16 (a loss scaler): use mixed_precision='bf16'")
