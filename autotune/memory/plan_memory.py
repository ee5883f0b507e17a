"""Memory of a model for ``autotune plan``.

If a probe verified the model, its trace is corrected by its measured peak. Otherwise
the step is traced now, as ``autotune estimate`` does.
"""

from dataclasses import replace

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE
from autotune.base.model_work import largest_gather_bytes
from autotune.corpus.values import SequenceContents
from autotune.machine.gpu_models import GpuModel
from autotune.memory.decide.memory_model import memory_breakdown
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
)
from autotune.memory.decide.sharding import shares, state_of_terms, zero_share
from autotune.memory.estimate import (
    CannotTrace,
    MemoryEstimate,
    estimate_model,
    trace_request,
)
from autotune.memory.values import MemoryPlan, StateBytes
from autotune.plan.values import Basis, Fleet, PlanFigure
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.values import Profile
from autotune.trials.fork_server import ForkServerMachine
from trainer.config.train_config import Strategy, TrainConfig
from trainer.record.progress import Update

_STRATEGIES: dict[str, Strategy] = {"ZeRO-1": "zero1", "ZeRO-3 (FSDP2)": "fsdp2"}
"""The trainer's strategies that share a model's state, by ``Share.name``."""


def memory_of_probe(profile: Profile) -> MemoryPlan | None:
    """Return the memory of the profile's micro-batch, from the profile's probe.

    The probe traced its largest micro-batch, and a trial of the same size corrects the
    trace.

    Returns:
        None if nothing was traced, or only a rank's share of the model.
    """
    train = profile.train
    probe = profile.evidence.probe
    if probe is None or not probe.traced_terms_bytes or probe.parameters is None:
        return None
    # Any other strategy sharded the traced state already, and ``with_shares`` would
    # divide it a second time.
    if probe.local_ranks > 1 and train.parallel.strategy != "ddp":
        return None
    limit = with_headroom(probe.feasible_max, profile.constraints.headroom_share)
    return MemoryPlan(
        parameters=PlanFigure(
            value=probe.parameters, basis="measured", source="counted by the probe"
        ),
        state=_calibrated(
            state_of_terms(probe.traced_terms_bytes),
            probe.feasible_peak_bytes,
            size_share=train.micro_batch_size / probe.feasible_max,
        ),
        micro_batch_size=train.micro_batch_size,
        max_micro_batch_size=max(train.micro_batch_size, limit),
        largest_bytes=largest_gather_bytes(train, probe.parameters),
        source=(
            "the probe's trace, corrected by the measured peak of the largest verified"
            f" micro-batch, {probe.feasible_max}"
        ),
    )


def _calibrated(
    traced: StateBytes, peak_bytes: int, *, size_share: float
) -> StateBytes:
    """Correct a traced memory by its measured peak, and scale it to a micro-batch size.

    Parameters, gradients and optimizer state are exact. All other parts are scaled so
    that the sum is the measured peak. Activations, head and loss are then scaled with
    the micro-batch size.

    Args:
        traced: Memory of the micro-batch size whose peak was measured.
        peak_bytes: The measured peak.
        size_share: Micro-batch size of the result over the measured one.
    """
    other_bytes = traced.total_bytes - traced.state_bytes
    correction = 1.0
    if other_bytes > 0 and peak_bytes > traced.state_bytes:
        correction = (peak_bytes - traced.state_bytes) / other_bytes
    size_correction = correction * size_share
    return replace(
        traced,
        activations_bytes=round(traced.activations_bytes * size_correction),
        head_and_loss_bytes=round(traced.head_and_loss_bytes * size_correction),
        temporaries_bytes=round(traced.temporaries_bytes * correction),
        non_pytorch_bytes=round(traced.non_pytorch_bytes * correction),
    )


def trace_memory(
    train: TrainConfig,
    fleet: Fleet,
    gpu_model: GpuModel | None,
    contents: SequenceContents,
    update: Update,
    *,
    sequences_per_rank: int,
) -> MemoryPlan | CannotTrace:
    """Trace the trainer's step now, as ``autotune estimate`` does.

    Args:
        train: Settings of the step; DDP replaces their parallel strategy.
        fleet: GPUs that will train.
        gpu_model: Their model; None if it is unknown.
        contents: Contents of the sequences.
        update: Reports progress.
        sequences_per_rank: Largest micro-batch that a rank can use.

    Returns:
        The memory with the largest micro-batch that fits a rank alone, but no more than
        ``sequences_per_rank`` and at least 1; the error if the step cannot be traced.
    """
    overheads = _fleet_overheads(fleet, gpu_model).usual
    # Two micro-batches stand for any larger number of them: gradients exist while the
    # next one is computed.
    micro_batches = 2
    request = trace_request(
        _unshared(train), contents, micro_batches, ranks=fleet.ranks
    )
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, None, f"tracing {train.model.name}")
        try:
            estimate = estimate_model(
                request,
                machine,
                fleet.memory_bytes,
                overheads,
                max_micro_batch_size=MAX_MICRO_BATCH_SIZE,
            )
        except CannotTrace as error:
            return error
    max_size = 0
    if estimate.max_micro_batch_size:
        max_size = with_headroom(estimate.max_micro_batch_size, HEADROOM_SHARE)
    size = max(1, min(max_size, sequences_per_rank))
    model = estimate.memory_model
    breakdown = memory_breakdown(model, size, overheads)
    return MemoryPlan(
        parameters=_traced_parameters(estimate, contents),
        state=state_of_terms(breakdown.terms_bytes),
        micro_batch_size=size,
        max_micro_batch_size=max_size,
        work=estimate.work_near(size),
        largest_bytes=max(
            model.largest_parameter_bytes,
            largest_gather_bytes(train, estimate.parameters),
        ),
        source="a trace of the trainer's step, with assumed overheads",
    )


def _unshared(train: TrainConfig) -> TrainConfig:
    """Return the settings under DDP, in which each rank holds the whole state.

    Under any other strategy a rank's share would be traced, and ``with_shares`` would
    divide it a second time.
    """
    parallel = train.parallel.model_copy(
        update={"strategy": "ddp", "shard_ranks": None}
    )
    return train.model_copy(update={"parallel": parallel})


def _traced_parameters(
    estimate: MemoryEstimate, contents: SequenceContents
) -> PlanFigure:
    """Return the number of parameters; it is assumed if the vocabulary's size is."""
    basis: Basis = "predicted"
    source = "counted in the traced model"
    if contents.assumed:
        basis = "assumed"
        source += f"; vocabulary of {contents.vocab_size:,} assumed"
    return PlanFigure(value=estimate.parameters, basis=basis, source=source)


def _fleet_overheads(fleet: Fleet, gpu_model: GpuModel | None) -> OverheadsRange:
    """Return the memory that each GPU of the fleet needs in addition to a trace."""
    if fleet.device == "cpu":
        return overheads_on_cpu()
    if gpu_model is None:
        return overheads_on_gpu(None, fleet.ranks_per_node)
    return overheads_on_gpu(
        gpu_model.compute_capability, fleet.ranks_per_node, gpu_model.usable_bytes
    )


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
    by_strategy = shares(
        memory.state,
        fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
        tensor_ranks=tensor_ranks if tensor_ranks <= fleet.ranks else 1,
        pipeline_stages=pipeline_stages if pipeline_stages <= fleet.ranks else 1,
        budget_bytes=max(fleet.memory_bytes, verified_bytes),
    )
    return replace(memory, shares=by_strategy)


def max_micro_batch_size_shared(memory: MemoryPlan, fleet: Fleet) -> int:
    """Return the largest micro-batch if all ranks share the state under ZeRO-3.

    The headroom stays free. It is 1 even if not a single sequence is predicted to fit.
    """
    share = zero_share(
        memory.state, 3, fleet.ranks, largest_layer_bytes=memory.largest_bytes
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
        if share.fits and share.name in _STRATEGIES:
            return _STRATEGIES[share.name]
    return "fsdp2"
