"""Parallel strategies: how ranks share a module and synchronise its gradients."""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from trainer.config.train_config import (
    GradientDtype,
    ParallelSettings,
    TrainConfig,
    gradient_accumulation_steps,
)
from trainer.distributed.device_events import DeviceEvent, mark
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig

DTYPES: dict[GradientDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
TORCHS_BUCKET_CAP_MIB = 25
"""Size of DDP's gradient buckets if none is set."""


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
        """Take what was noted since the last call.

        Returns:
            This rank's squared gradient norm, shape (), and the event before it waits
            for the last all-reduce.
        """
        square = self._square
        departed = self._departed
        self._square = torch.zeros((), device=self._device)
        self._departed = None
        return square, departed

    def _send(
        self, _: object, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the all-reduce of a bucket; the result is the averaged gradient."""
        gradient = bucket.buffer()
        self._square += gradient.dot(gradient)  # no temporary
        self._departed = mark(self._device)
        # NCCL divides on the way; gloo cannot.
        backend_divides = self.synchronise and self._device.type == "cuda"
        if not backend_divides:
            gradient.div_(dist.get_world_size())
        sent = gradient
        if gradient.dtype != torch.float64:
            sent = gradient.to(self._dtype)

        def receive(future: torch.futures.Future[Any]) -> torch.Tensor:
            (reduced,) = future.value()
            return gradient if reduced is gradient else gradient.copy_(reduced)

        future: torch.futures.Future[Any] = torch.futures.Future()
        if self.synchronise:
            operation = dist.ReduceOp.AVG if backend_divides else dist.ReduceOp.SUM
            future = dist.all_reduce(sent, operation, async_op=True).get_future()
        else:
            future.set_result([sent])
        return future.then(receive)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModule:
    """Module wrapped for the parallel strategy, with its gradient synchronisation."""

    module: nn.Module
    """Wrapped module, to be called; the original module with a single rank."""
    traffic: GradientTraffic | None
    """DDP's communication hook; None with a single rank or fsdp2."""

    def synchronise(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward synchronises gradients.

        If not ``enabled``, backward only accumulates them.
        """
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(enabled)
        elif isinstance(self.module, DistributedDataParallel) and not enabled:
            return self.module.no_sync()
        return contextlib.nullcontext()


def parallelise(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainConfig, ranks: Ranks
) -> ParallelModule:
    """Wrap a module for its parallel strategy; with a single rank, leave it unchanged.

    Args:
        module: Module on this rank's device, with the same weights on every rank.
        layers: Its layers, which fsdp2 gathers one at a time.
        config: Configuration with the parallel strategy.
        ranks: This process's rank.

    Raises:
        BadConfig: If settings are invalid with fsdp2.
    """
    parallel = config.parallel
    if ranks.world_size == 1:
        return ParallelModule(module=module, traffic=None)
    if parallel.strategy == "fsdp2":
        _shard(module, layers, config, ranks)
        return ParallelModule(module=module, traffic=None)
    wrapped = _replicate(module, parallel, ranks.device)
    traffic = GradientTraffic(wrapped, parallel.gradient_dtype, ranks.device)
    return ParallelModule(module=wrapped, traffic=traffic)


def reshard_weights(module: nn.Module) -> None:
    """Reshard the weights after a forward without a backward; for fsdp2 only."""
    if isinstance(module, FSDPModule):
        module.reshard()


def _replicate(
    module: nn.Module, parallel: ParallelSettings, device: torch.device
) -> DistributedDataParallel:
    """Wrap a module for DDP, whose buffers never change."""
    # The older name warns if torch has the newer one.
    names = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "broadcast_buffers"
    if "forward_sync_buffers" in names:
        sync_buffers = "forward_sync_buffers"
    unchanged_buffers: dict[str, Any] = {sync_buffers: False}
    # torch makes the first bucket small, to start gradient synchronisation early, only
    # if no size is set.
    bucket_cap_mib: float | None = parallel.bucket_cap_mib
    if bucket_cap_mib == TORCHS_BUCKET_CAP_MIB:
        bucket_cap_mib = None
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mib,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        static_graph=parallel.static_graph,
        **unchanged_buffers,
    )


def _shard(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainConfig, ranks: Ranks
) -> None:
    """Shard a module and its layers with fsdp2, in place."""
    gradient_dtype = config.parallel.gradient_dtype
    accumulation_steps = gradient_accumulation_steps(config, ranks.world_size)
    if gradient_dtype != "fp32" and accumulation_steps > 1:
        raise BadConfig(
            f"gradient_dtype = {gradient_dtype!r} cannot be used with fsdp2 and"
            " gradient accumulation, which would also be in 16 bits",
            next_step=(
                "Use --set train.parallel.gradient_dtype=fp32, or micro-batches large"
                " enough for one per step."
            ),
        )
    mesh = _mesh(config, ranks)
    module_policy = MixedPrecisionPolicy(
        reduce_dtype=None if gradient_dtype == "fp32" else DTYPES[gradient_dtype]
    )
    layer_policy = module_policy
    if config.precision == "bf16":
        layer_policy = MixedPrecisionPolicy(
            torch.bfloat16,
            reduce_dtype=DTYPES[gradient_dtype],
            cast_forward_inputs=False,
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=layer_policy)
    fully_shard(module, mesh=mesh, mp_policy=module_policy)
    register_fsdp_forward_method(module, "evaluate")


def _mesh(config: TrainConfig, ranks: Ranks) -> DeviceMesh:
    """Return the mesh of ranks that hold shards, and copies of them.

    One dimension is FSDP; a second one for copies makes it HSDP.

    Raises:
        BadConfig: If ``shard_ranks`` does not divide the number of ranks.
    """
    shard_ranks = config.parallel.shard_ranks or ranks.world_size
    copies, remainder = divmod(ranks.world_size, shard_ranks)
    if remainder:
        raise BadConfig(
            f"parallel.shard_ranks = {shard_ranks} must divide the number of ranks,"
            f" {ranks.world_size}",
            next_step="Use a divisor, such as the number of GPUs per node.",
        )
    device_type = ranks.device.type
    if copies == 1:
        return init_device_mesh(device_type, (shard_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device_type, (copies, shard_ranks), mesh_dim_names=("copy", "shard")
    )
