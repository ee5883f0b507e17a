"""The memory of a rank under each way of sharing a model: from a profile's trace, or from one that is made now."""

from dataclasses import replace

from autotune.core.cards import Card
from autotune.core.dataset import RowContents
from autotune.core.defaults import HEADROOM_SHARE, MAX_ROWS
from autotune.core.plan import Fleet, PlanFigure
from autotune.core.profile import Profile
from autotune.decide.choose import rows_with_headroom
from autotune.decide.memory import expected_on_cpu, expected_on_gpu, largest_rows, ledger
from autotune.decide.plan import MemoryPlan
from autotune.decide.shape import largest_parameter_bytes
from autotune.decide.sharding import shares, state_of_terms, zero_share
from autotune.measure.machine import ForkServerMachine
from autotune.search.estimate import CannotTrace, EstimateRequest, Room, estimate_model
from trainer.config import Strategy, TrainConfig
from trainer.progress import Update


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
    train: TrainConfig, fleet: Fleet, card: Card | None, contents: RowContents, update: Update, *, rows_per_rank: int
) -> MemoryPlan | CannotTrace:
    """Trace the trainer's step now, as ``autotune estimate`` does.

    Raises:
        BadInput: If transformers cannot build the model.
    """
    budget = fleet.memory_bytes
    if fleet.device == "cpu":
        usual = expected_on_cpu().usual
    elif card is None:
        usual = expected_on_gpu(None, fleet.ranks_per_node).usual
    else:
        usual = expected_on_gpu(card.compute_capability, fleet.ranks_per_node, card.usable_bytes).usual
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
    room = Room(budget_bytes=budget, surroundings=usual, max_rows=MAX_ROWS)
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, None, f"tracing {train.model.name}")
        try:
            estimate = estimate_model(request, machine, room)
        except CannotTrace as error:
            return error
    law, parameters = estimate.law, estimate.parameters
    most = largest_rows(law, budget, usual, max_rows=MAX_ROWS)
    with_headroom = rows_with_headroom(most, HEADROOM_SHARE) if most else 0
    rows = max(1, min(with_headroom, rows_per_rank))
    told = f"; vocabulary of {contents.vocab_size:,} assumed" if contents.assumed else ""
    return MemoryPlan(
        parameters=PlanFigure(
            value=parameters,
            basis="assumed" if contents.assumed else "predicted",
            source=f"counted in the model as it would be built{told}",
        ),
        state=state_of_terms(ledger(law, rows, usual).terms_bytes),
        micro_batch_rows=rows,
        most_rows=with_headroom,
        largest_bytes=max(int(law.largest_parameter_bytes), largest_parameter_bytes(train, parameters)),
        source="a trace of the trainer's step; what lies around it is assumed",
    )


def shared(memory: MemoryPlan, fleet: Fleet, tensor_ranks: int, pipeline_stages: int, *, is_proven: bool) -> MemoryPlan:
    """Return the same with every way of sharing the model among the ranks."""
    tensor, stages = (count if count <= fleet.ranks else 1 for count in (tensor_ranks, pipeline_stages))
    proven_bytes = memory.state.total_bytes if is_proven else 0  # a trial says that it fits, whatever a trace predicts
    found = shares(
        memory.state,
        fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
        tensor_ranks=tensor,
        pipeline_stages=stages,
        budget_bytes=max(fleet.memory_bytes, proven_bytes),
    )
    return replace(memory, shares=found)


def most_rows_shared(memory: MemoryPlan, fleet: Fleet) -> int:
    """Return the rows of a micro-batch that fit when all ranks share the state; at least one."""
    whole = zero_share(memory.state, 3, fleet.ranks, largest_layer_bytes=memory.largest_bytes)
    of_a_row = (whole.activations_bytes + whole.head_and_loss_bytes) / memory.micro_batch_rows
    room = fleet.memory_bytes - (whole.total_bytes - of_a_row * memory.micro_batch_rows)
    return max(1, rows_with_headroom(int(room // max(1.0, of_a_row)), HEADROOM_SHARE))


def strategy_that_fits(memory: MemoryPlan, said: Strategy) -> Strategy:
    """Return the profile's; if the model does not fit so, the first of the trainer's ways in which it does."""
    if memory.most_rows > 0 or said != "ddp":
        return said
    names: dict[str, Strategy] = {"ZeRO-1": "zero1", "ZeRO-3 (FSDP2)": "fsdp2"}
    return next((names[one.name] for one in memory.shares if one.fits and one.name in names), "fsdp2")
