"""Evidence of a probe: sizes that fit, and their throughput."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.errors import NotCheckable
from autotune.evidence.argument import Argument
from autotune.evidence.peak_contents import PeakContents
from trainer.formats.tables import StrictTable


class CurvePoint(StrictTable):
    """Throughput at one size, measured with full batches, padding included."""

    size: PositiveInt
    """Size of each rank's micro-batch."""
    units_per_s: PositiveFloat
    """Units/s of all ranks, such as tokens/s, including padding."""
    step_s: PositiveFloat
    """Median time of the timed optimizer steps of one micro-batch each, in seconds."""
    timed_steps: PositiveInt
    """Number of timed optimizer steps."""
    units_per_s_low: PositiveFloat | None = None
    """Lower bound at 95 % confidence; None if the timed steps show no reliable
    spread."""
    units_per_s_high: PositiveFloat | None = None
    """Upper bound at 95 % confidence; None if the timed steps show no reliable
    spread."""

    @property
    def rate(self) -> Interval:
        """Units/s including padding, with their bounds."""
        return Interval.from_bounds(
            self.units_per_s,
            self.units_per_s_low,
            self.units_per_s_high,
            SHOWN_CONFIDENCE,
        )


class GrownKernel(StrictTable):
    """Kernel that takes longer per token at the larger size of a dip."""

    name: str
    """Name without its numbers, which differ between sizes."""
    ratio: PositiveFloat
    """Time per token at the larger size, divided by that at the smaller one."""
    added_s_per_token: PositiveFloat
    """Time per token that it adds at the larger size, in seconds."""


class ThroughputDip(StrictTable):
    """Size that has clearly fewer tokens/s than a smaller one, and why."""

    smaller_size: PositiveInt
    """Micro-batch size that is faster."""
    larger_size: PositiveInt
    """Micro-batch size that is slower per token."""
    ratio: PositiveFloat
    """Tokens/s of the larger size, divided by those of the smaller one."""
    kernels: list[GrownKernel] = Field(default_factory=list)
    """Kernels whose time per token grew most; empty if none was profiled, or none
    grew."""
    not_profiled: str | None = None
    """Reason why kernels were not profiled; None if they were."""


LOWER_BOUND = "lower bound, not verified"
"""Words for the largest size that ran, if no larger one is known to run out of memory.
"""


class SizeRow(StrictTable):
    """A trial of one size."""

    size: PositiveInt
    fits: bool
    peak_bytes: PositiveInt | None = None
    """Peak memory; None if the size did not fit."""
    step_s: PositiveFloat | None = None
    """Median time of the steps but the first; None if the size did not fit, or on a
    GPU that takes no time to compute."""


class ProbeEvidence(StrictTable):
    """Result of a probe: the largest micro-batch that fits, and the one in use."""

    feasible_max: PositiveInt
    """Largest micro-batch, in sequences, that ran optimizer steps under the budget."""
    infeasible_min: PositiveInt | None = None
    """Smallest micro-batch that ran out of memory; None if the search reached its upper
    limit first."""
    is_lower_bound: bool = False
    """True if time ended before the limit was verified: ``feasible_max`` ran, and more
    may fit."""
    feasible_peak_bytes: PositiveInt
    """Highest peak memory of ``feasible_max`` in its trials."""
    predicted_peak_bytes: PositiveInt | None = None
    """Peak of ``feasible_max``, predicted from trials of smaller sizes that correct the
    trace. Without a trace, a line through two of them predicts it; None if they do not
    suffice."""
    traced_peak_bytes: PositiveInt | None = None
    """Peak predicted for ``feasible_max`` before any trial; None if the model was not
    traced."""
    traced_micro_batch_size: NonNegativeInt | None = None
    """Largest micro-batch that the trace alone predicted; None if the model was not
    traced."""
    traced_terms_bytes: dict[str, int] = Field(default_factory=dict)
    """Memory breakdown of ``feasible_max``, predicted by the trace; empty without
    one."""
    parameters: PositiveInt | None = None
    """Number of parameters, counted by the trace; None without one."""
    not_traced: str | None = None
    """Reason for a failed trace; None if it succeeded or was not requested."""
    kept_bytes: NonNegativeInt | None = None
    """Memory in use between two steps of ``feasible_max``: weights, optimizer state,
    whatever your code keeps. None if it was not measured."""
    host_peak_bytes: NonNegativeInt = 0
    """Highest resident memory of the trial's process."""
    optimizer_steps: NonNegativeInt = 0
    """Steps of torch's optimizers in that trial; 0 if none of them is used."""
    trains: bool = False
    """True if the function is a training loop, which another loader cannot feed."""
    settings: dict[str, Argument] = Field(default_factory=dict)
    """Present values of settings that may be varied, as far as the step reports
    them."""
    multiple_of: PositiveInt = 1
    """Sizes that were tried are multiples of it."""
    varies_bytes: NonNegativeInt = 0
    """Difference between steps of one size, accepted with --allow-varying; 0 if steps
    agree."""
    verified_in: Literal["fresh processes", "this process"] = "fresh processes"
    """Processes of the trials. In one process, what earlier trials left counts."""
    sizes: list[SizeRow] = Field(default_factory=list)
    """Sizes in the order in which they were tried."""
    local_ranks: PositiveInt = 1
    """Ranks that took the steps together, each under the budget."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches of a step in the search. Two need as much memory as any larger
    number: gradients exist while the second one is computed."""
    search_trials: PositiveInt
    """Trials until both sides were verified; the throughput curve took further ones."""
    seconds: NonNegativeFloat
    """Time of all trials in seconds, the throughput curve's included."""
    mean_tokens_per_sequence: PositiveFloat | None = None
    """Mean non-padding tokens per sequence of this dataset, in this layout; None if the
    subject has no tokens."""
    curve: list[CurvePoint]
    """Throughput by ascending size; empty if it was not measured."""
    knee_micro_batch_sizes: list[PositiveInt] = Field(default_factory=list)
    """Smallest and largest size at which the knee of the curve may lie, given the noise
    of the measurement; empty if the curve shows no knee."""
    dip: ThroughputDip | None = None
    """Deepest dip of the curve; None without one."""
    sustained: CurvePoint | None = None
    """Throughput to expect of the chosen micro-batch, measured for a minute, so that
    the GPU is warm and at its power limit. The measurement is shorter if a trial's time
    limit is below 4 minutes. None on a CPU, or if time ran out."""
    contents: PeakContents | None = None
    """Contents of memory at the peak of ``feasible_max``; None if they were not
    recorded."""
    refused_contents: PeakContents | None = None
    """Contents of memory when ``infeasible_min`` ran out of it; None if they were not
    recorded."""
    contents_not_recorded: str | None = None
    """Reason for contents that were requested and not recorded."""
    choice: str
    """Reason for the micro-batch size that the probe chose."""

    @property
    def tokens_per_sequence(self) -> float:
        """Mean non-padding tokens per sequence.

        Raises:
            NotCheckable: If the subject has no tokens.
        """
        if self.mean_tokens_per_sequence is None:
            raise NotCheckable(
                "the profile has no tokens per sequence, which this needs",
                next_step="Use a profile of the bundled trainer.",
            )
        return self.mean_tokens_per_sequence

    def expected_throughput(self, size: int) -> CurvePoint | None:
        """Return the throughput to expect of a size.

        Returns:
            The throughput on a warm GPU if it was measured, else the point of the
            curve; None if the size was not measured.
        """
        for point in (self.sustained, *self.curve):
            if point is not None and point.size == size:
                return point
        return None

    def step_s_at(self, size: int) -> float | None:
        """Return the seconds of a step of one micro-batch of a size.

        Returns:
            The seconds; None if the size was not timed.
        """
        point = self.expected_throughput(size)
        if point is not None:
            return point.step_s
        for row in self.sizes:
            if row.size == size and row.step_s is not None:
                return row.step_s
        return None
