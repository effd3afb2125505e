"""What the results must show, each line decided by the numbers. The thresholds stand here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from esper.training.statistics import Estimate
from results.figures import Content, best_rival, estimate, gains, harm, rivals, share_kept, shortfall, versus
from results.kept import LEARNED, SCHEDULE
from results.wording import in_points, plain, share, share_with_interval

HARM_LIMIT = -0.5
"""Points of test accuracy: a draw below this was harmed."""
SHARE_KEPT = 0.7
"""Of the gain over the fixed schedule, on families that the controller was not trained on."""
BETTER_THAN_RANDOM = 0.75
"""Probability of improvement."""
SHARE_OF_REGRET = 0.5
"""Of the best rule's capacity regret."""
MINUTES = 30
"""For the main table on two cores."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One line that the results must show."""

    text: str
    holds: bool | None
    """None: not measured yet."""
    evidence: str = "not measured yet"


def claims(parts: Mapping[str, Content | None]) -> list[Claim]:
    """`parts` by name: mixed, mixed_quick, harm, transfer, cifar; None for those that were not run."""
    mixed = parts["mixed"]
    return [
        *_beats_everyone(mixed),
        *_beats_static(mixed),
        _harmless(parts["harm"]),
        *_transfer(parts["transfer"], mixed),
        *_images(parts["cifar"]),
        _quick(mixed, parts["mixed_quick"]),
    ]


def above_zero(found: Estimate) -> bool:
    """The whole 95 % interval."""
    return found.low is not None and found.low > 0.0


def below_zero(found: Estimate) -> bool:
    return found.high is not None and found.high < 0.0


def _beats_everyone(mixed: Content | None) -> list[Claim]:
    if mixed is None:
        return [Claim("A better score than every baseline on held-out draws of `mixed`", None)]
    found = []
    for rival in rivals(mixed):
        against = versus(mixed, rival)
        evidence = f"{in_points(against.score)} points; better in {share(against.better.value)} of the draws"
        found.append(Claim(f"A better score than *{rival}* on `mixed`", above_zero(against.score), evidence))
    if "random" in mixed["episodes"]:
        better = versus(mixed, "random").better
        text = f"Better than chance in at least {share(BETTER_THAN_RANDOM)} of the draws"
        found.append(Claim(text, better.value >= BETTER_THAN_RANDOM, share_with_interval(better)))
    return found


def _beats_static(mixed: Content | None) -> list[Claim]:
    regret_text = f"At most {share(SHARE_OF_REGRET)} of the capacity regret of the best rule"
    if mixed is None or not mixed.get("controls"):
        return [Claim(regret_text, None), Claim("More accurate than its own final networks trained from scratch", None)]
    found = [Claim(regret_text, None)]
    if "regret" in mixed["episodes"][LEARNED]:
        own = shortfall(mixed, LEARNED)
        growing = [rival for rival in rivals(mixed) if rival not in ("none", "random")]
        rule, least = min(((rival, shortfall(mixed, rival)) for rival in growing), key=lambda one: one[1].value)
        signed = " against ".join(in_points(estimate(mixed, label, "regret")) for label in (LEARNED, rule))
        evidence = f"{own.value:.3f} points against {least.value:.3f} of *{rule}*; with what is below 0: {signed}"
        found = [Claim(regret_text, own.value <= SHARE_OF_REGRET * least.value, evidence)]
    for label in mixed["controls"]:
        if label.startswith(f"{LEARNED}: from scratch"):
            against = versus(mixed, label).accuracy
            text = f"More accurate than its own final networks trained{label.partition(':')[2]}"
            found.append(Claim(text, above_zero(against), f"{in_points(against)} points of accuracy"))
    return found


def _harmless(content: Content | None) -> Claim:
    text = f"Harmless: no draw ends more than {plain(-HARM_LIMIT)} points of accuracy below no growth"
    if content is None:
        return Claim(text, None)
    found = harm(content, HARM_LIMIT)
    worst = min(found.differences.values())
    evidence = f"{len(found.below)} of {len(found.differences)} draws; the worst at {plain(worst)} points"
    return Claim(text, not found.below, evidence)


def _transfer(content: Content | None, mixed: Content | None) -> list[Claim]:
    kept_text = f"Keeps {share(SHARE_KEPT)} of its gain over the fixed schedule on families that it was not trained on"
    worse_text = "Worse than no growth on no family that it was not trained on (no interval below 0)"
    if content is None or mixed is None:
        return [Claim(kept_text, None), Claim(worse_text, None)]
    families = content["families"]
    kept = share_kept([gains(family, SCHEDULE) for family in families.values()], gains(mixed, SCHEDULE))
    against = {name: versus(family, "none").score for name, family in families.items()}
    worse = [f"{name} {in_points(found)}" for name, found in against.items() if below_zero(found)]
    return [
        Claim(kept_text, False, "there is no gain over the fixed schedule on `mixed`")
        if kept is None
        else Claim(kept_text, kept.value >= SHARE_KEPT, f"{share_with_interval(kept)} over {len(families)} families"),
        Claim(worse_text, not worse, ", ".join(worse) or f"none of {len(families)}"),
    ]


def _images(content: Content | None) -> list[Claim]:
    if content is None:
        return [Claim("A better score than every baseline on CIFAR-10", None)]
    found = []
    for name, host in content["hosts"].items():
        if LEARNED not in host["episodes"]:
            continue
        rules = {label: rows for label, rows in host["episodes"].items() if not label.startswith(f"{LEARNED}:")}
        rival = best_rival({"episodes": rules})
        against = versus(host, rival).score
        text = f"A better score than the best baseline, `{rival}`, on {name}"
        found.append(Claim(text, above_zero(against), f"{in_points(against)} points"))
    return found


def _quick(whole: Content | None, fewer_draws: Content | None) -> Claim:
    text = f"One command gives the main table on 2 cores in under {MINUTES} minutes"
    content = whole if whole is not None and whole["workers"] <= 2 else fewer_draws
    if content is None:
        return Claim(text, None)
    minutes, workers = content["wall_seconds"] / 60, content["workers"]
    evidence = f"{len(content['draws'])} draws in {minutes:.0f} minutes with {workers} processes"
    return Claim(text, None if workers > 2 else minutes < MINUTES, evidence)
