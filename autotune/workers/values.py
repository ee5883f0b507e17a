"""Requests and evidence of a sweep of DataLoader workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from autotune.base.defaults import TRIAL_TIMEOUT_S, WINDOW_S
from autotune.base.interval import (
    Interval,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RatioBounds,
)
from autotune.trials.job_figures import GpuUse, Share
from autotune.trials.values import JobName, TrialRequest
from trainer.config.tables import StrictTable
from trainer.config.train_config import TrainConfig


class TrainingRequest(TrialRequest):
    """Request to train for a timed window on the dataset, or on cached batches."""

    job: ClassVar[JobName] = "training"

    config: TrainConfig
    """Trainer settings, with the loader settings to try."""
    cached: bool
    """True if batches are cached, which gives the upper bound without data loading."""
    round: int
    """Number of the round; its windows read sequences in the same order."""
    interleaved_with: list[str]
    """Names of all windows of the round."""
    storage: str
    """File system that the dataset is read from."""
    window_s: float
    min_steps: int
    local_ranks: int
    replayed_step_s: float | None
    """Time of a replayed micro-batch; None runs the trainer's own step."""
    sample_delay_s: float
    """Delay added to the reading of each sample."""
    losses: bool = False
    """True if the loss of each step is reported."""


VERDICT_WORDS = {"verified": "sufficient", "refuted": "too few", "open": "undecided"}
"""Words that users read for each verdict."""


class CountRow(RatioBounds):
    """Results of windows with one number of workers."""

    num_workers: NonNegative
    """DataLoader workers of each rank."""
    ratio_to_cached: PositiveFloat
    """Throughput over that of the same step on cached batches, round by round."""
    verdict: Literal["verified", "refuted", "open"]
    data_wait_share: Share
    """Median share of a window in which GPUs waited for data, summed over local
    ranks."""
    memory_bytes: Positive | None = None
    """Memory of all local ranks and their workers, the largest of all windows."""
    gpu: GpuUse | None = None

    @property
    def ratio(self) -> Interval:
        """Ratio to cached batches with its bounds."""
        return self.bounded(self.ratio_to_cached)


class WorkersRow(CountRow):
    """Results of windows of the trainer with one number of DataLoader workers."""

    padded_tokens_per_s: list[float]
    """Tokens/s including padding in each window, of all local ranks."""
    model_flops_per_s_per_rank: list[NonNegativeFloat] = Field(default_factory=list)
    """Model FLOP/s of a rank for non-padding tokens, in each window; empty if the step
    was replayed."""
    storage_bytes_per_s: NonNegativeFloat | None = None
    """Median rate of reads from storage rather than from memory."""


class JointChoice(RatioBounds):
    """Result of a joint search over workers, prefetching and pinning.

    The search runs if no number of workers is sufficient.
    """

    trials: Positive
    num_workers: NonNegative
    prefetch_factor: Positive
    pin_memory: bool
    ratio_to_workers_alone: PositiveFloat
    """Throughput over that of workers alone, round by round."""
    adopted: bool
    """True if it is faster at 98 % confidence and is in the profile."""

    @property
    def ratio(self) -> Interval:
        """Ratio to workers alone with its bounds."""
        return self.bounded(self.ratio_to_workers_alone)


class CountEvidence(StrictTable):
    """Sufficient number of workers, with its evidence."""

    chosen: NonNegative
    """DataLoader workers of each rank."""
    undecided_between: list[NonNegative] = Field(default_factory=list)
    """Fewest and most workers that may be sufficient; empty if it is decided."""
    choice: str
    next_smaller: str | None = None
    """Result of the next smaller count that was measured."""
    keeps_up: bool
    """True if data loading with the chosen count keeps up with the training step."""
    max_workers: NonNegative
    max_workers_because: str
    window_s: PositiveFloat
    """Minimum duration of a window."""
    windows: Positive
    seconds: NonNegativeFloat
    gpu_source: str
    """Source of the GPU figures, or the reason why they are missing."""
    replayed_step_s: PositiveFloat | None = None
    """Time of a replayed micro-batch; None if the training step ran."""


class WorkersEvidence(CountEvidence):
    """Sufficient number of DataLoader workers of the trainer, with its evidence."""

    cached_padded_tokens_per_s: list[float]
    """Tokens/s including padding of the same step on cached batches, in each window."""
    rows: list[WorkersRow]
    joint: JointChoice | None = None
    local_ranks: Positive
    consumer: str
    """Consumer of the batches: the training step, or a replay of one."""
    data_filesystem: str | None = None
    data_on_network: bool = False
    """True if the dataset is on a shared network file system."""
    operating_state: str | None = None
    """Power, clocks and power cap of the GPU while the step runs on cached batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Request for windows of training, with their time budget."""

    data: Path
    reports: Path
    minutes: float
    """Time budget of all windows, including those from the trial log; the result may be
    undecided after it, but three rounds are measured unless ``ends_s`` is over."""
    ranks: int | None = None
    """Number of local ranks; None means as probed."""
    max_workers: int | None = None
    window_s: float = WINDOW_S
    replayed_step_s: float | None = None
    """Time of a micro-batch on the simulated GPU; None runs the training step."""
    sample_delay_s: float = 0.0
    """Delay added to the reading of each sample, which simulates slower storage."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    ends_s: float | None = None
    """Deadline as Unix time: no window starts that is likely to end later."""

    @property
    def budget_s(self) -> float:
        """Time budget in seconds."""
        return 60 * self.minutes
