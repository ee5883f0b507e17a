"""Steps and a loader of a user, for comparisons and measurements on ranks."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def build_step(micro_batch_size=2):
    """Return a step that takes batches, on the ranks of torchrun's variables."""
    model: torch.nn.Module = torch.nn.Linear(64, 64)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    own_batch = torch.ones(micro_batch_size, 64)

    def step(batch=own_batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_loader(micro_batch_size=2, num_workers=0):
    """Return a loader of 256 samples."""
    return DataLoader(
        torch.ones(256, 64), batch_size=micro_batch_size, num_workers=num_workers
    )


def build_sized_step(micro_batch_size):
    """Return the step, whose size has no default."""
    return build_step(micro_batch_size)
