"""Memory of a model that the ranks of a training plan share."""

from dataclasses import replace

from autotune.base.defaults import HEADROOM_SHARE
from autotune.evidence.plan import Fleet
from autotune.memory.decide.sharding import ZERO_WAYS, shares, zero_share
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.subjects.mlm.memory.values import MemoryPlan
from trainer.formats.train_config import Strategy

_SHARDING_STRATEGIES = {
    way.name: way.strategy
    for way in ZERO_WAYS
    if way.strategy is not None and way.strategy != "ddp"
}
"""The trainer's strategies that shard a model's state, by ``Share.name``."""


def with_shares(
    memory: MemoryPlan,
    fleet: Fleet,
    tensor_ranks: int,
    pipeline_stages: int,
    *,
    is_verified: bool,
) -> MemoryPlan:
    """Return the plan with the memory under every way of sharing the model.

    Args:
        memory: Memory of a rank alone.
        fleet: GPUs that share the model.
        tensor_ranks: Tensor-parallel ranks; ignored if there are fewer GPUs.
        pipeline_stages: Pipeline stages; ignored if there are fewer GPUs.
        is_verified: True if a trial verified that ``memory`` fits a rank alone.
    """
    # A verified size fits, whatever the trace predicts for it.
    verified_bytes = memory.state.total_bytes if is_verified else 0
    all_shares = shares(
        memory.state,
        fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
        tensor_ranks=tensor_ranks if tensor_ranks <= fleet.ranks else 1,
        pipeline_stages=pipeline_stages if pipeline_stages <= fleet.ranks else 1,
        budget_bytes=max(fleet.memory_bytes, verified_bytes),
    )
    return replace(memory, shares=all_shares)


def max_micro_batch_size_shared(memory: MemoryPlan, fleet: Fleet) -> int:
    """Return the largest micro-batch if all ranks share the state under ZeRO-3.

    The headroom stays free.

    Returns:
        The size; 1 even if not a single sequence is predicted to fit.
    """
    share = zero_share(
        memory.state,
        zero_stage=3,
        ranks=fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
    )
    growing_bytes = share.activations_bytes + share.head_and_loss_bytes
    bytes_per_sequence = growing_bytes / memory.micro_batch_size
    fixed_bytes = share.total_bytes - bytes_per_sequence * memory.micro_batch_size
    free_bytes = fleet.memory_bytes - fixed_bytes
    # At least one byte, as a plan may have no activations.
    max_size = int(free_bytes // max(1.0, bytes_per_sequence))
    return max(1, with_headroom(max_size, HEADROOM_SHARE))


def strategy_that_fits(memory: MemoryPlan, strategy: Strategy) -> Strategy:
    """Return the strategy, or one that shares the state if the model needs it.

    DDP becomes ZeRO-1 if the model fits only with that, and FSDP2 if it does not fit
    with ZeRO-1 either. Other strategies are kept.
    """
    if memory.max_micro_batch_size > 0 or strategy != "ddp":
        return strategy
    for share in memory.shares:
        if share.fits and share.name in _SHARDING_STRATEGIES:
            return _SHARDING_STRATEGIES[share.name]
    return "fsdp2"
