"""Joint search over workers, prefetching and pinning.

It runs if no number of workers alone is sufficient. Our sampler proposes settings for
the study of the sweep; each is tried in a window next to one of workers alone. Then
rounds of windows compare the best settings with workers alone.
"""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autotune.base.interval import Interval
from autotune.base.window_statistics import paired_ratio
from autotune.errors import AutotuneError, OutOfTime
from autotune.evidence.workers import JointChoice
from autotune.subjects.subject import Argument
from autotune.trials.job_figures import WindowFigures
from autotune.trials.study import distributions_of
from autotune.workers.decide.count_statistics import FIRST_ROUNDS
from autotune.workers.decide.dead_workers import WorkersDied
from autotune.workers.decide.worker_count import WorkersChoice, ladder
from autotune.workers.loader_study import RATIOS, evaluations_of
from autotune.workers.measure import NamedWindow, WorkerSweep
from autotune.workers.windows import LoaderSettings, settings_words, window_trial

if TYPE_CHECKING:
    from autotune.sampler.pairwise_effects import PairwiseEffectsSampler

MOST_TRIALS = 12
"""Limit of windows in which the search tries settings."""
FEWEST_COMPARISON_ROUNDS = 2 * FIRST_ROUNDS
"""Fewest rounds that compare the best settings of the search with workers alone, twice
as many as judge a number of workers."""
MOST_COMPARISON_ROUNDS = 12
"""Limit of rounds that compare the best settings of the search with workers alone."""
ALL_COUNTS = 16
"""Numbers of workers up to which the search proposes each; of more it proposes those of
the ladder and of the sweep."""


def search_joint(
    sweep: WorkerSweep, choice: WorkersChoice, trials: int = MOST_TRIALS
) -> JointChoice | None:
    """Search loader settings after a sweep, and compare the best with workers alone.

    "Workers alone" are the subject's settings, with the number of workers that the
    sweep chose.

    Args:
        sweep: Finished sweep.
        choice: Choice of the sweep.
        trials: Number of windows to try settings in, each next to workers alone.

    Returns:
        The result; None if the loader takes no other settings, if none ran, or if
        workers died in the comparison.

    Raises:
        OutOfTime: If a window is likely to end after the deadline.
        Undecided: If a window failed.
    """
    if not sweep.windows.searched:
        return None
    search = _JointSearch(sweep=sweep, chosen=choice.workers)
    unmeasured = "interrupted"
    try:
        ratios = search.try_settings(trials)
        if not ratios:
            return None
        candidate = max(ratios, key=lambda settings: statistics.fmean(ratios[settings]))
        return search.compare(candidate)
    except AutotuneError as error:
        unmeasured = error.message
        raise
    finally:
        sweep.study.study.fail_running(unmeasured)


@dataclass(slots=True, kw_only=True)
class _JointSearch:
    """Search in progress."""

    sweep: WorkerSweep
    chosen: int
    """Number of workers that the sweep chose."""
    tried: int = 0
    """Number of windows in which settings were tried."""
    alone: LoaderSettings = field(init=False)
    """Settings of workers alone, from which others differ."""
    _unfit: list[LoaderSettings] = field(default_factory=list)
    """Settings that would not fit into memory, but are not in the study yet."""

    def __post_init__(self) -> None:
        study = self.sweep.study
        chosen = LoaderSettings(num_workers=self.chosen)
        self.alone = study.settings(study.params(chosen))

    def try_settings(self, trials: int) -> dict[LoaderSettings, list[float]]:
        """Try settings, and return their ratios to workers alone, for each window.

        Settings whose workers die, or would not fit into memory, are left out.
        """
        study = self.sweep.study
        sampler = self._sampler()
        ratios: dict[LoaderSettings, list[float]] = {}
        for _ in range(trials):
            if self.sweep.time_is_over:
                break
            params = sampler.propose(study.study.study)
            self._tell_unfit()
            if params is None:
                break
            settings = study.settings(params)
            trial = study.ask(settings)
            try:
                figures, alone = self._measure_next_to_alone(settings)
            except WorkersDied as died:
                study.fail(trial, str(died))
                continue
            self.tried += 1
            ratio = figures.padded_units_per_s / alone.padded_units_per_s
            ratios.setdefault(settings, []).append(ratio)
            study.tell(
                trial,
                [figures],
                phase="joint search",
                **{"outcome": "measured", RATIOS: [ratio]},
            )
        return ratios

    def compare(self, candidate: LoaderSettings) -> JointChoice | None:
        """Interleave windows of a candidate and of workers alone, and choose.

        The rounds end when the settings differ at 98 % confidence, or when rounds or
        time are used up.

        Returns:
            The choice; None if workers of the candidate died, which then is not safe to
            train with.
        """
        study = self.sweep.study
        trial = study.ask(candidate)
        tried = self.tried
        windows = []
        pairs: list[tuple[float, float]] = []
        ratio = Interval(value=1.0)
        while True:
            try:
                figures, alone = self._measure_next_to_alone(candidate)
            except WorkersDied as died:
                study.fail(trial, str(died))
                return None
            except OutOfTime:
                if not pairs:
                    raise
                break
            self.tried += 1
            windows.append(figures)
            pairs.append((figures.padded_units_per_s, alone.padded_units_per_s))
            ratio = paired_ratio(pairs)
            is_decided = len(pairs) >= FEWEST_COMPARISON_ROUNDS and _excludes_one(ratio)
            is_last = len(pairs) >= MOST_COMPARISON_ROUNDS or self.sweep.time_is_over
            if is_decided or is_last:
                break
        joint = JointChoice(
            trials=tried,
            num_workers=candidate.num_workers,
            prefetch_factor=candidate.arguments.get("prefetch_factor"),
            pin_memory=candidate.pin_memory,
            ratio_to_workers_alone=ratio.value,
            ratio_low=ratio.low,
            ratio_high=ratio.high,
            adopted=ratio.low is not None and ratio.low > 1.0,
        )
        attributes = {
            "outcome": joint.result_words,
            RATIOS: [rate / alone_rate for rate, alone_rate in pairs],
        }
        study.tell(trial, windows, phase="comparison", **attributes)
        return joint

    def _sampler(self) -> "PairwiseEffectsSampler":
        """Return the sampler, which also knows the windows of the sweep."""
        # Imported when used, because Optuna is slow to import.
        from autotune.sampler.pairwise_effects import PairwiseEffectsSampler

        study = self.sweep.study
        return PairwiseEffectsSampler(
            space=distributions_of(study.values),
            candidates=self._candidates(),
            is_possible=self._is_possible,
            reference=study.params(self.alone),
            evaluations_of=evaluations_of,
        )

    def _candidates(self) -> list[dict[str, Argument]]:
        """Return the settings to choose from, without those of workers alone."""
        most = self.sweep.max_workers
        counts = list(range(most + 1))
        if len(counts) > ALL_COUNTS:
            counts = sorted({*ladder(most), *self.sweep.counts})
        study = self.sweep.study
        alone = study.params(self.alone)
        candidates: list[dict[str, Argument]] = []
        for count in counts:
            choices = dict(study.choices)
            if count == 0 and "prefetch_factor" in alone:
                # Without workers nothing is loaded ahead.
                choices["prefetch_factor"] = (alone["prefetch_factor"],)
            for values in itertools.product(*choices.values()):
                others = dict(zip(choices, values, strict=True))
                candidates.append({"num_workers": count, **others})
        return [candidate for candidate in candidates if candidate != alone]

    def _is_possible(self, params: Mapping[str, Argument]) -> bool:
        """Return whether workers with these settings are predicted to fit."""
        settings = self.sweep.study.settings(params)
        if self._shortage(settings) is None:
            return True
        self._unfit.append(settings)
        return False

    def _shortage(self, settings: LoaderSettings) -> str | None:
        """Return why workers do not fit into memory; None if they do."""
        limits = self.sweep.limits
        if settings.prefetch_factor is not None:
            limits = replace(limits, prefetch_factor=settings.prefetch_factor)
        return limits.shortage(settings.num_workers, self.sweep.worker_bytes)

    def _tell_unfit(self) -> None:
        """Put settings that were predicted not to fit into the study."""
        study = self.sweep.study
        for settings in self._unfit:
            study.fail(study.ask(settings), "predicted not to fit into memory")
        self._unfit.clear()

    def _measure_next_to_alone(
        self, settings: LoaderSettings
    ) -> tuple[WindowFigures, WindowFigures]:
        """Return figures of a round with settings, and with workers alone.

        Raises:
            WorkersDied: If DataLoader workers of a window ran out of host memory.
            OutOfTime: If a window is likely to end after the deadline.
            Undecided: If a window failed.
        """
        # Rounds of the search follow those of the sweep.
        number = len(self.sweep.rounds) + self.tried
        compared = (settings, self.alone)
        names = [settings_words(setting.arguments) for setting in compared]
        windows = [
            NamedWindow(
                name=name,
                trial=window_trial(self.sweep.windows, number, names, settings=one),
            )
            for name, one in zip(names, compared, strict=True)
        ]
        figures, alone = self.sweep.measure_windows(number, windows)
        return figures, alone


def _excludes_one(ratio: Interval) -> bool:
    """Return True if a ratio has bounds, and 1 does not lie between them."""
    if ratio.low is None or ratio.high is None:
        return False
    return not ratio.low <= 1.0 <= ratio.high
