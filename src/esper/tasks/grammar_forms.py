"""The forms of the hosts of the family `grammar`: a handful per layout, of which those of one depth can be stacked."""

from __future__ import annotations

from dataclasses import dataclass

from esper.growth.blueprints import Layout
from esper.tasks.problems import Form

CLASSES = 4
BATCH = 64
LAYOUTS: tuple[Layout, ...] = ("dense", "sequence", "conv1d", "conv2d")
DATA_NAMES = ("vector", "sequence", "series", "image")
"""What a person calls the data of each layout: `grammar/vector` and so on."""
SIZES: dict[Layout, tuple[int, ...]] = {"dense": (), "sequence": (12,), "conv1d": (32,), "conv2d": (8, 8)}


@dataclass(frozen=True, slots=True)
class HostForm:
    """What does not vary among the hosts of one form; the tuples have one entry per stage."""

    layout: Layout
    kernels: tuple[int, ...]
    pools: tuple[int, ...]
    attends: tuple[bool, ...]
    pooling: str
    norm: bool

    @property
    def stages(self) -> int:
        return len(self.pools)

    @property
    def stack(self) -> Form:
        return Form(self.layout, self.stages, self.pooling, self.norm, CLASSES, BATCH)


def _form(
    layout: Layout,
    pools: tuple[int, ...],
    *,
    kernels: tuple[int, ...] | None = None,
    attends_at: int | None = None,
    norm: bool = True,
    pooling: str = "average",
) -> HostForm:
    return HostForm(
        layout=layout,
        kernels=kernels or (1,) * len(pools),
        pools=pools,
        attends=tuple(stage == attends_at for stage in range(len(pools))),
        pooling=pooling,
        norm=norm and layout.startswith("conv"),
    )


# Early pooling, missing neighbourhoods, missing attention and missing norms are properties of a form; missing
# nonlinearities and narrow stages are columns.
FORMS: tuple[HostForm, ...] = (
    _form("dense", (1, 1)),
    _form("dense", (1, 1, 1)),
    _form("dense", (1, 1, 1, 1)),
    _form("dense", (1, 1, 1, 1, 1, 1)),
    _form("sequence", (1, 1)),
    _form("sequence", (12, 1, 1)),
    _form("sequence", (1, 12, 1)),
    _form("sequence", (1, 1, 1), attends_at=0),
    _form("sequence", (1, 1, 4, 1), attends_at=1),
    _form("conv1d", (4, 4, 1)),
    _form("conv1d", (2, 16, 1)),
    _form("conv1d", (1, 4, 1), norm=False),
    _form("conv1d", (4, 4, 1), kernels=(5, 1, 1)),
    _form("conv1d", (2, 2, 2, 1), kernels=(1, 3, 1, 1)),
    _form("conv1d", (4, 1), kernels=(3, 3), pooling="max"),
    _form("conv2d", (4, 2, 1)),
    _form("conv2d", (2, 4, 1), norm=False),
    _form("conv2d", (2, 2, 1), kernels=(3, 1, 1)),
    _form("conv2d", (2, 2, 1, 1), kernels=(1, 3, 1, 1)),
    _form("conv2d", (2, 1), kernels=(3, 3), pooling="max"),
)
STAGES = max(form.stages for form in FORMS)
STACKS: tuple[Form, ...] = tuple(dict.fromkeys(form.stack for form in FORMS))
"""What can be one stacked network; in the order of the layouts."""


def forms_of(layout: Layout) -> list[int]:
    """The numbers of a layout's forms."""
    return [number for number, form in enumerate(FORMS) if form.layout == layout]


def first_pool(form: HostForm) -> int:
    """The stage whose output is pooled first; what a seed must see in detail, it must see there or before."""
    return next((stage for stage, factor in enumerate(form.pools) if factor > 1), form.stages - 1)
