"""Optuna's study of loader settings: the space, and what earlier windows tell.

Functions import Optuna themselves: the import is slow, and few sweeps need the search.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.trials.job_figures import TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import FinishedTrial
from autotune.workers.values import TrainingRequest
from trainer.config.train_config import DataSettings

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

PREFETCH_CHOICES = (1, 2, 4, 8)
"""Micro-batches that a worker loads ahead, to try."""


def loader_space(max_workers: int, *, pinning: bool) -> "dict[str, BaseDistribution]":
    """Return the joint space of loader settings.

    Args:
        max_workers: Most DataLoader workers of a rank.
        pinning: True to search over pinned memory, which is only useful with a GPU.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution

    space: dict[str, BaseDistribution] = {
        "num_workers": IntDistribution(0, max_workers),
        "prefetch_factor": CategoricalDistribution(PREFETCH_CHOICES),
    }
    if pinning:
        space["pin_memory"] = CategoricalDistribution((True, False))
    return space


def study_of(
    finished: Iterable[FinishedTrial], max_workers: int, *, pinning: bool
) -> "optuna.Study":
    """Return a study that maximises throughput relative to cached batches.

    It begins with the windows that were measured so far, except for those with settings
    outside the space, and those without cached batches in their round. Throughput is in
    tokens/s including padding.

    Args:
        finished: Finished trials, among them the windows of training.
        max_workers: Most DataLoader workers of a rank.
        pinning: True to search over pinned memory.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A fixed seed, so that the same trial log gives the same search.
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0)
    )
    space = loader_space(max_workers, pinning=pinning)
    windows = _measured_windows(finished)
    cached_rates = {
        window.request.round: window.padded_tokens_per_s
        for window in windows
        if window.request.cached
    }
    for window in windows:
        round_number = window.request.round
        if window.request.cached or round_number not in cached_rates:
            continue
        data = window.request.config.data
        if not _is_in_space(data, max_workers):
            continue
        ratio_to_cached = window.padded_tokens_per_s / cached_rates[round_number]
        trial = optuna.trial.create_trial(
            params={name: getattr(data, name) for name in space},
            distributions=space,
            value=ratio_to_cached,
        )
        study.add_trial(trial)
    return study


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredWindow:
    """Window of training with its rate."""

    request: TrainingRequest
    """Request of the window, with its settings and its round."""
    padded_tokens_per_s: float
    """Tokens/s including padding."""


def _measured_windows(finished: Iterable[FinishedTrial]) -> list[_MeasuredWindow]:
    """Return the windows of training that have figures."""
    windows = []
    for trial in finished:
        if trial.trial.job == "training" and isinstance(trial.outcome, Measured):
            figures = TrainingFigures.of(trial.outcome)
            window = _MeasuredWindow(
                request=TrainingRequest.of(trial.trial.measured),
                padded_tokens_per_s=figures.padded_tokens_per_s,
            )
            windows.append(window)
    return windows


def _is_in_space(data: DataSettings, max_workers: int) -> bool:
    """Return True if the study may contain these loader settings."""
    return data.num_workers <= max_workers and data.prefetch_factor in PREFETCH_CHOICES
