"""The graph engine gives the eager engine's numbers, whatever grows, and whoever used its graphs before.

On a CPU nothing is captured, but everything else (fixed addresses, planned minibatches and rates, the cache) is the
same; with a GPU the same tests run on CUDA graphs.

Covers: R143
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from esper.actions import WAIT, Action, Op
from esper.engine.captured import CapturedEpoch
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.fingerprint import CachedFingerprint, module_fingerprint, value_fingerprint
from esper.engine.graph_storage import why_not_capturable
from esper.engine.graphs import GraphCache, GraphEngine
from esper.engine.learner import Learner
from esper.engine.optimizer import GrowingOptimizer
from esper.growth.attach import attach
from esper.growth.blueprints import fitting
from esper.tasks.feed import LoaderFeed, TensorFeed
from esper.tasks.registry import cross_entropy, percent_correct
from small_worlds import BUILT_IN, EAGER, WORLDS, World, germinate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
Make = Callable[[int], Learner]


@pytest.fixture(autouse=True)
def repeatable_convolutions() -> Iterator[None]:
    """cuDNN tries algorithms out, and some of the fast ones add in an order that changes from run to run."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def without_dropout(host: nn.Module) -> nn.Module:
    for module in host.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "dropout" in vars(module):
            module.dropout = 0.0
    return host


def fused(parameters: Iterator[nn.Parameter], device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01, fused=True)


def maker(world: World, device: str, optimizer: Callable[..., torch.optim.Optimizer] = fused) -> Make:
    def make(seed: int) -> Learner:
        host = without_dropout(world.host(seed)).to(device)
        model = attach(host, world.slots, world.examples(4).x.to(device), rules=EAGER, rng_seed=seed)
        train, val = world.examples(24, seed).to(device), world.examples(12, 100 + seed).to(device)
        feed = TensorFeed(train, val, batch_size=8, updates_per_epoch=3, seed=seed)
        growing = GrowingOptimizer(optimizer(host.parameters(), device), warmup_updates=4, decay=lambda n: 0.99**n)
        return Learner(model, growing, feed, cross_entropy, percent_correct, seed=seed)

    return make


def life(first: str, second: str, blend: str = "linear") -> list[Action]:
    """A seed that is kept, beside it one that is pruned, and the same place grown again: 17 epochs."""
    keep, prune = Action(Op.FOSSILIZE, 0), Action(Op.PRUNE, 1)
    return [
        *(WAIT, germinate(0, first, blend), WAIT, WAIT, germinate(1, second), WAIT, WAIT, keep, WAIT, prune),
        *(WAIT, WAIT, germinate(1, second, "gated"), WAIT, WAIT, WAIT, WAIT),
    ]


def run(engine: EagerEngine, scripts: Sequence[Sequence[Action]]) -> list[list[EpochRecord]]:
    return [engine.step(list(actions)) for actions in zip(*scripts, strict=True)]


def assert_same(seen: list[list[EpochRecord]], expected: list[list[EpochRecord]], device: str = "cpu") -> None:
    for epoch, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"epoch {epoch}, learner {row}, {b.stages}"
            assert (a.stages, a.alphas, a.parameters) == (b.stages, b.alphas, b.parameters), where
            assert a.verdict == b.verdict, where
            assert numbers(a) == close_to(b, device), where


def close_to(record: EpochRecord, device: str) -> object:
    """Within rounding.

    On a CPU the weights are the same bit by bit, and sums are taken in another precision. On a GPU learning rates are
    rounded to single precision, and sums are taken in an order that changes; a contrast is a small difference of
    losses, and has their error.
    """
    tolerance = 1e-6 if device == "cpu" else 1e-4
    return pytest.approx(numbers(record), rel=tolerance, abs=tolerance)


def numbers(record: EpochRecord) -> list[float]:
    trained, measured = record.trained, record.measured
    contrasts = [*measured.contributions.items(), *measured.shadow_benefits.items()]
    return [
        *(trained.loss, trained.host_gradient, measured.loss, measured.accuracy, float(trained.finite)),
        *(value for pair in trained.seed_gradients.items() for value in pair),
        *(value for pair in trained.shadow_losses.items() for value in pair),
        *(value for slot, c in contrasts for value in (slot, *astuple(c))),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WORLDS)
def test_the_same_numbers_as_the_eager_engine(name: str, device: str) -> None:
    """Every host, two learners side by side, a kept, a pruned and a grown-again seed."""
    make = maker(WORLDS[name], device)
    candidates = [b.name for b in fitting(make(0).model.slots[1].shape)]
    scripts = [life(candidates[0], candidates[-1]), life(candidates[-1], candidates[0], "gated")]
    expected = run(EagerEngine([make(0), make(1)], [None, None]), scripts)
    engine = GraphEngine([make(0), make(1)], [None, None])
    assert_same(run(engine, scripts), expected, device)
    assert bool(engine.cache.refused) == (name == "spectral")  # it replaces a buffer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_blueprint_in_every_stage(name: str, device: str) -> None:
    make = maker(BUILT_IN[name], device)
    blueprints = [b.name for b in fitting(make(0).model.slots[0].shape)]
    scripts = [[*life(blueprint, "norm")[:9], WAIT] for blueprint in blueprints]
    for script in scripts:
        script[4] = WAIT  # one seed at a time
    makers = [make(seed) for seed in range(len(blueprints))], [make(seed) for seed in range(len(blueprints))]
    unwatched = [None] * len(blueprints)
    expected = run(EagerEngine(makers[0], unwatched), scripts)
    assert_same(run(GraphEngine(makers[1], unwatched), scripts), expected, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_one_learner_leaves_in_the_cache_serves_the_next_and_both_keep_their_numbers(device: str) -> None:
    make, script = maker(BUILT_IN["conv2d"], device), life("conv", "depthwise")
    cache = GraphCache(streams=2)
    first = GraphEngine([make(0), make(1)], [None, None], cache=cache)
    run(first, [script, script])
    captured = cache.captures
    weights = [[p.detach().clone() for p in learner.model.parameters()] for learner in first.learners]
    cache.release()

    second = GraphEngine([make(2), make(3)], [None, None], cache=cache)
    expected = run(EagerEngine([make(2), make(3)], [None, None]), [script, script])
    assert_same(run(second, [script, script]), expected, device)
    assert cache.captures == captured
    for learner, before in zip(first.learners, weights, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_rollback_stays_equal_and_spares_the_neighbour(device: str) -> None:
    make = maker(BUILT_IN["conv1d"], device)

    def broken(engine: EagerEngine) -> list[list[EpochRecord]]:
        records = []
        for epoch, actions in enumerate(zip(life("conv", "norm"), life("pointwise", "norm"), strict=True)):
            if epoch == 5:
                with torch.no_grad():
                    next(engine.learners[0].model.host.parameters()).fill_(math.nan)
            records.append(engine.step(list(actions)))
        return records

    seen = broken(GraphEngine([make(0), make(1)]))
    expected = broken(EagerEngine([make(0), make(1)]))
    assert [r[0].verdict is not None for r in seen] == [epoch == 5 for epoch in range(len(seen))]
    for records in (seen, expected):  # the verdict's own numbers are NaN
        records[5] = [records[5][1]]
    for ours, theirs in zip(seen, expected, strict=True):
        assert [numbers(r) for r in ours] == [close_to(r, device) for r in theirs]


@pytest.mark.parametrize("device", DEVICES)
def test_sgd_with_momentum_and_rates_that_fall(device: str) -> None:
    def sgd(parameters: Iterator[nn.Parameter], device: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)

    make, script = maker(BUILT_IN["mlp"], device, sgd), life("mlp", "mlp")
    expected = run(EagerEngine([make(0)], [None]), [script])
    assert_same(run(GraphEngine([make(0)], [None]), [script]), expected, device)


@pytest.mark.parametrize("copied", [0, 2**20])
@pytest.mark.parametrize("block", [1, 3])
def test_updates_in_blocks_and_data_by_address_or_copied(
    monkeypatch: pytest.MonkeyPatch, block: int, copied: int
) -> None:
    monkeypatch.setattr("esper.engine.captured.BLOCK", block)
    monkeypatch.setattr("esper.engine.graph_storage.COPIED_BYTES", copied)
    make, script = maker(BUILT_IN["mlp"], "cpu"), life("mlp", "mlp")
    assert_same(run(GraphEngine([make(0)], [None]), [script]), run(EagerEngine([make(0)], [None]), [script]))


def from_a_loader(make: Make, seed: int) -> Learner:
    """A learner that cannot be replayed."""
    learner = make(seed)
    batches = [make(seed).feed.next_batch() for _ in range(3)]
    learner.feed = LoaderFeed(batches, batches, torch.device("cpu"))
    return learner


def test_python_prepares_one_part_while_the_device_works_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five learners in parts of two; one is not replayed, and one is not active. Records come in the old order."""
    monkeypatch.setattr("esper.engine.graphs.PARTS", (1, 1, 1))
    make, script, active = maker(BUILT_IN["mlp"], "cpu"), life("mlp", "mlp"), [True, True, False, True, True]

    def learners() -> list[Learner]:
        return [make(0), from_a_loader(make, 1), *(make(seed) for seed in (2, 3, 4))]

    def play(engine: EagerEngine) -> list[list[EpochRecord]]:
        records = [engine.step([action] * 5, active) for action in script]
        assert all([r is not None for r in row] == active for row in records)
        return [[r for r in row if r is not None] for row in records]

    engine = GraphEngine(learners(), [None] * 5)
    assert_same(play(engine), play(EagerEngine(learners(), [None] * 5)))

    happened: list[tuple[str, int]] = []
    number = {learner: i for i, learner in enumerate(engine.learners)}
    begin, launch, end = Learner.begin_epoch, CapturedEpoch.run, Learner.end_epoch
    monkeypatch.setattr(Learner, "begin_epoch", lambda x: (happened.append(("begin", number[x])), begin(x))[1])
    monkeypatch.setattr(Learner, "end_epoch", lambda x, *a: (happened.append(("end", number[x])), end(x, *a))[1])
    monkeypatch.setattr(CapturedEpoch, "run", lambda x: (happened.append(("run", number[x.learner])), launch(x))[1])
    engine.step([WAIT] * 5, active)
    assert happened == [
        *(("begin", 0), ("begin", 1), ("run", 0)),
        *(("begin", 3), ("begin", 4), ("run", 3), ("run", 4)),
        *(("end", 0), ("end", 1), ("end", 3), ("end", 4)),
    ]


def test_neighbours_have_lanes_of_their_own_whatever_grows() -> None:
    """They are launched together: on one stream they would wait for each other. A new episode finds the same places."""
    make, cache = maker(BUILT_IN["mlp"], "cpu"), GraphCache(streams=3)
    for _ in range(2):
        learners = [make(seed) for seed in range(6)]
        engine = GraphEngine(learners, [None] * 6, cache=cache)
        cached = cache.of(torch.device("cpu"))
        for action in (WAIT, germinate(0, "mlp"), WAIT, WAIT, WAIT):
            engine.step([action, WAIT] * 3)
            at = [cached.streams.index(cached.epoch_of(learner).stream) for learner in learners]
            assert at == [0, 1, 2, 0, 1, 2]
        captures = cache.captures
        cache.release()
    assert cache.captures == captures


def test_learners_that_cannot_be_replayed_run_eagerly_and_the_reason_is_kept() -> None:
    make = maker(BUILT_IN["mlp"], "cpu")
    engine = GraphEngine([make(0), from_a_loader(make, 1)], [None, None])
    scripts = [life("mlp", "mlp")] * 2
    assert_same(run(engine, scripts), run(EagerEngine([make(0), from_a_loader(make, 1)], [None, None]), scripts))
    (reason,) = engine.cache.refused
    assert "LoaderFeed" in reason

    plain = maker(BUILT_IN["mlp"], "cpu", lambda ps, device: torch.optim.Adagrad(ps))
    (reason,) = GraphEngine([plain(0)]).cache.refused
    assert reason == "the optimizer is Adagrad: use one of Adam, AdamW, SGD with fused=True"


def test_settings_that_a_graph_would_freeze_are_refused() -> None:
    make = maker(
        BUILT_IN["mlp"], "cpu", lambda ps, device: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    )
    assert "dampening" in why_not_capturable(make(0))
    make = maker(BUILT_IN["mlp"], "cpu")
    cycling = make(0)
    cycling.optimizer.schedulers = [OneCycleLR(cycling.optimizer.optimizer, max_lr=0.1, total_steps=9)]
    assert "momentum" in why_not_capturable(cycling)
    assert why_not_capturable(make(0)) == ""


def test_what_is_released_is_forgotten_and_what_waits_too_long_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.engine.captured.MOST_FREE", 3)
    make, cache = maker(BUILT_IN["mlp"], "cpu"), GraphCache(streams=2)
    engine = GraphEngine([make(0)], [None], cache=cache)
    run(engine, [life("mlp", "mlp")])
    assert len(engine.learners) == cache.in_use == 1
    kept = cache.of(torch.device("cpu"))
    gone = weakref.ref(engine.learners[0])
    cache.release()
    assert cache.in_use == 0
    assert sum(map(len, kept._free.values())) == 3
    assert [stream.busy for stream in kept.streams] == [0, 0]
    del engine
    gc.collect()
    assert gone() is None
    kept.make_room()
    assert not kept._free


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_released_network_keeps_its_numbers_at_addresses_of_its_own(by_hand: bool) -> None:
    make, cache = maker(BUILT_IN["conv2d"], "cpu"), GraphCache(streams=1)
    (learner,) = GraphEngine([make(0)], [None], cache=cache).learners
    epoch = cache.of(torch.device("cpu")).epoch_of(learner)
    if by_hand:  # a user has moved it meanwhile, and it stays as it is
        learner.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {name: (t.clone(), t.stride()) for name, t in learner.model.state_dict().items()}
    cache.release()
    for piece in epoch._storage._pieces:  # the next network writes there
        piece.zero_()
    for name, tensor in learner.model.state_dict().items():
        assert (torch.equal(tensor, before[name][0]), tensor.stride()) == (True, before[name][1])


def test_an_interrupted_epoch_leaves_no_trace_for_the_next_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.engine.captured.BLOCK", 1)
    make, cache = maker(BUILT_IN["mlp"], "cpu"), GraphCache(streams=1)
    first = make(0)
    epoch = cache.of(torch.device("cpu")).epoch_of(first)
    epoch._updates()  # one block of three, and then nothing more
    cache.release()
    script = [WAIT, WAIT]
    expected = run(EagerEngine([make(1)], [None]), [script])
    assert_same(run(GraphEngine([make(1)], [None], cache=cache), [script]), expected)
    assert cache.captures == 1


def test_a_full_device_says_how_many_networks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    class Card:
        total_memory = 100 * 2**30

    monkeypatch.setattr("esper.engine.graphs.PARTS", (1,))  # so that all four hold memory when it is full
    monkeypatch.setattr("esper.engine.captured.CapturedEpoch.run", full)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 90 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: Card)
    make = maker(BUILT_IN["mlp"], "cpu")
    with pytest.raises(RuntimeError, match=r"4 networks do not fit into 100 GiB .* use at most about 3 environments"):
        GraphEngine([make(seed) for seed in range(4)], [None] * 4).step([WAIT] * 4)


def test_fingerprints_tell_apart_what_computes_something_else() -> None:
    def host(slope: float = 0.1, width: int = 4, function: Callable[..., object] = torch.relu) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, width), nn.LeakyReLU(slope))
        module.function = function
        return module

    assert module_fingerprint(host()) == module_fingerprint(host())
    assert module_fingerprint(host()) != module_fingerprint(host(slope=0.2))
    assert module_fingerprint(host()) != module_fingerprint(host(width=5))
    assert module_fingerprint(host()) != module_fingerprint(host(function=torch.tanh))
    one, other = host(function=lambda x: x), host(function=lambda x: x)
    assert module_fingerprint(one) != module_fingerprint(other)  # who knows what they do
    frozen = host()
    frozen[0].weight.requires_grad_(False)
    assert module_fingerprint(host()) != module_fingerprint(frozen)
    hooked = host()
    hooked[0].register_forward_hook(lambda *args: None)
    assert module_fingerprint(host()) != module_fingerprint(hooked)
    tied, untied = (nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert module_fingerprint(tied) != module_fingerprint(untied)
    patched = host()
    patched[0].forward = lambda x: x
    assert module_fingerprint(host()) != module_fingerprint(patched)
    clipped = host()
    clipped[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert module_fingerprint(host()) != module_fingerprint(clipped)
    assert value_fingerprint([1, True]) != value_fingerprint([True, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_in_an_epoch_waits_for_the_device_but_the_reading_of_results() -> None:
    make = maker(BUILT_IN["conv2d"], "cuda")
    learners = [make(seed) for seed in range(4)]
    engine = GraphEngine(learners, [None] * 4)
    for _ in range(3):
        engine.step([germinate(0, "conv")] * 4)
    torch.cuda.set_sync_debug_mode("error")  # waiting for an event, which is how results are awaited, is not forbidden
    try:
        assert len(list(engine.run(learners))) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_fingerprint_is_compared_in_full_only_once_with_its_equal() -> None:
    class Told:
        compared = 0

        def __eq__(self, other: object) -> bool:
            Told.compared += 1
            return isinstance(other, Told)

        def __hash__(self) -> int:
            return 1

    one, same, other = CachedFingerprint((Told(), 1)), CachedFingerprint((Told(), 1)), CachedFingerprint((Told(), 2))
    assert [one == same, one == same, one != other, {one: 5}[same]] == [True, True, True, 5]
    assert Told.compared == 1
