"""Windows of real training steps, and the sweep of the trainer's DataLoader workers.

The search for faster settings and the comparison with baselines measure the same
windows, with other settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.profiles.store import with_data
from autotune.trials.job_figures import TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.session import Session
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.values import Trial
from autotune.workers.count_sweep import CountSweep
from autotune.workers.decide.count_statistics import Count
from autotune.workers.decide.loader_limits import LoaderLimits, micro_batch_bytes
from autotune.workers.values import TrainingRequest
from trainer.config.train_config import TrainConfig

MIN_STEPS = 4
"""Fewest optimizer steps of a window."""


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
    """Name of the storage that holds the dataset. A trial log is reused only if its
    windows read from the same storage."""


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
        """Return tokens/s including padding, in which the samples make no difference.

        How many tokens of a window are not padding is chance.
        """
        return figures.padded_tokens_per_s


def training_windows(
    bench: Session, config: TrainConfig, request: SweepRequest, ranks: int
) -> TrainingWindows:
    """Return the request for windows on this machine, with its limits of workers.

    Args:
        bench: Session on the machine and the dataset.
        config: Trainer settings.
        request: Windows to measure, with their time budget.
        ranks: Number of local ranks.
    """
    limits = LoaderLimits(
        host=bench.site.host,
        local_ranks=ranks,
        batch_bytes=_mean_batch_bytes(bench, config),
        prefetch_factor=config.data.prefetch_factor,
        requested_workers=request.max_workers,
    )
    # The device number tells file systems of one type apart.
    filesystem = bench.site.host.disks[0].filesystem_type
    storage = f"{filesystem}:{request.data.stat().st_dev}"
    return TrainingWindows(
        request=request, config=config, limits=limits, storage=storage
    )


def _mean_batch_bytes(bench: Session, config: TrainConfig) -> int:
    """Return the mean size of a micro-batch that a worker sends."""
    samples_per_sequence = 1.0
    if config.layout == "packed":
        train = bench.manifest.train
        tokens = max(1, sum(shard.tokens for shard in train.shards))
        samples_per_sequence = config.seq_length_tokens * train.samples / tokens
    id_bits = int(bench.manifest.dtype.removeprefix("uint"))
    return micro_batch_bytes(
        micro_batch_size=config.micro_batch_size,
        seq_length_tokens=config.seq_length_tokens,
        id_bytes=id_bits // 8,
        masking_probability=config.masking_probability,
        samples_per_sequence=max(1.0, samples_per_sequence),
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
        training: Request for windows of which this is one.
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
