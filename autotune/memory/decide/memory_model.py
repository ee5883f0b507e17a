"""Memory of any micro-batch size, from traces of a few sizes.

It gives the peak, the terms of the peak, and the largest micro-batch that fits.

Traces of different sizes have the same allocations in the same order, with other sizes
in bytes. Between two traced sizes each allocation is interpolated separately; the
sequence is then replayed through the device's allocator. A difference of a few bytes
may decide whether a block is reused, and so change the peak by a per cent.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.memory.decide.caching_allocator import reserve
from autotune.memory.decide.largest_within import largest_below_gaps
from autotune.memory.decide.overheads import (
    UNTRACED_SHARE,
    MemoryOverheads,
    OverheadsRange,
)
from autotune.memory.values import MemoryBreakdown, Term, Trace

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
SlotsOf = Callable[[int], int]
"""Function that returns the slots of the MLM head for a micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Allocations of training with a micro-batch of any size, from two traces or more.

    Shapes: R traced sizes, A allocations.
    """

    micro_batch_sizes: Int64
    """Traced micro-batch sizes, ascending; shape (R,)."""
    traced_bytes: Int64
    """Size of each allocation in each trace; shape (R, A)."""
    term_of: Int64
    """Term of each allocation, as an index of ``terms``; shape (A,)."""
    terms: tuple[str, ...]
    """Terms of the memory breakdown, in alphabetical order."""
    streams: Int64
    """CUDA stream on which each allocation is used; shape (A,)."""
    events: Int64
    """``i``: allocation i is made; ``-1 - i``: it is released."""
    slots_of: SlotsOf | None
    """Slots of the head, which are rounded up; None if no allocation follows them."""
    follows_slots: Bool
    """True for allocations that are proportional to the slots; shape (A,)."""

    def sizes_bytes(self, micro_batch_size: int) -> Int64:
        """Return the size of each allocation for a micro-batch, shape (A,).

        Sizes are interpolated between two traces, and extrapolated outside of them.
        Those that follow the slots of the head are exact.
        """
        traced_sizes = self.micro_batch_sizes
        position = np.searchsorted(traced_sizes, micro_batch_size)
        # Beyond the traced sizes, the two nearest ones are extrapolated.
        upper = int(np.clip(position, 1, len(traced_sizes) - 1))
        lower = upper - 1
        distance = micro_batch_size - traced_sizes[lower]
        traced_distance = traced_sizes[upper] - traced_sizes[lower]
        lower_bytes = self.traced_bytes[lower]
        # Floor division of the negated growth rounds the growth up.
        negated_growth = lower_bytes - self.traced_bytes[upper]
        interpolated: Int64 = lower_bytes - negated_growth * distance // traced_distance
        if self.slots_of is not None:
            follows = self.follows_slots
            slots = self.slots_of(micro_batch_size)
            traced_slots = self.slots_of(int(traced_sizes[lower]))
            interpolated[follows] = lower_bytes[follows] * slots // traced_slots
        return np.maximum(interpolated, 0)

    def running_bytes(self, micro_batch_size: int) -> Int64:
        """Return the bytes in use after each event, before an allocator rounds them."""
        sizes = self.sizes_bytes(micro_batch_size)
        is_made = self.events >= 0
        changes = np.where(is_made, sizes[self.events], -sizes[-1 - self.events])
        return np.cumsum(changes)

    @property
    def largest_parameter_bytes(self) -> int:
        """Size of the largest single parameter, such as the embedding table."""
        is_parameter = self.term_of == self.terms.index(Term.PARAMETERS)
        # The size of a parameter is the same in each trace.
        parameters_bytes = self.traced_bytes[0, is_parameter]
        return int(parameters_bytes.max(initial=0))


def fit_memory_model(
    traces: Sequence[Trace], slots_of: SlotsOf | None = None
) -> MemoryModel | None:
    """Return the memory model of traces; only that of two or more predicts sizes.

    Args:
        traces: Traces of different micro-batch sizes.
        slots_of: Slots of a sparse MLM head. They are ignored unless the traces have
            these numbers of them.

    Returns:
        None if the terms or the order of the traces' allocations differ.
    """
    ordered = sorted(traces, key=lambda trace: trace.micro_batch_size)
    first = ordered[0]
    terms = _terms_of(first)
    for trace in ordered:
        if trace.events != first.events or _terms_of(trace) != terms:
            return None
    index_of = {term: index for index, term in enumerate(sorted(set(terms)))}
    traced_bytes = [
        [allocation.size_bytes for allocation in trace.allocations] for trace in ordered
    ]
    streams = [allocation.stream for allocation in first.allocations]
    sizes = [trace.micro_batch_size for trace in ordered]
    slots = [trace.predicted_tokens for trace in ordered]
    follows_slots = np.zeros(len(terms), dtype=np.bool_)
    if slots_of is not None and slots == [slots_of(size) for size in sizes]:
        follows_slots = _is_proportional(traced_bytes, slots)
        # Others may also seem to, if the slots of these sizes are not rounded.
        follows_slots &= ~_is_proportional(traced_bytes, sizes)
    return MemoryModel(
        micro_batch_sizes=np.array(sizes, dtype=np.int64),
        traced_bytes=np.array(traced_bytes, dtype=np.int64),
        term_of=np.array([index_of[term] for term in terms], dtype=np.int64),
        terms=tuple(index_of),
        streams=np.array(streams, dtype=np.int64),
        events=np.array(first.events, dtype=np.int64),
        slots_of=slots_of if follows_slots.any() else None,
        follows_slots=follows_slots,
    )


def _is_proportional(
    traced_bytes: Sequence[Sequence[int]], numbers: Sequence[int]
) -> Bool:
    """Return which allocations are proportional to a number that differs, shape (A,).

    Args:
        traced_bytes: Size of each allocation in each trace; shape (R, A).
        numbers: The number in each trace.
    """
    bytes_RA = np.array(traced_bytes, dtype=np.int64)
    number_R1 = np.array(numbers, dtype=np.int64)[:, np.newaxis]
    if len(set(numbers)) == 1:
        return np.zeros(bytes_RA.shape[1], dtype=np.bool_)
    is_equal_RA = bytes_RA * number_R1[0] == bytes_RA[0] * number_R1
    is_proportional: Bool = is_equal_RA.all(axis=0)
    return is_proportional


def _terms_of(trace: Trace) -> list[str]:
    """Return the term of each allocation of a trace."""
    return [allocation.term for allocation in trace.allocations]


def peak_bytes(
    model: MemoryModel, micro_batch_size: int, overheads: MemoryOverheads
) -> int:
    """Return the peak memory of a device that trains with this micro-batch size.

    On a CPU it is the most memory in use at a time; on a GPU it is the memory that the
    caching allocator reserves.
    """
    if overheads.kind == "cpu":
        running_bytes = model.running_bytes(micro_batch_size)
        return int(running_bytes.max()) + overheads.non_pytorch_bytes
    traced_bytes = model.sizes_bytes(micro_batch_size).tolist()
    # The first matmuls come before the model, so that handles and workspaces exist when
    # it is built: workspaces are allocated first, on the stream that computes, with
    # numbers after those of the traced allocations.
    workspaces_bytes = overheads.workspaces_bytes
    first_workspace = len(traced_bytes)
    workspace_numbers = range(first_workspace, first_workspace + len(workspaces_bytes))
    workspace_streams = [0] * len(workspaces_bytes)
    reserved_bytes = reserve(
        [*traced_bytes, *workspaces_bytes],
        [*workspace_numbers, *model.events.tolist()],
        [*model.streams.tolist(), *workspace_streams],
        device_bytes=overheads.device_bytes,
    )
    return reserved_bytes + overheads.non_pytorch_bytes


def memory_breakdown(
    model: MemoryModel, micro_batch_size: int, overheads: MemoryOverheads
) -> MemoryBreakdown:
    """Return the memory breakdown at the peak.

    The blocks in use at the event with the most bytes in use are summed by term.
    Rounding and fragmentation are the rest of the peak, beyond these blocks and the
    overheads.
    """
    peak = peak_bytes(model, micro_batch_size, overheads)
    peak_event = int(model.running_bytes(micro_batch_size).argmax())
    terms = _terms_in_use(model, micro_batch_size, peak_event)
    terms[Term.WORKSPACES] = sum(overheads.workspaces_bytes)
    terms[Term.NON_PYTORCH] = overheads.non_pytorch_bytes
    terms[Term.ROUNDING] = peak - sum(terms.values())
    return MemoryBreakdown(
        micro_batch_size=micro_batch_size,
        terms_bytes={term: size for term, size in terms.items() if size},
        peak_bytes=peak,
    )


def _terms_in_use(
    model: MemoryModel, micro_batch_size: int, last_event: int
) -> dict[str, int]:
    """Return the bytes in use after an event, by term.

    Args:
        model: Memory of any micro-batch size.
        micro_batch_size: Sequences of a micro-batch.
        last_event: Index of the event in ``model.events``.
    """
    events = model.events[: last_event + 1]
    is_made = events >= 0
    signs = np.where(is_made, 1, -1)
    numbers = np.where(is_made, events, -1 - events)
    sizes = model.sizes_bytes(micro_batch_size)
    by_term = np.zeros(len(model.terms), dtype=np.int64)
    np.add.at(by_term, model.term_of[numbers], signs * sizes[numbers])
    return dict(zip(model.terms, by_term.tolist(), strict=True))


def largest_micro_batch_size(
    model: MemoryModel,
    budget_bytes: float,
    overheads: MemoryOverheads,
    *,
    max_micro_batch_size: int,
) -> int:
    """Return the largest micro-batch whose peak is within a budget.

    So are the peaks of the sizes that ``largest_below_gaps`` looks at below it.

    Returns:
        0 if not even one sequence fits.
    """

    # A search for gaps compares some sizes again, and each replays a whole trace.
    @functools.cache
    def need_of(micro_batch_size: int) -> int:
        return peak_bytes(model, micro_batch_size, overheads)

    return largest_below_gaps(need_of, budget_bytes, top=max_micro_batch_size)


def size_range(
    model: MemoryModel,
    budget_bytes: float,
    overheads: OverheadsRange,
    *,
    max_micro_batch_size: int,
    unconfirmed_share: float = 0.0,
) -> tuple[int, int]:
    """Return the range of the largest micro-batch size, its lower end first.

    The lower end is for the most overheads, the upper end for the least.

    Args:
        model: Memory of any micro-batch size.
        budget_bytes: Memory that a step may use.
        overheads: Assumed overheads, with their range.
        max_micro_batch_size: Largest size to consider.
        unconfirmed_share: Share of its growth with the micro-batch size by which a step
            may need more than was traced.
    """
    growth_bytes = max(0, budget_bytes - peak_bytes(model, 1, overheads.usual))
    untraced_bytes = UNTRACED_SHARE[overheads.usual.kind] * growth_bytes
    low = largest_micro_batch_size(
        model,
        budget_bytes - untraced_bytes - unconfirmed_share * growth_bytes,
        overheads.most,
        max_micro_batch_size=max_micro_batch_size,
    )
    high = largest_micro_batch_size(
        model,
        budget_bytes + untraced_bytes,
        overheads.least,
        max_micro_batch_size=max_micro_batch_size,
    )
    return low, high
