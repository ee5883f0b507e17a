"""Sweep of the trainer's DataLoader workers, by windows of real training steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.base.units import format_percent, format_seconds
from autotune.machine.measured_device import MeasuredDevice
from autotune.profiles.store import with_data
from autotune.trials.decide.gpu_activity import combine_known
from autotune.trials.job_figures import GpuUseFigures, LoadedWindow, TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.session import Session
from autotune.trials.values import Trial
from autotune.workers.count_sweep import CountSweep, mean_gpu_use
from autotune.workers.decide.count_statistics import Count
from autotune.workers.decide.loader_limits import LoaderLimits, batch_bytes
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.values import (
    SweepRequest,
    TrainingRequest,
    WorkersEvidence,
    WorkersRow,
)
from trainer.config.train_config import TrainConfig

MIN_STEPS = 4
"""Least number of steps in a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWindows:
    """Request for windows of a profile's training on a known machine."""

    request: SweepRequest
    """Windows to measure, with their time budget."""
    config: TrainConfig
    """Trainer settings of the profile."""
    limits: LoaderLimits
    """Limits of the DataLoader workers of a rank."""
    storage: str = ""
    """Name of the storage that holds the dataset; trial logs are reused on the same
    storage only."""


@dataclass(slots=True, kw_only=True)
class Sweep(CountSweep[TrainingFigures]):
    """Measure numbers of workers of the trainer's own DataLoader."""

    training: TrainingWindows
    """Request for the windows of the sweep."""

    @property
    def limits(self) -> LoaderLimits:
        """Limits of the workers of a rank."""
        return self.training.limits

    def window_trial(
        self, count: Count, round_number: int, names: Sequence[str]
    ) -> Trial:
        """Return the trial of a window with ``count`` workers; None caches batches."""
        config = with_data(self.training.config, {"num_workers": count or 0})
        return training_trial(
            self.training, config, round_number, names, cached=count is None
        )

    def read_figures(self, outcome: Measured) -> TrainingFigures:
        """Return the figures of a window that was measured."""
        return TrainingFigures.of(outcome)

    def compared_rate(self, figures: TrainingFigures) -> float:
        """Return tokens/s including padding.

        The non-padding tokens of a window depend on its samples.
        """
        return figures.padded_tokens_per_s


def training_windows(
    bench: Session, config: TrainConfig, request: SweepRequest, ranks: int
) -> TrainingWindows:
    """Return the request for windows here, with the limits of each rank's workers.

    Args:
        bench: Session on the machine and the dataset.
        config: Trainer settings.
        request: Windows to measure, with their time budget.
        ranks: Number of local ranks.
    """
    limits = LoaderLimits(
        host=bench.site.host,
        local_ranks=ranks,
        batch_bytes=_batch_bytes(bench, config),
        prefetch_factor=config.data.prefetch_factor,
        requested_workers=request.max_workers,
    )
    # The device number tells file systems of one type apart.
    filesystem = bench.site.host.disks[0].filesystem_type
    storage = f"{filesystem}:{request.data.stat().st_dev}"
    return TrainingWindows(
        request=request, config=config, limits=limits, storage=storage
    )


def _batch_bytes(bench: Session, config: TrainConfig) -> int:
    """Return the mean size of a micro-batch that a worker sends."""
    samples_per_sequence = 1.0
    if config.layout == "packed":
        train = bench.manifest.train
        tokens = max(1, sum(shard.tokens for shard in train.shards))
        samples_per_sequence = config.seq_length_tokens * train.samples / tokens
    id_bits = int(bench.manifest.dtype.removeprefix("uint"))
    return batch_bytes(
        config.micro_batch_size,
        config.seq_length_tokens,
        id_bits // 8,
        config.masking_probability,
        max(1.0, samples_per_sequence),
    )


def training_trial(
    training: TrainingWindows,
    config: TrainConfig,
    round_number: int,
    interleaved_with: Sequence[str],
    *,
    cached: bool = False,
    **changes: Any,
) -> Trial:
    """Return the trial of a window.

    Args:
        training: Windows of which it is one.
        config: Trainer settings of the window.
        round_number: Number of the window's round, from 0.
        interleaved_with: Names of all windows of the round.
        cached: True to train on cached batches, without data loading.
        changes: Fields of ``TrainingRequest`` that differ from those of ``training``.
    """
    request = training.request
    fields: dict[str, Any] = {
        "config": config,
        "cached": cached,
        "round": round_number,
        "interleaved_with": list(interleaved_with),
        "storage": training.storage,
        "window_s": request.window_s,
        "min_steps": MIN_STEPS,
        "local_ranks": training.limits.local_ranks,
        "replayed_step_s": request.replayed_step_s,
        "sample_delay_s": request.sample_delay_s,
    }
    return TrainingRequest(**fields | changes).trial(
        timeout_s=request.trial_timeout_s, data_dir=str(request.data.resolve())
    )


def evidence(
    sweep: Sweep, choice: WorkersChoice, site: MeasuredDevice
) -> WorkersEvidence:
    """Return the evidence of a sweep for the profile."""
    request = sweep.training.request
    disk = site.host.disks[0]
    cached_windows = sweep.windows_with(None)
    return WorkersEvidence(
        **sweep.evidence_fields(choice),
        cached_padded_tokens_per_s=[
            window.padded_tokens_per_s for window in cached_windows
        ],
        rows=[_row(count, sweep, choice) for count in sweep.counts],
        local_ranks=sweep.training.limits.local_ranks,
        consumer=_consumer(request),
        replayed_step_s=request.replayed_step_s,
        window_s=request.window_s,
        data_filesystem=disk.filesystem_type,
        data_on_network=disk.is_network,
        gpu_source=gpu_source(
            site, sweep.all_windows, replayed=request.replayed_step_s is not None
        ),
        operating_state=_operating_state(cached_windows),
    )


def _consumer(request: SweepRequest) -> str:
    """Return the consumer of the batches, in words."""
    consumer = "the training step"
    if request.replayed_step_s is not None:
        consumer = f"a replayed step of {format_seconds(request.replayed_step_s)}"
    if request.sample_delay_s:
        delay = format_seconds(request.sample_delay_s)
        return f"{consumer}, each sample delayed by {delay}"
    return consumer


def _row(count: int, sweep: Sweep, choice: WorkersChoice) -> WorkersRow:
    windows = sweep.windows_with(count)
    return WorkersRow(
        **sweep.row_fields(count, choice),
        padded_tokens_per_s=[window.padded_tokens_per_s for window in windows],
        model_flops_per_s_per_rank=[
            window.model_flops_per_s / window.local_ranks
            for window in windows
            if window.model_flops_per_s is not None
        ],
        storage_bytes_per_s=combine_known(
            statistics.median, (window.storage_bytes_per_s for window in windows)
        ),
    )


def _operating_state(windows: Sequence[TrainingFigures]) -> str | None:
    """Return power, clock and power cap of the GPU in words; None without a GPU."""
    use = mean_gpu_use(windows)
    if use is None or use.power_w is None:
        return None
    parts = [f"{use.power_w:,.0f} W"]
    if use.sm_clock_mhz is not None:
        parts.append(f"SM clock {use.sm_clock_mhz:,.0f} MHz")
    if use.power_capped_share is not None:
        parts.append(
            f"at the power cap in {format_percent(use.power_capped_share)} of samples"
        )
    return ", ".join(parts)


def gpu_source(
    site: MeasuredDevice, windows: Sequence[LoadedWindow], *, replayed: bool = False
) -> str:
    """Return the source of each kind of GPU figure.

    Args:
        site: The measured machine.
        windows: Windows with the figures of their GPUs.
        replayed: True if no training step ran.
    """
    if replayed:
        return "n/a (simulated step)"
    if site.gpu is None:
        reason = "" if site.gpu_absent is None else f": {site.gpu_absent}"
        return f"n/a (CPU run{reason})"
    gpus = [gpu for window in windows for gpu in window.gpus]
    return f"{site.gpu.name}; {_nvml_source(gpus)}; {_gpm_source(gpus)}"


def _nvml_source(gpus: Sequence[GpuUseFigures]) -> str:
    if any(gpu.utilisation_share is not None for gpu in gpus):
        return "NVML utilisation"
    reasons = (gpu.lacking for gpu in gpus if gpu.lacking)
    return f"NVML utilisation: n/a ({next(reasons, 'no samples')})"


def _gpm_source(gpus: Sequence[GpuUseFigures]) -> str:
    if any(gpu.gpm_windows for gpu in gpus):
        return "GPM counters during the timed windows"
    reasons = (gpu.gpm_lacking for gpu in gpus if gpu.gpm_lacking)
    return f"GPM: n/a ({next(reasons, 'no counters')})"
