"""Sweep of the trainer's DataLoader workers, by windows of real training steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.base.units import format_percent, format_seconds
from autotune.machine.measured_device import MeasuredDevice
from autotune.profiles.store import with_data
from autotune.trials.decide.contamination import combine_known
from autotune.trials.session import Session
from autotune.trials.values import LoadedWindow, TrainingFigures, Trial
from autotune.workers.count_sweep import CountSweep, gpu_use
from autotune.workers.decide.loader_limits import LoaderLimits, batch_bytes
from autotune.workers.decide.worker_count import Count, WorkersChoice
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
    config: TrainConfig
    limits: LoaderLimits
    storage: str = ""
    """Name of the storage that holds the dataset; trial logs are reused on the same
    storage only."""


@dataclass(slots=True, kw_only=True)
class Sweep(CountSweep[TrainingFigures]):
    """State of a sweep of the trainer's own DataLoader."""

    training: TrainingWindows
    figures: type[TrainingFigures] = TrainingFigures
    rate: str = "padded_tokens_per_s"
    """Tokens/s including padding, because the non-padding tokens of a window depend on
    its samples."""

    @property
    def limits(self) -> LoaderLimits:
        """Limits of the workers of a rank."""
        return self.training.limits

    def window_of(self, count: Count, number: int, names: Sequence[str]) -> Trial:
        """Return the trial of a window."""
        config = with_data(self.training.config, {"num_workers": count or 0})
        return training_trial(
            self.training, config, number, names, cached=count is None
        )


def training_windows(
    bench: Session, config: TrainConfig, request: SweepRequest, ranks: int
) -> TrainingWindows:
    """Return the request for windows of ``ranks`` here, with the limits of DataLoader workers of each rank."""
    train, disk = bench.manifest.train, bench.site.host.disks[0].filesystem_type
    tokens = sum(shard.tokens for shard in train.shards)
    per_row = (
        config.seq_length_tokens * train.samples / max(1, tokens)
        if config.layout == "packed"
        else 1.0
    )
    id_bytes, masked = (
        int(bench.manifest.dtype.removeprefix("uint")) // 8,
        config.masking_probability,
    )
    size = batch_bytes(
        config.micro_batch_size,
        config.seq_length_tokens,
        id_bytes,
        masked,
        max(1.0, per_row),
    )
    host, ahead, most = (
        bench.site.host,
        config.data.prefetch_factor,
        request.max_workers,
    )
    limits = LoaderLimits(
        host=host,
        local_ranks=ranks,
        batch_bytes=size,
        prefetch_factor=ahead,
        asked=most,
    )
    storage = f"{disk}:{request.data.stat().st_dev}"
    return TrainingWindows(
        request=request, config=config, limits=limits, storage=storage
    )


def training_trial(
    training: TrainingWindows,
    config: TrainConfig,
    number: int,
    interleaved_with: Sequence[str],
    *,
    cached: bool = False,
    **changes: Any,
) -> Trial:
    """Return the trial of a window in round ``number`` with the named windows.

    ``changes`` alter the request.
    """
    request = training.request
    said: dict[str, Any] = {
        "config": config,
        "cached": cached,
        "round": number,
        "storage": training.storage,
    }
    said |= {
        "interleaved_with": list(interleaved_with),
        "local_ranks": training.limits.local_ranks,
    }
    said |= {
        name: getattr(request, name)
        for name in ("window_s", "replayed_step_s", "sample_delay_s")
    }
    asked = TrainingRequest(**said | {"min_steps": MIN_STEPS} | changes)
    return asked.trial(
        timeout_s=request.trial_timeout_s, data_dir=str(request.data.resolve())
    )


def evidence(
    sweep: Sweep, choice: WorkersChoice, site: MeasuredDevice
) -> WorkersEvidence:
    """Return the evidence of a sweep for the profile."""
    request, disk = sweep.training.request, site.host.disks[0]
    cached = [one[None] for one in sweep.rounds if None in one]
    every = [figures for one in sweep.rounds for figures in one.values()]
    replayed_s = request.replayed_step_s
    step = (
        "the training step"
        if replayed_s is None
        else f"a replayed step of {format_seconds(replayed_s)}"
    )
    if request.sample_delay_s:
        step += f", each sample delayed by {format_seconds(request.sample_delay_s)}"
    return WorkersEvidence(
        **sweep.evidence_of(choice),
        cached_padded_tokens_per_s=[one.padded_tokens_per_s for one in cached],
        rows=[_row(count, sweep, choice) for count in sweep.counts],
        local_ranks=sweep.training.limits.local_ranks,
        consumer=step,
        replayed_step_s=replayed_s,
        window_s=request.window_s,
        data_filesystem=disk.filesystem_type,
        data_on_network=disk.is_network,
        gpu_source=gpu_source(site, every, replayed=replayed_s is not None),
        operating_state=_operating_state(cached),
    )


def _row(count: int, sweep: Sweep, choice: WorkersChoice) -> WorkersRow:
    known, windows = sweep.row_of(count, choice)
    flops = [
        one.model_flops_per_s / one.local_ranks
        for one in windows
        if one.model_flops_per_s is not None
    ]
    return WorkersRow(
        **known,
        padded_tokens_per_s=[one.padded_tokens_per_s for one in windows],
        model_flops_per_s_per_rank=flops,
        storage_bytes_per_s=combine_known(
            statistics.median, (one.storage_bytes_per_s for one in windows)
        ),
    )


def _operating_state(windows: Sequence[TrainingFigures]) -> str | None:
    use = gpu_use(windows)
    if use is None or use.power_w is None:
        return None
    clock = (
        "" if use.sm_clock_mhz is None else f", SM clock {use.sm_clock_mhz:,.0f} MHz"
    )
    share = use.power_capped_share
    capped = (
        ""
        if share is None
        else f", at the power cap in {format_percent(share)} of samples"
    )
    return f"{use.power_w:,.0f} W{clock}{capped}"


def gpu_source(
    site: MeasuredDevice, windows: Sequence[LoadedWindow], *, replayed: bool = False
) -> str:
    """Return the source of each kind of GPU figure.

    ``replayed`` if no training step ran.
    """
    if replayed:
        return "n/a (simulated step)"
    if site.gpu is None:
        return (
            f"n/a (CPU run{'' if site.gpu_absent is None else f': {site.gpu_absent}'})"
        )
    gpus = [gpu for one in windows for gpu in one.gpus]
    lacking = next((gpu.lacking for gpu in gpus if gpu.lacking), "no samples")
    no_counters = next(
        (gpu.gpm_lacking for gpu in gpus if gpu.gpm_lacking), "no counters"
    )
    known = any(gpu.utilisation_share is not None for gpu in gpus)
    nvml = "NVML utilisation" if known else f"NVML utilisation: n/a ({lacking})"
    counted = any(gpu.gpm_windows for gpu in gpus)
    gpm = (
        "GPM counters during the timed windows"
        if counted
        else f"GPM: n/a ({no_counters})"
    )
    return f"{site.gpu.name}; {nvml}; {gpm}"
