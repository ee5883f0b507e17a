"""Requests and evidence of a sweep of DataLoader workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from autotune.base.defaults import TRIAL_TIMEOUT_S, WINDOW_S
from autotune.base.interval import Interval, NonNegative, NonNegativeFloat, Positive, PositiveFloat, RatioBounds
from autotune.trials.values import GpuUse, JobName, Share, TrialRequest
from trainer.config.tables import StrictTable
from trainer.config.train_config import TrainConfig


class FeedRequest(TrialRequest):
    """Train for a window of time on the dataset, or on batches from memory."""

    job: ClassVar[JobName] = "feed"

    config: TrainConfig
    """The trainer's settings, with the loader settings to try."""
    cached: bool
    """Take batches from memory, which gives the ceiling."""
    round: int
    """Windows of the same round read rows in the same order."""
    beside: list[str]
    """Names of all windows of the round."""
    storage: str
    """File system that the dataset is read from."""
    window_s: float
    min_steps: int
    local_ranks: int
    replayed_step_s: float | None
    """Seconds that a micro-batch is replayed with; None runs the trainer's own step."""
    sample_delay_s: float
    """Delay added to the reading of each sample."""
    losses: bool = False
    """Report the loss of each step."""


class WorkersRow(RatioBounds):
    """What windows with one number of loader workers say."""

    num_workers: NonNegative
    """For each rank."""
    padded_tokens_per_s: list[float]
    """One figure per window, of all local ranks; a step costs the same whatever its sequences hold."""
    ratio_to_cached: PositiveFloat
    """To the same step on batches from memory, windows of the same round against each other."""
    verdict: Literal["proven", "refuted", "open"]
    data_wait_share: Share
    """Median; of the time, that devices waited for data, all local ranks' added up."""
    model_flops_per_s_per_rank: list[NonNegativeFloat] = Field(default_factory=list)
    """One figure per window: what the mathematics of the real tokens asks for; empty where the step was replayed."""
    memory_bytes: Positive | None = None
    """Largest; of all local ranks and their workers."""
    storage_bytes_per_s: NonNegativeFloat | None = None
    """Median; read from storage rather than from memory."""
    gpu: GpuUse | None = None

    @property
    def ratio(self) -> Interval:
        """The ratio to batches from memory with its bounds."""
        return self.bounded(self.ratio_to_cached)


class JointChoice(RatioBounds):
    """What a search over workers, prefetching and pinning together found, where workers alone left a gap."""

    trials: Positive
    num_workers: NonNegative
    prefetch_factor: Positive
    pin_memory: bool
    ratio_to_workers_alone: PositiveFloat
    """Throughput, window by window."""
    adopted: bool
    """Whether it was proven to be faster, and is what the profile says."""

    @property
    def ratio(self) -> Interval:
        """The ratio to workers alone with its bounds."""
        return self.bounded(self.ratio_to_workers_alone)


class WorkersEvidence(StrictTable):
    """How many loader workers are enough."""

    chosen: NonNegative
    """For each rank."""
    undecided_between: list[NonNegative] = Field(default_factory=list)
    """The fewest and the most that it may be; empty when it is decided."""
    choice: str
    refusal: str | None = None
    """What is known of the next smaller count that was measured."""
    keeps_up: bool
    """Whether the chosen count keeps the step supplied with data."""
    cached_padded_tokens_per_s: list[float]
    """The same step on batches that already lie in memory."""
    rows: list[WorkersRow]
    joint: JointChoice | None = None
    local_ranks: Positive
    max_workers: NonNegative
    max_workers_because: str
    consumer: str
    """What took the batches: the training step, or a replay of one."""
    replayed_step_s: PositiveFloat | None = None
    """Of a micro-batch, where the step was a replay."""
    window_s: PositiveFloat
    """Least time of a window."""
    windows: Positive
    seconds: NonNegativeFloat
    data_filesystem: str | None = None
    data_on_network: bool = False
    """Whether the file system is another machine's, and others use it too."""
    gpu_source: str
    """Where the GPU's figures come from, or why there are none."""
    operating_state: str | None = None
    """Power, clocks and power cap of the GPU while the step is fed from memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Which windows of training to measure, and for how long."""

    data: Path
    reports: Path
    minutes: float
    """Time of all windows, those from the trial log included, after which the answer may be that it is undecided."""
    ranks: int | None = None
    """None: as the profile was probed."""
    max_workers: int | None = None
    window_s: float = WINDOW_S
    replayed_step_s: float | None = None
    """Of a micro-batch on a GPU that is not here; None takes the training step itself."""
    sample_delay_s: float = 0.0
    """Added to the reading of every sample, as storage that is so much slower would."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    ends_s: float | None = None
    """When all of it should be over, in seconds since 1970: no window begins that is likely to end later."""

    @property
    def budget_s(self) -> float:
        """The same in seconds."""
        return 60 * self.minutes
