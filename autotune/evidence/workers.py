"""Evidence of a sweep of DataLoader workers."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import Interval, RatioBounds
from autotune.evidence.gpu_use import GpuUse, Share
from trainer.formats.tables import StrictTable

BATCHES = "batches"
"""Unit of the rates of a step that does not count its work."""
VERDICT_WORDS = {"verified": "sufficient", "refuted": "too few", "open": "undecided"}
"""Words for users, by verdict."""


class WorkersRow(RatioBounds):
    """Results of the windows of a sweep with one number of DataLoader workers."""

    num_workers: NonNegativeInt
    """DataLoader workers of each rank."""
    units_per_s: list[float]
    """Units/s in each window, of all local ranks, with padding if the step counts it.
    ``WorkersEvidence.unit`` names the unit."""
    ratio_to_cached: PositiveFloat
    """Throughput over that of the same step on cached batches, from the ratios within
    rounds."""
    verdict: Literal["verified", "refuted", "open"]
    """Verdict on whether this number of workers is sufficient."""
    data_wait_share: Share
    """Median share of a window in which GPUs waited for data, summed over local
    ranks."""
    processes: NonNegativeInt | None = None
    """Most worker processes that a rank had; None if they were not counted."""
    memory_bytes: PositiveInt | None = None
    """Memory of all local ranks and their workers, the largest of all windows."""
    model_flops_per_s_per_rank: list[NonNegativeFloat] = Field(default_factory=list)
    """Model FLOP/s of a rank, without padding, in each window; empty if the step does
    not count FLOPs, or was replayed."""
    storage_bytes_per_s: NonNegativeFloat | None = None
    """Median rate of reads from storage rather than from memory."""
    gpu: GpuUse | None = None
    """Use of the GPUs as means over all windows and GPUs; None without a GPU."""

    @property
    def verdict_words(self) -> str:
        """Verdict in the words that users read."""
        return VERDICT_WORDS[self.verdict]

    @property
    def ratio(self) -> Interval:
        """Ratio to cached batches with its bounds."""
        return self.bounded(self.ratio_to_cached)


class JointChoice(RatioBounds):
    """Result of a joint search over workers, prefetching and pinning.

    The search runs if no number of workers is sufficient. A setting that the loader
    does not take, or that was not varied, is None.
    """

    trials: PositiveInt
    """Number of settings that were tried."""
    num_workers: NonNegativeInt
    """DataLoader workers of each rank, in the best settings that were tried."""
    prefetch_factor: PositiveInt | None = None
    """Micro-batches that each of these workers loads ahead."""
    pin_memory: bool | None = None
    """True if these settings pin memory for copies to the GPU."""
    ratio_to_workers_alone: PositiveFloat
    """Throughput over that of the best number of workers with the other settings as
    they were, from the ratios within rounds."""
    adopted: bool
    """True if it is faster at 98 % confidence and is in the profile."""

    @property
    def ratio(self) -> Interval:
        """Ratio to workers alone with its bounds."""
        return self.bounded(self.ratio_to_workers_alone)

    @property
    def result_words(self) -> str:
        """The decision on adopting the settings, in words."""
        return "adopted" if self.adopted else "not faster at 98 % confidence"

    @property
    def settings(self) -> dict[str, int | bool]:
        """The settings by name, without those that are None."""
        settings = {
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
            "pin_memory": self.pin_memory,
        }
        return {name: value for name, value in settings.items() if value is not None}


class UtilisationFinding(StrictTable):
    """Contradiction between GPU utilisation and throughput, with the chosen workers."""

    kind: Literal["idle at the upper bound", "busy below the upper bound"]
    """Contradiction: the GPU is less than 90 % busy although data loading keeps up with
    the step, or always busy although throughput is clearly below the upper bound."""
    utilisation_share: Share
    """Share of the time with a kernel running, by NVML."""
    claim: str
    """Contradiction and its reason, in words."""
    next_step: str
    """Next step, in words."""

    @property
    def sentence(self) -> str:
        """Contradiction, its reason and the next step, in one sentence."""
        return f"{self.claim}; next: {self.next_step}"


class WorkersEvidence(StrictTable):
    """Sufficient number of DataLoader workers of a subject, with its evidence."""

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
    unit: str
    """Unit of all rates, as a plural: that of the subject, or ``batches`` if its step
    does not count its work."""
    counts_padding: bool
    """True if rates count padding too, so that the samples of a window add no noise."""
    cached_units_per_s: list[float]
    """Units/s of the same step on cached batches, in each window."""
    rows: list[WorkersRow]
    """Results by number of workers, in ascending order."""
    joint: JointChoice | None = None
    """Result of the joint search; None if there was none."""
    local_ranks: PositiveInt
    """Ranks that trained together on this node."""
    consumer: str
    """Consumer of the batches: the training step, or a replay of one."""
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
    worker_bytes: PositiveInt | None = None
    """Private memory of the largest DataLoader worker; None if none was measured."""
    batch_bytes: NonNegativeInt | None = None
    """Bytes of the tensors of the largest batch that was measured; None if unknown."""
    epoch_batches: PositiveInt | None = None
    """Batches of an epoch of a rank, if one ended within a window, so that restarting
    the loader is part of its cost."""
    data_filesystem: str | None = None
    """Type of the file system that the dataset is on; None if unknown."""
    data_on_network: bool = False
    """True if the dataset is on a shared network file system."""
    utilisation_finding: UtilisationFinding | None = None
    """Contradiction between GPU utilisation and throughput; None if there is none, or
    without a GPU."""
    operating_state: str | None = None
    """Power, clocks and power cap of the GPU while the step runs on cached batches."""

    @property
    def rate_unit(self) -> str:
        """Unit of the rates in words, for headers: ``batches/s``."""
        padding = " incl. padding" if self.counts_padding else ""
        return f"{self.unit}/s{padding}"

    @property
    def loader_settings(self) -> dict[str, int | bool]:
        """Settings of the DataLoader that the sweep chose, by name."""
        if self.joint is None or not self.joint.adopted:
            return {"num_workers": self.chosen}
        return self.joint.settings
