"""Memory of a rank that shares nothing, for ``autotune plan``.

If a probe verified the model, the probe's trace is corrected by the measured peak.
Otherwise the step is traced now, as ``autotune estimate`` does. ``plan_shares`` divides
this memory among ranks.
"""

from dataclasses import replace

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE
from autotune.corpus.values import SequenceContents
from autotune.evidence.plan import Basis, Fleet, PlanFigure
from autotune.evidence.profile import Profile
from autotune.machine.gpu_models import GpuModel
from autotune.memory.decide.memory_model import memory_breakdown
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
)
from autotune.memory.decide.sharding import parts_of_terms
from autotune.memory.estimate import CannotTrace, MemoryEstimate, estimate_model
from autotune.memory.values import MemoryParts
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.subjects.mlm.memory.gathered_parameters import largest_gather_bytes
from autotune.subjects.mlm.memory.trace_request import trace_request
from autotune.subjects.mlm.memory.values import MemoryPlan
from autotune.trials.fork_server import ForkServerMachine
from trainer.formats.progress import Update
from trainer.formats.train_config import TrainConfig


def memory_of_probe(profile: Profile) -> MemoryPlan | None:
    """Return the memory of the profile's micro-batch, from the profile's probe.

    The probe traced its largest micro-batch, and a trial of the same size corrects the
    trace.

    Returns:
        The memory; None if the profile has no trace of a rank that holds the whole
        model.
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
            parts_of_terms(probe.traced_terms_bytes),
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
    traced: MemoryParts, peak_bytes: int, *, size_share: float
) -> MemoryParts:
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
    # A trace that has no other part, or exceeds the peak by the state alone, cannot be
    # corrected.
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
    # Two micro-batches need as much memory as any larger number of them: gradients
    # exist while the second one is computed.
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
        state=parts_of_terms(breakdown.terms_bytes),
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
