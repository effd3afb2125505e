"""The report of one grown network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper.dashboard.drawings import known, slot_lanes
from esper.dashboard.episode_answers import episode
from esper.dashboard.findings import files
from esper.dashboard.markup import Html, joined, number, table, tag
from esper.dashboard.report_parts import fact_boxes, page, section
from esper.dashboard.source import Source
from esper.telemetry.store import StoreError


def of_growth(source: Source, view: Mapping[str, Any]) -> Html:
    played = episode(source, (1, "train", 0))
    if played is None:
        raise StoreError(f"{source.folder} has no epoch of growth yet")
    result = view["result"] or {}
    size = view["parameters"] / max(1, view["host_parameters"]) if known(view["parameters"]) else None
    return page(
        str(view["name"]),
        f"A network grown by the controller {view['controller']} in {view['update']} epochs",
        tag("p", {"class": "lead"}, _growth_story(view, result, played)),
        fact_boxes(
            {
                "test accuracy": (number(result.get("test_accuracy")), "percent"),
                "without growth": (number(result.get("control_accuracy")), "percent, same host, same epochs"),
                "score": (number(result.get("score")), joined(("rent ", number(view["rent"], "g"), " a host-size"))),
                "parameters": (
                    number(view["parameters"], ",d"),
                    joined(("host ", number(view["host_parameters"], ",d"))),
                ),
                "size": (number(size, ".2f"), "times the host"),
            }
        ),
        section("How it grew", slot_lanes(played)),
        section("Decisions that changed it, and why", _decisions(played)),
        section("Stage changes", _changes(played)),
        section("Remarks", [tag("p", None, one) for one in result.get("remarks", [])] or tag("p", None, "None.")),
        section("Files beside this report", _files(source)),
    )


def _growth_story(view: Mapping[str, Any], result: Mapping[str, Any], played: Mapping[str, Any]) -> str:
    kept = [one for one in played["changes"] if one["target"] == "FOSSILIZED"]
    removed = [one for one in played["changes"] if one["target"] == "PRUNED"]
    grown, control = result.get("test_accuracy"), result.get("control_accuracy")
    said = [f"Seeds that became part of the network: {len(kept)}; removed: {len(removed)}."]
    if known(grown) and known(control):
        said.insert(0, f"Growing changed the test accuracy from {control:.1f} % to {grown:.1f} %.")
    elif known(view["accuracy"]):
        said.insert(0, f"The validation accuracy ended at {view['accuracy']:.1f} %.")
    return " ".join(said)


def _decisions(played: Mapping[str, Any]) -> Html:
    rows = [
        (
            step["epoch"] + 1,
            step["op"].lower(),
            " → ".join(part for part in (step["blueprint"], step["slot"]) if part),
            step["message"],
            number(step["accuracy"]),
        )
        for step in played["steps"]
        if step["op"] != "WAIT"
    ]
    return table(["epoch", "operation", "seed → slot", "why", "accuracy after the epoch"], rows, (0, 4))


def _changes(played: Mapping[str, Any]) -> Html:
    rows = [(one["epoch"] + 1, one["slot"], one["target"].lower(), one["reason"]) for one in played["changes"]]
    return table(["epoch", "slot", "becomes", "because"], rows, (0,))


def _files(source: Source) -> Html:
    rows = [(one["name"], f"{one['bytes']:,}") for one in files(source)]
    return table(["file", "bytes"], rows, (1,))
