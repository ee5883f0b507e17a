"""Traces of allocations, and the requests for steps and traces in child processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from autotune.speed.values import StepWork
from autotune.trials.values import JobName, TrialRequest
from trainer.config.train_config import TrainConfig
from trainer.data.manifest import SpecialIds


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


def activations_of(module: object) -> str:
    """Return the term of a module's activations: ``activations: CLASS``."""
    return f"{ACTIVATIONS}: {type(module).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of memory, before any allocator rounds it."""

    size_bytes: int
    term: str
    stream: int = 0
    """CUDA stream; 0 is the one that computes. The allocator keeps separate blocks for
    each stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Allocations in the order in which they were made, and when each was released."""

    work: StepWork
    """Kernels of the last step."""
    predicted_tokens: int
    """Positions that the head computes."""
    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]
    """``i``: allocation i is made; ``-1 - i``: it is released."""
    repeats_from: int
    """Index in ``events`` from which every further step repeats the events."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch."""
        return self.work.micro_batch_size

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON.

        Each allocation has its term by number, as a trace has thousands of them.
        """
        terms = sorted({allocation.term for allocation in self.allocations})
        number = {term: index for index, term in enumerate(terms)}
        return {
            "work": self.work.to_json(),
            "predicted_tokens": self.predicted_tokens,
            "terms": terms,
            "sizes_bytes": [allocation.size_bytes for allocation in self.allocations],
            "term_of": [number[allocation.term] for allocation in self.allocations],
            "streams": [allocation.stream for allocation in self.allocations],
            "events": list(self.events),
            "repeats_from": self.repeats_from,
        }

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "Trace":
        """Read the result of ``to_json``.

        Raises:
            KeyError, IndexError, TypeError: If it has another form.
        """
        terms: Sequence[str] = value["terms"]
        allocations = zip(
            value["sizes_bytes"], value["term_of"], value["streams"], strict=True
        )
        return cls(
            work=StepWork.of(value["work"]),
            predicted_tokens=value["predicted_tokens"],
            allocations=tuple(
                Allocation(size_bytes=size, term=terms[number], stream=stream)
                for size, number, stream in allocations
            ),
            events=tuple(value["events"]),
            repeats_from=value["repeats_from"],
        )


class StepRequest(TrialRequest):
    """Request for optimizer steps on random full sequences under a memory budget."""

    job: ClassVar[JobName] = "step"

    config: TrainConfig
    """``micro_batch_size`` is each rank's; the global batch sets the number of
    micro-batches in a step."""
    vocab_size: int
    special_ids: SpecialIds
    memory_budget_bytes: int | None
    """Memory budget of each rank; None means no limit."""
    warmup_steps: int
    timed_steps: int
    local_ranks: int
    documents_per_sequence: float
    attempt: int = 0
    """Number that makes a repeated trial another trial."""


class TraceRequest(TrialRequest):
    """Request for traces of one rank's training steps on the meta device."""

    job: ClassVar[JobName] = "trace"

    config: TrainConfig
    """The trainer's settings; ``sizes`` replaces ``micro_batch_size``."""
    vocab_size: int
    special_ids: SpecialIds
    documents_per_sequence: float
    micro_batches: int
    """Micro-batches in an optimizer step; with two or more, gradients exist while later
    ones are computed."""
    ranks: int
    sizes: list[int] = Field(default_factory=list)
    """Micro-batch size of each trace."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.model.name
