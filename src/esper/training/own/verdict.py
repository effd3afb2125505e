"""Whether growing paid: the grown network against the same host without growth, with figures and their noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from esper.engine.measure import BLOCKS, Evaluation, Score, SetScore, jackknife_error, standard_error
from esper.env.rent import rent as rent_of
from esper.growth.probe import call, untouched
from esper.growth.randomness import preserved_rng
from esper.tasks.feed import Batch


@dataclass(frozen=True, slots=True)
class Compared:
    """Two networks on one set of data."""

    grown: float
    control: float
    """Their scores in percent."""
    error: float
    """Standard error of the difference, paired by example; infinite where it could not be estimated."""

    @classmethod
    def of(
        cls,
        measured: Sequence[Evaluation],
        networks: Sequence[nn.Module],
        batches: Callable[[], Iterable[Batch]],
        score: Score,
    ) -> Compared:
        """What was measured of the grown network and of the control; for the noise, both see the same batches again."""
        with preserved_rng(next(networks[0].parameters()).device):
            return cls(measured[0].accuracy, measured[1].accuracy, _error(networks, batches(), score))

    @property
    def gain(self) -> float:
        return self.grown - self.control


@dataclass(frozen=True, slots=True)
class Verdict:
    """For a network in which something grew, and its control."""

    validation: Compared
    test: Compared | None
    sizes: tuple[int, int]
    """Parameters of the grown network and of its host."""
    rent: float
    metric: str

    @property
    def cost(self) -> float:
        """Points that the network's size must earn."""
        return rent_of(*self.sizes, self.rent)

    @property
    def paid(self) -> bool:
        """On the validation data: test data decide nothing."""
        return self.validation.grown - self.cost > self.validation.control

    @property
    def text(self) -> str:
        found = self.validation
        said = [
            f"Growing {'paid' if self.paid else 'did not pay'}: the validation {self.metric} is {found.grown:.1f} % "
            f"with growth and {found.control:.1f} % without{self._difference(found, self._price)}."
        ]
        if abs(found.gain - self.cost) <= found.error < math.inf:
            said.append("That is within one standard error, so it may be chance.")
        if self.test is not None:
            said.append(
                f"On the test data, by which nothing was decided, it is {self.test.grown:.1f} % and "
                f"{self.test.control:.1f} %{self._difference(self.test)}."
            )
        if not self.paid:
            said.append("The network without growth is `grown.ungrown`, which `save` writes into the folder `ungrown`.")
        if not self.paid and found.gain > 0.0:  # it is the price alone
            said.append("Where size costs nothing, set the rent to 0.")
        return " ".join(said)

    @property
    def _price(self) -> str:
        more = self.sizes[0] / self.sizes[1] - 1.0
        return f"; {more:.2f} extra host sizes at a rent of {self.rent:g} cost {self.cost:.1f}"

    def _difference(self, found: Compared, price: str = "") -> str:
        error = f" ± {found.error:.1f}" if math.isfinite(found.error) else ""
        gain = f" ({found.gain:+z.1f}{error} points)"
        net = found.gain - self.cost
        higher = "higher" if net > 0.0 else "lower"
        return gain if self.cost == 0.0 else f"{gain}{price}, so the score is {abs(net):.1f} points {higher}"


def _error(networks: Sequence[nn.Module], batches: Iterable[Batch], score: Score) -> float:
    return (
        _error_of_set(networks, batches, score)
        if isinstance(score, SetScore)
        else _error_of_mean(networks, batches, score)
    )


def _error_of_mean(networks: Sequence[nn.Module], batches: Iterable[Batch], score: Score) -> float:
    differences = []
    for inputs, targets in batches:
        first, second = (score(_outputs(network, inputs), targets).double().reshape(-1) for network in networks)
        differences.append((first - second).cpu())
    found = torch.cat(differences)
    return standard_error(float(found.mean()), float(found.square().mean()), len(found)) if len(found) > 1 else math.inf


def _error_of_set(networks: Sequence[nn.Module], batches: Iterable[Batch], score: SetScore) -> float:
    """By leaving out blocks of examples."""
    counts, count = [score.start(BLOCKS) for _ in networks], 0
    for inputs, targets in batches:
        block = torch.arange(count, count + len(targets), device=targets.device) % BLOCKS
        for network, counted in zip(networks, counts, strict=True):
            counted.update(_outputs(network, inputs), targets, block)
        count += len(targets)
    blocks = min(BLOCKS, count)
    first, second = (counted.compute(blocks)[1:] for counted in counts)
    return jackknife_error([a - b for a, b in zip(first, second, strict=True)])


def _outputs(network: nn.Module, inputs: object) -> object:
    with untouched(network):
        return call(network, inputs)
