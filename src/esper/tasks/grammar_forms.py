"""The hosts of the family `grammar` that can be stacked with each other: a handful of forms per layout."""

from __future__ import annotations

from esper.growth.blueprints import Layout
from esper.tasks.problems import Form

CLASSES = 4
BATCH = 64
LAYOUTS: tuple[Layout, ...] = ("dense", "sequence", "conv1d", "conv2d")
PARTS = ("vector", "sequence", "series", "image")
"""What a person calls the data of each layout: `grammar/vector` and so on."""
SIZES: dict[Layout, tuple[int, ...]] = {"dense": (), "sequence": (12,), "conv1d": (32,), "conv2d": (8, 8)}


def _form(
    layout: Layout,
    pools: tuple[int, ...],
    *,
    kernels: tuple[int, ...] | None = None,
    attends_at: int | None = None,
    norm: bool = True,
    pooling: str = "average",
) -> Form:
    return Form(
        layout=layout,
        sizes=SIZES[layout],
        kernels=kernels or (1,) * len(pools),
        pools=pools,
        pooling=pooling,
        attends=tuple(stage == attends_at for stage in range(len(pools))),
        norm=norm and layout.startswith("conv"),
        classes=CLASSES,
        batch_size=BATCH,
    )


# Early pooling, missing neighbourhoods, missing attention and missing norms are properties of a form; missing
# nonlinearities and narrow stages are columns.
FORMS: tuple[Form, ...] = (
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


def forms_of(layout: Layout) -> list[int]:
    """The numbers of a layout's forms."""
    return [number for number, form in enumerate(FORMS) if form.layout == layout]


def first_pool(form: Form) -> int:
    """The stage whose output is pooled first; what a seed must see in detail, it must see there or before."""
    return next((stage for stage, factor in enumerate(form.pools) if factor > 1), form.stages - 1)
