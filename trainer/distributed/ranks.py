"""Ranks: this process's rank and device, device events, collectives, and the parallel strategy of a module."""

import contextlib
import datetime
import gc
import inspect
import os
import re
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its stubs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from trainer.config.train_config import (
    GradientDtype,
    TrainConfig,
    gradient_accumulation_steps,
)
from trainer.distributed.cpu_binding import bind_to_nearest_cpus
from trainer.errors import BadConfig, DeviceMissing
from trainer.staging.stage import DEFAULT_TIMEOUT_S

ValueT = TypeVar("ValueT")
DTYPES: dict[GradientDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
TORCHS_BUCKET_CAP_MIB = 25
_MOST_COMPILE_THREADS = 8
_GROUP_LATER_S = 60.0
_OF_THIS_RANK = re.compile(
    r"nccl(UnhandledCudaError|InternalError|InvalidArgument|InvalidUsage)"
)
"""NCCL error codes that are not caused by the death of a peer."""
_CUT_OFF = re.compile(
    r"[Cc]onnection (closed|reset|refused|timed out)|Broken pipe|[Tt]imed? ?out"
)
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of torch's allocator. If both are set, torch reads only the
first, even if it is empty."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Point in time, on the host clock or in the device's work queue (a CUDA event)."""

    moment: Any

    def reached(self) -> bool:
        """Return whether the device has reached this event."""
        return isinstance(self.moment, float) or bool(self.moment.query())

    def wait(self) -> None:
        """Wait until the device has reached this event."""
        if not isinstance(self.moment, float) and not self.moment.query():
            self.moment.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the seconds since an earlier event.

        The device must have reached both.
        """
        if isinstance(self.moment, float):
            return float(self.moment - earlier.moment)
        return float(earlier.moment.elapsed_time(self.moment)) / 1e3


def mark(device: torch.device) -> DeviceEvent:
    """Record an event in the device's queue and return it.

    On a CPU, return the current time.
    """
    if device.type != "cuda":
        return DeviceEvent(time.perf_counter())
    # The host sleeps while it waits, as spinning would take a core from DataLoader
    # workers.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return DeviceEvent(event)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start an asynchronous copy to the host.

    It is complete once the device reaches an event marked afterwards.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Start an asynchronous copy of numbers to a device, in fp64."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=torch.float64, pin_memory=pinned).to(
        device, non_blocking=True
    )


class GradientTraffic:
    """DDP communication hook that averages gradient buckets over all ranks.

    With a 16-bit gradient dtype, gradients are divided before they are added, so that
    sums stay in range; ``parameter.grad`` and the optimizer stay in 32 bits.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        dtype: GradientDtype,
        device: torch.device,
    ) -> None:
        self._dtype = DTYPES[dtype]
        self._device = device
        self._square = torch.zeros((), device=device)
        self._departed: DeviceEvent | None = None
        self.synchronise = True
        """False skips the all-reduce, to measure compute-only steps: weights then
        differ between ranks."""
        module.register_comm_hook(None, self._send)

    def take(self) -> tuple[torch.Tensor, DeviceEvent | None]:
        """Return this rank's squared gradient norm, shape (), and the event before it waits for the last all-reduce."""
        square, self._square = self._square, torch.zeros((), device=self._device)
        departed, self._departed = self._departed, None
        return square, departed

    def _send(
        self, _: object, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer()
        self._square += gradient.dot(gradient)  # no temporary
        self._departed = mark(self._device)
        # NCCL divides on the way; gloo cannot.
        averages = self.synchronise and self._device.type == "cuda"
        if not averages:
            gradient.div_(dist.get_world_size())
        travelling = (
            gradient if gradient.dtype == torch.float64 else gradient.to(self._dtype)
        )

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            (reduced,) = future.value()
            return gradient if reduced is gradient else gradient.copy_(reduced)

        sent: torch.futures.Future[Any] = torch.futures.Future()
        if self.synchronise:
            operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
            sent = dist.all_reduce(travelling, operation, async_op=True).get_future()
        else:
            sent.set_result([travelling])
        return sent.then(arrived)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's rank and device, and collectives over all ranks."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    device: torch.device
    cpus_before_binding: int | None = None
    """Number of CPUs available to this process before it was bound to those near its
    GPU; None if not recorded."""

    @property
    def leads(self) -> bool:
        """True on rank 0, which writes files and messages."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Name of the GPU, or ``cpu``."""
        return (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else "cpu"
        )

    @property
    def device_memory_bytes(self) -> int | None:
        """Total GPU memory as torch reports it, in bytes; None on a CPU."""
        return (
            int(torch.cuda.get_device_properties(self.device).total_memory)
            if self.device.type == "cuda"
            else None
        )

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the sums over all ranks, in double precision.

        This blocks the host, but waits for no device.
        """
        return self._agree(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the element-wise maxima over all ranks.

        Otherwise like ``all_reduce_sum``.
        """
        return self._agree(values, dist.ReduceOp.MAX)

    def all_gather_float(self, value: float) -> list[float]:
        """Return every rank's value, by rank; otherwise like ``all_reduce_sum``."""
        return self.all_reduce_sum(
            *(value if rank == self.rank else 0.0 for rank in range(self.world_size))
        )

    def _agree(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return [float(value) for value in tensor.tolist()]

    def all_gather_object(self, value: ValueT) -> list[ValueT]:
        """Return every rank's value, by rank.

        This blocks the host until all ranks have called it.
        """
        found = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: ValueT) -> ValueT:
        """Return the value of rank 0 on every rank."""
        told = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(told)
        return told[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor on the device with that of rank 0."""
        if self.world_size > 1:
            dist.broadcast(tensor, 0)

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start to sum a tensor over all ranks, overwriting it.

        Return a function that makes its device wait.
        """
        return (
            (lambda: None)
            if self.world_size == 1
            else dist.all_reduce(tensor, async_op=True).wait
        )


def join_ranks(
    config: TrainConfig,
    environment: Mapping[str, str] = os.environ,
    rendezvous: str | Path | None = None,
) -> Ranks:
    """Join the process group described by torchrun's environment variables.

    Without them, return a single rank.

    ``rendezvous`` is a file through which ranks of one host connect; it must not exist
    yet, in a separate directory. None uses ``MASTER_ADDR`` and ``MASTER_PORT``. Raises
    ``DeviceMissing`` if there is no GPU for this rank.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    device, cpus = pick_device(config.device, local_rank), len(os.sched_getaffinity(0))
    ranks = Ranks(
        rank=int(environment.get("RANK", "0")),
        local_rank=local_rank,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        device=device,
        cpus_before_binding=cpus,
    )
    if device.type == "cuda":
        gpu: Any = torch.cuda.get_device_properties(device)
        bind_to_nearest_cpus(
            f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        )
    else:
        # torchrun limits every rank to one thread unless you set OMP_NUM_THREADS.
        torch.set_num_threads(max(1, cpus // ranks.local_world_size))
    if ranks.world_size > 1:
        timeout = datetime.timedelta(seconds=process_group_timeout_s(config))
        # gloo for tensors on the host, so that agreeing on a number does not wait for
        # the GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        file = dist.FileStore  # type: ignore[attr-defined]  # exists, though not exported
        store = None if rendezvous is None else file(str(rendezvous), ranks.world_size)
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
    return ranks


def open_libraries(ranks: Ranks) -> None:
    """Let libraries take their threads, handles, workspaces and connections now, before there is a model.

    Workspaces of cuBLAS taken within a step would split the memory of its activations
    for good: with BERT-base on 94 GB the allocator then reserved 4 GB more.
    """
    device = ranks.device
    weight = torch.ones(256, 256, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    ranks.all_reduce_async(torch.zeros(1, device=device))()
    if device.type == "cuda":
        ranks.all_reduce_sum(0.0)  # hosts agree over connections of their own
        torch.cuda.synchronize(device)


def process_group_timeout_s(config: TrainConfig) -> float:
    """Return the process group's timeout, in seconds: above the ``Watchdog``'s and that of staging on another node."""
    return (
        max(
            config.parallel.timeout_s,
            0 if config.data.stage_to is None else DEFAULT_TIMEOUT_S,
        )
        + _GROUP_LATER_S
    )


def leave_ranks(*, together: bool) -> None:
    """Destroy the process group, if any.

    ``together`` waits for all ranks, as messages in flight could crash a peer.
    """
    if not dist.is_initialized():
        return
    if together:
        dist.barrier()
    gc.collect()  # reference cycles of modules keep the group alive
    dist.destroy_process_group()


def is_lost_rank_error(error: Exception, *, rehearsed: bool = True) -> bool:
    """Return whether an error means that another rank is unreachable.

    Before a step was ``rehearsed``, which creates every communicator, an NCCL system
    error comes from this node, such as too little shared memory or a wrong network
    interface, and a restart does not help.
    """
    told = str(error)
    if _OF_THIS_RANK.search(told) or (not rehearsed and "ncclSystemError" in told):
        return _CUT_OFF.search(told) is not None
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        name in told for name in ("gloo", "NCCL", "TCPStore")
    )


def set_cuda_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the environment variables of CUDA and torch's allocator, unless you have set the same options yourself.

    GPUs are numbered by PCI bus position, as in NVML. Expandable segments make memory
    grow almost linearly with the micro-batch size; ``cudaMallocAsync`` has no segments.
    Processes in which Inductor compiles kernels, by default as many as CPUs in every
    rank, share the CPUs. Call this before CUDA is first used.
    """
    together = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(
        1, min(_MOST_COMPILE_THREADS, len(os.sched_getaffinity(0)) // together)
    )
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    name = next(
        (name for name in _ALLOCATOR_SETTINGS if name in environment),
        "PYTORCH_ALLOC_CONF",
    )
    settings = environment.get(name, "")
    if "expandable_segments" not in settings and "cudaMallocAsync" not in settings:
        environment[name] = ",".join(
            filter(None, (settings, "expandable_segments:True"))
        )


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a local rank, and select it.

    Raises:
        DeviceMissing: If there is no such GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    set_cuda_defaults(os.environ)
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        message = (
            f"process {local_rank} of this node requires a GPU, but torch sees {found}"
        )
        next_step = (
            "Start one process per GPU (--nproc-per-node), or use --set"
            " train.device=cpu"
        )
        raise DeviceMissing(message, next_step=next_step)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModule:
    """Module wrapped for the parallel strategy, with its gradient synchronisation."""

    module: nn.Module
    """Wrapped module, to be called; the original module with a single rank."""
    traffic: GradientTraffic | None
    """DDP's communication hook; None with a single rank or fsdp2."""

    def synchronise(self, now: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward synchronises gradients, or only accumulates them if ``now`` is false."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(now)
        elif isinstance(self.module, DistributedDataParallel) and not now:
            return self.module.no_sync()
        return contextlib.nullcontext()


def parallelise(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainConfig, ranks: Ranks
) -> ParallelModule:
    """Wrap a module for its parallel strategy; with a single rank, leave it unchanged.

    ``module`` is on this rank's device, with the same weights on every rank; fsdp2
    gathers ``layers`` one at a time. Raises ``BadConfig`` for invalid fsdp2 settings.
    """
    parallel = config.parallel
    if ranks.world_size == 1:
        return ParallelModule(module=module, traffic=None)
    if parallel.strategy == "fsdp2":
        return ParallelModule(
            module=_shard(module, layers, config, ranks), traffic=None
        )
    # The older name warns if torch has the newer one.
    newer = (
        "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    )
    unchanged_buffers: dict[str, Any] = {
        "forward_sync_buffers" if newer else "broadcast_buffers": False
    }
    wrapped = DistributedDataParallel(
        module,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        # torch makes the first bucket small, to start gradient synchronisation early,
        # only if no size is set.
        bucket_cap_mb=(
            None
            if parallel.bucket_cap_mib == TORCHS_BUCKET_CAP_MIB
            else parallel.bucket_cap_mib
        ),
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        static_graph=parallel.static_graph,
        **unchanged_buffers,
    )
    return ParallelModule(
        module=wrapped,
        traffic=GradientTraffic(wrapped, parallel.gradient_dtype, ranks.device),
    )


def reshard_weights(module: nn.Module) -> None:
    """Reshard the weights after a forward without a backward; for fsdp2 only."""
    if isinstance(module, FSDPModule):
        module.reshard()


def _shard(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainConfig, ranks: Ranks
) -> nn.Module:
    dtype = config.parallel.gradient_dtype
    if dtype != "fp32" and gradient_accumulation_steps(config, ranks.world_size) > 1:
        why = (
            "cannot be used with fsdp2 and gradient accumulation, which would also be"
            " in 16 bits"
        )
        next_step = (
            "Use --set train.parallel.gradient_dtype=fp32, or micro-batches large"
            " enough for one per step."
        )
        raise BadConfig(f"gradient_dtype = {dtype!r} {why}", next_step=next_step)
    together = config.parallel.shard_ranks or ranks.world_size
    copies, left = divmod(ranks.world_size, together)
    if left:
        message = (
            f"parallel.shard_ranks = {together} must divide the number of ranks,"
            f" {ranks.world_size}"
        )
        raise BadConfig(
            message, next_step="Use a divisor, such as the number of GPUs per node."
        )
    # One dimension is FSDP; a second one for copies makes it HSDP.
    shape, names = (
        ((together,), ("shard",))
        if copies == 1
        else ((copies, together), ("copy", "shard"))
    )
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    of_layers = policy = MixedPrecisionPolicy(
        reduce_dtype=None if dtype == "fp32" else DTYPES[dtype]
    )
    if config.precision == "bf16":
        of_layers = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=DTYPES[dtype], cast_forward_inputs=False
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=of_layers)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(module, "evaluate")
    return module
