"""Problems of a generated family, made short and small so that stacks of them train in a moment. For workers, too."""

from __future__ import annotations

from dataclasses import replace

from esper.tasks.data import Split, Splits
from esper.tasks.family import Draw, get_family


class ShortFamily:
    """Two updates an epoch, few examples."""

    def __init__(self, name: str, horizon: int = 6, examples: int = 96) -> None:
        self.base = get_family(name)
        self.name, self.slots, self.round = self.base.name, self.base.slots, self.base.round
        self.horizon, self.examples = horizon, examples

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        drawn = self.base.draw(number, held_out=held_out)
        splits = drawn.task.splits
        parts = [
            Split(one.x[: self.examples], one.y[: self.examples]) for one in (splits.train, splits.val, splits.test)
        ]
        task = replace(drawn.task, splits=Splits(*parts, check=False), updates_per_epoch=2)
        return replace(drawn, task=task, horizon=self.horizon - number % 2)
