"""Ranks: this process's rank and device, and collectives over all ranks."""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.formats.train_config import STAGING_TIMEOUT_S, TrainConfig
from trainer.runtime.cpu_binding import bind_to_nearest_cpus
from trainer.runtime.device import pick_device

ValueT = TypeVar("ValueT")
_GROUP_EXTRA_S = 60.0
"""Time by which the process group's timeout exceeds those of the watchdog and of
staging, in seconds, so that they report a hang first."""
_LEFT_GROUPS: list[Any] = []
"""Process groups that this process has left. Dropping the last reference to one joins
its threads. DDP's reducer does so while it holds the GIL, which a thread of gloo may
need first to release a tensor, and both wait forever
(https://github.com/pytorch/pytorch/issues/56297)."""
_WARM_UP_SIZE = 256
"""Rows and columns of the matrix that warms up the matmul library; any size does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's rank and device, and collectives over all ranks."""

    rank: int
    """Number of this process among all ranks, from 0."""
    local_rank: int
    """Number of this process among the ranks of its node, from 0."""
    local_world_size: int
    """Number of ranks of this node."""
    world_size: int
    """Number of all ranks."""
    device: torch.device
    """Device of this rank's model and batches."""
    cpus_before_binding: int | None = None
    """Number of CPUs available to this process before it was bound to those near its
    GPU; None if not recorded."""

    @property
    def leads(self) -> bool:
        """True on rank 0 only, which writes files and messages for all ranks."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Name of the GPU, or ``cpu``."""
        if self.device.type != "cuda":
            return "cpu"
        return torch.cuda.get_device_name(self.device)

    @property
    def device_memory_bytes(self) -> int | None:
        """Total GPU memory as torch reports it, in bytes; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def gpu_uuid(self) -> str | None:
        """UUID of the GPU, as NVML writes it; None on a CPU."""
        if self.device.type != "cuda":
            return None
        gpu: Any = torch.cuda.get_device_properties(self.device)
        return f"GPU-{gpu.uuid}"

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the element-wise sums over all ranks, in fp64.

        This blocks the host until all ranks have called it, but waits for no GPU.
        """
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the element-wise maxima over all ranks, in fp64.

        Like ``all_reduce_sum``, this blocks the host.
        """
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def all_gather_float(self, value: float) -> list[float]:
        """Return every rank's value, in the order of ranks, in fp64.

        Like ``all_reduce_sum``, this blocks the host.
        """
        by_rank = [0.0] * self.world_size
        by_rank[self.rank] = value
        return self.all_reduce_sum(*by_rank)

    def _all_reduce(
        self, values: Sequence[float], operation: dist.ReduceOp.RedOpType
    ) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor.tolist()]

    def all_gather_object(self, value: ValueT) -> list[ValueT]:
        """Return every rank's picklable value, in the order of ranks.

        This blocks the host until all ranks have called it.
        """
        by_rank = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(by_rank, value)
        return by_rank

    def broadcast_object(self, value: ValueT) -> ValueT:
        """Return rank 0's picklable value on every rank.

        Values of other ranks are ignored.
        """
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor on the device with that of rank 0."""
        if self.world_size > 1:
            dist.broadcast(tensor, 0)

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start to sum a tensor over all ranks, overwriting it.

        Returns:
            A function that lets the tensor's device wait for the sums.
        """
        if self.world_size == 1:
            return lambda: None
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work.wait


def join_ranks(
    config: TrainConfig,
    environment: Mapping[str, str] = os.environ,
    rendezvous: str | Path | None = None,
) -> Ranks:
    """Join the other ranks of a training, as ``join_on_device`` does.

    Args:
        config: Configuration of training.
        environment: Environment variables.
        rendezvous: File through which the ranks of one node connect, or None.

    Raises:
        DeviceMissing: If there is no GPU for this rank.
    """
    return join_on_device(
        config.device,
        environment,
        rendezvous,
        timeout_s=process_group_timeout_s(config),
    )


def join_on_device(
    device_type: str,
    environment: Mapping[str, str] = os.environ,
    rendezvous: str | Path | None = None,
    *,
    timeout_s: float,
) -> Ranks:
    """Join the process group described by torchrun's environment variables.

    Without these variables, the process is a single rank. It is bound to the CPUs near
    its GPU.

    Args:
        device_type: Kind of device, ``cpu`` or ``cuda``.
        environment: Environment variables.
        rendezvous: File through which the ranks of one node connect. It must not exist
            yet, and its directory must hold nothing else. None uses ``MASTER_ADDR`` and
            ``MASTER_PORT``.
        timeout_s: Time after which a collective fails, in seconds.

    Raises:
        DeviceMissing: If there is no GPU for this rank.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    device = pick_device(device_type, local_rank)
    cpus_before_binding = len(os.sched_getaffinity(0))
    ranks = Ranks(
        rank=int(environment.get("RANK", "0")),
        local_rank=local_rank,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        device=device,
        cpus_before_binding=cpus_before_binding,
    )
    if device.type == "cuda":
        bind_to_nearest_cpus(_pci_address(device))
    else:
        # torchrun limits every rank to one thread unless you set OMP_NUM_THREADS.
        torch.set_num_threads(max(1, cpus_before_binding // ranks.local_world_size))
    if ranks.world_size > 1:
        _init_process_group(ranks, rendezvous, timeout_s)
    return ranks


def _pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU, such as ``0000:dc:00.0``."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def _init_process_group(
    ranks: Ranks, rendezvous: str | Path | None, timeout_s: float
) -> None:
    # gloo for tensors on the host, so that ranks agree on a number without waiting for
    # their GPUs.
    backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
    store = None
    if rendezvous is not None:
        file_store = dist.FileStore  # type: ignore[attr-defined]  # exists, though not exported
        store = file_store(str(rendezvous), ranks.world_size)
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def warm_up_libraries(ranks: Ranks) -> None:
    """Use each library once, so that it takes threads, workspaces and connections.

    Call this before there is a model. Workspaces of cuBLAS taken within a step would
    split the memory of its activations for good: with BERT-base on 94 GB the allocator
    then reserved 4 GB more.
    """
    device = ranks.device
    weight = torch.ones(_WARM_UP_SIZE, _WARM_UP_SIZE, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    wait_for_sum = ranks.all_reduce_async(torch.zeros(1, device=device))
    wait_for_sum()
    if device.type == "cuda":
        # Tensors on the host have connections of their own, those of gloo.
        ranks.all_reduce_sum(0.0)
        torch.cuda.synchronize(device)


def process_group_timeout_s(config: TrainConfig) -> float:
    """Return the process group's timeout, in seconds.

    It exceeds the timeout of the ``Watchdog`` and, if data is staged, that of waiting
    for another process that stages it.
    """
    timeout_s: float = config.parallel.timeout_s
    if config.data.stage_to is not None:
        timeout_s = max(timeout_s, STAGING_TIMEOUT_S)
    return timeout_s + _GROUP_EXTRA_S


def leave_ranks(*, together: bool) -> None:
    """Destroy the process group, if any.

    Its object, threads and connections over gloo stay until the process ends, which
    should be soon.

    Args:
        together: True to wait first until all ranks call this, so that none leaves
            while another still needs its messages, which would crash that one.
    """
    if not dist.is_initialized():
        return
    if together:
        dist.barrier()
    _LEFT_GROUPS.append(dist.group.WORLD)
    dist.destroy_process_group()
