"""Timed windows of the bundled trainer, as trials."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.machine.measured_device import local_ranks
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.store import StoredProfile, before_sweep
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.batch_bytes import micro_batch_bytes
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench
from autotune.trials.values import Trial
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.windows import SubjectWindows, window_trial
from trainer.formats.manifest import Manifest, read_manifest
from trainer.formats.train_config import TrainConfig


def training_windows(
    bench: Bench, config: TrainConfig, request: SweepRequest, ranks: int
) -> SubjectWindows[MlmSubject]:
    """Return windows of the bundled trainer on this machine, with limits of workers.

    Args:
        bench: The machine.
        config: Trainer settings.
        request: Dataset, length of the windows, and their time budget.
        ranks: Number of local ranks.
    """
    manifest = read_manifest(request.data)
    limits = LoaderLimits(
        host=bench.site.host,
        local_ranks=ranks,
        batch_bytes=_mean_batch_bytes(manifest, config),
        prefetch_factor=config.data.prefetch_factor,
        requested_workers=request.max_workers,
    )
    # The device number tells file systems of one type apart.
    filesystem = bench.site.host.disks[0].filesystem_type
    return windows_of_trainer(
        MlmSubject.of_dataset(config, manifest, local_ranks=ranks),
        request,
        limits,
        storage=f"{filesystem}:{request.data.stat().st_dev}",
    )


def windows_of_profile(
    bench: SubjectBench, stored: StoredProfile | None, request: SweepRequest, path: Path
) -> SubjectWindows[MlmSubject]:
    """Return the windows of a probed profile, on as many ranks as requested or probed.

    It is the part of ``autotune.workers.stage`` that knows the trainer's settings.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
    """
    assert stored is not None, "the trainer's loader is swept for a profile"
    is_replayed = request.replayed_step_s is not None
    config = before_sweep(stored.profile)
    probe = require_local_probe(stored, bench.fingerprint, replayed=is_replayed)
    ranks = request.local_ranks or probe.local_ranks
    if is_replayed:
        # A replay computes nothing, so its ranks need no GPUs.
        config = config.model_copy(update={"device": "cpu"})
    else:
        ranks = local_ranks(bench.site, ranks)
    return training_windows(bench, config, request, ranks)


def windows_of_trainer(
    subject: MlmSubject, request: SweepRequest, limits: LoaderLimits, storage: str = ""
) -> SubjectWindows[MlmSubject]:
    """Return windows of the bundled trainer, whose loader takes all settings."""
    config = subject.config
    varied = {"prefetch_factor"}
    if config.device == "cuda":
        varied.add("pin_memory")
    return SubjectWindows(
        subject=subject,
        request=request,
        device=config.device,
        limits=limits,
        varied=frozenset(varied),
        inputs={"data_dir": str(request.data.resolve())},
        storage=storage,
    )


def _mean_batch_bytes(manifest: Manifest, config: TrainConfig) -> int:
    """Return the mean size of a micro-batch that a worker sends."""
    samples_per_sequence = 1.0
    if config.layout == "packed":
        train = manifest.train
        tokens = max(1, sum(shard.tokens for shard in train.shards))
        samples_per_sequence = config.seq_length_tokens * train.samples / tokens
    id_bits = int(manifest.dtype.removeprefix("uint"))
    return micro_batch_bytes(
        micro_batch_size=config.micro_batch_size,
        seq_length_tokens=config.seq_length_tokens,
        id_bytes=id_bits // 8,
        masking_probability=config.masking_probability,
        samples_per_sequence=max(1.0, samples_per_sequence),
    )


def training_trial(
    windows: SubjectWindows[MlmSubject],
    config: TrainConfig,
    round_number: int,
    interleaved_with: Sequence[str],
    *,
    most_micro_batches: int | None = None,
    **changes: Any,
) -> Trial:
    """Return the trial of a window of the bundled trainer with other settings.

    Args:
        windows: Windows of which this is one.
        config: Trainer settings of the window.
        round_number: Number of the window's round, from 0.
        interleaved_with: Names of all windows of the round.
        most_micro_batches: Limit of micro-batches in a step; None takes the default.
        changes: Further arguments of ``window_trial``.
    """
    subject = windows.subject.model_copy(update={"config": config})
    choice = dict(windows.choice)
    if most_micro_batches is not None:
        choice["most_micro_batches"] = most_micro_batches
    windows = replace(windows, subject=subject, choice=choice, device=config.device)
    return window_trial(windows, round_number, interleaved_with, **changes)
