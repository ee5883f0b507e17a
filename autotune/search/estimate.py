"""Predict the memory of training without the device: trace the trainer's own step, and play it through an allocator."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.allocations import Trace
from autotune.core.outcome import Measured, TimedOut
from autotune.core.trial import Trial
from autotune.decide.memory import UNTRACED_SHARE, Expected, Law, Surroundings, largest_rows, law_of, peak_bytes
from autotune.errors import NotCheckable
from autotune.measure.machine import Machine
from trainer.config import TrainConfig
from trainer.dataset import SpecialIds

FIRST_ROWS = 8, 64
BELOW_SHARE = 0.8
"""Of the predicted largest micro-batch: traced as well, so that every size near it lies between two traced ones."""
CLOSE_SHARE = 0.005
"""The prediction stands where a size this near to it was traced."""
MOST_ROUNDS = 3
SHIFTS = 3
"""How often sizes are traced with a row more if nothing is like the largest: compiled layers write over blocks that are
of the same size by chance."""
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
class MemoryEstimate:
    """The law of one model's memory, and where it comes from."""

    request: EstimateRequest
    law: Law
    parameters: int
    attention: str
    attention_reason: str
    traces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that a micro-batch is to fill."""

    budget_bytes: float
    surroundings: Surroundings
    max_rows: int


class CannotTrace(NotCheckable):
    """A model computes in a way that can only be seen by running it."""


def estimate_model(request: EstimateRequest, machine: Machine, room: Room | None = None) -> MemoryEstimate:
    """Trace a model's step at two sizes and, if there is room to fill, at the largest micro-batch that fills it.

    What kernels request grows in steps, and differently for few rows; so the prediction is made again from traces near
    what was predicted at first, until it stands.

    Raises:
        CannotTrace: If the model cannot be traced, or allocates in another order at another size.
        BadInput: If the configuration cannot be built.
    """
    estimate, traces = _extended(request, machine, (), FIRST_ROWS)
    for number in range(MOST_ROUNDS if room is not None else 0):
        assert room is not None
        rows = predicted_rows(estimate, room.budget_bytes, room.surroundings, max_rows=room.max_rows)
        rows = max(2, rows)  # a single row is a view where several are copied
        if any(abs(trace.rows - rows) <= CLOSE_SHARE * rows for trace in traces):
            break
        below = (max(1, round(BELOW_SHARE * rows)),) if number == 0 else ()
        estimate, traces = _extended(request, machine, traces, (*below, rows))
    return estimate


def _extended(
    request: EstimateRequest, machine: Machine, traces: tuple[Trace, ...], rows: tuple[int, ...]
) -> tuple[MemoryEstimate, tuple[Trace, ...]]:
    """Trace further sizes; return what all traces say that are like the largest."""
    for shift in range(SHIFTS):
        known = {trace.rows for trace in traces}
        sizes = dict.fromkeys(one + shift for one in rows)
        found = _traced(request, machine, tuple(one for one in sizes if one not in known))
        traces = (*traces, *(Trace.of(one) for one in found["traces"]))
        largest = max(traces, key=lambda trace: trace.rows)
        alike = [trace for trace in traces if trace is largest or law_of((trace, largest)) is not None]
        law = law_of(alike)
        if law is not None and len(alike) > 1:
            break
    else:
        raise _cannot(request, "it allocates in another order at another size")
    estimate = MemoryEstimate(
        request=request,
        law=law,
        parameters=found["parameters"],
        attention=found["attention"],
        attention_reason=found["attention_reason"],
        traces=len(law.rows),
    )
    return estimate, tuple(alike)


def predicted_rows(estimate: MemoryEstimate, budget_bytes: float, surroundings: Surroundings, *, max_rows: int) -> int:
    """Return the largest micro-batch that is predicted to fit."""
    return largest_rows(estimate.law, budget_bytes, surroundings, max_rows=max_rows)


def rows_range(estimate: MemoryEstimate, budget_bytes: float, expected: Expected, *, max_rows: int) -> tuple[int, int]:
    """Return the same with everything that is assumed at its most, and at its least."""
    share = UNTRACED_SHARE[expected.usual.kind]
    room = max(0, budget_bytes - peak_bytes(estimate.law, 1, expected.usual))
    low = predicted_rows(estimate, budget_bytes - share * room, expected.most, max_rows=max_rows)
    high = predicted_rows(estimate, budget_bytes + share * room, expected.least, max_rows=max_rows)
    return low, high


def predicted_bytes(estimate: MemoryEstimate, surroundings: Surroundings) -> Callable[[int], float]:
    """Return the peak by rows; each is computed once."""
    return functools.cache(lambda rows: float(peak_bytes(estimate.law, rows, surroundings)))


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
        why = (outcome.detail.strip().splitlines() or [outcome.kind])[-1]
        if isinstance(outcome, TimedOut):
            why = f"tracing took longer than {TRACE_TIMEOUT_S:g} s"
        raise _cannot(request, why)
    return outcome.figures


def _cannot(request: EstimateRequest, why: str) -> CannotTrace:
    name = request.config.model.name
    return CannotTrace(
        f"{name} cannot be predicted without running it: {why}",
        next_step="Measure it where it is to run, with autotune probe.",
    )
