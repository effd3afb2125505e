"""The agent's settings: what makes no sense is refused in one line, whether it comes from a file or from code.

Covers: R013, R035, R054, R069, R073
"""

from dataclasses import fields

import pytest

from esper.agent.config import PPOConfig

NUMBERS = [field.name for field in fields(PPOConfig) if "float" in field.type or "int" in field.type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, True, "1"])
@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "head_entropy_weights"])
def test_numbers_that_make_no_sense_are_refused_in_one_line(name, value):
    """Every number, those of later fields too: a negative max_grad_norm, for one, would negate every gradient."""
    ends = {"anneal_updates": 3} if name.endswith("_end") else {}
    with pytest.raises(ValueError, match=rf"^{name} must be .*, not {value!r}$"):
        PPOConfig(**{name: value}, **ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a number above 0, not 0.0"),
        ({"clip": 0.0}, "clip must be a number above 0, not 0.0"),
        ({"target_kl": 0.0}, "target_kl must be a number above 0 or None, not 0.0"),
        ({"huber_delta": 0.0}, "huber_delta must be a number above 0 or None, not 0.0"),
        ({"value_clip": 0.0}, "value_clip must be a number above 0 or None, not 0.0"),
        ({"value_momentum": 1.0}, "value_momentum must be a number between 0 and 1 or None, not 1.0"),
        ({"rare_head_share": 1.5}, "rare_head_share must be a number from 0 to 1, not 1.5"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, not 1.5"),
        ({"minibatches": 0}, "minibatches must be a whole number of at least 1, not 0"),
        ({"chunk_rows": 0}, "chunk_rows must be a whole number of at least 1 or None, not 0"),
        ({"teacher_updates": 0}, "teacher_updates must be a whole number of at least 1, not 0"),
        (
            {"head_entropy_weights": (1.0, -1.0, 1.0, 1.0)},
            "must be a number of at least 0, not -1",
        ),
        ({"head_entropy_weights": (1.0, 1.0, float("nan"), 1.0)}, "head_entropy_weights must be .* not nan"),
        ({"head_entropy_weights": (0.0, 0.0, 0.0, 0.0)}, "one of them above 0"),
        ({"head_entropy_weights": (1.0, 1.0)}, "four numbers"),
        ({"learning_rate_end": 1e-5}, "learning_rate_end is never reached: set anneal_updates"),
        ({"entropy_coefficient_end": 0.0}, "entropy_coefficient_end is never reached: set anneal_updates"),
        ({"anneal_updates": 5}, "anneal_updates = 5 anneals nothing: set learning_rate_end or entropy_coefficient_end"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        PPOConfig(**settings)
    assert "\n" not in str(caught.value)


def test_ends_of_ranges_are_allowed():
    PPOConfig(learning_rate=0.0, discount=0.0, gae_decay=1.0, rare_head_share=0.0, entropy_coefficient=0.0)
    PPOConfig(target_kl=None, huber_delta=None, value_clip=None, value_momentum=None, value_coefficient=0, clip=1)
    PPOConfig(learning_rate_end=0.0, entropy_coefficient_end=0.0, anneal_updates=1, head_entropy_weights=(0, 0, 0, 1))
