"""Allocations and releases that a profile lacks, from the allocator's own history.

The profiler follows the threads of a step, but libraries also release memory in other
threads, as NCCL does. The history has every allocation and release in order, and no
operators.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.memory.decide.peak_contents import Allocated, Event, Position, Released

_UNKNOWN = Position(phase="other")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """An allocation or a release in the allocator's history."""

    address: int
    size_bytes: int
    """Requested size, which the allocator rounds up."""
    is_release: bool


def complete_events(
    events: Sequence[Event], history: Sequence[HistoryEntry]
) -> list[Event]:
    """Return the events of a profile with those that only the history has.

    Args:
        events: Events of a profile, in order.
        history: All allocations and releases of the same time, in order.
    """
    pending: dict[int, deque[tuple[int, bool]]] = defaultdict(deque)
    for number, event in enumerate(events):
        if isinstance(event, Allocated | Released):
            pending[event.address].append((number, isinstance(event, Released)))
    complete: list[Event] = []
    next_number = 0
    for entry in history:
        queue = pending[entry.address]
        # At an address, allocations and releases take turns.
        if queue and queue[0][1] == entry.is_release:
            number, _ = queue.popleft()
            if number >= next_number:
                complete += events[next_number : number + 1]
                next_number = number + 1
        elif entry.is_release:
            complete.append(Released(address=entry.address))
        else:
            allocated = Allocated(
                address=entry.address, size_bytes=entry.size_bytes, position=_UNKNOWN
            )
            complete.append(allocated)
    return [*complete, *events[next_number:]]
