"""Accelerate: ``--subject accelerate --step accelerate_parts:make_parts``."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small_training import Network, Samples, collate


def make_parts(strategy="ddp"):
    """Return the parts of the loop."""
    plugin = None
    if strategy == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (
        accelerator,
        model,
        optimizer,
        Samples(),
        collate,
    )
