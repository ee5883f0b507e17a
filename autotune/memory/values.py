"""Values of memory.

These are traces of allocations, requests, the evidence of a probe, and predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from autotune.base.interval import (
    SHOWN_CONFIDENCE,
    Interval,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from autotune.plan.values import PlanFigure
from autotune.speed.values import SpeedPrediction, StepWork
from autotune.trials.values import JobName, TrialRequest
from trainer.config.tables import StrictTable
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import SpecialIds


class Term(StrEnum):
    """A line of the memory breakdown.

    Each kind of module has a further one for its activations.
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
    """Return the term of the activations of a module's kind."""
    return f"{ACTIVATIONS}: {type(module).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of memory, before any allocator rounds it."""

    size_bytes: int
    term: str
    stream: int = 0
    """CUDA stream; 0 computes. The allocator keeps separate blocks for each."""


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
        """Return plain JSON, terms by number."""
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


class CurvePoint(StrictTable):
    """Throughput at one micro-batch size."""

    micro_batch_size: Positive
    padded_tokens_per_s: PositiveFloat
    """Tokens/s including padding, with full sequences."""
    step_s: PositiveFloat
    """Median time of the timed optimizer steps of one micro-batch each, in seconds."""
    timed_steps: Positive
    padded_tokens_per_s_low: PositiveFloat | None = None
    """Lower bound at 95 % confidence; None if the timed steps show no reliable
    spread."""
    padded_tokens_per_s_high: PositiveFloat | None = None

    @property
    def padded_rate(self) -> Interval:
        """Tokens/s including padding, with their bounds."""
        low, high = self.padded_tokens_per_s_low, self.padded_tokens_per_s_high
        return Interval.from_bounds(
            self.padded_tokens_per_s, low, high, SHOWN_CONFIDENCE
        )


LOWER_BOUND = "lower bound, not verified"
"""Words for a largest size behind which nothing was tried."""


class ProbeEvidence(StrictTable):
    """Result of a probe: the largest micro-batch that fits, and the one in use."""

    feasible_max: Positive
    """Largest micro-batch, in sequences, that ran optimizer steps under the budget."""
    infeasible_min: Positive | None = None
    """Smallest micro-batch that ran out of memory; None if the search reached its upper
    limit first."""
    is_lower_bound: bool = False
    """True if time ended before the limit was verified: ``feasible_max`` ran, and more
    may fit."""
    feasible_peak_bytes: Positive
    """Peak memory of ``feasible_max`` in its trials."""
    predicted_peak_bytes: Positive | None = None
    """Peak of ``feasible_max`` predicted by the trace and smaller trials; without a
    trace by a line through two."""
    traced_peak_bytes: Positive | None = None
    """Peak predicted for ``feasible_max`` before any trial; None if the model was not
    traced."""
    traced_micro_batch_size: NonNegative | None = None
    """Largest micro-batch that the trace alone predicted."""
    traced_terms_bytes: dict[str, int] = Field(default_factory=dict)
    """Memory breakdown of ``feasible_max``, predicted by the trace."""
    parameters: Positive | None = None
    not_traced: str | None = None
    """Reason for a missing trace."""
    local_ranks: Positive = 1
    """Ranks that took the steps together, each under the budget."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches of a step; two stand for any larger number: gradients exist while
    the next one is computed."""
    search_trials: Positive
    """Trials until both sides were verified; the throughput curve took further ones."""
    seconds: NonNegativeFloat
    """Time of all trials, the throughput curve's included."""
    mean_tokens_per_sequence: PositiveFloat
    """Mean non-padding tokens per sequence of this dataset, in this layout."""
    curve: list[CurvePoint]
    knee_micro_batch_sizes: list[Positive] = Field(default_factory=list)
    """Two sizes between which the knee of the curve lies, within measurement noise."""
    sustained: CurvePoint | None = None
    """Throughput to expect: the chosen micro-batch over a minute, warm and at the power
    limit; over less if a trial's time limit is below 4 minutes. None on a CPU."""
    choice: str
    """Reason for ``micro_batch_size``."""

    def promised(self, micro_batch_size: int) -> CurvePoint | None:
        """Return the throughput to expect of a micro-batch size.

        Returns:
            None if it was not measured.
        """
        for point in (self.sustained, *self.curve):
            if point is not None and point.micro_batch_size == micro_batch_size:
                return point
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Memory of one GPU at its peak: of the whole model, or of a share of it."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    head_and_loss_bytes: int
    temporaries_bytes: int
    """Blocks that are allocated and released within a step."""
    non_pytorch_bytes: int
    """Non-PyTorch memory: context, NCCL, handles."""
    gathered_bytes: int = 0
    """The layer that ZeRO-3 has gathered at the moment."""

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state, which ZeRO shards."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Memory of one GPU under one way of sharing a model."""

    name: str
    trains_here: bool
    """True if this project's trainer supports it; the others are formulas for
    comparison."""
    total_bytes: int
    fits: bool
    held: StateBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a model, for a training plan."""

    parameters: PlanFigure
    state: StateBytes
    """Memory of a rank alone, with ``micro_batch_size``."""
    largest_bytes: int
    """Largest unit that FSDP gathers."""
    micro_batch_size: int
    """Micro-batch size of a rank to which the figures apply."""
    max_micro_batch_size: int
    """Largest micro-batch that fits a rank alone with the headroom left; 0 if none
    does."""
    source: str
    work: StepWork | None = None
    """Kernels of a step, if it was traced."""
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Memory at its peak, by term; the terms add up to the peak."""

    micro_batch_size: int
    terms_bytes: Mapping[str, int]
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedModel:
    """Prediction for one model and one memory budget."""

    model: str
    config: TrainConfig
    """Settings of the step; batch sizes are ignored."""
    parameters: int
    attention: str
    attention_reason: str
    budget_bytes: int
    micro_batch_size: int
    """Largest micro-batch that is predicted to fit."""
    micro_batch_size_low: int
    """Largest micro-batch if all assumed overheads are at their most."""
    micro_batch_size_high: int
    """Largest micro-batch if all assumed overheads are at their least."""
    limited: bool
    """True if more may fit, but larger sizes were not tried."""
    breakdown: MemoryBreakdown
    bytes_per_sequence: float
    non_padding_tokens: float | None
    samples: float | None
    traces: int
    torch: str
    """Version of torch whose step was traced; others may keep more or less."""
    speed: SpeedPrediction | None
    """Predicted speed at ``micro_batch_size``; None if the machine's constants are not
    known."""
    shares: tuple[Share, ...]
    """Memory of one of several GPUs that share the model; empty for one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions for one GPU, without any measurement."""

    target: str
    """GPU, or amount of memory, of the prediction."""
    reserve_bytes: int
    """GPU memory that is left out of the budget."""
    models: tuple[PredictedModel, ...]
    rejected: Mapping[str, Mapping[str, Any]]
    """Models that do not fit or cannot be predicted, each with its ``exit_code``,
    ``message`` and ``next_step``."""
    what_if: tuple[Mapping[str, Any], ...]
    """Alternatives: settings, the ``micro_batch_size`` that fits (null if unknown), its
    ``non_padding_tokens``, and a ``note``."""
