"""Ranks: who this process is, its device, and what all ranks agree on."""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainConfig
from trainer.errors import DeviceMissing

GROUP_TIMEOUT = datetime.timedelta(minutes=10)
"""A rank that has not answered for so long is dead or hung, and the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all of them."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and talks."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Add numbers up over all ranks, in double precision."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]


def join_ranks(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> Ranks:
    """Take the place that torchrun gave this process, or stand alone.

    Raises:
        DeviceMissing: If the configuration asks for CUDA and there is none, or fewer GPUs than local ranks.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(environment.get("WORLD_SIZE", "1"))
    device = pick_device(config.device, local_rank)
    if device.type == "cpu":
        # torchrun gives every rank one thread unless told otherwise, however many cores there are.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=GROUP_TIMEOUT)
    return Ranks(
        rank=int(environment.get("RANK", "0")),
        local_rank=local_rank,
        local_world_size=local_world_size,
        world_size=world_size,
        device=device,
    )


def leave_ranks() -> None:
    """Close the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The device of a local rank.

    Raises:
        DeviceMissing: If there is no such GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise DeviceMissing(
            f"local rank {local_rank} needs a CUDA device and torch sees {found}",
            next_step="Start as many local ranks as there are GPUs, or use --set train.device=cpu.",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def share_gradients(model: nn.Module, config: TrainConfig, ranks: Ranks) -> nn.Module:
    """Wrap a model so that gradients are averaged over ranks; alone, it is returned as it is."""
    if ranks.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=config.parallel.bucket_cap_mib,
        gradient_as_bucket_view=True,  # without it every gradient exists twice
    )
