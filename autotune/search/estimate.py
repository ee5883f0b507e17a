"""Predict the memory of training without the device: trace the trainer's own step, and play it through an allocator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.allocations import Trace
from autotune.core.outcome import Measured, Outcome, TimedOut
from autotune.core.trial import Trial
from autotune.decide.memory import Law, Surroundings, affine_law, holds_for, largest_rows, peak_bytes
from autotune.decide.surroundings import UNTRACED_SHARE, Expected
from autotune.errors import NotCheckable
from autotune.measure.machine import Machine
from trainer.config import TrainConfig
from trainer.dataset import SpecialIds
from trainer.masking import most_predicted

FEW_ROWS, MORE_TIMES, MANY_TIMES, MOST_FULL_ROWS = 3, 2.7, 8, 1000
"""What is traced is small, and apart in both rows and slots of the head, as three tell two slopes and a constant."""
TRACE_TIMEOUT_S = 120.0
DOCUMENTS_PER_PACKED_ROW = 4.0
"""Assumed where no dataset says better: functions of programs come at about 2.1 to a row of 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """What is to be predicted."""

    config: TrainConfig
    """Its micro-batch does not count."""
    vocab_size: int
    special_ids: SpecialIds
    documents_per_row: float
    micro_batches: int
    """Of an optimizer step: with two or more, gradients exist while later ones are computed."""
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The law of one model's memory, and where it comes from."""

    request: EstimateRequest
    law: Law
    parameters: int
    attention: str
    attention_reason: str
    traces: int


class CannotTrace(NotCheckable):
    """A model computes in a way that can only be seen by running it."""


def estimate_model(request: EstimateRequest, machine: Machine) -> Estimate:
    """Trace a model's step at a few sizes.

    Raises:
        CannotTrace: If the model cannot be traced, or changes its ways with the size of the micro-batch.
        BadInput: If the configuration cannot be built.
    """
    slots_of = _slots_of(request.config)
    found = _traced(request, machine, traced_rows(slots_of, request.config.seq_length_tokens))
    law = affine_law([Trace.of(one) for one in found["traces"]], slots_of)
    if law is None:
        raise _cannot(request, "its allocations do not follow one law over several micro-batches")
    return Estimate(
        request=request,
        law=law,
        parameters=found["parameters"],
        attention=found["attention"],
        attention_reason=found["attention_reason"],
        traces=len(found["traces"]),
    )


def confirm(estimate: Estimate, machine: Machine, rows: int) -> Estimate:
    """Trace the size that is to be believed as well, and hold the law against it, to the byte.

    Raises:
        CannotTrace: If the law does not hold there.
    """
    rows = max(2, rows)  # a single row is a view where several are copied
    trace = Trace.of(_traced(estimate.request, machine, (rows,))["traces"][0])
    if not holds_for(estimate.law, trace):
        raise _cannot(estimate.request, f"{rows} rows do not follow the law of smaller micro-batches")
    return replace(estimate, traces=estimate.traces + 1)


def predicted_rows(estimate: Estimate, budget_bytes: float, surroundings: Surroundings, *, max_rows: int) -> int:
    """The largest micro-batch that is predicted to fit."""
    return largest_rows(estimate.law, budget_bytes, surroundings, max_rows=max_rows)


def rows_range(estimate: Estimate, budget_bytes: float, expected: Expected, *, max_rows: int) -> tuple[int, int]:
    """The same with everything that is assumed at its most, and at its least."""
    share = UNTRACED_SHARE[expected.usual.kind]
    room = max(0, budget_bytes - peak_bytes(estimate.law, 1, expected.usual))
    low = predicted_rows(estimate, budget_bytes - share * room, expected.most, max_rows=max_rows)
    high = predicted_rows(estimate, budget_bytes + share * room, expected.least, max_rows=max_rows)
    return low, high


def predicted_bytes(estimate: Estimate, surroundings: Surroundings) -> Callable[[int], float]:
    """The peak by rows; each is computed once."""
    known: dict[int, float] = {}

    def by_rows(rows: int) -> float:
        if rows not in known:
            known[rows] = float(peak_bytes(estimate.law, rows, surroundings))
        return known[rows]

    return by_rows


def traced_rows(slots_of: Callable[[int], int], width: int) -> tuple[int, int, int]:
    """Three micro-batches whose rows and slots do not lie on one line; slots come in tiles, so some lie on one.

    Args:
        slots_of: Places that the head computes, by rows.
        width: Places of a row.
    """
    # Where every place has a slot they follow another law than that of micro-batches worth training with.
    full = max((rows for rows in range(1, MOST_FULL_ROWS) if slots_of(rows) == rows * width), default=0)
    enough = max(FEW_ROWS, full + 1) if full < MOST_FULL_ROWS - 1 else FEW_ROWS
    few, more, least = enough, round(enough * MORE_TIMES), enough * MANY_TIMES
    for many in range(least, 100 * least):
        if (more - few) * (slots_of(many) - slots_of(few)) != (many - few) * (slots_of(more) - slots_of(few)):
            return few, more, many
    return few, more, least  # on one line everywhere: every place has a slot


def _slots_of(config: TrainConfig) -> Callable[[int], int]:
    width, probability = config.seq_length_tokens, config.masking_probability
    return lambda rows: most_predicted(rows * width, probability)


def _traced(request: EstimateRequest, machine: Machine, rows: tuple[int, ...]) -> Mapping[str, Any]:
    measured = {
        "config": request.config.model_dump(mode="json"),
        "vocab_size": request.vocab_size,
        "special_ids": request.special_ids.model_dump(),
        "sizes": list(rows),
        "micro_batches": request.micro_batches,
        "documents_per_row": request.documents_per_row,
        "ranks": request.ranks,
    }
    outcome = machine.run(Trial(job="trace", measured=measured, timeout_s=TRACE_TIMEOUT_S))
    if not isinstance(outcome, Measured):
        raise _cannot(request, _why(outcome))
    return outcome.figures


def _why(outcome: Outcome) -> str:
    if isinstance(outcome, Measured):
        return ""
    if isinstance(outcome, TimedOut):
        return f"tracing took longer than {TRACE_TIMEOUT_S:g} s"
    return (outcome.detail.strip().splitlines() or [outcome.kind])[-1]


def _cannot(request: EstimateRequest, why: str) -> CannotTrace:
    name = request.config.model.name
    return CannotTrace(
        f"{name} cannot be predicted without running it: {why}",
        next_step="Measure it where it is to run, with autotune probe.",
    )
