"""Draws of a family as `Problems`: the same data, hosts, minibatches and first weights as the per-network engines see.

Draws are sorted by the form of their hosts. What cannot be stacked (text, hosts of other classes, data that are
augmented) is named with its reason, and played by another engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.blueprints import Layout, SlotShape, Visibility
from esper.tasks.data import Split
from esper.tasks.family import Draw, Family, Together
from esper.tasks.hosts import Conv1dHost, Conv2dHost
from esper.tasks.problems import Form, Problems
from esper.tasks.registry import cross_entropy, percent_correct
from esper.tasks.token_host import TokenHost

LARGEST_DATA = 2**15 - 1
"""Training examples of a problem: every network of a stack holds a copy of them."""


def why_not_stacked(draw: Draw) -> str:
    """Why a draw's problem cannot be part of a stack; empty if it can."""
    task = draw.task
    if task.numbers is not None:
        return "its random numbers are counted, and only a family that makes many problems at once can stack those"
    host = _host_class(draw)
    if host not in (TokenHost, Conv1dHost, Conv2dHost):
        return f"its host is {getattr(host, '__name__', host)}, which has no stacked form"
    if task.augment:
        return "its images are cropped and flipped"
    if len(task.splits.train) > LARGEST_DATA:
        return f"it has more than {LARGEST_DATA:,} training examples, and each network of a stack holds its own"
    if task.loss is not cross_entropy or task.score is not percent_correct:
        return "its loss or its score is not that of a classification"
    return _why_not_grown(draw, _config(draw))


def _why_not_grown(draw: Draw, config: dict[str, Any]) -> str:
    """Why the slots or the classes of a host that has a stacked form differ from those of the stack."""
    task, stages = draw.task, len(config["widths"])
    if sorted(task.slots) != sorted(f"stages.{i}" for i in range(stages)):
        return f"its slots are {', '.join(task.slots)}, not all {stages} stages"
    if config["classes"] != len(task.labels):
        return f"its host has {config['classes']} outputs for {len(task.labels)} labels"
    layout = form_of(draw, config).layout
    if layout != "dense" and task.visibility != _visibility(layout):
        return f"its seeds may read {task.visibility!r}, those of {layout} stacks {_visibility(layout)!r}"
    return ""


def _visibility(layout: Layout) -> Visibility:
    """What seeds may read in a stack."""
    return "causal" if layout == "sequence" else "both"


def form_of(draw: Draw, config: dict[str, Any] | None = None) -> Form:
    """What the draw's host has in common with those that it can be stacked with; `config` is the host's, if known."""
    task, config = draw.task, config or _config(draw)
    x, batch = task.splits.train.x, min(task.batch_size, len(task.splits.train))
    stages, classes = len(config["widths"]), len(task.labels)
    if _host_class(draw) is TokenHost:
        return Form("sequence" if x.dim() == 3 else "dense", stages, "average", False, classes, batch)
    layout: Layout = "conv1d" if x.dim() == 3 else "conv2d"
    return Form(layout, stages, config.get("pooling", "max"), config.get("norm", True), classes, batch)


def stacked_problems(
    family: Family, draw_ids: Sequence[int], *, held_out: bool, device: torch.device | str = "cpu"
) -> list[tuple[list[int], Problems]]:
    """The problems of these draws, sorted by form: for each form the places of its draws, and the problems.

    Families in turn are sorted by member first.
    """
    if isinstance(family, BatchedFamily):
        return family.problems(draw_ids, held_out=held_out, device=device)
    if isinstance(family, Together):
        return [
            ([places[i] for i in own], problems)
            for member, places, ids in by_member(family, draw_ids)
            for own, problems in stacked_problems(member, ids, held_out=held_out, device=device)
        ]
    made = {draw_id: family.draw(draw_id, held_out=held_out) for draw_id in dict.fromkeys(draw_ids)}  # siblings: once
    for draw_id, draw in made.items():
        if refusal := why_not_stacked(draw):
            raise ValueError(f"draw {draw_id} of {family.name} cannot be stacked: {refusal}; use another engine")
    return stack_draws(draw_ids, [made[draw_id] for draw_id in draw_ids], device)


@runtime_checkable
class BatchedFamily(Protocol):
    """A family that makes many problems at once, on the device."""

    def problems(
        self, draw_ids: Sequence[int], *, held_out: bool, device: torch.device | str
    ) -> list[tuple[list[int], Problems]]: ...


def by_member(family: Together, draw_ids: Sequence[int]) -> list[tuple[Family, list[int], list[int]]]:
    """Each member that has some of the draws, with their places among all, and their numbers there."""
    found: dict[int, tuple[Family, list[int], list[int]]] = {}
    for place, draw_id in enumerate(draw_ids):
        member, own = family.member_of(draw_id)
        _, places, ids = found.setdefault(family.members.index(member), (member, [], []))
        places.append(place)
        ids.append(own)
    return [found[index] for index in sorted(found)]


@runtime_checkable
class SortedFamily(Protocol):
    """A family that can say which draws share a stack without drawing them."""

    def sorts(self, draw_ids: Sequence[int], *, held_out: bool) -> list[str]:
        """Of each draw: those of one sort make one stack, or few."""


def sorts_of(family: Family, draw_ids: Sequence[int], *, held_out: bool) -> list[str]:
    """The same for any family; all draws of one that cannot say are of one sort."""
    if isinstance(family, SortedFamily):
        return family.sorts(draw_ids, held_out=held_out)
    found = [family.name] * len(draw_ids)
    if isinstance(family, Together):
        for member, places, ids in by_member(family, draw_ids):
            for place, sort in zip(places, sorts_of(member, ids, held_out=held_out), strict=True):
                found[place] = f"{member.name}: {sort}"
    return found


def stack_draws(
    draw_ids: Sequence[int], draws: Sequence[Draw], device: torch.device | str = "cpu"
) -> list[tuple[list[int], Problems]]:
    """The draws sorted by form: for each form the places of its draws, and the problems."""
    configs = [_config(draw) for draw in draws]
    places: dict[tuple[Form, int, int], list[int]] = {}
    for place, (draw, config) in enumerate(zip(draws, configs, strict=True)):
        splits = draw.task.splits
        places.setdefault((form_of(draw, config), len(splits.val), len(splits.test)), []).append(place)
    made = []
    for (form, _, _), some in places.items():
        ids, own = [draw_ids[i] for i in some], [draws[i] for i in some]
        made.append((some, _problems(form, ids, own, [configs[i] for i in some], torch.device(device))))
    return made


def _problems(
    form: Form,
    draw_ids: Sequence[int],
    draws: Sequence[Draw],
    configs: Sequence[dict[str, Any]],
    device: torch.device,
) -> Problems:
    stages = form.stages
    is_map = form.layout.startswith("conv")
    bends = [[c.get("activation", True)] * stages if is_map else c["bends"] for c in configs]
    tasks = [draw.task for draw in draws]
    splits = {
        name: _padded([getattr(task.splits, name) for task in tasks], is_map, device)
        for name in ("train", "val", "test")
    }

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    whole, real = torch.int64, torch.float64
    seeds = [draw.seed for draw in draws]
    plan = _stacked_plans([_minibatches(draw, form.batch_size) for draw in draws], device)

    def host_uniforms(rows: Tensor, count: int) -> Tensor:
        """`task_learner` seeds torch with the draw's seed."""
        return _uniforms([seeds[row] for row in rows.tolist()], count, device)

    def seed_uniforms(rows: Tensor, born: Tensor, count: int) -> Tensor:
        """`GrowingModel.germinate` seeds torch with the network's seed and the number of the seed."""
        chosen = zip(rows.tolist(), born.tolist(), strict=True)
        return _uniforms([seeds[row] * 1_000_003 + number for row, number in chosen], count, device)

    return Problems(
        form=form,
        draw=column(draw_ids, whole),
        features=column([c["in_channels"] if is_map else c["features"] for c in configs], whole),
        widths=torch.tensor([list(c["widths"]) for c in configs]).to(device),
        sizes=torch.tensor([_sizes(t.splits.train.x, is_map) for t in tasks], dtype=whole).to(device),
        kernels=torch.tensor([c["kernels"] if is_map else [1] * stages for c in configs]).to(device),
        pools=torch.tensor([c.get("pools") or [2] * (stages - 1) + [1] for c in configs]).to(device),
        bends=torch.tensor(bends).to(device),
        attends=torch.tensor([[False] * stages if is_map else c["attends"] for c in configs]).to(device),
        learning_rate=column([t.learning_rate for t in tasks], real),
        weight_decay=column([t.weight_decay for t in tasks], real),
        updates=column([t.updates_per_epoch for t in tasks], whole),
        horizon=column([draw.horizon for draw in draws], whole),
        budget=column([math.inf if draw.budget is None else draw.budget for draw in draws], real),
        max_seeds=column([math.inf if draw.max_seeds is None else draw.max_seeds for draw in draws], real),
        examples=column([len(t.splits.train) for t in tasks], whole),
        train_x=splits["train"][0],
        train_y=splits["train"][1],
        val_x=splits["val"][0],
        val_y=splits["val"][1],
        test_x=splits["test"][0],
        test_y=splits["test"][1],
        minibatches=lambda rows, epoch: plan[epoch].index_select(1, rows).long(),
        host_uniforms=host_uniforms,
        seed_uniforms=seed_uniforms,
        facts=tuple(dict(draw.facts) for draw in draws),
    )


def _stacked_plans(plans: Sequence[Tensor], device: torch.device) -> Tensor:
    """[epochs, updates, N, batch] int16 or int32 of plans [horizon, updates, batch]."""
    epochs, updates = max(len(p) for p in plans), max(p.shape[1] for p in plans)
    padded = [F.pad(p, (0, 0, 0, updates - p.shape[1], 0, epochs - len(p))) for p in plans]
    return torch.stack(padded, 2).to(device)


def _minibatches(draw: Draw, batch: int) -> Tensor:
    """As `TensorFeed` draws them: all epochs of a network from one generator, so they are drawn with the problem."""
    task = draw.task
    generator = torch.Generator().manual_seed(draw.seed)
    shape, examples = (draw.horizon, task.updates_per_epoch, batch), len(task.splits.train)
    small = torch.int16 if examples <= 2**15 else torch.int32
    return torch.randint(examples, shape, generator=generator).to(small)


def _uniforms(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    generator, drawn = torch.Generator(), torch.empty(len(seeds), count)
    for i, seed in enumerate(seeds):
        torch.rand(count, generator=generator.manual_seed(seed), out=drawn[i])
    return drawn.to(device)


def _channels_last(x: Tensor, is_map: bool) -> Tensor:
    return x.movedim(1, -1) if is_map else x


def _sizes(x: Tensor, is_map: bool) -> list[int]:
    return list(x.shape[2:] if is_map else x.shape[1:-1])


def _padded(splits: Sequence[Split], is_map: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros up to the most examples, the largest sizes and the most features."""
    xs, ys = [_channels_last(split.x, is_map) for split in splits], [split.y for split in splits]
    shape = [max(sizes) for sizes in zip(*(x.shape for x in xs), strict=True)]
    x = torch.zeros((len(xs), *shape))
    y = torch.zeros((len(ys), shape[0]), dtype=torch.int64)
    for i, (inputs, targets) in enumerate(zip(xs, ys, strict=True)):
        x[i][tuple(slice(size) for size in inputs.shape)] = inputs
        y[i, : len(targets)] = targets
    return x.to(device), y.to(device)


def _host_class(draw: Draw) -> object:
    make = draw.task.make_host
    return make.func if isinstance(make, partial) else make


def _config(draw: Draw) -> dict[str, Any]:
    """The settings of the draw's host, without building its weights."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        host: nn.Module = draw.task.make_host()
    config: dict[str, Any] = host.config  # type: ignore[assignment]
    return config


def plain_host(problems: Problems, row: int) -> nn.Module:
    """The host of one problem as a module of its own, on the current device, with weights from torch's random state."""
    form, stages = problems.form, problems.form.stages
    features = int(problems.features[row])
    widths, kernels, pools, bends, attends = (
        getattr(problems, name)[row].tolist() for name in ("widths", "kernels", "pools", "bends", "attends")
    )
    if not form.layout.startswith("conv"):
        return TokenHost(features, widths, form.classes, bends, attends, pools)
    if len(set(bends)) > 1:
        raise ValueError(f"stages with and without a ReLU are no plain host: {bends} of {stages} stages")
    kind = Conv1dHost if form.layout == "conv1d" else Conv2dHost
    return kind(features, widths, kernels, form.classes, pools, form.pooling, form.norm, bends[0])


def slot_shapes(problems: Problems, row: int) -> list[SlotShape]:
    """What passes through each slot of one problem's host."""
    form, sizes, shapes = problems.form, problems.sizes[row], []
    for width, pool in zip(problems.widths[row].tolist(), problems.pools[row].tolist(), strict=True):
        shapes.append(SlotShape(form.layout, width, tuple(sizes.tolist()), _visibility(form.layout)))
        sizes = sizes // pool
    return shapes
