"""A small network and its samples, which the programs beside this file train."""

import os
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

READ_S = float(os.environ.get("BATCH_READ_S", "0"))
"""Time that each batch takes to read, in place of a slow file system."""
POSITIONS, WIDTH, CLASSES, LAYERS = 64, 64, 10, 4


class Output(NamedTuple):
    """Output of the network, as the libraries expect it."""

    loss: torch.Tensor


class Network(nn.Module):
    """Layers over positions, and a class for each sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs, labels):
        hidden = inputs
        for layer in self.layers:
            hidden = functional.gelu(layer(hidden))
        logits = self.head(hidden.mean(dim=1))
        return Output(loss=functional.cross_entropy(logits, labels))


class Samples(torch.utils.data.Dataset):
    """Noise with a class, the same in every process."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        noise = torch.Generator().manual_seed(index)
        inputs = torch.randn(POSITIONS, WIDTH, generator=noise)
        return {"inputs": inputs, "labels": torch.tensor(index % CLASSES)}


def collate(samples):
    """Return a batch of samples."""
    time.sleep(READ_S)
    return torch.utils.data.default_collate(samples)
