"""Parallel strategies: how ranks share a module and synchronise its gradients."""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.gradient_traffic import DTYPES, GradientTraffic
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import (
    ParallelSettings,
    TrainConfig,
    gradient_accumulation_steps,
)
from trainer.runtime.ranks import Ranks

DEFAULT_BUCKET_CAP_MIB = 25
"""Default of torch for the size of DDP's gradient buckets, in MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModule:
    """Module wrapped for the parallel strategy, with its gradient synchronisation."""

    module: nn.Module
    """Wrapped module, to be called; the original module with a single rank."""
    traffic: GradientTraffic | None
    """DDP's communication hook; None with a single rank or fsdp2."""

    def synchronise(self, *, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward synchronises gradients over ranks.

        If not ``enabled``, backward only adds to this rank's own gradients.
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
    # torch makes the first bucket small, to start gradient synchronisation early, only
    # if no size is set.
    bucket_cap_mib: float | None = parallel.bucket_cap_mib
    if bucket_cap_mib == DEFAULT_BUCKET_CAP_MIB:
        bucket_cap_mib = None
    unchanged_buffers: dict[str, Any] = {_sync_buffers_option(): False}
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mib,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        static_graph=parallel.static_graph,
        **unchanged_buffers,
    )


def _sync_buffers_option() -> str:
    """Return the name of DDP's option to synchronise buffers in this torch.

    The older name warns if torch has the newer one.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    if "forward_sync_buffers" in names:
        return "forward_sync_buffers"
    return "broadcast_buffers"


def _shard(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainConfig, ranks: Ranks
) -> None:
    """Shard a module and its layers with fsdp2, in place."""
    _check_gradient_dtype(config, ranks)
    mesh = _mesh(config, ranks)
    gradient_dtype = config.parallel.gradient_dtype
    # Without a type, gradients are reduced in that of the parameters.
    module_policy = MixedPrecisionPolicy(
        reduce_dtype=None if gradient_dtype == "fp32" else DTYPES[gradient_dtype]
    )
    layer_policy = module_policy
    if config.precision == "bf16":
        # Layers gather and use their weights in bf16. A cast of their inputs would put
        # the residual stream in bf16 too.
        layer_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=DTYPES[gradient_dtype],
            cast_forward_inputs=False,
        )
    # Layers first: the module then shards what is left, such as embeddings.
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=layer_policy)
    fully_shard(module, mesh=mesh, mp_policy=module_policy)
    # Without this, a call of ``evaluate`` would not gather weights as a forward does.
    register_fsdp_forward_method(module, "evaluate")


def _check_gradient_dtype(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ``BadConfig`` if fsdp2 would accumulate gradients in 16 bits."""
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
