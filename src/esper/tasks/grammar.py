"""`grammar`: problems composed at random, made in batches on the device (`docs/grammar.md`).

Everything random is counted (`esper.tasks.counted`): a draw is the same problem alone or among a thousand others, on a
CPU or a GPU, for the stacked engine (`problems`) and for those that train one network at a time (`draw`).
`grammar-unseen` has the kinds of problems that no draw of `grammar` is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from esper.tasks.counted import Purpose, draw_keys, integers, uniforms
from esper.tasks.counted_init import DrawNumbers
from esper.tasks.data import Split, Splits
from esper.tasks.family import Draw
from esper.tasks.grammar_data import FIRST_TRAINED, make_data
from esper.tasks.grammar_forms import CLASSES, FORMS, LAYOUTS, PARTS, STAGES
from esper.tasks.grammar_kinds import Code, Expression, Rule, Structure
from esper.tasks.grammar_settings import (
    ANSWERS,
    HORIZON,
    LACKS,
    TEST,
    VAL,
    Settings,
    answers,
    draw_settings,
    host_parameters,
)
from esper.tasks.hosts import Conv1dHost, Conv2dHost
from esper.tasks.problems import Form, Problems
from esper.tasks.registry import Task
from esper.tasks.token_host import TokenHost

CHUNK = {"cpu": 8, "cuda": 512}
"""Problems whose data are made at once: few enough for the cache of a core, enough to fill a GPU."""
STREAMS = 4
"""Training and held-out draws of `grammar`, and the same of `grammar-unseen`: no key is in two of them."""


class Grammar:
    """The four layouts in turn; everything else at random."""

    slots = STAGES
    horizon = HORIZON[1]

    def __init__(self, *, part: str | None = None, unseen: bool = False) -> None:
        """`part` leaves only the problems of one layout: one of PARTS."""
        self.name = "grammar-unseen" if unseen else "grammar"
        self.unseen = unseen
        self.layouts = range(len(LAYOUTS)) if part is None else [PARTS.index(part)]
        self.round = len(self.layouts)

    def settings(self, draw_ids: Sequence[int], held_out: bool) -> Settings:
        """Everything about these problems but their data."""
        if min(draw_ids) < 0:
            raise ValueError(f"draws are numbered from 0, not {min(draw_ids)}")
        draw = torch.tensor(draw_ids, dtype=torch.int64)
        layout = torch.tensor(self.layouts)[draw % self.round]
        # Draw i of one layout is the i-th draw of that layout in the whole family.
        number = len(LAYOUTS) * (draw // self.round) + layout
        keys = draw_keys(number, stream=2 * self.unseen + held_out, streams=STREAMS)
        return draw_settings(keys, draw, layout, self.unseen)

    def problems(
        self, draw_ids: Sequence[int], *, held_out: bool = False, device: torch.device | str = "cpu"
    ) -> list[Problems]:
        """These problems with their data on the device, grouped by the form of their hosts."""
        on_cpu = self.settings(draw_ids, held_out)
        on_device = on_cpu.to(device)
        made = []
        for number in sorted(set(on_cpu.form.tolist())):
            rows = (on_cpu.form == number).nonzero()[:, 0]
            rows = rows[on_cpu.examples[rows].argsort()]  # neighbours of one size: data are made a few at a time
            made.append(_problems(on_cpu.rows(rows), on_device.rows(rows.to(device)), FORMS[number]))
        return made

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        (one,) = self.problems([number], held_out=held_out)
        key = int(self.settings([number], held_out).keys)
        numbers = DrawNumbers(key)
        features, stages = int(one.features), one.form.stages
        sizes = {"train": int(one.examples), "val": VAL, "test": TEST}
        parts = [_split(one, name, count, features) for name, count in sizes.items()]
        task = Task(
            name=self.name,
            description=f"generated: {one.facts[0]['kind']}",
            splits=Splits(*parts),
            make_host=partial(make_host, one.form, features, one.widths[0].tolist(), one.bends[0].tolist(), numbers),
            slots=tuple(f"stages.{i}" for i in range(stages)),
            labels=tuple(str(label) for label in range(CLASSES)),
            batch_size=one.form.batch_size,
            updates_per_epoch=int(one.updates),
            learning_rate=float(one.learning_rate),
            weight_decay=float(one.weight_decay),
            visibility="causal" if one.form.layout == "sequence" else "both",
            numbers=numbers,
        )
        seed = 2 * ((key >> 34) & (2**30 - 1)) + held_out
        limits = (_limit(one.budget), _limit(one.max_seeds))
        return Draw(task, seed, int(one.horizon), *limits, facts={"number": number, **one.facts[0]})


def _limit(column: Tensor) -> int | None:
    return None if column.isinf() else int(column)


def _split(one: Problems, name: str, count: int, features: int) -> Split:
    x, y = getattr(one, f"{name}_x")[0, :count, ..., :features], getattr(one, f"{name}_y")[0, :count]
    return Split((x.movedim(-1, 1) if one.form.layout.startswith("conv") else x).contiguous(), y.contiguous())


def make_host(form: Form, features: int, widths: list[int], bends: list[bool], numbers: DrawNumbers) -> nn.Module:
    """The plain host of one problem, with its counted first weights."""
    common: dict[str, Any] = {"widths": widths, "classes": form.classes, "pools": list(form.pools)}
    with numbers.host():
        if not form.layout.startswith("conv"):
            return TokenHost(features, bends=bends, attends=list(form.attends), **common)
        kind = Conv1dHost if form.layout == "conv1d" else Conv2dHost
        common |= {"kernels": list(form.kernels), "pooling": form.pooling, "norm": form.norm, "activation": any(bends)}
        return kind(features, **common)


# -- many problems of one form -----------------------------------------------------------------------------------------


def _problems(on_cpu: Settings, settings: Settings, form: Form) -> Problems:
    keys, stages = settings.keys, form.stages
    data = _data(on_cpu, settings, form)

    def minibatches(rows: Tensor, epoch: int) -> Tensor:
        updates, batch = settings.updates[rows], form.batch_size
        most = int(updates.max())
        first = epoch * updates * batch
        drawn = integers(keys[rows], Purpose.MINIBATCH, most * batch, settings.examples[rows], first)
        return drawn.view(-1, most, batch).transpose(0, 1)

    return Problems(
        form=form,
        draw=settings.draw,
        features=settings.features,
        widths=settings.widths[:, :stages],
        bends=settings.bends[:, :stages],
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        updates=settings.updates,
        horizon=settings.horizon,
        budget=settings.budget,
        max_seeds=settings.max_seeds,
        examples=settings.examples,
        **data,
        minibatches=minibatches,
        host_uniforms=lambda rows, count: uniforms(keys[rows], Purpose.HOST, count),
        seed_uniforms=lambda rows, number, count: uniforms(keys[rows], Purpose.SEED, count, number << 32),
        facts=_facts(on_cpu, form),
    )


def _data(on_cpu: Settings, settings: Settings, form: Form) -> dict[str, Tensor]:
    """The three splits, with as many examples and features as the largest problem has, and zeros beyond each one's."""
    n, device = len(on_cpu), settings.keys.device
    most, features = int(on_cpu.examples.max()), int(on_cpu.features.max())
    starts = {"val": (0, VAL), "test": (VAL, TEST), "train": (FIRST_TRAINED, most)}
    made = {}
    for name, (_, count) in starts.items():
        made[f"{name}_x"] = torch.zeros(n, count, *form.sizes, features, device=device)
        made[f"{name}_y"] = torch.zeros(n, count, dtype=torch.int64, device=device)
    for rows in torch.split(torch.arange(n), CHUNK[device.type]):
        inputs, labels = make_data(on_cpu.rows(rows), settings.rows(rows.to(device)), form)
        first, stop = int(rows[0]), int(rows[-1]) + 1
        for name, (start, count) in starts.items():
            end = min(start + count, inputs.shape[1])
            made[f"{name}_x"][first:stop, : end - start] = inputs[:, start:end, ..., :features]
            made[f"{name}_y"][first:stop, : end - start] = labels[:, start:end]
    beyond = torch.arange(most, device=device) >= settings.examples[:, None]  # [n, most]
    made["train_x"].masked_fill_(beyond.view(n, most, *[1] * (len(form.sizes) + 1)), 0.0)
    made["train_y"].masked_fill_(beyond, 0)
    return made


def _facts(settings: Settings, form: Form) -> tuple[dict[str, str | int | float], ...]:
    layout = LAYOUTS.index(form.layout)
    sizes = host_parameters(settings.form, settings.features, settings.widths).tolist()
    kinds = (settings.structure, settings.code, settings.rule, settings.first, settings.second)
    columns = zip(
        zip(*(column.tolist() for column in kinds), strict=True),
        settings.lacks.tolist(),
        answers(settings.lacks).tolist(),
        settings.places.tolist(),
        settings.widths[:, : form.stages].tolist(),
        sizes,
        settings.wrong.tolist(),
        strict=True,
    )
    made: list[dict[str, str | int | float]] = []
    for kind, lacks, wanted, places, widths, size, wrong in columns:
        seeds = compress((row[layout] for row in ANSWERS), wanted)
        made.append(
            {
                "kind": f"{PARTS[layout]} {_spelled(*kind)}",
                "layout": form.layout,
                "lacks": "+".join(compress(LACKS, lacks)) or "nothing",
                "answer": "+".join(f"{seed}@{place}" for seed, place in zip(seeds, places, strict=False)) or "none",
                "widths": "-".join(str(width) for width in widths),
                "host_parameters": size,
                "ceiling": 100.0 * (1.0 - wrong * (1.0 - 1.0 / CLASSES)),
            }
        )
    return tuple(made)


def _spelled(structure: int, code: int, rule: int, first: int, second: int) -> str:
    """The composition in words: "one motif", "all point bits of product and fold", "bands of waves"."""
    words = [] if structure == Structure.VECTOR else [Structure(structure).name.lower()]
    if code not in (Code.NONE, Code.POINT) and structure != Structure.WAVES:
        words.append(Code(code).name.lower())
    if code == Code.POINT or structure == Structure.VECTOR:
        both = rule in (Rule.BITS, Rule.SUM)
        of = [Expression(one).name.lower() for one in ((first, second) if both else (first,))]
        words.append(f"{Rule(rule).name.lower()} of {' and '.join(of)}")
    return " ".join(words)
