"""A grown model for people: what grew where and why, what it is worth and what it costs, as tables.

`Grown.summary`, `Grown._repr_html_` and `esper grow` show the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from esper.engine.counterfactual import SeedValue
from esper.lifecycle import Contrast, Stage
from esper.tables import Report, Rows, quantity
from esper.training.own.history import History, SeedStory

if TYPE_CHECKING:
    from esper.training.own.grown import Grown


def summary_of(grown: Grown) -> Report:
    """The tables, then what should not be left to guess."""
    title = f"{type(grown.model).__name__}, grown by {grown.history.controller}"
    notes = map("note: {}".format, notes_of(grown))
    return Report((*seed_tables(grown.history), result_table(grown, title), *notes))


def notes_of(grown: Grown) -> list[str]:
    """The remarks, and where growing paid that it did: nothing to remark on, but the first thing to know."""
    return [*grown.remarks, *([grown.verdict] if grown.paid else [])]


def one_line(grown: Grown) -> str:
    """For the prompt of a shell: a model of a thousand modules says no more than its class there."""
    found, kind = (grown.test, "test") if grown.test is not None else (grown.validation, "validation")
    acting = len(acting_seeds(grown.history))
    return (
        f"<Grown {type(grown.model).__name__}: {found.accuracy:.1f} % {kind} {grown.history.metric}, "
        f"{grown.parameters:,} parameters ({grown.history.host_parameters:,} before), "
        f"{acting} seed{'s' * (acting != 1)} kept; .summary() says more>"
    )


def seed_tables(history: History) -> Iterator[Rows | str]:
    """What was planted and why; then what is left of it in the final network."""
    stories = history.seeds()
    if not stories:
        yield "Nothing was grown."
        return
    yield Rows(
        "What grew",
        ("slot", "seed", "epochs", "planted because", "became", "because", "worth"),
        tuple(_story(history, story) for story in stories),
        ("planted because", "because"),
        f"worth: validation {history.metric} with the seed minus without it, in points, ± standard error, as last "
        "measured at its fullest strength (of a seed that never acted: its shadow benefit). Epochs count from 1; a "
        "decision belongs to the epoch that follows it",
    )
    acting = [(story, story.value) for story in acting_seeds(history) if story.value is not None]
    if acting:
        yield _contributions(acting, history.metric)
    elif not acting_seeds(history):
        yield "No seed was kept: the grown network is the host alone."


def _contributions(acting: Sequence[tuple[SeedStory, SeedValue]], metric: str) -> Rows:
    rows = [(s.slot, s.blueprint, *_cost(s), _points(v.contribution), _points(v.shapley)) for s, v in acting]
    parameters, flops = sum(s.parameters or 0 for s, _ in acting), sum(s.flops or 0 for s, _ in acting)
    gain = sum(value.shapley.accuracy for _, value in acting)
    rows.append(("all together", "", f"{parameters:,}", _flops(flops), "", f"{gain:+z.1f}"))
    return Rows(
        "What the seeds of the final network contribute",
        ("slot", "seed", "parameters", "FLOPs", "leave-one-out", "Shapley value"),
        tuple(rows),
        note=f"leave-one-out: points of validation {metric} lost without this seed, ± standard error; Shapley value: "
        "its gain averaged over the orders in which the seeds could be added, so that the values sum to the gain of "
        "all. None of them is the gain over no growth, because host and seeds have adapted to each other",
    )


def result_table(grown: Grown, title: str) -> Rows:
    """The network before, without growth and with it."""
    history, tested = grown.history, grown.test is not None
    control, validated = (
        "not trained" if found is None else _percent(found.accuracy)
        for found in (grown.control, grown.control_validation)
    )
    host = (f"{history.host_parameters:,}", _flops(history.host_flops))
    rows = [  # of a model that was trained before, the start is not chance
        ("before training", _percent(history.untrained), "–", "–", *host),
        ("same host, not grown", validated, control, _number(grown.control_score), *host),
        (
            "grown",
            _percent(grown.validation.accuracy),
            "–" if grown.test is None else _percent(grown.test.accuracy),
            _number(grown.score),
            f"{grown.parameters:,}",
            _flops(grown.flops),
        ),
    ]
    metric = history.metric
    headings: tuple[str, ...] = ("", f"val {metric}", f"test {metric}", "score", "parameters", "FLOPs per example")
    shown = [i for i in range(len(headings)) if tested or headings[i] != f"test {metric}"]
    what = "test" if tested else "validation"
    return Rows(
        title,
        tuple(headings[i] for i in shown),
        tuple(tuple(row[i] for i in shown) for row in rows),
        headings[:1],
        f"score: {what} {metric} minus rent, {grown.rent:g} points per extra host-size of parameters",
    )


def acting_seeds(history: History) -> list[SeedStory]:
    """Those that are part of the final network."""
    return [story for story in history.seeds() if story.fate is not Stage.PRUNED]


def worth(history: History, story: SeedStory) -> Contrast | None:
    """The last measurement of a seed at its fullest strength: what became of the reasons.

    While a seed is taken out it is measured, too, at less and less strength; that says nothing about its worth.
    """
    slot = history.slots.index(story.slot)
    best: tuple[float, Contrast] | None = None
    for record in history.kept_records[story.born : story.ended + 1]:
        found = record.measured.contributions.get(slot) or record.measured.shadow_benefits.get(slot)
        if found is not None and (best is None or record.alphas[slot] >= best[0]):
            best = (record.alphas[slot], found)
    return None if best is None else best[1]


def _story(history: History, story: SeedStory) -> tuple[str, ...]:
    last = min(story.ended + 1, len(history.kept_records))  # what ends with the run ends after its last epoch
    found = worth(history, story)
    measured = "not measured" if found is None else _points(found)
    span, fate = f"{story.born + 1}–{last}", story.fate.name.lower()
    return (story.slot, story.blueprint, span, story.why_born, fate, story.why_ended, measured)


def _cost(story: SeedStory) -> tuple[str, str]:
    return "–" if story.parameters is None else f"{story.parameters:,}", _flops(story.flops)


def _flops(number: int | None) -> str:
    return "–" if number is None else quantity(number)


def _percent(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f} %"


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}"


def _points(contrast: Contrast) -> str:
    return f"{contrast.accuracy:+z.1f} ± {contrast.error:.1f}"
