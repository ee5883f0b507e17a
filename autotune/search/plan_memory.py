"""The memory of a rank under each way of sharing a model: from a profile's trace, or from one that is made now."""

from dataclasses import replace

from autotune.core.dataset import RowContents
from autotune.core.defaults import HEADROOM_SHARE, MAX_ROWS
from autotune.core.plan import Fleet, PlanFigure
from autotune.core.profile import Profile
from autotune.decide.choose import rows_with_headroom
from autotune.decide.memory import Expected, ledger
from autotune.decide.plan import MemoryPlan
from autotune.decide.shape import largest_parameter_bytes
from autotune.decide.sharding import shares, state_of_terms, zero_share
from autotune.measure.machine import ForkServerMachine
from autotune.search.estimate import CannotTrace, EstimateRequest, Room, estimate_model, predicted_rows
from trainer.config import TrainConfig
from trainer.progress import Update


def shared(memory: MemoryPlan, fleet: Fleet, *, tensor_ranks: int | None, pipeline_stages: int | None) -> MemoryPlan:
    """Return the same with every way of sharing the model among the ranks."""
    tensor, stages = (count if count <= fleet.ranks else 1 for count in (tensor_ranks or 2, pipeline_stages or 2))
    found = shares(
        memory.state,
        fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
        tensor_ranks=tensor,
        pipeline_stages=stages,
        budget_bytes=fleet.memory_bytes,
    )
    return replace(memory, shares=found)


def most_rows_shared(memory: MemoryPlan, fleet: Fleet) -> int:
    """Return the rows of a micro-batch that fit when all ranks share the state; at least one."""
    whole = zero_share(memory.state, 3, fleet.ranks, largest_layer_bytes=memory.largest_bytes)
    of_a_row = (whole.activations_bytes + whole.head_and_loss_bytes) / memory.micro_batch_rows
    room = (fleet.memory_bytes or 0) - (whole.total_bytes - of_a_row * memory.micro_batch_rows)
    return max(1, rows_with_headroom(int(room // max(1.0, of_a_row)), HEADROOM_SHARE))


def memory_of_probe(profile: Profile) -> MemoryPlan | None:
    """Return the terms that the profile's probe traced; None without them, and if they are a rank's share of a state.

    Formulas would divide a share once more.
    """
    probe, train = profile.evidence.probe, profile.train
    if probe is None or not probe.traced_terms_bytes or probe.parameters is None:
        return None
    if probe.local_ranks > 1 and train.parallel.strategy != "ddp":
        return None
    most = rows_with_headroom(probe.feasible_max, profile.constraints.headroom_share)
    return MemoryPlan(
        parameters=PlanFigure(value=probe.parameters, basis="measured", source="counted by the probe"),
        state=state_of_terms(probe.traced_terms_bytes),
        micro_batch_rows=probe.feasible_max,
        most_rows=max(train.micro_batch_rows, most),
        largest_bytes=largest_parameter_bytes(train, probe.parameters),
        source=f"the probe's trace; {probe.feasible_max} rows are the largest that were shown to fit",
    )


def traced(
    train: TrainConfig,
    fleet: Fleet,
    expected: Expected,
    contents: RowContents,
    update: Update,
    *,
    vocab_assumed: bool,
    rows_per_rank: int,
) -> MemoryPlan | CannotTrace:
    """Trace the trainer's step now, as ``autotune estimate`` does.

    Raises:
        BadInput: If transformers cannot build the model.
    """
    # Under any other strategy a rank's share is traced, and formulas would divide it once more.
    whole = train.parallel.model_copy(update={"strategy": "ddp", "shard_ranks": None})
    request = EstimateRequest(
        config=train.model_copy(update={"parallel": whole}),
        vocab_size=contents.vocab_size,
        special_ids=contents.special_ids,
        documents_per_row=contents.documents,
        micro_batches=2,
        ranks=fleet.ranks,
    )
    budget, usual = fleet.memory_bytes, expected.usual
    room = None if budget is None else Room(budget_bytes=budget, surroundings=usual, max_rows=MAX_ROWS)
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, None, f"tracing {train.model.name}")
        try:
            estimate = estimate_model(request, machine, room)
        except CannotTrace as error:
            return error
    most = 1 if budget is None else predicted_rows(estimate, budget, usual, max_rows=MAX_ROWS)
    with_headroom = rows_with_headroom(most, HEADROOM_SHARE) if most else 0
    rows = max(1, min(with_headroom, rows_per_rank))
    law, parameters = estimate.law, estimate.parameters
    told = f"; vocabulary of {contents.vocab_size:,} assumed" if vocab_assumed else ""
    return MemoryPlan(
        parameters=PlanFigure(
            value=parameters,
            basis="assumed" if vocab_assumed else "predicted",
            source=f"counted in the model as it would be built{told}",
        ),
        state=state_of_terms(ledger(law, rows, usual).terms_bytes),
        micro_batch_rows=rows,
        most_rows=with_headroom,
        largest_bytes=max(int(law.largest_parameter_bytes), largest_parameter_bytes(train, parameters)),
        source="a trace of the trainer's step; what lies around it is assumed",
    )
