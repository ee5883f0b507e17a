"""Traces of allocations, and the requests for steps and traces in child processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.speed.values import StepWork


class Term(StrEnum):
    """A line of the memory breakdown.

    The activations of each class of modules are a further line (``activations_of``).
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    TEMPORARIES = "temporaries"
    INPUTS = "inputs and masks"
    HEAD = "head and loss"
    COPIES = "16-bit copies of weights"
    WORKSPACES = "matmul workspaces"
    NON_PYTORCH = "non-PyTorch memory"
    ROUNDING = "rounding and fragmentation"


ACTIVATIONS = "activations"
"""Beginning of the terms of activations, of which each class of modules has one."""


def activations_of(module: object) -> str:
    """Return the term of a module's activations: ``activations: CLASS``."""
    return f"{ACTIVATIONS}: {type(module).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of memory, before any allocator rounds it."""

    size_bytes: int
    """Requested size."""
    term: str
    """Line of the memory breakdown: a ``Term``, or one of ``activations_of``."""
    stream: int = 0
    """CUDA stream; 0 is the one that computes. The allocator keeps separate blocks for
    each stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Allocations of training steps, with the order of allocations and releases."""

    work: StepWork
    """Kernels of the last step."""
    predicted_tokens: int
    """Positions of a micro-batch for which the MLM head computes logits."""
    allocations: tuple[Allocation, ...]
    """Allocations, in the order in which they were made."""
    events: tuple[int, ...]
    """Allocations and releases in their order. ``i``: allocation i is made; ``-1 - i``:
    it is released."""
    repeats_from: int
    """Index in ``events`` from which every further step repeats the events."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch."""
        return self.work.micro_batch_size

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON.

        ``term_of`` has the term of each allocation as an index of ``terms``, as a trace
        has thousands of allocations with few terms.
        """
        terms = sorted({allocation.term for allocation in self.allocations})
        index_of = {term: index for index, term in enumerate(terms)}
        return {
            "work": self.work.to_json(),
            "predicted_tokens": self.predicted_tokens,
            "terms": terms,
            "sizes_bytes": [allocation.size_bytes for allocation in self.allocations],
            "term_of": [index_of[allocation.term] for allocation in self.allocations],
            "streams": [allocation.stream for allocation in self.allocations],
            "events": list(self.events),
            "repeats_from": self.repeats_from,
        }

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "Trace":
        """Read the result of ``to_json``.

        Raises:
            KeyError, IndexError, TypeError, ValueError: If ``value`` is not such a
                result.
        """
        terms: Sequence[str] = value["terms"]
        allocations = zip(
            value["sizes_bytes"], value["term_of"], value["streams"], strict=True
        )
        return cls(
            work=StepWork.of(value["work"]),
            predicted_tokens=value["predicted_tokens"],
            allocations=tuple(
                Allocation(size_bytes=size, term=terms[term_index], stream=stream)
                for size, term_index, stream in allocations
            ),
            events=tuple(value["events"]),
            repeats_from=value["repeats_from"],
        )
