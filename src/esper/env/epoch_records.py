"""An epoch of networks that are modules of their own, from readable records to columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, WAIT
from esper.engine.eager import EpochRecord
from esper.engine.epoch import EpochColumns
from esper.engine.governor import FAULTS
from esper.env.observation import to_tensor
from esper.lifecycle import Stage
from esper.slot_columns import SlotColumns
from esper.slot_views import measured_columns


def epoch_columns(records: Sequence[EpochRecord | None], slots: SlotColumns) -> EpochColumns:
    """The records of N networks, None where nothing was played, as columns beside those of their slots."""
    width = slots.present.shape[1]
    played = torch.tensor([record is not None for record in records])
    done = to_tensor([WAIT if record is None else record.effect.action for record in records])  # [N, heads]
    heads = dict(zip(HEAD_NAMES, done.unbind(1), strict=True))
    gradients, shadows, contributions = measured_columns(
        [{} if record is None else record.trained.seed_gradients for record in records],
        [{} if record is None else record.measured.shadow_benefits for record in records],
        [{} if record is None else record.measured.contributions for record in records],
        width,
    )

    def numbers(of: Callable[[EpochRecord], float]) -> Tensor:
        return torch.tensor([math.nan if record is None else of(record) for record in records], dtype=torch.float64)

    verdicts = [None if record is None else record.verdict for record in records]
    stages = [_padded(record.stages, width, Stage.DORMANT) if record else [-1] * width for record in records]
    alphas = [_padded(record.alphas, width, 0.0) if record else [math.nan] * width for record in records]
    return EpochColumns(
        played=played,
        op=torch.where(played, heads["op"], -1),
        slot=heads["slot"],
        blueprint=heads["blueprint"],
        blend=heads["blend"],
        changed=torch.tensor([record is not None and record.effect.changed for record in records]),
        train_loss=numbers(lambda record: record.trained.loss),
        host_gradient=numbers(lambda record: record.trained.host_gradient),
        seed_gradient=gradients,
        accuracy=numbers(lambda record: record.measured.accuracy),
        loss=numbers(lambda record: record.measured.loss),
        shadow=shadows,
        contribution=contributions,
        stage=torch.tensor(stages, dtype=torch.int64).reshape(len(records), width),
        alpha=torch.tensor(alphas, dtype=torch.float64).reshape(len(records), width),
        parameters=numbers(lambda record: record.parameters),
        fault=torch.tensor([-1 if verdict is None else FAULTS.index(verdict.kind) for verdict in verdicts]),
        fault_seen=numbers(lambda record: record.verdict.seen if record.verdict else math.nan),
        fault_limit=numbers(lambda record: record.verdict.limit if record.verdict else math.nan),
    )


def _padded(values: Sequence[float], width: int, empty: float) -> list[float]:
    return [*values, *[empty] * (width - len(values))]
