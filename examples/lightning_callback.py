"""A Lightning module that grows while the Trainer trains it; needs `pip install -e ".[lightning]"`.

python examples/lightning_callback.py [FOLDER]      # FOLDER keeps checkpoints; a second call goes on from the last one
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.integrations.lightning import GrowthCallback

EPOCHS = 20


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        convolutions = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def main(folder=None):
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    train, validation = TensorDataset(images[:1200], labels[:1200]), (images[1200:], labels[1200:])

    growth = GrowthCallback(slots=["1", "3"], validate=validation, model="net", controller="heuristic")
    callbacks = [growth] if folder is None else [growth, ModelCheckpoint(folder, filename="{epoch}", save_last=True)]
    last = None if folder is None else Path(folder) / "last.ckpt"
    trainer = pl.Trainer(
        max_epochs=EPOCHS, callbacks=callbacks, gradient_clip_val=1.0, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=folder is not None,
    )  # fmt: skip
    module = Digits()
    trainer.fit(
        module, DataLoader(train, batch_size=64, shuffle=True), ckpt_path=last if last and last.exists() else None
    )

    grown = growth.grown
    print(f"{grown.validation.accuracy:.1f} % with {grown.parameters:,} parameters")
    for seed in grown.history.seeds():
        print(seed.slot, seed.blueprint, seed.fate.name, "-", seed.why_ended)
    if folder is not None:  # after the fit: last.ckpt may still have a seed that the end of the fit removed
        path = Path(folder) / "grown.ckpt"
        trainer.save_checkpoint(path)
        host = Digits.load_from_checkpoint(path)  # by its own keys; then the seeds
        again = esper.load_seeds(host, path).eval()
        print(f"reloaded: {(again(validation[0]).argmax(1) == validation[1]).float().mean():.1%}")
    return grown


if __name__ == "__main__":
    main(*sys.argv[1:2])
