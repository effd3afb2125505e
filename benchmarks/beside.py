"""Seeds after a linear layer or beside it: what each is worth to a narrow host, on generated tables.

    python benchmarks/beside.py            # seven tables, three rates, four seeds: about five minutes on one core

Nothing grows here: the seeds are there from the start, so that only their place differs. For each table and network the
best of three rates is shown, chosen by the same test set for all of them. The form of seeds beside a layer was chosen
on these tables (docs/slots.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro
from sklearn import datasets
from torch import Tensor, nn

import esper
from esper.growth.graft import graft
from esper.growth.seed import Seed
from esper.growth.tensors import count_parameters
from esper.training.statistics import bootstrap
from page_text import in_points, table
from real_arms import accuracy, adamw, loss_of

EXAMPLES, TRAIN, EPOCHS, BATCH, WIDTH = 1200, 400, 40, 32, 8
RATES = (0.001, 0.003, 0.01)
Pair = tuple[Tensor, Tensor]


def classes(features: int, informative: int, redundant: int) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        return datasets.make_classification(
            EXAMPLES,
            features,
            n_informative=informative,
            n_redundant=redundant,
            n_classes=5,
            flip_y=0.05,
            random_state=seed,
        )

    return make


TABLES: dict[str, Callable[[int], Any]] = {
    "friedman1": lambda seed: datasets.make_friedman1(EXAMPLES, 10, noise=1.0, random_state=seed),
    "friedman1, 50 features": lambda seed: datasets.make_friedman1(EXAMPLES, 50, noise=1.0, random_state=seed),
    "friedman2": lambda seed: datasets.make_friedman2(EXAMPLES, noise=50.0, random_state=seed),
    "classes, 20 features": classes(20, 8, 4),
    "classes, 100 features": classes(100, 12, 10),
    "quantiles, 4 features": lambda seed: datasets.make_gaussian_quantiles(
        n_samples=EXAMPLES, n_features=4, n_classes=4, random_state=seed
    ),
    "quantiles, 10 features": lambda seed: datasets.make_gaussian_quantiles(
        n_samples=EXAMPLES, n_features=10, n_classes=4, random_state=seed
    ),
}
NETWORKS = {
    "host": (WIDTH, ()),
    "seeds after": (WIDTH, ("1", "3")),
    "seeds beside": (WIDTH, ("0", "2")),
    "host with ×4 parameters": (2 * WIDTH + 2, ()),
}


def read(name: str, seed: int) -> tuple[Pair, Pair]:
    """Inputs, and the targets of a regression, are scaled by the training examples."""
    x, y = (torch.from_numpy(part) for part in TABLES[name](seed))
    x = ((x - x[:TRAIN].mean(0)) / x[:TRAIN].std(0)).float()
    if y.is_floating_point():
        y = ((y - y[:TRAIN].mean()) / y[:TRAIN].std()).float()[:, None]
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def network(width: int, slots: tuple[str, ...], train: Pair, seed: int) -> nn.Module:
    x, y = train
    outputs = 1 if y.is_floating_point() else int(y.max()) + 1
    torch.manual_seed(seed)
    hidden = [nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(width, outputs))
    shapes = {slot.path: slot.shape for slot in esper.slots(model, x[:2])}
    graft(model, [(path, Seed("mlp_small", shapes[path]).body, 1.0, {}) for path in slots])
    return model


def trained(model: nn.Module, train: Pair, rate: float, seed: int) -> nn.Module:
    """AdamW; the rate falls to zero over the last 30 % of the updates."""
    updates, rng = EPOCHS * TRAIN // BATCH, torch.Generator().manual_seed(seed)
    optimizer = adamw(rate, model.parameters())
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (updates - update) / (0.3 * updates))
        rows = torch.randint(TRAIN, (BATCH,), generator=rng)
        optimizer.zero_grad()
        loss_of(model(train[0][rows]), train[1][rows]).backward()
        optimizer.step()
    return model


def measure(name: str, kind: str, seeds: int) -> tuple[list[float], int]:
    """Accuracy (R²) by seed with the best rate, and parameters."""
    width, slots = NETWORKS[kind]
    by_rate, size = [], 0
    for rate in RATES:
        found = []
        for seed in range(seeds):
            train, test = read(name, seed)
            model = network(width, slots, train, seed)
            size = count_parameters(model)
            found.append(accuracy(trained(model, train, rate, seed), test))
        by_rate.append(found)
    return max(by_rate, key=np.mean), size


def main(seeds: int = 4) -> int:
    torch.set_num_threads(1)
    rows, ahead = [], []
    for name in TABLES:
        found = {kind: measure(name, kind, seeds) for kind in NETWORKS}
        rows.append([name, *(f"{np.mean(values):.1f} ({size:,})" for values, size in found.values())])
        ahead.append(float(np.mean(found["seeds beside"][0]) - np.mean(found["seeds after"][0])))
        print(f"{name}: beside − after {ahead[-1]:+.1f}", flush=True)
    print("\n".join(table(["table", *(f"{kind} (parameters)" for kind in NETWORKS)], rows)))
    print(f"\nbeside − after, mean over tables: {in_points(bootstrap(ahead))} points")
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))
