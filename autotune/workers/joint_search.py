"""Joint search over workers, prefetching and pinning by Optuna's TPE.

It runs if no number of workers alone is sufficient. Settings are tried in windows next
to cached batches; then rounds of windows compare the best ones with workers alone.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.base.interval import Interval
from autotune.base.window_statistics import paired_ratio
from autotune.evidence.workers import JointChoice
from autotune.workers.decide.count_statistics import FIRST_ROUNDS
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE
from autotune.workers.decide.dead_workers import WorkersDied
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.joint_study import loader_space, study_of
from autotune.workers.measure import NamedWindow, WorkerSweep
from autotune.workers.windows import (
    TORCH_DEFAULTS,
    LoaderSettings,
    SubjectWindows,
    settings_words,
    window_trial,
)

MOST_TRIALS = 12
"""Limit of settings that the search tries."""
FEWEST_COMPARISON_ROUNDS = 2 * FIRST_ROUNDS
"""Fewest rounds that compare the best settings of the search with workers alone, twice
as many as judge a number of workers."""
MOST_COMPARISON_ROUNDS = 12
"""Limit of rounds that compare the best settings of the search with workers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Window to measure."""

    settings: LoaderSettings
    """Loader settings of the window."""
    cached: bool = False
    """True to train on cached batches, without data loading."""

    @property
    def name(self) -> str:
        """Name for people, unique in a round."""
        if self.cached:
            return "cached batches"
        return settings_words(self.settings.arguments)


def varied_settings(windows: SubjectWindows[Any]) -> frozenset[str]:
    """Return the loader settings that a joint search varies besides the workers.

    Pinned memory is only useful with a GPU.
    """
    if windows.device == "cuda" and windows.request.replayed_step_s is None:
        return windows.varied
    return windows.varied - {"pin_memory"}


def gap_remains(choice: WorkersChoice) -> bool:
    """Return True if no number of workers closes the gap to cached batches.

    At 98 % confidence, the fastest number is too slow. The chosen one waits for data.
    """
    best = max(choice.ratios.values(), key=lambda ratio: ratio.value)
    return not choice.keeps_up and best.high is not None and best.high < ENOUGH_SHARE


def search_joint(
    sweep: WorkerSweep, choice: WorkersChoice, trials: int = MOST_TRIALS
) -> JointChoice | None:
    """Search loader settings after a sweep, and compare the best with workers alone.

    "Workers alone" are the subject's settings, with the number of workers that the
    sweep chose.

    Args:
        sweep: Finished sweep.
        choice: Choice of the sweep.
        trials: Number of settings to try, each in a window next to cached batches.

    Returns:
        The result; None if the loader takes no other settings, if none ran, or if
        workers died in the comparison.

    Raises:
        OutOfTime: If a window is likely to end after the deadline.
        Undecided: If a window failed.
    """
    if not varied_settings(sweep.windows):
        return None
    alone = _settings_alone(sweep, choice.workers)
    ratios = _search(sweep, alone, trials)
    tried = sum(len(ratios_of_settings) for ratios_of_settings in ratios.values())
    others = [settings for settings in ratios if settings != alone]
    if not others:
        return None
    candidate = max(others, key=lambda settings: statistics.fmean(ratios[settings]))
    first_round = len(sweep.rounds) + tried
    try:
        ratio = _compare(sweep, first_round, candidate, alone)
    except WorkersDied:
        # The candidate ran in the search, but is not safe to train with.
        return None
    return JointChoice(
        trials=tried,
        num_workers=candidate.num_workers,
        prefetch_factor=candidate.arguments.get("prefetch_factor"),
        pin_memory=candidate.pin_memory,
        ratio_to_workers_alone=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        adopted=ratio.low is not None and ratio.low > 1.0,
    )


def _settings_alone(sweep: WorkerSweep, num_workers: int) -> LoaderSettings:
    """Return the subject's loader settings with a number of workers."""
    arguments = {**TORCH_DEFAULTS, **sweep.windows.loader.arguments}
    varied = varied_settings(sweep.windows)
    return LoaderSettings(
        num_workers=num_workers, **{name: arguments[name] for name in varied}
    )


def _search(
    sweep: WorkerSweep, alone: LoaderSettings, trials: int
) -> dict[LoaderSettings, list[float]]:
    """Try settings, and return their ratios to cached batches.

    Settings whose workers die, or would not fit into memory, are left out.

    Args:
        sweep: Finished sweep.
        alone: Settings of workers alone, which those to try are based on.
        trials: Number of settings to try; the study may suggest some twice.

    Returns:
        Ratio in each window of the settings, by settings.
    """
    # Imported when used, because the import is slow.
    from optuna.trial import TrialState

    varied = varied_settings(sweep.windows)
    space = loader_space(sweep.max_workers, varied)
    study = study_of(sweep.runner.finished, sweep.max_workers, varied)
    round_number = len(sweep.rounds)
    ratios: dict[LoaderSettings, list[float]] = {}
    for _ in range(trials):
        if sweep.time_is_over:
            break
        trial = study.ask(fixed_distributions=space)
        settings = replace(alone, **trial.params)
        windows = (_Window(settings=alone, cached=True), _Window(settings=settings))
        try:
            _check_memory(sweep, settings)
            cached_rate, rate = _rates(sweep, round_number, windows)
        except WorkersDied:
            # By the forecast of memory, or in the window itself.
            study.tell(trial, state=TrialState.FAIL)
            continue
        study.tell(trial, rate / cached_rate)
        ratios.setdefault(settings, []).append(rate / cached_rate)
        round_number += 1
    return ratios


def _check_memory(sweep: WorkerSweep, settings: LoaderSettings) -> None:
    """Raise ``WorkersDied`` if the workers of these settings do not fit into memory."""
    limits = sweep.limits
    if settings.prefetch_factor is not None:
        limits = replace(limits, prefetch_factor=settings.prefetch_factor)
    shortage = limits.shortage(settings.num_workers, sweep.worker_bytes)
    if shortage is not None:
        raise WorkersDied(shortage)


def _compare(
    sweep: WorkerSweep,
    first_round: int,
    candidate: LoaderSettings,
    alone: LoaderSettings,
) -> Interval:
    """Interleave windows of two settings, and return the ratio of their throughput.

    The rounds end when the settings differ at 98 % confidence, or when rounds or time
    are used up.

    Args:
        sweep: Finished sweep.
        first_round: Number of the first round, after all rounds so far.
        candidate: Settings whose throughput is divided by that of ``alone``.
        alone: Settings of workers alone.
    """
    windows = (_Window(settings=candidate), _Window(settings=alone))
    pairs: list[tuple[float, float]] = []
    while True:
        candidate_rate, alone_rate = _rates(sweep, first_round + len(pairs), windows)
        pairs.append((candidate_rate, alone_rate))
        ratio = paired_ratio(pairs)
        is_decided = len(pairs) >= FEWEST_COMPARISON_ROUNDS and _excludes_one(ratio)
        if is_decided or len(pairs) >= MOST_COMPARISON_ROUNDS or sweep.time_is_over:
            return ratio


def _excludes_one(ratio: Interval) -> bool:
    """Return True if a ratio has bounds, and 1 does not lie between them."""
    if ratio.low is None or ratio.high is None:
        return False
    return not ratio.low <= 1.0 <= ratio.high


def _rates(
    sweep: WorkerSweep, round_number: int, windows: Sequence[_Window]
) -> list[float]:
    """Return units/s including padding of consecutive windows, in their order.

    Raises:
        WorkersDied: If DataLoader workers of a window ran out of host memory.
        OutOfTime: If a window is likely to end after the deadline.
        Undecided: If a window failed.
    """
    names = [window.name for window in windows]
    named_windows = []
    for window in windows:
        trial = window_trial(
            sweep.windows,
            round_number,
            names,
            settings=window.settings,
            cached=window.cached,
        )
        named_windows.append(NamedWindow(name=window.name, trial=trial))
    figures_of_windows = sweep.measure_windows(round_number, named_windows)
    return [figures.padded_units_per_s for figures in figures_of_windows]
