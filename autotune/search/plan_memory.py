"""The memory of a rank under each way of sharing a model: from a profile's trace, or from one that is made now."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.core.plan import Basis, Figure, MemoryPlan, MemoryRow
from autotune.decide.choose import rows_with_headroom
from autotune.decide.memory import Ledger, ledger
from autotune.decide.shape import largest_parameter_bytes
from autotune.decide.sharding import Layout, StateBytes, shard, state_of_terms
from autotune.decide.surroundings import Expected, expected_on_cpu, expected_on_gpu
from autotune.measure.machine import ForkServerMachine
from autotune.search.estimate import CannotTrace, Estimate, EstimateRequest, Room, estimate_model, predicted_rows
from autotune.search.plan_data import RowFacts
from autotune.search.plan_subject import Subject
from trainer.progress import Update

HEADROOM_SHARE = 0.03
"""As ``probe`` leaves by default."""
MOST_ROWS = 16_384
_ZERO = (("DDP", 0, True), ("ZeRO-1", 1, True), ("ZeRO-2", 2, False), ("ZeRO-3 (FSDP2)", 3, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is known of a model's memory."""

    parameters: Figure
    state: StateBytes
    """Of a rank alone, with so many rows."""
    rows: int
    most_rows: int
    """That fit a rank alone with the headroom left."""
    largest_bytes: int
    basis: Basis
    source: str


def held_by(
    subject: Subject, rows: RowFacts, vocab_size: int, update: Update, *, rows_per_rank: int
) -> Held | CannotTrace:
    """Where a rank's memory goes; of a profile that does not say it, and of a model, by tracing it now.

    Args:
        subject: The model and the machines.
        rows: What rows hold.
        vocab_size: Of the model.
        update: Told what is going on.
        rows_per_rank: Of a step: a micro-batch need not be larger.

    Raises:
        BadInput: If transformers cannot build the model.
    """
    return _of_probe(subject) or _of_estimate(subject) or _traced(subject, rows, vocab_size, update, rows_per_rank)


def memory_plan(held: Held, subject: Subject, *, tensor_ranks: int | None, pipeline_stages: int | None) -> MemoryPlan:
    """Every way of sharing the model among the ranks; both parallelisms of layers at once only where both are named."""
    fleet = subject.fleet
    found = tuple(_rows(held, fleet.ranks, fleet.memory_bytes, tensor_ranks, pipeline_stages))
    return MemoryPlan(
        rows=found, micro_batch_rows=held.rows, most_rows=held.most_rows, basis=held.basis, source=held.source
    )


def most_rows_shared(held: Held, subject: Subject) -> int:
    """Rows of a micro-batch that fit when all ranks share the state; at least one."""
    fleet = subject.fleet
    layout = Layout(zero_stage=3, data_ranks=fleet.ranks, tensor_ranks=1, pipeline_stages=1)
    whole = shard(held.state, layout, largest_layer_bytes=held.largest_bytes)
    of_a_row = (whole.activations_bytes + whole.head_and_loss_bytes) / held.rows
    room = (fleet.memory_bytes or 0) - (whole.total_bytes - of_a_row * held.rows)
    return max(1, rows_with_headroom(int(room // max(1.0, of_a_row)), HEADROOM_SHARE))


def _rows(
    held: Held, ranks: int, memory_bytes: int | None, tensor_ranks: int | None, pipeline_stages: int | None
) -> Iterator[MemoryRow]:
    ways = [(name, stage, 1, 1, here) for name, stage, here in (_ZERO if ranks > 1 else _ZERO[:1])]
    tensor_parts, pipeline_parts = tensor_ranks or 2, pipeline_stages or 2
    both = tensor_ranks is not None and pipeline_stages is not None
    for tensor, stages in ((tensor_parts, 1), (1, pipeline_parts), (tensor_parts, pipeline_parts))[: 3 if both else 2]:
        named = [f"TP {tensor}"] * (tensor > 1) + [f"PP {stages}"] * (stages > 1)
        if named and tensor * stages <= ranks:
            ways.append((", ".join(named), 0, tensor, stages, False))
    for name, stage, tensor, stages, here in ways:
        layout = Layout(
            zero_stage=stage,
            data_ranks=max(1, ranks // (tensor * stages)),
            tensor_ranks=tensor,
            pipeline_stages=stages,
        )
        one = shard(held.state, layout, largest_layer_bytes=held.largest_bytes)
        total = one.total_bytes
        yield MemoryRow(
            name=name if ranks > 1 else "one rank alone",
            state_bytes=one.state_bytes + one.gathered_bytes,
            activations_bytes=one.activations_bytes + one.head_and_loss_bytes,
            other_bytes=one.temporaries_bytes + one.outside_bytes,
            fits=None if memory_bytes is None else total <= memory_bytes,
            trains_here=here,
        )


def _of_probe(subject: Subject) -> Held | None:
    """Return the terms that the profile's probe traced, if they are of these machines and of a rank's whole state."""
    measured = subject.measured
    probe = None if measured is None else measured.evidence.probe
    if measured is None or probe is None or not probe.traced_terms_bytes or probe.parameters is None:
        return None
    if probe.local_ranks > 1 and measured.train.parallel.strategy != "ddp":
        return None  # a rank's share: formulas would divide it once more
    return Held(
        parameters=Figure(value=probe.parameters, basis="measured", source="counted by the probe"),
        state=state_of_terms(probe.traced_terms_bytes),
        rows=probe.feasible_max,
        most_rows=max(
            subject.train.micro_batch_rows,
            rows_with_headroom(probe.feasible_max, measured.constraints.headroom_share),
        ),
        largest_bytes=largest_parameter_bytes(subject.train, probe.parameters),
        basis="predicted",
        source=f"the probe's trace; {probe.feasible_max} rows are the largest that were shown to fit",
    )


def _of_estimate(subject: Subject) -> Held | None:
    """What an estimated profile predicts for these machines."""
    profile = subject.measured
    estimate = None if profile is None else profile.evidence.estimate
    if profile is None or estimate is None:
        return None
    assumed = "; vocabulary assumed" if estimate.rows_assumed else ""
    return Held(
        parameters=Figure(
            value=estimate.parameters,
            basis="assumed" if estimate.rows_assumed else "predicted",
            source=f"counted by the estimate{assumed}",
        ),
        state=state_of_terms(estimate.terms_bytes),
        rows=estimate.rows_usual,
        most_rows=max(
            subject.train.micro_batch_rows,
            rows_with_headroom(estimate.rows_usual, profile.constraints.headroom_share),
        ),
        largest_bytes=largest_parameter_bytes(subject.train, estimate.parameters),
        basis="predicted",
        source="the profile's estimate; what lies around it is assumed",
    )


def _traced(
    subject: Subject, rows: RowFacts, vocab_size: int, update: Update, rows_per_rank: int
) -> Held | CannotTrace:
    fleet, train = subject.fleet, subject.train
    # Under any other strategy a rank's share is traced, and formulas would divide it once more.
    whole = train.parallel.model_copy(update={"strategy": "ddp", "shard_ranks": None})
    request = EstimateRequest(
        config=train.model_copy(update={"parallel": whole}),
        vocab_size=vocab_size,
        special_ids=rows.special_ids,
        documents_per_row=rows.documents_per_row,
        micro_batches=2,
        ranks=fleet.ranks,
    )
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, None, f"tracing {train.model.name}")
        try:
            estimate = estimate_model(request, machine, _room(subject))
        except CannotTrace as error:
            return error
    return _of_trace(estimate, subject, rows, rows_per_rank)


def _expected(subject: Subject) -> Expected:
    if subject.fleet.device == "cpu":
        return expected_on_cpu()
    if subject.card is None:
        return expected_on_gpu(None, subject.fleet.ranks_per_node)
    return expected_on_gpu(subject.card.compute_capability, subject.fleet.ranks_per_node, subject.card.usable_bytes)


def _room(subject: Subject) -> Room | None:
    if subject.fleet.memory_bytes is None:
        return None
    usual = _expected(subject).usual
    return Room(budget_bytes=subject.fleet.memory_bytes, surroundings=usual, max_rows=MOST_ROWS)


def _of_trace(estimate: Estimate, subject: Subject, rows: RowFacts, rows_per_rank: int) -> Held:
    fleet = subject.fleet
    usual = _expected(subject).usual
    most = 1
    if fleet.memory_bytes is not None:
        most = predicted_rows(estimate, fleet.memory_bytes, usual, max_rows=MOST_ROWS)
    with_headroom = rows_with_headroom(most, HEADROOM_SHARE) if most else 0
    of_micro_batch = max(1, min(with_headroom, rows_per_rank))
    found: Ledger = ledger(estimate.law, of_micro_batch, usual)
    assumed = "" if rows.vocab_size is not None else f"; vocabulary of {estimate.request.vocab_size:,} assumed"
    return Held(
        parameters=Figure(
            value=estimate.parameters,
            basis="predicted" if not assumed else "assumed",
            source=f"counted in the model as it would be built{assumed}",
        ),
        state=state_of_terms(found.terms_bytes),
        rows=of_micro_batch,
        most_rows=with_headroom,
        largest_bytes=max(
            int(estimate.law.largest_parameter_bytes), largest_parameter_bytes(subject.train, estimate.parameters)
        ),
        basis="predicted",
        source="a trace of the trainer's step; what lies around it is assumed",
    )
