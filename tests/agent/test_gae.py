"""Advantages: hand-worked numbers, both forms equal, splicing invalid steps changes nothing.

Covers: R005, R028, R031, R036, R050, R052, R113
"""

import pytest
import torch
from gae_by_loop import advantages_by_loop
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.agent.gae import advantages, against_siblings, normalise_advantages

F, T = False, True


def one_row(reward, value, next_value, terminated, done, valid=None):
    valid = [True] * len(reward) if valid is None else valid
    floats = [torch.tensor([x], dtype=torch.float64) for x in (reward, value, next_value)]
    return (*floats, *(torch.tensor([x]) for x in (terminated, done, valid)))


def test_by_hand():
    # γ = 0.5, λ = 0.5; the third step truncates into a state worth 8, the fifth terminates.
    row = one_row([1, 2, 3, 4, 5], [1, 1, 1, 1, 1], [1, 1, 8, 1, 99], [F, F, F, F, T], [F, F, T, F, T])
    # δ5 = 5 + 0 − 1 = 4                              A5 = 4
    # δ4 = 4 + 0.5·1 − 1 = 3.5                        A4 = 3.5 + 0.25·4 = 4.5
    # δ3 = 3 + 0.5·8 − 1 = 6   bootstrapped, cut      A3 = 6
    # δ2 = 2 + 0.5·1 − 1 = 1.5                        A2 = 1.5 + 0.25·6 = 3
    # δ1 = 1 + 0.5·1 − 1 = 0.5                        A1 = 0.5 + 0.25·3 = 1.25
    for form in (advantages, advantages_by_loop):
        assert form(*row, 0.5, 0.5)[0].tolist() == pytest.approx([1.25, 3.0, 6.0, 4.5, 4.0])


def test_a_terminal_step_ignores_whatever_value_follows():
    for after in (0.0, 1e6):
        row = one_row([1.0, 1.0], [0.0, 0.0], [0.0, after], [F, T], [F, T])
        assert advantages(*row, 0.9, 1.0)[0, 1].item() == 1.0


def random_rows(seed: int, rows: int, steps: int):
    generator = torch.Generator().manual_seed(seed)
    reward, value, following = (torch.randn(rows, steps, generator=generator, dtype=torch.float64) for _ in range(3))
    terminated, truncated = (torch.rand(rows, steps, generator=generator) < 0.2 for _ in range(2))
    valid = torch.rand(rows, steps, generator=generator) < 0.8
    return reward, value, following, terminated, terminated | truncated, valid


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 5), st.integers(1, 40), st.floats(0, 1), st.floats(0, 1))
def test_log_step_form_equals_the_loop(seed, rows, steps, discount, decay):
    given_rows = random_rows(seed, rows, steps)
    fast, slow = advantages(*given_rows, discount, decay), advantages_by_loop(*given_rows, discount, decay)
    assert torch.allclose(fast, slow, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 20), st.integers(0, 20))
def test_splicing_invalid_steps_changes_nothing(seed, steps, place):
    rows = random_rows(seed, 1, steps)
    rows = (*rows[:5], torch.ones(1, steps, dtype=torch.bool))
    place = min(place, steps)
    junk = (1e9, torch.nan, -1e9, True, True, False)
    spliced = [
        torch.cat((tensor[:, :place], torch.full((1, 2), x, dtype=tensor.dtype), tensor[:, place:]), dim=1)
        for tensor, x in zip(rows, junk, strict=True)
    ]
    plain = advantages(*rows, 0.9, 0.8)
    for form in (advantages, advantages_by_loop):
        got = form(*spliced, 0.9, 0.8)
        kept = torch.cat((got[:, :place], got[:, place + 2 :]), dim=1)
        assert torch.allclose(kept, plain, atol=1e-9)
        assert (got[:, place : place + 2] == 0).all()


def test_against_siblings_by_hand():
    # Two groups of three; in the second step the third row of the first group is over, the last group has one left.
    advantage = torch.tensor([[3.0, 1.0], [6.0, 5.0], [9.0, 7.0], [1.0, 2.0], [1.0, 9.0], [1.0, 9.0]])
    valid = torch.tensor([[T, T], [T, T], [T, F], [T, T], [T, F], [T, F]])
    # 3 − (6 + 9)/2, 6 − (3 + 9)/2, 9 − (3 + 6)/2; then 1 − 5 and 5 − 1; nobody to compare with leaves 2 as it is.
    expected = [[-4.5, -4.0], [0.0, 4.0], [4.5, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert against_siblings(advantage, valid, 3).tolist() == expected
    assert torch.equal(against_siblings(advantage, valid, 1), advantage)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
def test_what_all_siblings_share_goes_away(seed):
    """Whatever the critic got wrong about a problem, step by step: it cannot tell one row's action from another's."""
    generator = torch.Generator().manual_seed(seed)
    advantage = torch.randn(8, 6, generator=generator)
    luck = torch.randn(2, 1, 6, generator=generator).expand(2, 4, 6).reshape(8, 6)
    everywhere = torch.ones(8, 6, dtype=torch.bool)
    plain, lucky = (against_siblings(a, everywhere, 4) for a in (advantage, advantage + 100 * luck))
    assert torch.allclose(plain, lucky, atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
def test_environments_do_not_leak_into_each_other(seed):
    rows = random_rows(seed, 4, 12)
    together = advantages(*rows, 0.99, 0.95)
    for n in range(4):
        alone = advantages(*(tensor[n : n + 1] for tensor in rows), 0.99, 0.95)
        assert torch.equal(together[n : n + 1], alone)


def test_normalisation_has_a_floor_and_skips_invalid_steps():
    advantage = torch.tensor([[1.0, 3.0, 100.0]])
    valid = torch.tensor([[True, True, False]])
    out = normalise_advantages(advantage, valid, torch.tensor([2.0]), torch.tensor([1.0]), 1e-3)
    assert out.tolist() == [[-1.0, 1.0, 0.0]]
    quiet = normalise_advantages(
        torch.tensor([[1e-6, -1e-6]]), valid[:, :2], torch.zeros(1), torch.tensor([1e-6]), 1e-3
    )
    assert quiet.abs().max().item() == pytest.approx(1e-3)
