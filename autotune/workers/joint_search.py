"""Joint search over workers, prefetching and pinning by Optuna's TPE.

It runs if no number of workers alone is sufficient.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.base.interval import Interval
from autotune.base.window_statistics import paired_ratio
from autotune.trials.job_figures import TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import FinishedTrial
from autotune.workers.count_sweep import NamedWindow
from autotune.workers.decide.count_statistics import FIRST_ROUNDS
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE
from autotune.workers.decide.dead_workers import WorkersDied
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.measure import Sweep, training_trial
from autotune.workers.values import JointChoice, TrainingRequest
from trainer.config.train_config import DataSettings, Tag, tagged

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

PREFETCH_CHOICES = (1, 2, 4, 8)
"""Micro-batches that a worker loads ahead, to try."""
MOST_TRIALS = 12
"""Limit of settings that the search tries."""
VERIFYING_ROUNDS = 12
"""Limit of rounds that compare the best of the search with the best number of workers
alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Window to measure."""

    data: DataSettings
    """Loader settings of the window."""
    cached: bool = False
    """True to train on cached batches, without data loading."""

    @property
    def name(self) -> str:
        """Name for people, unique in a round."""
        if self.cached:
            return "cached batches"
        return (
            f"num_workers={self.data.num_workers},"
            f" prefetch_factor={self.data.prefetch_factor},"
            f" pin_memory={self.data.pin_memory}"
        )


def gap_remains(choice: WorkersChoice) -> bool:
    """Return True if no number of workers closes the gap to cached batches.

    Even the best one is too slow at 98 % confidence, and waits for data.
    """
    best = max(choice.ratios.values(), key=lambda ratio: ratio.value)
    return not choice.keeps_up and best.high is not None and best.high < ENOUGH_SHARE


def search_joint(
    sweep: Sweep, choice: WorkersChoice, trials: int = MOST_TRIALS
) -> JointChoice | None:
    """Search loader settings after a sweep, and compare the best with workers alone.

    The comparison interleaves windows of the best settings with windows of the number
    of workers that the sweep chose, whose other settings are those of the profile.

    Args:
        sweep: Finished sweep.
        choice: Choice of the sweep.
        trials: Settings to try, each in a window next to one on cached batches.

    Returns:
        None if no setting was tried.
    """
    alone = sweep.training.config.data.model_copy(
        update={"num_workers": choice.workers}
    )
    ratios = _search(sweep, alone, trials)
    tried = sum(map(len, ratios.values()))
    ratios.pop(alone, None)
    if not ratios:
        return None
    candidate = max(ratios, key=lambda data: statistics.fmean(ratios[data]))
    try:
        ratio = _verify(sweep, len(sweep.rounds) + tried, candidate, alone)
    except WorkersDied:
        # The candidate ran once in the search, but is not safe to train with.
        return None
    settings = {
        name: getattr(candidate, name) for name in tagged(DataSettings, Tag.LOADER)
    }
    return JointChoice(
        trials=tried,
        ratio_to_workers_alone=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        adopted=ratio.low is not None and ratio.low > 1.0,
        **settings,
    )


def _search(
    sweep: Sweep, alone: DataSettings, trials: int
) -> dict[DataSettings, list[float]]:
    """Try settings, and return their ratios to cached batches.

    Settings whose workers die, or would not fit into memory, are left out.
    """
    from optuna.trial import TrialState

    is_replayed = sweep.training.request.replayed_step_s is not None
    pinning = sweep.training.config.device == "cuda" and not is_replayed
    space = loader_space(sweep.max_workers, pinning=pinning)
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=pinning)
    round_number = len(sweep.rounds)
    ratios: dict[DataSettings, list[float]] = {}
    for _ in range(trials):
        if sweep.time_is_over:
            break
        trial = study.ask(fixed_distributions=space)
        data = alone.model_copy(update=trial.params)
        windows = (_Window(data=alone, cached=True), _Window(data=data))
        try:
            _check_memory(sweep, data)
            cached_rate, rate = _rates(sweep, round_number, windows)
        except WorkersDied:
            study.tell(trial, state=TrialState.FAIL)
            continue
        study.tell(trial, rate / cached_rate)
        ratios.setdefault(data, []).append(rate / cached_rate)
        round_number += 1
    return ratios


def _check_memory(sweep: Sweep, data: DataSettings) -> None:
    """Raise ``WorkersDied`` if the workers of these settings do not fit into memory."""
    limits = replace(sweep.training.limits, prefetch_factor=data.prefetch_factor)
    shortage = limits.shortage(data.num_workers, sweep.worker_bytes)
    if shortage is not None:
        raise WorkersDied(shortage)


def _verify(
    sweep: Sweep, first_round: int, candidate: DataSettings, alone: DataSettings
) -> Interval:
    """Interleave windows of two settings, and return the ratio of their throughput.

    This ends when the settings differ at 98 % confidence, or the rounds or the time are
    used up.
    """
    windows = (_Window(data=candidate), _Window(data=alone))
    pairs: list[tuple[float, float]] = []
    while True:
        candidate_rate, alone_rate = _rates(sweep, first_round + len(pairs), windows)
        pairs.append((candidate_rate, alone_rate))
        ratio = paired_ratio(pairs)
        differs = (
            ratio.low is not None
            and ratio.high is not None
            and not ratio.low <= 1.0 <= ratio.high
        )
        is_decided = differs and len(pairs) >= 2 * FIRST_ROUNDS
        if is_decided or len(pairs) >= VERIFYING_ROUNDS or sweep.time_is_over:
            return ratio


def _rates(sweep: Sweep, round_number: int, windows: Sequence[_Window]) -> list[float]:
    """Return tokens/s including padding of consecutive windows."""
    names = [window.name for window in windows]
    named_windows = []
    for window in windows:
        config = sweep.training.config.model_copy(update={"data": window.data})
        trial = training_trial(
            sweep.training, config, round_number, names, cached=window.cached
        )
        named_windows.append(NamedWindow(name=window.name, trial=trial))
    figures_of_windows = sweep.measure_windows(round_number, named_windows)
    return [figures.padded_tokens_per_s for figures in figures_of_windows]


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

    Throughput is in tokens/s including padding, and is compared in the same round.
    Windows with settings outside the space, or without cached batches in their round,
    are ignored.

    Args:
        finished: Finished trials, of which the study takes the windows of training.
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
        trial = optuna.trial.create_trial(
            params={name: getattr(data, name) for name in space},
            distributions=space,
            value=window.padded_tokens_per_s / cached_rates[round_number],
        )
        study.add_trial(trial)
    return study


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredWindow:
    """Window of training with its rate."""

    request: TrainingRequest
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
