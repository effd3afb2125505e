"""`esper.inspect`: what a growing model looks like now, as a table that prints."""

from __future__ import annotations

from dataclasses import dataclass

from esper.growth.model import GrowingModel


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot, for people."""

    path: str
    shape: str
    sees: str
    """What a seed here may read: both sides, nothing later (causal), or its own position alone."""
    stage: str
    seed: str
    alpha: float
    parameters: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A growing model at a glance; `print` it."""

    host: str
    host_parameters: int
    parameters: int
    rows: tuple[SlotRow, ...]

    def __str__(self) -> str:
        header = ("slot", "shape", "sees", "stage", "seed", "alpha", "parameters")
        cells = [(r.path, r.shape, r.sees, r.stage, r.seed, f"{r.alpha:.2f}", f"{r.parameters:,}") for r in self.rows]
        widths = [max(len(row[i]) for row in (header, *cells)) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *cells)
        ]
        title = f"{self.host}: {self.parameters:,} parameters, {self.host_parameters:,} of them the host's"
        return "\n".join([title, *(line.rstrip() for line in lines)])


def inspect(model: GrowingModel) -> Inspection:
    """Slots, stages and parameters of a growing model, as a table that prints."""
    if not isinstance(model, GrowingModel):
        raise TypeError(f"inspect shows a GrowingModel; make one of your {type(model).__name__} with esper.attach")
    return Inspection(
        host=type(model.host).__name__,
        host_parameters=model.host_parameters,
        parameters=model.parameter_count,
        rows=tuple(
            SlotRow(
                path=slot.path,
                shape=str(slot.shape),
                sees="–" if slot.shape.layout == "dense" else slot.shape.visibility,
                stage=slot.life.stage.name,
                seed="–" if slot.seed is None else f"{slot.seed.blueprint} ({slot.seed.blend})",
                alpha=slot.life.alpha,
                parameters=sum(parameter.numel() for parameter in model.seed_parameters(slot)),
            )
            for slot in model.slots
        ),
    )
