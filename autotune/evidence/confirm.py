"""Evidence of a confirmation: promised and delivered throughput."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.evidence.kernels import StepKernels
from trainer.formats.tables import StrictTable

TOKENS = "tokens"
"""Unit of rates unless another one is named."""


class SplitRates(StrictTable):
    """Throughput of one split of the global batch, in windows of training."""

    micro_batch_size: PositiveInt
    """Sequences of each rank's micro-batch; for code of yours, its searched size."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches of each rank in an optimizer step of training."""
    micro_batches_measured: PositiveInt
    """Micro-batches of each rank in an optimizer step of the windows, which is less if
    a whole step takes long."""
    tokens_per_s: list[PositiveFloat]
    """Non-padding tokens/s, or the evidence's unit/s, of each window, each in a
    separate process."""


class DeliveredTraining(StrictTable):
    """Throughput of a short training by the trainer's own loop."""

    tokens_per_s: PositiveFloat
    """Non-padding tokens/s, or the evidence's unit/s, of its steps, without the first
    ones."""
    steps: PositiveInt
    """Optimizer steps that count."""
    seconds: NonNegativeFloat
    """Time of these steps."""
    mfu: PositiveFloat | None = None
    """Model FLOPs utilisation of these steps, as a share of the peak; None if the peak
    is unknown."""


class ConfirmEvidence(StrictTable):
    """Throughput that the settings of a profile promise, and what training delivers."""

    unit: str | None = None
    """Unit of all rates, as a plural; None for tokens."""
    rows: list[SplitRates]
    """Splits of the global batch, the chosen one first."""
    num_workers: NonNegativeInt
    """DataLoader workers of each rank in all windows."""
    local_ranks: PositiveInt
    """Ranks that trained together on this node."""
    promised_tokens_per_s: PositiveFloat
    """Non-padding tokens/s, or the unit/s, to expect of a training with the chosen
    split."""
    promised_low: PositiveFloat | None = None
    """Lower bound for one further process at 95 % confidence; None if too few windows
    show a spread."""
    promised_high: PositiveFloat | None = None
    """Upper bound for one further process at 95 % confidence; None if too few windows
    show a spread."""
    delivered: DeliveredTraining | None = None
    """Short training with the chosen split; None if there was none."""
    not_delivered: str | None = None
    """Reason why there was no training, in words; None if there was one."""
    not_verified: str | None = None
    """Tuned settings with which nothing was trained, and why; None if all were."""
    kernels: StepKernels | None = None
    """Kernels of a step with the chosen split, each with its bound; None if they were
    not profiled."""
    not_profiled: str | None = None
    """Reason why kernels were not profiled, in words; None if they were."""
    window_s: PositiveFloat
    """Shortest duration of a window."""
    windows: PositiveInt
    """Number of windows of all splits."""
    seconds: NonNegativeFloat
    """Seconds that windows and training took, those from the trial log included."""

    @property
    def rate_unit(self) -> str:
        """Unit of all rates, such as ``tokens/s``."""
        return f"{self.unit or TOKENS}/s"

    @property
    def promised(self) -> Interval:
        """Promised rate, with the bounds for one further process."""
        return Interval.from_bounds(
            self.promised_tokens_per_s,
            self.promised_low,
            self.promised_high,
            SHOWN_CONFIDENCE,
        )

    @property
    def is_kept(self) -> bool | None:
        """True if training delivered a rate within the bounds that were promised.

        None without bounds, or without a training.
        """
        promised = self.promised
        if self.delivered is None or promised.low is None or promised.high is None:
            return None
        return promised.low <= self.delivered.tokens_per_s <= promised.high
