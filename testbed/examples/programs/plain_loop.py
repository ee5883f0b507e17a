"""A plain loop: ``--step plain_loop:build_step``."""

import os

import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from small_training import Network, Samples, collate


def wrap(model, device, strategy):
    """Return the model for its ranks, if torchrun or a trial started several."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if strategy == "none" or world_size == 1:
        return model
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    model.to(device)
    if strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = torch.distributed.device_mesh.init_device_mesh(device, (world_size,))
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


def build_step(micro_batch_size=8, device="cpu", strategy="none"):
    """Return the step that autotune probes, which takes batches of the loader too."""
    model = wrap(Network().to(device), device, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    largest = collate([Samples()[0]] * micro_batch_size)

    def step(batch=largest):
        model(
            **{name: value.to(device) for name, value in batch.items()}
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_loader(
    num_workers=0, micro_batch_size=8, prefetch_factor=None, pin_memory=False
):
    """Return the loader that autotune measures."""
    return torch.utils.data.DataLoader(
        Samples(),
        batch_size=micro_batch_size,
        collate_fn=collate,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )
