"""From traces of a few micro-batches to the memory of any: the law, the ledger, and the largest that fits.

Every allocation of a step grows with the rows of the micro-batch, with the places that the head computes (which grow a
little slower, as they hold six standard deviations), with both or with neither; so three traces tell each one's law
exactly, and the whole sequence can be played through a device's allocator for any number of rows. Nothing is fitted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from autotune.core.allocations import Trace
from autotune.decide.allocator import reserve
from autotune.decide.largest import largest_within

Int64 = npt.NDArray[np.int64]
Kind = Literal["cpu", "cuda"]

ROUNDING = "rounding and fragmentation"
OUTSIDE = "outside the allocator"
PARAMETERS = "parameters"
WORKSPACES = "workspaces of matrix products"


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Allocations of training with a micro-batch of any number of rows."""

    fixed_bytes: Int64
    """Shape (A,), as all that follow: one for each allocation."""
    bytes_per_row: Int64
    bytes_per_slot: Int64
    """For each place that the head computes."""
    term_of: Int64
    terms: tuple[str, ...]
    events: Int64
    slots_of: Callable[[int], int]
    """Places that the head computes, by rows."""

    def sizes_bytes(self, rows: int) -> Int64:
        """Shape (A,), of a micro-batch of so many rows."""
        return self.fixed_bytes + self.bytes_per_row * rows + self.bytes_per_slot * self.slots_of(rows)

    def running_bytes(self, rows: int) -> Int64:
        """Shape (events,): bytes in use after each, before any allocator rounds them."""
        sizes = self.sizes_bytes(rows)
        made = self.events >= 0
        running: Int64 = np.cumsum(np.where(made, sizes[self.events], -sizes[-1 - self.events]))
        return running

    @property
    def largest_parameter_bytes(self) -> int:
        """The largest single block of the model itself, such as its table of embeddings."""
        number = self.terms.index(PARAMETERS)
        return int(self.fixed_bytes[self.term_of == number].max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a device needs beside the traced allocations."""

    kind: Kind
    workspaces_bytes: tuple[int, ...] = ()
    """Blocks within the allocator that libraries take once and keep."""
    outside_bytes: int = 0
    """Outside the allocator: context, handles, communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the memory goes at its peak, by term; the terms add up to the peak."""

    rows: int
    terms_bytes: Mapping[str, int]
    peak_bytes: int


def affine_law(traces: Sequence[Trace], slots_of: Callable[[int], int]) -> Law | None:
    """The law that three traces of different micro-batches tell, in whole numbers.

    Where the head's places lie on a straight line in the rows, so that they cannot be told from rows by these traces,
    all is laid to the rows.

    Returns:
        None when the traces do not have the same allocations in the same order, or do not lie on one law: the model
        then computes in another way at another size.
    """
    first = traces[0]
    if any(not _alike(first, other) for other in traces[1:]):
        return None
    terms = sorted({one.term for one in first.allocations})
    number = {term: index for index, term in enumerate(terms)}
    observed = np.array([[one.size_bytes for one in trace.allocations] for trace in traces], dtype=np.int64)
    more, much_more = observed[1] - observed[0], observed[2] - observed[0]
    rows = [trace.rows - first.rows for trace in traces[1:]]
    slots = [slots_of(trace.rows) - slots_of(first.rows) for trace in traces[1:]]
    apart = rows[0] * slots[1] - rows[1] * slots[0]
    per_slot = (rows[0] * much_more - rows[1] * more) // apart if apart else np.zeros_like(more)
    per_row = (more - slots[0] * per_slot) // rows[0]
    law = Law(
        fixed_bytes=observed[0] - per_row * first.rows - per_slot * slots_of(first.rows),
        bytes_per_row=per_row,
        bytes_per_slot=per_slot,
        term_of=np.array([number[one.term] for one in first.allocations], dtype=np.int64),
        terms=tuple(terms),
        events=np.array(first.events, dtype=np.int64),
        slots_of=slots_of,
    )
    return law if all(holds_for(law, trace) for trace in traces) else None


def holds_for(law: Law, trace: Trace) -> bool:
    """Whether a trace is what the law says, to the byte."""
    sizes = [one.size_bytes for one in trace.allocations]
    return (
        len(sizes) == len(law.fixed_bytes)
        and np.array_equal(law.sizes_bytes(trace.rows), sizes)
        and np.array_equal(law.events, trace.events)
    )


def _alike(one: Trace, other: Trace) -> bool:
    return one.events == other.events and [a.term for a in one.allocations] == [a.term for a in other.allocations]


def peak_bytes(law: Law, rows: int, surroundings: Surroundings) -> int:
    """The highest use of a device's memory by training with so many rows."""
    if surroundings.kind == "cpu":
        return int(law.running_bytes(rows).max()) + surroundings.outside_bytes
    sizes, events = _with_workspaces(law, rows, surroundings)
    return reserve(sizes, events) + surroundings.outside_bytes


def ledger(law: Law, rows: int, surroundings: Surroundings) -> Ledger:
    """The terms of the peak."""
    peak = peak_bytes(law, rows, surroundings)
    running = law.running_bytes(rows)
    at = int(running.argmax())
    made = law.events[: at + 1]
    signs = np.where(made >= 0, 1, -1)
    numbers = np.where(made >= 0, made, -1 - made)
    by_term = np.zeros(len(law.terms), dtype=np.int64)
    np.add.at(by_term, law.term_of[numbers], signs * law.sizes_bytes(rows)[numbers])
    terms = {term: int(size) for term, size in zip(law.terms, by_term, strict=True) if size}
    if surroundings.workspaces_bytes:
        terms[WORKSPACES] = sum(surroundings.workspaces_bytes)
    if surroundings.outside_bytes:
        terms[OUTSIDE] = surroundings.outside_bytes
    if peak != sum(terms.values()):
        terms[ROUNDING] = peak - sum(terms.values())
    return Ledger(rows=rows, terms_bytes=terms, peak_bytes=peak)


def largest_rows(law: Law, budget_bytes: float, surroundings: Surroundings, *, max_rows: int) -> int:
    """The largest micro-batch whose peak is within a budget; 0 when one row is not.

    Args:
        law: Of the model.
        budget_bytes: Of the device.
        surroundings: Of the step.
        max_rows: Look no further.
    """
    return largest_within(lambda rows: peak_bytes(law, rows, surroundings), budget_bytes, low=0, top=max_rows)


def _with_workspaces(law: Law, rows: int, surroundings: Surroundings) -> tuple[list[int], list[int]]:
    sizes = law.sizes_bytes(rows).tolist()
    # They come with the first matrix product, when the model's own weights are there.
    place = _built(law)
    events = law.events.tolist()
    extra = list(range(len(sizes), len(sizes) + len(surroundings.workspaces_bytes)))
    return [*sizes, *surroundings.workspaces_bytes], [*events[:place], *extra, *events[place:]]


def _built(law: Law) -> int:
    """Index of the first event after the model was built."""
    weights = law.terms.index(PARAMETERS) if PARAMETERS in law.terms else -1
    numbers = np.where(law.events >= 0, law.events, -1 - law.events)
    return int(np.flatnonzero(law.term_of[numbers] == weights).max(initial=-1)) + 1
