"""A small trainer: a model, its optimizer, and the size of its batches."""

from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset


@dataclass
class MiniTrainer:
    """Trains a model on pairs of inputs and targets, in the given precision."""

    model: torch.nn.Module
    dataset: Dataset
    batch_size: int = 8
    bf16: bool = False

    def loader(self, **options):
        """Return the loader of the dataset."""
        return DataLoader(self.dataset, self.batch_size, **options)

    def step_function(self, batch):
        """Return a function that takes one optimizer step on a batch."""
        optimizer = torch.optim.AdamW(self.model.parameters())

        def step(batch=batch):
            inputs, targets = batch
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
