"""The masked factored distribution against hand-worked numbers, torch.distributions and brute force.

Covers: R001, R004, R021, R022, R029, R034, R039, R045, R046, R049, R086, R087, R112, R140, R155
"""

import itertools
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.actions import HEAD_NAMES, HEADS_USED, Op
from esper.env.spaces import ActionMasks
from esper.policy.distribution import (
    BLEND,
    BLUEPRINT,
    GROWTH_ACTIONS,
    MASK_VALUE,
    OP,
    SLOT,
    ActionSpace,
    FactoredLogits,
    FactoredPolicy,
    InvalidMaskError,
    masked_log_softmax,
    normalised_entropy_of,
    validate_masks,
)

OPS, SLOTS, BLUEPRINTS, BLENDS = 4, 3, 2, 3


def random_masks(lead: tuple[int, ...], generator: torch.Generator) -> ActionMasks:
    """Legal masks: WAIT possible; an operation is legal only if it has a slot, a slot only if it has choices."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand((*lead, *shape), generator=generator) < 0.6

    blueprint, blend = draw(SLOTS, BLUEPRINTS), draw(SLOTS, BLENDS)
    slot = draw(OPS, SLOTS)
    slot[..., Op.GERMINATE, :] &= blueprint.any(-1) & blend.any(-1)
    op = draw(OPS) & slot.any(-1)
    op[..., Op.WAIT] = True
    return ActionMasks(op, slot, blueprint, blend)


def random_policy(
    lead: tuple[int, ...], seed: int, floor: float = 0.0, masks: ActionMasks | None = None
) -> FactoredPolicy:
    generator = torch.Generator().manual_seed(seed)
    masks = masks or random_masks(lead, generator)
    logits = FactoredLogits(
        *(3 * torch.randn(m.shape, generator=generator) for m in (masks.op, masks.slot, masks.blueprint, masks.blend))
    )
    return FactoredPolicy.from_logits(logits, masks, GROWTH_ACTIONS.table(), floor)


def all_decisions() -> torch.Tensor:
    """Every distinct decision of the growth space, [D, heads], unused heads 0."""
    found = []
    for op in Op:
        uses = HEADS_USED[op]
        sizes = {"slot": SLOTS, "blueprint": BLUEPRINTS, "blend": BLENDS}
        ranges = [range(sizes[h]) if h in uses else range(1) for h in ("slot", "blueprint", "blend")]
        found += [(*choice, int(op)) for choice in itertools.product(*ranges)]
    return torch.tensor(found)


# --- one head


def one_head(logits: torch.Tensor, mask: torch.Tensor, floor: float = 0.0) -> FactoredPolicy:
    """A policy whose op head has these logits and this mask, and no other head a choice."""
    ops, lead = mask.shape[-1], mask.shape[:-1]
    masks = ActionMasks(mask, *(torch.ones((*lead, n, 1), dtype=torch.bool) for n in (ops, 1, 1)))
    rest = (torch.zeros(m.shape) for m in (masks.slot, masks.blueprint, masks.blend))
    return FactoredPolicy.from_logits(
        FactoredLogits(logits, *rest), masks, ActionSpace.uniform(ops, ("op",)).table(), floor
    )


def op_action(op: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(op[..., None], (OP, 0))


def test_three_of_four_legal_by_hand():
    # logits 0, ln 2, ln 3 and one forbidden: probabilities 1/6, 2/6, 3/6
    head = one_head(torch.tensor([0.0, log(2), 50.0, log(3)]), torch.tensor([True, True, False, True]))
    assert head.op.exp().tolist() == pytest.approx([1 / 6, 2 / 6, 0.0, 3 / 6], abs=1e-6)
    entropy = -(1 / 6 * log(1 / 6) + 1 / 3 * log(1 / 3) + 1 / 2 * log(1 / 2))
    assert head.entropy().tolist() == pytest.approx([0.0, 0.0, 0.0, entropy], abs=1e-6)
    assert head.live_entropy(head).tolist() == pytest.approx([0.0, 0.0, 0.0, entropy / log(3)], abs=1e-6)
    assert head.mode().tolist() == [0, 0, 0, 3]
    assert head.log_prob(op_action(torch.tensor(1))).tolist() == pytest.approx([0.0, 0.0, 0.0, log(1 / 3)], abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9))
def test_one_head_equals_torch_distributions(seed, n):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(5, n, generator=generator)
    mask = torch.rand(5, n, generator=generator) < 0.5
    mask[:, 0] = True
    ours = one_head(logits, mask)
    theirs = torch.distributions.Categorical(logits=logits.masked_fill(~mask, -torch.inf))
    assert torch.allclose(ours.op.exp(), theirs.probs, atol=1e-6)
    finite = torch.distributions.Categorical(logits=logits.masked_fill(~mask, MASK_VALUE))
    assert torch.allclose(ours.entropy()[:, OP], finite.entropy(), atol=1e-5)
    action, log_prob = ours.sample(generator)
    assert torch.allclose(log_prob[:, OP], theirs.log_prob(action[:, OP]), atol=1e-5)
    assert torch.allclose(log_prob, ours.log_prob(action), atol=1e-6)


def test_one_legal_choice_has_exactly_zero_normalised_entropy():
    logits, mask = torch.randn(7, 4), torch.tensor([False, True, False, False]).expand(7, 4)
    head = one_head(logits, mask)
    assert (normalised_entropy_of(head.op, mask) == 0).all()
    assert (head.live_entropy(head) == 0).all()
    assert (head.sample()[0][:, OP] == 1).all()


def test_mask_value_is_finite_and_survives_half_precision():
    assert torch.tensor(MASK_VALUE, dtype=torch.float16).isfinite()
    log_p = masked_log_softmax(torch.zeros(2, dtype=torch.float16), torch.tensor([True, False]))
    assert log_p.isfinite().all()


def test_the_floor_holds_by_hand():
    # two legal choices, p = (1 − 1e-4, 1e-4) nearly; floor 0.1 gives 0.1 + 0.8·p
    logits = torch.tensor([10.0, 10.0 + log(1e-4), 0.0])
    probabilities = one_head(logits, torch.tensor([True, True, False]), floor=0.1).op.exp()
    p = 1e-4 / (1 + 1e-4)
    assert probabilities.tolist() == pytest.approx([0.1 + 0.8 * (1 - p), 0.1 + 0.8 * p, 0.0], abs=1e-6)
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_a_floor_too_large_for_the_choices_is_cut():
    probabilities = one_head(torch.tensor([5.0, 0.0, 0.0]), torch.ones(3, dtype=torch.bool), floor=0.9).op.exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert probabilities.min() >= 0.99 / 3 - 1e-6


def test_validation_is_apart_from_the_distribution():
    """So that it can be switched off (`PPOConfig.validate_masks`): a policy with nothing legal is finite."""
    head = one_head(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert head.op.isfinite().all()
    with pytest.raises(InvalidMaskError, match=r"the op head can be reached .* \(2 of 2 environments"):
        validate_masks(head.masks, head.uses)


# --- all heads


def test_growth_table_is_the_causal_relevance_of_the_operations():
    for op in Op:
        for head, name in enumerate(HEAD_NAMES):
            assert GROWTH_ACTIONS.uses[op][head] == (name in HEADS_USED[op])


def test_an_action_space_must_make_sense():
    with pytest.raises(ValueError, match="must use the op head"):
        ActionSpace(((True, False, False, False),))
    with pytest.raises(ValueError, match="without a slot"):
        ActionSpace(((False, True, False, True),))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([0.0, 0.03]))
def test_entropy_kl_and_total_probability_equal_brute_force(seed, floor):
    new = random_policy((), seed, floor)
    old = random_policy((), seed + 1, floor, masks=new.masks)
    decisions = all_decisions()

    def joint(policy: FactoredPolicy) -> torch.Tensor:
        count = decisions.shape[0]
        expanded = FactoredPolicy(
            *(t.expand(count, *t.shape) for t in (policy.op, policy.slot, policy.blueprint, policy.blend)),
            policy.masks,
            policy.uses,
        )
        return expanded.log_prob(decisions).double().sum(-1)

    p, q = joint(old), joint(new)
    reachable = p > MASK_VALUE / 2
    assert p[reachable].exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    entropy = -(p.exp() * p)[reachable].sum()
    assert old.entropy().sum().item() == pytest.approx(entropy.item(), abs=1e-4)
    kl = (p.exp() * (p - q))[reachable].sum()
    assert new.kl_from(old).sum().item() == pytest.approx(kl.item(), abs=2e-4)
    assert new.kl_from(new).abs().max().item() < 1e-6


@given(seed=st.integers(0, 10_000), floor=st.sampled_from([0.0, 0.02]))
@settings(max_examples=25, deadline=None)
def test_the_joint_table_has_every_decision_once_and_sums_to_one(seed, floor):
    policy, decisions = random_policy((2,), seed, floor), all_decisions()
    joint = policy.joint()
    assert joint.shape == (2, OPS, SLOTS, BLUEPRINTS, BLENDS)
    assert joint.exp().sum((1, 2, 3, 4)).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    chained = torch.stack([policy.log_prob(one.expand(2, -1)).sum(-1).exp() for one in decisions])  # [D, 2]
    at = decisions[:, OP], decisions[:, SLOT], decisions[:, BLUEPRINT], decisions[:, BLEND]
    assert torch.allclose(joint.exp()[:, *at].T, chained, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
def test_sampled_decisions_are_legal_and_unused_heads_are_zero(seed):
    policy = random_policy((200,), seed)
    masks, generator = policy.masks, torch.Generator().manual_seed(seed)
    for action in (policy.sample(generator)[0], policy.mode()):
        slot, blueprint, blend, op = action.unbind(-1)
        rows = torch.arange(200)
        used = policy.relevant(action)
        assert masks.op[rows, op].all()
        assert masks.slot[rows, op, slot][used[:, SLOT]].all()
        assert masks.blueprint[rows, slot, blueprint][used[:, BLUEPRINT]].all()
        assert masks.blend[rows, slot, blend][used[:, BLEND]].all()
        assert (action[~used] == 0).all()
        log_prob = policy.log_prob(action)
        assert (log_prob[~used] == 0).all()
        assert (log_prob > MASK_VALUE / 2).all()


def test_sampling_frequencies_match_probabilities():
    policy = random_policy((), 5)
    many = FactoredPolicy(
        *(t.expand(40_000, *t.shape) for t in (policy.op, policy.slot, policy.blueprint, policy.blend)),
        policy.masks,
        policy.uses,
    )
    op = many.sample(torch.Generator().manual_seed(0))[0][:, OP]
    assert torch.allclose(torch.bincount(op, minlength=4) / 40_000, policy.op.exp(), atol=0.01)


def test_masked_rows_give_no_nan_in_values_or_gradients():
    masks = ActionMasks(
        op=torch.tensor([[True, False, False, False]]),
        slot=torch.zeros(1, OPS, SLOTS, dtype=torch.bool),
        blueprint=torch.zeros(1, SLOTS, BLUEPRINTS, dtype=torch.bool),
        blend=torch.zeros(1, SLOTS, BLENDS, dtype=torch.bool),
    )
    validate_masks(masks, GROWTH_ACTIONS.table())  # nothing of it can be reached
    for floor in (0.0, 0.05):
        tensors = [
            torch.randn(m.shape, requires_grad=True) for m in (masks.op, masks.slot, masks.blueprint, masks.blend)
        ]
        policy = FactoredPolicy.from_logits(FactoredLogits(*tensors), masks, GROWTH_ACTIONS.table(), floor)
        action, log_prob = policy.sample()
        assert torch.equal(log_prob, policy.log_prob(action))
        assert action.tolist() == [[0, 0, 0, 0]]
        total = (
            policy.log_prob(action).sum()
            + policy.entropy().sum()
            + policy.kl_from(policy).sum()
            + policy.live_entropy(policy).sum()
        )
        total.backward()
        assert total.isfinite()
        assert all(t.grad is not None and (t.grad == 0).all() for t in tensors)


def test_live_entropy_is_a_mean_over_live_steps_only():
    # Two steps. First: WAIT is forced. Second: GERMINATE is forced, one of two slots and (slot-independent) two
    # blueprints at p = 3/4, 1/4; one blend. Only the second may enter slot's and blueprint's mean; op and blend have
    # no choice anywhere.
    op = torch.tensor([[True, False, False, False], [False, True, False, False]])
    slot = torch.ones(2, 4, 2, dtype=torch.bool)
    blueprint = torch.ones(2, 2, 2, dtype=torch.bool)
    blend = torch.ones(2, 2, 1, dtype=torch.bool)
    masks = ActionMasks(op, slot, blueprint, blend)
    logits = FactoredLogits(
        torch.zeros(2, 4),
        torch.zeros(2, 4, 2),
        torch.tensor([log(3.0), 0.0]).expand(2, 2, 2),
        torch.zeros(2, 2, 1),
    )
    policy = FactoredPolicy.from_logits(logits, masks, GROWTH_ACTIONS.table())
    share = policy.live_share().sum(0)
    assert share.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])
    mean = policy.live_entropy(policy).sum(0) / share.clamp(min=1e-6)
    three_to_one = -(0.75 * log(0.75) + 0.25 * log(0.25)) / log(2)
    assert mean.tolist() == pytest.approx([1.0, three_to_one, 0.0, 0.0], abs=1e-6)


def test_live_weights_carry_no_gradient_to_the_operation():
    policy_logits = torch.zeros(1, 4, requires_grad=True)
    masks = random_masks((1,), torch.Generator().manual_seed(3))
    masks = ActionMasks(
        torch.ones_like(masks.op), *(torch.ones_like(m) for m in (masks.slot, masks.blueprint, masks.blend))
    )
    rest = [torch.randn(m.shape, requires_grad=True) for m in (masks.slot, masks.blueprint, masks.blend)]
    policy = FactoredPolicy.from_logits(FactoredLogits(policy_logits, *rest), masks, GROWTH_ACTIONS.table())
    policy.live_entropy(policy)[..., BLUEPRINT].sum().backward()
    assert policy_logits.grad is None or (policy_logits.grad == 0).all()
    assert rest[1].grad is not None
    assert rest[1].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("head", "change"),
    [
        ("op", lambda m: m.op[2].fill_(False)),
        ("slot", lambda m: m.slot[2, Op.PRUNE].fill_(False)),
        ("blueprint", lambda m: m.blueprint[2, 1].fill_(False)),
        ("blend", lambda m: m.blend[2, 1].fill_(False)),
    ],
)
def test_validation_names_environment_step_and_head(head, change):
    shapes = ((OPS,), (OPS, SLOTS), (SLOTS, BLUEPRINTS), (SLOTS, BLENDS))
    masks = ActionMasks(*(torch.ones((4, 9, *s), dtype=torch.bool) for s in shapes))
    valid = torch.ones(4, 9, dtype=torch.bool)
    validate_masks(masks, GROWTH_ACTIONS.table(), valid)
    at_the_step = ActionMasks(*(tensor[:, 7] for tensor in (masks.op, masks.slot, masks.blueprint, masks.blend)))
    change(at_the_step)
    with pytest.raises(InvalidMaskError, match=f"environment 2: the {head} head"):
        validate_masks(at_the_step, GROWTH_ACTIONS.table())
    with pytest.raises(InvalidMaskError, match=f"environment 2 at step 7: the {head} head"):
        validate_masks(masks, GROWTH_ACTIONS.table(), valid)
    valid[2, 7] = False  # it did not happen
    validate_masks(masks, GROWTH_ACTIONS.table(), valid)
