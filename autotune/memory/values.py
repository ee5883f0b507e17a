"""Memory as values: traces of allocations, requests, the evidence of a probe, and estimates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from autotune.base.interval import SHOWN_CONFIDENCE, Interval, NonNegative, NonNegativeFloat, Positive, PositiveFloat
from autotune.plan.values import PlanFigure
from autotune.trials.values import JobName, TrialRequest
from trainer.config.tables import StrictTable
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import SpecialIds


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

    micro_batch_size: int
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
            "micro_batch_size": self.micro_batch_size,
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
            micro_batch_size=value["micro_batch_size"],
            predicted_tokens=value["predicted_tokens"],
            allocations=tuple(
                Allocation(size_bytes=size, term=terms[term], stream=stream)
                for size, term, stream in zip(value["sizes_bytes"], value["term_of"], value["streams"], strict=True)
            ),
            events=tuple(value["events"]),
            repeats_from=value["repeats_from"],
        )


class StepRequest(TrialRequest):
    """Take optimizer steps on random full rows under a memory budget."""

    job: ClassVar[JobName] = "step"

    config: TrainConfig
    """``micro_batch_size`` is each rank's; the global batch sets the number of micro-batches in a step."""
    vocab_size: int
    special_ids: SpecialIds
    memory_budget_bytes: int | None
    """Budget of each rank; None means no limit."""
    warmup_steps: int
    timed_steps: int
    local_ranks: int
    documents_per_sequence: float
    attempt: int = 0
    """A number that makes a repeated trial another trial."""


class TraceRequest(TrialRequest):
    """Trace one rank's training steps on the meta device, for several micro-batch sizes."""

    job: ClassVar[JobName] = "trace"

    config: TrainConfig
    """The trainer's settings; ``sizes`` replaces ``micro_batch_size``."""
    vocab_size: int
    special_ids: SpecialIds
    documents_per_sequence: float
    micro_batches: int
    """Micro-batches in an optimizer step; with two or more, gradients exist while later ones are computed."""
    ranks: int
    sizes: list[int] = Field(default_factory=list)
    """Rows of the micro-batch in each trace."""


class CurvePoint(StrictTable):
    """Throughput at one micro-batch."""

    micro_batch_size: Positive
    padded_tokens_per_s: PositiveFloat
    """All rows full."""
    step_s: PositiveFloat
    """Median of the timed optimizer steps, one micro-batch each."""
    timed_steps: Positive
    padded_tokens_per_s_low: PositiveFloat | None = None
    """95 % confidence bounds; None if the timed steps show no spread that could be trusted."""
    padded_tokens_per_s_high: PositiveFloat | None = None

    @property
    def slot_rate(self) -> Interval:
        """Slot tokens/s with their bounds."""
        low, high = self.padded_tokens_per_s_low, self.padded_tokens_per_s_high
        return Interval.of(self.padded_tokens_per_s, low, high, SHOWN_CONFIDENCE)


class ProbeEvidence(StrictTable):
    """Which micro-batch fits, and which one is used."""

    feasible_max: Positive
    """The largest micro-batch, in rows, that ran optimizer steps under the budget."""
    infeasible_min: Positive | None = None
    """The smallest that was refused; None when the search met its own upper limit first."""
    feasible_peak_bytes: Positive
    """What ``feasible_max`` needed."""
    predicted_peak_bytes: Positive | None = None
    """For ``feasible_max``, by the trace as smaller trials corrected it; without a trace by a line through two."""
    traced_peak_bytes: Positive | None = None
    """The same before any trial; None where the model was not traced."""
    traced_micro_batch_size: NonNegative | None = None
    """The largest micro-batch that the trace alone predicted."""
    traced_terms_bytes: dict[str, int] = Field(default_factory=dict)
    """Where the trace says that the memory of ``feasible_max`` goes."""
    parameters: Positive | None = None
    not_traced: str | None = None
    """Why there is no trace."""
    local_ranks: Positive = 1
    """Ranks that took the steps together, each under the budget."""
    gradient_accumulation_steps: Positive = 1
    """With two, which stand for any number above, gradients exist while the next micro-batch is computed."""
    search_trials: Positive
    """Trials until both sides were proven; the throughput curve took further ones."""
    seconds: NonNegativeFloat
    """The curve's included."""
    mean_tokens_per_sequence: PositiveFloat
    """Of this dataset, in this layout."""
    curve: list[CurvePoint]
    knee_micro_batch_sizes: list[Positive] = Field(default_factory=list)
    """Between which two sizes the knee of the curve lies, for all that the noise tells."""
    sustained: CurvePoint | None = None
    """The chosen micro-batch over a minute, warm and at the power limit: what is promised; over less if a trial's time
    limit is below 4 minutes. None on a CPU."""
    choice: str
    """Why ``micro_batch_size`` is what it is."""

    def promised(self, rows: int) -> CurvePoint | None:
        """Return the throughput to expect of a micro-batch; None if it was not measured."""
        if self.sustained is not None and self.sustained.micro_batch_size == rows:
            return self.sustained
        return next((point for point in self.curve if point.micro_batch_size == rows), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Memory of one GPU at its peak, for one micro-batch: alone, or as a share of a model that several hold."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Activations kept for backward."""
    head_and_loss_bytes: int
    temporaries_bytes: int
    """Blocks that come and go in a step."""
    non_pytorch_bytes: int
    """Non-PyTorch memory: context, NCCL, handles."""
    gathered_bytes: int = 0
    """The layer that ZeRO-3 has put together at the moment."""

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer: what ZeRO spreads."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Everything."""
        work_bytes = self.activations_bytes + self.head_and_loss_bytes + self.temporaries_bytes
        return self.state_bytes + work_bytes + self.non_pytorch_bytes + self.gathered_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Memory of one GPU under one way of sharing a model."""

    name: str
    trains_here: bool
    """Whether this project's trainer can; the others are formulas for comparison."""
    total_bytes: int
    fits: bool
    """Whether that is within the budget."""
    held: StateBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is known of a model's memory."""

    parameters: PlanFigure
    state: StateBytes
    """Of a rank alone, with that micro-batch."""
    largest_bytes: int
    """The largest unit that FSDP gathers."""
    micro_batch_size: int
    """Of a rank, for which the figures are."""
    max_micro_batch_size: int
    """That fit a rank alone with the headroom left; 0 if not one does."""
    source: str
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Where the memory goes at its peak, by term; the terms add up to the peak."""

    micro_batch_size: int
    terms_bytes: Mapping[str, int]
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedModel:
    """Prediction for one model on one GPU, or in an amount of memory."""

    model: str
    config: TrainConfig
    """Settings of the step; batches do not count."""
    parameters: int
    attention: str
    """The kernel that the trace took."""
    attention_reason: str
    budget_bytes: int
    micro_batch_size: int
    """The largest micro-batch that should fit."""
    micro_batch_size_low: int
    """The same with everything that is assumed at its most."""
    micro_batch_size_high: int
    """The same with everything that is assumed at its least."""
    limited: bool
    """Whether more may fit, and none was looked for."""
    breakdown: MemoryBreakdown
    bytes_per_sequence: float
    non_padding_tokens: float | None
    samples: float | None
    traces: int
    shares: tuple[Share, ...]
    """Memory of one of several GPUs that share the model; empty with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions for one GPU; nothing of it was measured."""

    target: str
    """The GPU, or the amount of memory."""
    reserve_bytes: int
    """Of the GPU's memory, left out of the budget."""
    models: tuple[PredictedModel, ...]
    refused: Mapping[str, Mapping[str, Any]]
    """Models that do not fit or cannot be predicted, each with its ``exit_code``, ``message`` and ``next_step``."""
    what_if: tuple[Mapping[str, Any], ...]
    """Alternatives, each with its settings, ``rows`` that fit, their ``non_padding_tokens`` and a ``note``; ``rows`` is
    null if the note says why there is no answer."""
