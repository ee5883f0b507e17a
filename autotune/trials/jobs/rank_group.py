"""The ranks of a trial on one node: this process's rank, and agreement between ranks.

The group is apart from ``torch.distributed``'s default group, which belongs to the code
that is tried: that code joins its own ranks as under torchrun, or not at all.
"""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

TIMEOUT_S = 86400.0
"""Time that a rank waits for the others, in seconds: a day, so that the time limit of
the trial decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """This process's rank and device, and collectives over the ranks of a trial.

    Collectives are those of gloo on the host, which wait for no GPU.
    """

    rank: int
    """Number of this process among the ranks, from 0."""
    world_size: int
    """Number of ranks, all on this node."""
    device: torch.device
    """Device of this rank."""
    process_group: Any = None
    """``ProcessGroupGloo`` of the ranks; None for one rank."""

    @property
    def local_rank(self) -> int:
        """Number of this process among the ranks of this node: of all ranks."""
        return self.rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks of this node: all of them."""
        return self.world_size

    @property
    def device_name(self) -> str:
        """Name of the GPU, or ``cpu``."""
        if self.device.type != "cuda":
            return "cpu"
        return torch.cuda.get_device_name(self.device)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the element-wise sums over all ranks, in fp64; blocks the host."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the element-wise maxima over all ranks, in fp64; blocks the host."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def all_gather_float(self, value: float) -> list[float]:
        """Return every rank's value, in the order of ranks; blocks the host."""
        by_rank = [0.0] * self.world_size
        by_rank[self.rank] = value
        return self.all_reduce_sum(*by_rank)

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Leave a tensor as it is: libraries of the tried code are not opened here."""
        return lambda: tensor

    def leave(self) -> None:
        """Wait until all ranks call this, so that none leaves while one is needed."""
        if self.process_group is not None:
            self.process_group.barrier().wait()

    def _all_reduce(
        self, values: Sequence[float], operation: dist.ReduceOp.RedOpType
    ) -> list[float]:
        if self.process_group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        self.process_group.allreduce([tensor], options).wait()
        return [float(value) for value in tensor.tolist()]


def join_rank_group(
    device: Literal["cpu", "cuda"], local: Mapping[str, Any]
) -> RankGroup:
    """Join the ranks of a trial.

    Args:
        device: Kind of device; each rank takes the GPU of its number.
        local: ``Trial.local``, with ``environment`` (the variables of torchrun) and
            ``rendezvous`` (a file) if there are several ranks.
    """
    environment: Mapping[str, str] = local.get("environment", {})
    rank = int(environment.get("RANK", "0"))
    world_size = int(environment.get("WORLD_SIZE", "1"))
    torch_device = torch.device("cpu")
    if device == "cuda":
        torch_device = torch.device("cuda", rank)
        torch.cuda.set_device(torch_device)
    process_group = None
    if world_size > 1:
        distributed: Any = dist  # FileStore and ProcessGroupGloo exist, not exported
        store = distributed.FileStore(f"{local['rendezvous']}-agreement", world_size)
        process_group = distributed.ProcessGroupGloo(
            store, rank, world_size, datetime.timedelta(seconds=TIMEOUT_S)
        )
        if device == "cpu" and "OMP_NUM_THREADS" not in environment:
            cpus = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cpus // world_size))
    return RankGroup(
        rank=rank,
        world_size=world_size,
        device=torch_device,
        process_group=process_group,
    )
