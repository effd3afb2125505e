"""Hints in generated data: they tell the class of a share of the examples, and nothing of the others.

Covers: R149 (hosts that lack something which a seed can add)
"""

from functools import partial

import numpy as np
import pytest

from esper.tasks import needs

BALANCED = np.arange(2000) % 4
INPUTS = {
    "series": (partial(needs.motif, length=20, scale=1, noise=0.5), 1),
    "images": (partial(needs.folded_motif, size=8, scale=1, noise=0.5), 1),
    "vectors": (partial(needs.board, basis=np.eye(2), cells=4, noise=0.1), -1),
    "sequences": (partial(needs.token_relation, basis=np.eye(4), time=12, noise=0.1), -1),
}
CLASS_DIRECTIONS = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])


def hinted(make, axis, share):
    """The inputs without and with hints, and the hints [count, positions, 2]."""
    inputs = make(BALANCED, np.random.default_rng(1))
    found = needs.with_hints(inputs, BALANCED, np.random.default_rng(2), share=share, axis=axis)
    channels_last = np.moveaxis(found, axis, -1)
    return inputs, found, channels_last[..., -needs.HINTS :].reshape(len(BALANCED), -1, needs.HINTS)


@pytest.mark.parametrize(("make", "axis"), INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_hints_leave_the_inputs_as_they_were_and_are_the_same_at_every_position(make, axis, share):
    inputs, found, hints = hinted(make, axis, share)
    assert found.shape[axis] == inputs.shape[axis] + needs.HINTS
    assert np.array_equal(np.moveaxis(found, axis, -1)[..., : -needs.HINTS], np.moveaxis(inputs, axis, -1))
    assert (hints == hints[:, :1]).all()


@pytest.mark.parametrize(("make", "axis"), INPUTS.values(), ids=INPUTS)
def test_hints_tell_the_class_of_the_share_and_nothing_of_the_others(make, axis):
    nothing, some = (hinted(make, axis, share)[2][:, 0] for share in (0.0, 0.3))
    added = some - nothing  # the dice are the same: what differs is what the share got
    easy = np.abs(added).max(1) > 1e-9
    assert 0.25 < easy.mean() < 0.35
    assert np.allclose(added[easy], CLASS_DIRECTIONS[BALANCED[easy]])
    for hints, of, least, most in ((some, easy, 0.98, 1.0), (some, ~easy, 0.2, 0.3), (nothing, easy | True, 0.2, 0.3)):
        guess = (hints @ CLASS_DIRECTIONS.T).argmax(1)
        assert least < (guess == BALANCED)[of].mean() <= most
