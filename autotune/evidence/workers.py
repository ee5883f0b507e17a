"""Evidence of a sweep of DataLoader workers."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import Interval, RatioBounds
from autotune.evidence.gpu_use import GpuUse, Share
from trainer.formats.tables import StrictTable

_VERDICT_WORDS = {"verified": "sufficient", "refuted": "too few", "open": "undecided"}
"""Words for users, by verdict."""


class CountRow(RatioBounds):
    """Results of the windows of a sweep with one number of DataLoader workers.

    The sweep is of the trainer's own loader, or of yours.
    """

    num_workers: NonNegativeInt
    """DataLoader workers of each rank."""
    ratio_to_cached: PositiveFloat
    """Throughput over that of the same step on cached batches, from the ratios within
    rounds."""
    verdict: Literal["verified", "refuted", "open"]
    """Verdict on whether this number of workers is sufficient."""
    data_wait_share: Share
    """Median share of a window in which GPUs waited for data, summed over local
    ranks."""
    memory_bytes: PositiveInt | None = None
    """Memory of all local ranks and their workers, the largest of all windows."""
    gpu: GpuUse | None = None
    """Use of the GPUs as means over all windows and GPUs; None without a GPU."""

    @property
    def verdict_words(self) -> str:
        """Verdict in the words that users read."""
        return _VERDICT_WORDS[self.verdict]

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

    trials: PositiveInt
    """Number of settings that were tried."""
    num_workers: NonNegativeInt
    """DataLoader workers of each rank, in the best settings that were tried."""
    prefetch_factor: PositiveInt
    """Micro-batches that each of these workers loads ahead."""
    pin_memory: bool
    """True if these settings pin memory for copies to the GPU."""
    ratio_to_workers_alone: PositiveFloat
    """Throughput over that of the best number of workers with the profile's other
    settings, from the ratios within rounds."""
    adopted: bool
    """True if it is faster at 98 % confidence and is in the profile."""

    @property
    def ratio(self) -> Interval:
        """Ratio to workers alone with its bounds."""
        return self.bounded(self.ratio_to_workers_alone)


class CountEvidence(StrictTable):
    """Sufficient number of workers, with its evidence."""

    chosen: NonNegativeInt
    """DataLoader workers of each rank."""
    undecided_between: list[NonNegativeInt] = Field(default_factory=list)
    """Fewest and most workers that may be sufficient; empty if it is decided."""
    choice: str
    """Reason for ``chosen``, and what is undecided, in words."""
    next_smaller: str | None = None
    """Result of the next smaller count that was measured, as a sentence; None if there
    is no such count."""
    keeps_up: bool
    """True if data loading with the chosen count keeps up with the training step."""
    max_workers: NonNegativeInt
    """Most DataLoader workers of a rank that the sweep could try."""
    max_workers_because: str
    """Reason for ``max_workers``, in words."""
    window_s: PositiveFloat
    """Minimum duration of a window."""
    windows: PositiveInt
    """Number of windows that gave figures, those on cached batches included."""
    seconds: NonNegativeFloat
    """Seconds that all windows took together, including those from the trial log."""
    gpu_source: str
    """Source of the GPU figures, or the reason why they are missing."""
    replayed_step_s: PositiveFloat | None = None
    """Time of a replayed micro-batch; None if the training step ran."""


class WorkersEvidence(CountEvidence):
    """Sufficient number of DataLoader workers of the trainer, with its evidence."""

    cached_padded_tokens_per_s: list[float]
    """Tokens/s including padding of the same step on cached batches, in each window."""
    rows: list[WorkersRow]
    """Results by number of workers, in ascending order."""
    joint: JointChoice | None = None
    """Result of the joint search; None if there was none."""
    local_ranks: PositiveInt
    """Ranks that trained together on this node."""
    consumer: str
    """Consumer of the batches: the training step, or a replay of one."""
    data_filesystem: str | None = None
    """Type of the file system that the dataset is on; None if unknown."""
    data_on_network: bool = False
    """True if the dataset is on a shared network file system."""
    operating_state: str | None = None
    """Power, clocks and power cap of the GPU while the step runs on cached batches."""

    @property
    def loader_settings(self) -> dict[str, int | bool]:
        """Settings of the DataLoader that the sweep chose, by name."""
        if self.joint is None or not self.joint.adopted:
            return {"num_workers": self.chosen}
        return {
            "num_workers": self.joint.num_workers,
            "prefetch_factor": self.joint.prefetch_factor,
            "pin_memory": self.joint.pin_memory,
        }


class LoaderRow(CountRow):
    """Results of windows of your own loader with one number of workers."""

    batches_per_s: list[PositiveFloat]
    processes: NonNegativeInt
    """Worker processes that were started."""


class LoaderEvidence(CountEvidence):
    """Sufficient number of workers of your own loader, with its evidence."""

    cached_batches_per_s: list[PositiveFloat]
    rows: list[LoaderRow]
    worker_bytes: PositiveInt | None = None
    """Private memory of the largest worker."""
    batch_bytes: NonNegativeInt
    epoch_batches: PositiveInt | None = None
    """Batches of an epoch, if one ended within a window, so that restarting the loader
    is part of its cost."""
