"""Joint search over workers, prefetching and pinning by Optuna's TPE.

It runs if no number of workers alone is sufficient. Settings are tried in windows next
to cached batches; then rounds of windows compare the best ones with workers alone.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.base.interval import Interval
from autotune.base.window_statistics import paired_ratio
from autotune.evidence.workers import JointChoice
from autotune.workers.count_sweep import NamedWindow
from autotune.workers.decide.count_statistics import FIRST_ROUNDS
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE
from autotune.workers.decide.dead_workers import WorkersDied
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.joint_study import loader_space, study_of
from autotune.workers.measure import Sweep, training_trial
from trainer.config.train_config import DataSettings

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

    At 98 % confidence, the fastest number is too slow. The chosen one waits for data.
    """
    best = max(choice.ratios.values(), key=lambda ratio: ratio.value)
    return not choice.keeps_up and best.high is not None and best.high < ENOUGH_SHARE


def search_joint(
    sweep: Sweep, choice: WorkersChoice, trials: int = MOST_TRIALS
) -> JointChoice | None:
    """Search loader settings after a sweep, and compare the best with workers alone.

    "Workers alone" are the settings of the profile, with the number of workers that the
    sweep chose.

    Args:
        sweep: Finished sweep.
        choice: Choice of the sweep.
        trials: Number of settings to try, each in a window next to cached batches.

    Returns:
        The result; None if no other settings ran, or if workers died in the comparison.

    Raises:
        OutOfTime: If a window is likely to end after the deadline.
        Undecided: If a window failed.
    """
    alone = sweep.training.config.data.model_copy(
        update={"num_workers": choice.workers}
    )
    ratios = _search(sweep, alone, trials)
    tried = sum(len(ratios_of_data) for ratios_of_data in ratios.values())
    others = [data for data in ratios if data != alone]
    if not others:
        return None
    candidate = max(others, key=lambda data: statistics.fmean(ratios[data]))
    first_round = len(sweep.rounds) + tried
    try:
        ratio = _compare(sweep, first_round, candidate, alone)
    except WorkersDied:
        # The candidate ran in the search, but is not safe to train with.
        return None
    return JointChoice(
        trials=tried,
        num_workers=candidate.num_workers,
        prefetch_factor=candidate.prefetch_factor,
        pin_memory=candidate.pin_memory,
        ratio_to_workers_alone=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        adopted=ratio.low is not None and ratio.low > 1.0,
    )


def _search(
    sweep: Sweep, alone: DataSettings, trials: int
) -> dict[DataSettings, list[float]]:
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
            # By the forecast of memory, or in the window itself.
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


def _compare(
    sweep: Sweep, first_round: int, candidate: DataSettings, alone: DataSettings
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
    windows = (_Window(data=candidate), _Window(data=alone))
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


def _rates(sweep: Sweep, round_number: int, windows: Sequence[_Window]) -> list[float]:
    """Return tokens/s including padding of consecutive windows, in their order.

    Raises:
        WorkersDied: If DataLoader workers of a window ran out of host memory.
        OutOfTime: If a window is likely to end after the deadline.
        Undecided: If a window failed.
    """
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
