"""An image classifier with Lightning: train it, and let autotune find its batch size.

    python lightning_vision.py
    autotune probe --step lightning_vision:build_step --memory 1GB
    autotune workers profiles/lightning_vision-cpu.toml \
        --loader lightning_vision:build_loader

Images are random noise, so that the example needs no download.
"""

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.nn import functional

from autotune.subjects.lightning import module_loader, module_step

CLASSES, SIDE = 10, 64


class Noise(torch.utils.data.Dataset):
    """Images of noise with a class each, the same in every process."""

    def __len__(self):
        return 4096

    def __getitem__(self, number):
        image = torch.randn(
            3, SIDE, SIDE, generator=torch.Generator().manual_seed(number)
        )
        return image, number % CLASSES


class Data(lightning.LightningDataModule):
    """The data, with the two values that autotune finds."""

    def __init__(self, batch_size=8, num_workers=0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            Noise(), batch_size=self.batch_size, num_workers=self.num_workers
        )


def block(inputs, outputs):
    """Return a convolution that halves the image."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Classifier(lightning.LightningModule):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            block(3, 32),
            block(32, 64),
            block(64, 128),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, CLASSES),
        )

    def training_step(self, batch, number):
        images, classes = batch
        return functional.cross_entropy(self.network(images), classes)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def build_step(micro_batch_size, device):
    """Return what `autotune probe` tries."""
    return module_step(Classifier(), Data(), micro_batch_size, device)


def build_loader(num_workers):
    """Return what `autotune workers` tries."""
    return module_loader(Data(), num_workers)


if __name__ == "__main__":
    lightning.Trainer(max_steps=20, logger=False, enable_checkpointing=False).fit(
        Classifier(), Data()
    )
