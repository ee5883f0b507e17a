"""Optuna's study of loader settings: the space, and what earlier windows tell.

Functions import Optuna themselves: the import is slow, and few sweeps need the search.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import FinishedTrial
from autotune.workers.values import WindowRequest
from autotune.workers.windows import TORCH_DEFAULTS

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

PREFETCH_CHOICES = (1, 2, 4, 8)
"""Batches that a worker loads ahead, to try."""


def loader_space(
    max_workers: int, varied: Collection[str]
) -> "dict[str, BaseDistribution]":
    """Return the joint space of loader settings.

    Args:
        max_workers: Most DataLoader workers of a rank.
        varied: Settings that are searched besides the number of workers.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution

    space: dict[str, BaseDistribution] = {
        "num_workers": IntDistribution(0, max_workers)
    }
    if "prefetch_factor" in varied:
        space["prefetch_factor"] = CategoricalDistribution(PREFETCH_CHOICES)
    if "pin_memory" in varied:
        space["pin_memory"] = CategoricalDistribution((True, False))
    return space


def study_of(
    finished: Iterable[FinishedTrial], max_workers: int, varied: Collection[str]
) -> "optuna.Study":
    """Return a study that maximises throughput relative to cached batches.

    It begins with the windows that were measured so far, except for those with settings
    outside the space, and those without cached batches in their round. Throughput
    counts padding, if the step does.

    Args:
        finished: Finished trials, among them the windows of training.
        max_workers: Most DataLoader workers of a rank.
        varied: Settings that are searched besides the number of workers.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A fixed seed, so that the same trial log gives the same search.
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0)
    )
    space = loader_space(max_workers, varied)
    windows = _measured_windows(finished)
    cached_rates = {
        window.request.round: window.units_per_s
        for window in windows
        if window.request.cached
    }
    for window in windows:
        round_number = window.request.round
        if window.request.cached or round_number not in cached_rates:
            continue
        settings = {**TORCH_DEFAULTS, **window.request.loader.arguments}
        params = {name: settings[name] for name in space}
        if not _is_in_space(params, max_workers):
            continue
        ratio_to_cached = window.units_per_s / cached_rates[round_number]
        trial = optuna.trial.create_trial(
            params=params,
            distributions=space,
            value=ratio_to_cached,
        )
        study.add_trial(trial)
    return study


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredWindow:
    """Window of training with its rate."""

    request: WindowRequest
    """Request of the window, with its settings and its round."""
    units_per_s: float
    """Units/s, padding included."""


def _measured_windows(finished: Iterable[FinishedTrial]) -> list[_MeasuredWindow]:
    """Return the windows of training that have figures."""
    windows = []
    for trial in finished:
        if trial.trial.job == "window" and isinstance(trial.outcome, Measured):
            figures = WindowFigures.of(trial.outcome)
            window = _MeasuredWindow(
                request=WindowRequest.of(trial.trial.measured),
                units_per_s=figures.padded_units_per_s,
            )
            windows.append(window)
    return windows


def _is_in_space(params: Mapping[str, Any], max_workers: int) -> bool:
    """Return True if the study may contain these loader settings."""
    if params["num_workers"] > max_workers:
        return False
    return params.get("prefetch_factor", PREFETCH_CHOICES[0]) in PREFETCH_CHOICES
