"""What a decision may contain. Covers: R001, R046 (one order of heads), R021 (which heads an operation uses)."""

from __future__ import annotations

import dataclasses
import re

import pytest

from esper.actions import BLENDS, HEAD_NAMES, HEADS_USED, WAIT, Action, Op


def test_the_heads_have_one_order_and_every_operation_uses_some_of_them() -> None:
    assert HEAD_NAMES == ("slot", "blueprint", "blend", "op")
    assert {op: sorted(heads) for op, heads in HEADS_USED.items()} == {
        Op.WAIT: ["op"],
        Op.GERMINATE: ["blend", "blueprint", "op", "slot"],
        Op.PRUNE: ["op", "slot"],
        Op.FOSSILIZE: ["op", "slot"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Op.WAIT, 0), "WAIT takes no slot"),
        ((Op.PRUNE,), "PRUNE needs a slot"),
        ((Op.PRUNE, 0, "conv"), "PRUNE takes no blueprint"),
        ((Op.FOSSILIZE, 0, None, "linear"), "FOSSILIZE takes no blend"),
        ((Op.GERMINATE, 0, None, "linear"), "GERMINATE needs a blueprint"),
        ((Op.GERMINATE, 0, "conv"), "GERMINATE needs a blend"),
        ((Op.GERMINATE, 0, "conv", "cubic"), "unknown blend 'cubic': choose one of linear, sigmoid, gated"),
        (("PRUNE", 0), "unknown operation 'PRUNE': choose one of Op.WAIT, Op.GERMINATE, Op.PRUNE, Op.FOSSILIZE"),
        ((Op.PRUNE, -1), "slots count from 0, not -1"),
        ((Op.PRUNE, "layer1"), "slots count from 0, not 'layer1'"),
    ],
)
def test_an_incomplete_or_overfull_action_is_refused_in_one_line(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Action(*arguments)


def test_the_reason_is_not_part_of_what_an_action_is() -> None:
    assert Action(Op.PRUNE, 1, reason="it harms") == Action(Op.PRUNE, 1, reason="it idles")
    assert Action() == WAIT
    with pytest.raises(dataclasses.FrozenInstanceError):
        WAIT.op = Op.PRUNE  # type: ignore[misc]


def test_every_blend_makes_a_valid_germination() -> None:
    assert {Action(Op.GERMINATE, 0, "conv", blend).blend for blend in BLENDS} == set(BLENDS)
