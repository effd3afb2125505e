"""A training loop of one's own, with growth in it; killed at any moment, it goes on where its last epoch ended.

python examples/own_loop.py [FOLDER]      # FOLDER keeps the state; default: no state is kept
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper

EPOCHS = 20


def data():
    """Handwritten digits: training and validation images."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def main(folder=None):
    torch.manual_seed(0)
    train, validation = data()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, EPOCHS)
    growth = esper.Growth(
        model,
        optimizer,
        slots=["1", "3"],
        validate=validation,
        epochs=EPOCHS,
        schedulers=[scheduler],
        controller="heuristic",
    )
    if folder is not None and growth.load_state(f"{folder}/growth.pt"):
        print(f"going on after epoch {growth.epoch}")

    loader = DataLoader(train, batch_size=64, shuffle=True)
    while not growth.over:
        for batch in loader:
            growth.backward(batch)
            growth.clip_grad_norm_(1.0)
            growth.step()
        scheduler.step()
        record = growth.end_epoch()
        print(f"epoch {record.epoch + 1}: {record.measured.accuracy:.1f} %  {record.effect.message}", flush=True)
        if folder is not None:
            growth.save_state(f"{folder}/growth.pt")

    grown = growth.finish()
    print(f"{grown.validation.accuracy:.1f} % with {grown.parameters:,} parameters")
    for seed in grown.history.seeds():
        print(seed.slot, seed.blueprint, seed.fate.name, "-", seed.why_ended)
    return grown


if __name__ == "__main__":
    main(*sys.argv[1:2])
