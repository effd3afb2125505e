"""What the results must show, each line decided by the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from results.estimates import (
    HARM_LIMIT,
    Content,
    best_rival,
    difference,
    estimate,
    gains,
    harm,
    improvement,
    rivals,
    share_kept,
    shortfall,
)
from results.markdown import in_points, plain, share, share_with_interval, table
from results.measure import LEARNED, SCHEDULE, SCRATCH

SHARE_KEPT = 0.7
"""Of the gain over the fixed schedule, on families that the controller was not trained on."""
BETTER_THAN_RANDOM = 0.75
"""Probability of improvement."""
SHARE_OF_REGRET = 0.5
"""Of the best rule's capacity regret."""
MINUTES = 30
"""For the main table on two cores."""


class Claim(NamedTuple):
    """One line that the results must show."""

    text: str
    holds: bool | None
    """None: not measured yet."""
    evidence: str = "not measured yet"


def claims_section(parts: Mapping[str, Content | None]) -> list[str]:
    found = claims(parts)
    words = {True: "**holds**", False: "**does not hold**", None: "open"}
    counts = [sum(claim.holds is value for claim in found) for value in (True, False, None)]
    return [
        f"{counts[0]} lines hold, {counts[1]} do not, {counts[2]} are open. A line about a difference holds if "
        "its whole 95 % interval lies on the right side of 0.",
        "",
        *table(["line", "", "measured"], ((claim.text, words[claim.holds], claim.evidence) for claim in found)),
    ]


def claims(parts: Mapping[str, Content | None]) -> list[Claim]:
    """`parts` by name: mixed, which must be there, harm, transfer, cifar; None for those that were not run."""
    mixed = parts["mixed"]
    assert mixed is not None
    found = [*_beats_everyone(mixed), *_beats_static(mixed)]
    for name, claims_of in (("harm", _harmless), ("transfer", partial(_transfer, mixed)), ("cifar", _images)):
        content = parts[name]
        found += [Claim(f"What `run.py {name}` measures", None)] if content is None else claims_of(content)
    return [*found, _in_time(mixed)]


def _beats_everyone(mixed: Content) -> list[Claim]:
    found = []
    for rival in rivals(mixed):
        points = difference(mixed, rival)
        evidence = f"{in_points(points)} points; better in {share(improvement(mixed, rival).value)} of the draws"
        found.append(Claim(f"A better score than *{rival}* on `mixed`", _above_zero(points.low), evidence))
    if "random" in mixed["episodes"]:
        better = improvement(mixed, "random")
        text = f"Better than chance in at least {share(BETTER_THAN_RANDOM)} of the draws"
        found.append(Claim(text, better.value >= BETTER_THAN_RANDOM, share_with_interval(better)))
    return found


def _beats_static(mixed: Content) -> list[Claim]:
    own = shortfall(mixed, LEARNED)
    growing = [rival for rival in rivals(mixed) if rival not in ("none", "random")]
    rule, least = min(((rival, shortfall(mixed, rival)) for rival in growing), key=lambda one: one[1].value)
    signed = " against ".join(in_points(estimate(mixed, label, "regret")) for label in (LEARNED, rule))
    evidence = f"{own.value:.3f} points against {least.value:.3f} of *{rule}*; with what is below 0: {signed}"
    text = f"At most {share(SHARE_OF_REGRET)} of the capacity regret of the best rule"
    found = [Claim(text, own.value <= SHARE_OF_REGRET * least.value, evidence)]
    for label in (label for label in mixed["controls"] if label.startswith(SCRATCH)):
        points = difference(mixed, label, "accuracy")
        text = f"More accurate than its own final networks trained{label.partition(':')[2]}"
        found.append(Claim(text, _above_zero(points.low), f"{in_points(points)} points of accuracy"))
    return found


def _harmless(content: Content) -> list[Claim]:
    differences = list(harm(content).values())
    below = sum(points < HARM_LIMIT for points in differences)
    text = f"Harmless: no draw ends more than {plain(-HARM_LIMIT)} points of accuracy below no growth"
    evidence = f"{below} of {len(differences)} draws; the worst at {plain(differences[0])} points"
    return [Claim(text, not below, evidence)]


def _transfer(mixed: Content, content: Content) -> list[Claim]:
    kept_text = f"Keeps {share(SHARE_KEPT)} of its gain over the fixed schedule on families that it was not trained on"
    worse_text = "Worse than no growth on no family that it was not trained on (no interval below 0)"
    families = content["families"]
    kept = share_kept([gains(family, SCHEDULE) for family in families.values()], gains(mixed, SCHEDULE))
    against = {name: difference(family, "none") for name, family in families.items()}
    worse = [f"{name} {in_points(one)}" for name, one in against.items() if one.high is not None and one.high < 0.0]
    return [
        Claim(kept_text, False, "there is no gain over the fixed schedule on `mixed`")
        if kept is None
        else Claim(kept_text, kept.value >= SHARE_KEPT, f"{share_with_interval(kept)} over {len(families)} families"),
        Claim(worse_text, not worse, ", ".join(worse) or f"none of {len(families)}"),
    ]


def _images(content: Content) -> list[Claim]:
    found = []
    for name, host in content["hosts"].items():
        rival = best_rival(host)
        points = difference(host, rival)
        text = f"A better score than the best baseline, `{rival}`, on {name}"
        found.append(Claim(text, _above_zero(points.low), f"{in_points(points)} points"))
    return found


def _in_time(mixed: Content) -> Claim:
    text = f"One command gives the main table on 2 cores in under {MINUTES} minutes"
    if mixed["workers"] > 2:
        return Claim(text, None)
    minutes = mixed["wall_seconds"] / 60
    evidence = f"{len(mixed['draws'])} draws in {minutes:.0f} minutes with {mixed['workers']} processes"
    return Claim(text, minutes < MINUTES, evidence)


def _above_zero(low: float | None) -> bool:
    """The whole 95 % interval."""
    return low is not None and low > 0.0
