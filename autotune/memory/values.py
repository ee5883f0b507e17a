"""What training steps allocate and release, in order, as a trace without a device records it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Term(StrEnum):
    """A line of the memory breakdown; beside these each kind of module has one for its activations."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    TEMPORARIES = "temporaries"
    INPUTS = "inputs and masks"
    HEAD = "head and loss"
    COPIES = "16-bit copies of weights"
    WORKSPACES = "workspaces of matrix products"
    OUTSIDE = "outside the allocator"
    ROUNDING = "rounding and fragmentation"


ACTIVATIONS = "activations"


def activations_of(module: object) -> str:
    """Return the term of the activations of a module's kind."""
    return f"{ACTIVATIONS}: {type(module).__name__}"


def is_activations(term: str) -> bool:
    """Return whether a term is that of activations."""
    return term.startswith(ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of memory, before any allocator rounds it."""

    size_bytes: int
    term: str
    """Which line of the memory breakdown it belongs to."""
    stream: int = 0
    """CUDA stream; 0 computes. The allocator keeps separate blocks for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Allocations in the order in which they were made, and when each was released."""

    rows: int
    predicted_tokens: int
    """Places that the head computes."""
    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]
    """``i``: allocation i is made; ``-1 - i``: it is released."""
    repeats_from: int
    """Index in ``events`` from which on a run of many steps repeats what follows."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, terms by number."""
        terms = sorted({one.term for one in self.allocations})
        number = {term: index for index, term in enumerate(terms)}
        return {
            "rows": self.rows,
            "predicted_tokens": self.predicted_tokens,
            "terms": terms,
            "sizes_bytes": [one.size_bytes for one in self.allocations],
            "term_of": [number[one.term] for one in self.allocations],
            "streams": [one.stream for one in self.allocations],
            "events": list(self.events),
            "repeats_from": self.repeats_from,
        }

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "Trace":
        """Read what ``to_json`` gave.

        Raises:
            KeyError, IndexError, TypeError: If it is no such thing.
        """
        terms: Sequence[str] = value["terms"]
        return cls(
            rows=value["rows"],
            predicted_tokens=value["predicted_tokens"],
            allocations=tuple(
                Allocation(size_bytes=size, term=terms[term], stream=stream)
                for size, term, stream in zip(value["sizes_bytes"], value["term_of"], value["streams"], strict=True)
            ),
            events=tuple(value["events"]),
            repeats_from=value["repeats_from"],
        )
