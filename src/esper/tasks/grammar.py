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
from esper.tasks.family import Draw, dashed
from esper.tasks.grammar_data import FIRST_TRAINED, make_data
from esper.tasks.grammar_forms import CLASSES, DATA_NAMES, FORMS, LAYOUTS, SIZES, STACKS, STAGES, HostForm
from esper.tasks.grammar_kinds import ClassRule, Code, Expression, Structure
from esper.tasks.grammar_settings import (
    ANSWERS,
    EXAMPLES,
    HORIZON,
    LACKS,
    TEST,
    VAL,
    Settings,
    answers,
    draw_settings,
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
        """`part` leaves only the problems of one layout: one of DATA_NAMES."""
        self.name = "grammar-unseen" if unseen else "grammar"
        self.unseen = unseen
        self.layouts = range(len(LAYOUTS)) if part is None else [DATA_NAMES.index(part)]
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

    def sorts(self, draw_ids: Sequence[int], *, held_out: bool = False) -> list[str]:
        """Of each draw the stack that its host belongs to."""
        return [str(number) for number in _STACK_OF_FORM[self.settings(draw_ids, held_out).form].tolist()]

    def problems(
        self, draw_ids: Sequence[int], *, held_out: bool = False, device: torch.device | str = "cpu"
    ) -> list[tuple[list[int], Problems]]:
        """These problems with their data on the device, by the stacks of their hosts: the places of each stack's
        problems among `draw_ids`, and the problems."""
        on_cpu = self.settings(draw_ids, held_out)
        # Side by side: the problems of a stack, and among them those of about as many examples. Stacks are in the order
        # of their layouts.
        order = (2 * EXAMPLES[1] * _STACK_OF_FORM[on_cpu.form] + on_cpu.examples).argsort()
        on_cpu = on_cpu.rows(order)
        settings = on_cpu.to(device)
        groups = [_Group(on_cpu, settings, number) for number in sorted(set(_STACK_OF_FORM[on_cpu.form].tolist()))]
        for layout in sorted(set(on_cpu.layout.tolist())):
            mine = [group for group in groups if group.form.layout == LAYOUTS[layout]]
            for start in range(mine[0].first, mine[-1].stop, CHUNK[settings.keys.device.type]):
                rows = slice(start, min(start + CHUNK[settings.keys.device.type], mine[-1].stop))
                made = make_data(on_cpu.rows(rows), settings.rows(rows), LAYOUTS[layout])
                for group in mine:
                    group.take(start, *made)
        return [(order[group.first : group.stop].tolist(), group.problems()) for group in groups]

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        ((_, one),) = self.problems([number], held_out=held_out)
        drawn = self.settings([number], held_out)
        key, form = int(drawn.keys), FORMS[int(drawn.form)]
        numbers = DrawNumbers(key)
        features, stages = int(one.features), one.form.stages
        sizes = {"train": int(one.examples), "val": VAL, "test": TEST}
        parts = [_split(one, name, count, features) for name, count in sizes.items()]
        task = Task(
            name=self.name,
            description=f"generated: {one.facts[0]['kind']}",
            splits=Splits(*parts),
            make_host=partial(make_host, form, features, one.widths[0].tolist(), one.bends[0].tolist(), numbers),
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


def make_host(form: HostForm, features: int, widths: list[int], bends: list[bool], numbers: DrawNumbers) -> nn.Module:
    """The plain host of one problem, with its counted first weights."""
    common: dict[str, Any] = {"widths": widths, "classes": CLASSES, "pools": list(form.pools)}
    with numbers.host():
        if not form.layout.startswith("conv"):
            return TokenHost(features, bends=bends, attends=list(form.attends), **common)
        kind = Conv1dHost if form.layout == "conv1d" else Conv2dHost
        common |= {"kernels": list(form.kernels), "pooling": form.pooling, "norm": form.norm, "activation": any(bends)}
        return kind(features, **common)


# -- many problems of one form -----------------------------------------------------------------------------------------


class _Group:
    """The problems of one form, whose data come in a piece at a time."""

    def __init__(self, on_cpu: Settings, settings: Settings, number: int) -> None:
        """Of sorted settings, on the CPU and on the device."""
        self.form = STACKS[number]
        rows = (_STACK_OF_FORM[on_cpu.form] == number).nonzero()[:, 0].tolist()
        self.first, self.stop = rows[0], rows[-1] + 1
        self.on_cpu, self.settings = (all_of.rows(slice(self.first, self.stop)) for all_of in (on_cpu, settings))
        most, features = int(self.on_cpu.examples.max()), int(self.on_cpu.features.max())
        self.spans = {"val": (0, VAL), "test": (VAL, TEST), "train": (FIRST_TRAINED, most)}
        """Number of the first example of a split, and examples."""
        self.data: dict[str, Tensor] = {}
        device = settings.keys.device
        for name, (_, count) in self.spans.items():
            self.data[f"{name}_x"] = torch.zeros(len(rows), count, *SIZES[self.form.layout], features, device=device)
            self.data[f"{name}_y"] = torch.zeros(len(rows), count, dtype=torch.int64, device=device)

    def take(self, start: int, inputs: Tensor, labels: Tensor) -> None:
        """What is this group's of the data of all problems from `start` on."""
        first, stop = max(start, self.first), min(start + len(inputs), self.stop)
        if first >= stop:
            return
        mine, there = slice(first - start, stop - start), slice(first - self.first, stop - self.first)
        features = self.data["val_x"].shape[-1]
        for name, (begin, count) in self.spans.items():
            end = min(begin + count, inputs.shape[1])
            self.data[f"{name}_x"][there, : end - begin] = inputs[mine, begin:end, ..., :features]
            self.data[f"{name}_y"][there, : end - begin] = labels[mine, begin:end]

    def problems(self) -> Problems:
        form, settings, keys = self.form, self.settings, self.settings.keys
        most, n = self.spans["train"][1], len(settings)
        beyond = torch.arange(most, device=keys.device) >= settings.examples[:, None]  # [n, most]
        sizes = SIZES[form.layout]
        self.data["train_x"].masked_fill_(beyond.view(n, most, *[1] * (len(sizes) + 1)), 0.0)
        self.data["train_y"].masked_fill_(beyond, 0)

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
            widths=settings.widths[:, : form.stages],
            sizes=torch.tensor(sizes, dtype=torch.int64, device=keys.device).expand(n, -1),
            kernels=_of_forms(settings.form, "kernels", form.stages),
            pools=_of_forms(settings.form, "pools", form.stages),
            bends=settings.bends[:, : form.stages],
            attends=_of_forms(settings.form, "attends", form.stages).bool(),
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            updates=settings.updates,
            horizon=settings.horizon,
            budget=settings.budget,
            max_seeds=settings.max_seeds,
            examples=settings.examples,
            **self.data,
            minibatches=minibatches,
            host_uniforms=lambda rows, count: uniforms(keys[rows], Purpose.HOST, count),
            seed_uniforms=lambda rows, number, count: uniforms(keys[rows], Purpose.SEED, count, number << 32),
            facts=_facts(self.on_cpu, form),
        )


_STACK_OF_FORM = torch.tensor([STACKS.index(form.stack) for form in FORMS])


def _of_forms(form: Tensor, name: str, stages: int) -> Tensor:
    """[n, stages] int64: a setting of the hosts' forms [n], which all have so many stages."""
    table = [(*getattr(one, name), *[0] * (STAGES - one.stages))[:stages] for one in FORMS]
    return torch.tensor(table, dtype=torch.int64, device=form.device)[form]


def _facts(settings: Settings, form: Form) -> tuple[dict[str, str | int | float], ...]:
    layout = LAYOUTS.index(form.layout)
    kinds = (settings.structure, settings.code, settings.rule, settings.first, settings.second)
    columns = zip(
        zip(*(column.tolist() for column in kinds), strict=True),
        settings.lacks.tolist(),
        answers(settings.lacks).tolist(),
        settings.places.tolist(),
        settings.widths[:, : form.stages].tolist(),
        settings.host_parameters.tolist(),
        settings.wrong.tolist(),
        strict=True,
    )
    made: list[dict[str, str | int | float]] = []
    for kind, lacks, wanted, places, widths, size, wrong in columns:
        seeds = compress((row[layout] for row in ANSWERS), wanted)
        made.append(
            {
                "kind": f"{DATA_NAMES[layout]} {_spelled(*kind)}",
                "layout": form.layout,
                "lacks": "+".join(compress(LACKS, lacks)) or "nothing",
                "answer": "+".join(f"{seed}@{place}" for seed, place in zip(seeds, places, strict=False)) or "none",
                "widths": dashed(widths),
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
        both = rule in (ClassRule.BITS, ClassRule.SUM)
        of = [Expression(one).name.lower() for one in ((first, second) if both else (first,))]
        words.append(f"{ClassRule(rule).name.lower()} of {' and '.join(of)}")
    return " ".join(words)
