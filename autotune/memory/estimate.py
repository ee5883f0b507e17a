"""Traces of a model's step, until they predict the largest micro-batch.

The step is traced on the meta device, at a few micro-batch sizes, by a child process.
The memory of other sizes is interpolated between these traces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.errors import NotCheckable
from autotune.machine.decide import is_busy
from autotune.machine.host import SystemHost
from autotune.memory.decide.memory_model import (
    MemoryModel,
    SlotsOf,
    fit_memory_model,
    largest_micro_batch_size,
)
from autotune.memory.decide.overheads import MemoryOverheads
from autotune.memory.values import Trace
from autotune.speed.values import StepWork
from autotune.trials.outcomes import Measured, TimedOut
from autotune.trials.trial_machine import Machine
from autotune.trials.values import TrialRequest

FIRST_SIZES = (8, 64)
"""Micro-batch sizes that are traced first: far enough apart to show the growth of each
allocation, and small, as their traces only lead to the sizes that matter."""
BELOW_SHARE = 0.8
"""Share of the predicted largest micro-batch that is also traced, so that sizes near it
lie between two traces."""
CLOSE_SHARE = 0.005
"""Relative distance to a traced size within which a prediction is final."""
MAX_ROUNDS = 3
"""Most rounds in which sizes near the predicted largest micro-batch are traced."""
MAX_SHIFTS = 3
"""Attempts of a round, each with one sequence more in every size: compiled layers reuse
blocks of equal size, so that the trace of a single size may allocate unlike all
others."""
TRACE_TIMEOUT_S = 120.0
"""Time limit of the ``trace`` job; usually it takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Predicted memory of one model, with facts from its trace."""

    memory_model: MemoryModel
    max_micro_batch_size: int
    """Largest micro-batch that is predicted to fit; 0 if not even one sequence does."""
    parameters: int
    """Number of parameters of the model."""
    attention: str
    """Attention kernel of the traced step."""
    attention_reason: str
    """Reason for that kernel, in words."""
    works: tuple[StepWork, ...]
    """Kernels of a step, for each traced micro-batch size."""

    def work_near(self, micro_batch_size: int) -> StepWork:
        """Return the kernels of a step at the nearest traced micro-batch size."""
        return min(
            self.works, key=lambda work: abs(work.micro_batch_size - micro_batch_size)
        )


class CannotTrace(NotCheckable):
    """The memory of this model cannot be predicted from a trace, only measured."""


class AnyTraceRequest(Protocol):
    """Request for traces of a step, by a job of its subject.

    It is a pydantic model, whose field ``sizes`` has the micro-batch sizes to trace.
    """

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def slots_of(self) -> SlotsOf | None:
        """Function of the slots of a sparse MLM head, by size; None without one."""

    def model_copy(self, *, update: Mapping[str, Any]) -> TrialRequest:
        """Return the request with some fields changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceFigures:
    """Result of the ``trace`` job."""

    traces: tuple[Trace, ...]
    """Traces, in the order of the requested sizes."""
    parameters: int
    """Number of parameters of the model."""
    attention: str
    """Attention kernel of the traced step."""
    attention_reason: str
    """Reason for that kernel, in words."""

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> "_TraceFigures":
        """Read the figures that the job returned."""
        return cls(
            traces=tuple(Trace.of(trace) for trace in figures["traces"]),
            parameters=figures["parameters"],
            attention=figures["attention"],
            attention_reason=figures["attention_reason"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedSizes:
    """Traces that allocate like the trace of the largest size."""

    memory_model: MemoryModel
    """Memory of any size, from these traces."""
    traces: tuple[Trace, ...]
    """Traces in the order in which they were made."""
    figures: _TraceFigures
    """Result of the last job, for its facts of the model."""


def estimate_model(
    request: AnyTraceRequest,
    machine: Machine,
    budget_bytes: float,
    overheads: MemoryOverheads,
    *,
    max_micro_batch_size: int,
) -> MemoryEstimate:
    """Trace a model's step until the prediction of the largest micro-batch is stable.

    Two sizes are traced first, then sizes near the largest that is predicted to fit.

    Raises:
        CannotTrace: If it cannot be traced, or if no two sizes allocate in the same
            order.
        BadInput: If the settings are invalid.
    """

    def largest_size(memory_model: MemoryModel) -> int:
        return largest_micro_batch_size(
            memory_model,
            budget_bytes,
            overheads,
            max_micro_batch_size=max_micro_batch_size,
        )

    traced = _trace_more(request, machine, (), FIRST_SIZES)
    for round_number in range(MAX_ROUNDS):
        # At least two: one sequence alone is a view of its data while several are
        # copied, so that its trace has other allocations.
        size = max(2, largest_size(traced.memory_model))
        if _is_traced_nearby(traced.traces, size):
            break
        sizes = [size]
        if round_number == 0:
            sizes.insert(0, max(1, round(BELOW_SHARE * size)))
        traced = _trace_more(request, machine, traced.traces, sizes)
    return MemoryEstimate(
        memory_model=traced.memory_model,
        max_micro_batch_size=largest_size(traced.memory_model),
        works=tuple(trace.work for trace in traced.traces),
        parameters=traced.figures.parameters,
        attention=traced.figures.attention,
        attention_reason=traced.figures.attention_reason,
    )


def _is_traced_nearby(traces: Sequence[Trace], size: int) -> bool:
    """Return whether a size was traced, or one so close that its memory is known."""
    return any(
        abs(trace.micro_batch_size - size) <= CLOSE_SHARE * size for trace in traces
    )


def _trace_more(
    request: AnyTraceRequest,
    machine: Machine,
    traces: Sequence[Trace],
    sizes: Sequence[int],
) -> _TracedSizes:
    """Trace further sizes, and leave out traces that allocate unlike the largest size.

    If no other trace allocates like the largest size, the sizes are traced again, each
    with one sequence more.

    Args:
        request: The step to trace.
        machine: Runs the ``trace`` job.
        traces: Earlier traces, which are not repeated.
        sizes: Micro-batch sizes to trace.

    Raises:
        CannotTrace: If a trace fails, or if even the last attempt leaves no two traces
            that allocate alike.
        BadInput: If the settings are invalid.
    """
    all_traces = list(traces)
    for shift in range(MAX_SHIFTS):
        known_sizes = {trace.micro_batch_size for trace in all_traces}
        # Two sizes may be equal; a dictionary drops one, and keeps the order.
        shifted_sizes = dict.fromkeys(size + shift for size in sizes)
        new_sizes = [size for size in shifted_sizes if size not in known_sizes]
        figures = _run_trace(request, machine, new_sizes)
        all_traces += figures.traces
        alike = _like_the_largest(all_traces)
        memory_model = fit_memory_model(alike, request.slots_of)
        if memory_model is not None and len(alike) > 1:
            return _TracedSizes(
                memory_model=memory_model, traces=tuple(alike), figures=figures
            )
    raise _cannot_trace(
        request, "its allocations change order with the micro-batch size"
    )


def _like_the_largest(traces: Sequence[Trace]) -> list[Trace]:
    """Return the trace of the largest size, and all that allocate in the same order."""
    largest = max(traces, key=lambda trace: trace.micro_batch_size)
    return [
        trace
        for trace in traces
        if trace is largest or fit_memory_model((trace, largest)) is not None
    ]


def traced_work(request: AnyTraceRequest, machine: Machine, size: int) -> StepWork:
    """Return the kernels of a step at one size.

    Raises:
        CannotTrace: If the step cannot be traced.
        BadInput: If the settings are invalid.
    """
    (trace,) = _run_trace(request, machine, [size]).traces
    return trace.work


def _run_trace(
    request: AnyTraceRequest, machine: Machine, sizes: Sequence[int]
) -> _TraceFigures:
    """Run the ``trace`` job at some micro-batch sizes.

    Raises:
        CannotTrace: If the job fails, or takes too long.
        BadInput: If the settings are invalid.
    """
    sized = request.model_copy(update={"sizes": list(sizes)})
    outcome = machine.run(sized.trial(timeout_s=TRACE_TIMEOUT_S))
    if isinstance(outcome, Measured):
        return _TraceFigures.of(outcome.figures)
    if isinstance(outcome, TimedOut):
        raise _timed_out(request)
    # The last line of a traceback names the error.
    lines = outcome.detail.strip().splitlines() or [outcome.kind]
    raise _cannot_trace(request, lines[-1])


def _timed_out(request: AnyTraceRequest) -> CannotTrace:
    """Return the error of a trace that took too long.

    If other programs keep the machine busy, the error names them as the cause.
    """
    error = _cannot_trace(request, f"tracing took longer than {TRACE_TIMEOUT_S:g} s")
    host = SystemHost().facts(paths=())
    load = host.load_average_1min
    # The trace itself kept one core busy.
    if load is None or not is_busy(load - 1, host.allotted_cpus):
        return error
    return CannotTrace(
        f"{error.message}, because the machine is busy: the load average is {load:.2f}"
        f" with {host.allotted_cpus} CPU cores",
        next_step="Run the same command again once other programs have ended.",
    )


def _cannot_trace(request: AnyTraceRequest, reason: str) -> CannotTrace:
    """Return the error of a model that can only be measured."""
    return CannotTrace(
        f"the memory of {request.name!r} cannot be predicted: {reason}",
        next_step="Measure it on the machine that will train: autotune probe",
    )
