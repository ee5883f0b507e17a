"""Sweep of the number of DataLoader workers of a subject, by windows in rounds.

The sweep ends when the smallest sufficient count is decided, or its time budget is used
up.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.errors import AutotuneError, OutOfTime, Undecided
from autotune.subjects.decide import window_failure
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured, Outcome, describe
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial
from autotune.workers.decide.count_statistics import (
    FIRST_ROUNDS,
    Count,
    CountWindow,
)
from autotune.workers.decide.dead_workers import WorkersDied, workers_died
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.decide.worker_count import (
    NextRounds,
    WorkersChoice,
    WorkersRule,
)
from autotune.workers.loader_study import LoaderStudy, open_loader_study
from autotune.workers.windows import LoaderSettings, SubjectWindows, window_trial

COUNTS_SHARE = 0.6
"""Share of the time after which counts that all leave a gap are no longer measured, if
the loader takes other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWindow:
    """Window to measure."""

    name: str
    """Name for people, unique in its round."""
    trial: Trial
    """Trial that measures it."""


@dataclass(slots=True, kw_only=True)
class WorkerSweep:
    """Measure numbers of DataLoader workers until the smallest sufficient one is known.

    Each round has a window with each count that may be sufficient. ``WorkersRule``
    decides from the complete rounds which counts the next rounds need.
    """

    windows: SubjectWindows[Any]
    """Windows of the subject, with their time budget."""
    runner: TrialRunner
    """Runner of the windows, with their trial log."""
    study_name: str = "workers"
    """Name of the Optuna study; the request of the windows names its file."""
    study: LoaderStudy = field(init=False)
    """Study with a trial for each count."""
    rounds: list[dict[Count, WindowFigures]] = field(default_factory=list)
    """Figures of the complete rounds so far, by count."""
    max_workers: int = field(init=False)
    """Most DataLoader workers of a rank."""
    max_workers_because: str = field(init=False)
    """Reason for ``max_workers``."""
    measurement: Rounds = field(init=False)
    """Measurement of the rounds, with their number and time."""
    _ran_out_of_time: bool = False
    """True if the time left was too short for another window."""

    def __post_init__(self) -> None:
        self.measurement = Rounds(runner=self.runner)
        self.max_workers, self.max_workers_because = self.limits.max_workers()
        self.study = open_loader_study(self.windows, self.study_name, self.max_workers)

    @property
    def budget_s(self) -> float:
        """Time budget of all windows."""
        return self.windows.request.budget_s

    @property
    def limits(self) -> LoaderLimits:
        """Limits of the workers of a rank, by the largest batch that is known."""
        limits = self.windows.limits
        batch_bytes = self.batch_bytes or 0
        return replace(limits, batch_bytes=max(limits.batch_bytes, batch_bytes))

    def run(self) -> WorkersChoice:
        """Measure until the count is decided or the budget is used up.

        Raises:
            OutOfTime: If the deadline leaves no time for the first three rounds.
            Undecided: If a window failed.
        """
        choice = None
        unmeasured = "interrupted"
        try:
            while not self.time_is_over:
                rule = self._rule()
                next_rounds = rule.next_rounds()
                if next_rounds is None or self._leaves_time_for_settings(rule):
                    break
                self._measure_rounds(next_rounds)
                self._limit_by_measured_memory()
            choice = self._rule().choose()
            unmeasured = "no time was left"
        except AutotuneError as error:
            unmeasured = error.message
            raise
        finally:
            self.study.end_counts(self.rounds, choice, unmeasured=unmeasured)
        return choice

    @property
    def time_is_over(self) -> bool:
        """True if the budget is used up, or the deadline leaves no time for a window.

        It is False before three rounds, which are always measured.
        """
        if len(self.rounds) < FIRST_ROUNDS:
            return False
        return self._ran_out_of_time or self.measurement.seconds >= self.budget_s

    def _leaves_time_for_settings(self, rule: WorkersRule) -> bool:
        """Return True if the rest of the time is for other settings of the loader.

        If no count keeps up, two counts may be equally slow, and no number of rounds
        decides between them. The other settings may close the gap.
        """
        if not self.windows.searched or len(self.rounds) < FIRST_ROUNDS:
            return False
        has_used_share = self.measurement.seconds >= COUNTS_SHARE * self.budget_s
        return has_used_share and rule.choose().gap_remains

    def _rule(self) -> WorkersRule:
        """Return the rule on the complete rounds so far."""
        rounds = []
        for windows in self.rounds:
            compared = {
                count: CountWindow(
                    # With padding: how many tokens of a window are padding is chance.
                    units_per_s=figures.padded_units_per_s,
                    data_wait_share=figures.data_wait_share,
                )
                for count, figures in windows.items()
            }
            rounds.append(compared)
        return WorkersRule(rounds, self.max_workers)

    def _measure_rounds(self, next_rounds: NextRounds) -> None:
        """Measure rounds until their time is over, or their largest count does not fit.

        Raises:
            OutOfTime: If the deadline leaves no time for the first three rounds.
            Undecided: If a window failed.
        """
        for _ in range(next_rounds.rounds):
            try:
                windows = self._measure_round(next_rounds.counts)
            except OutOfTime:
                # The runner raises this before a window that would likely end after the
                # deadline. The windows of the begun round are then not used.
                if len(self.rounds) < FIRST_ROUNDS:
                    raise
                self._ran_out_of_time = True
                return
            except WorkersDied as died:
                # ``_check_window`` raises this after the window in which they died.
                self._limit_to_tried_counts(next_rounds.counts, died)
                return
            self.rounds.append(windows)
            if self.time_is_over or self._leaves_time_for_settings(self._rule()):
                return

    def _measure_round(self, counts: Sequence[Count]) -> dict[Count, WindowFigures]:
        """Return the figures of a round, by count."""
        round_number = len(self.rounds)
        names = [_window_name(count) for count in counts]
        windows = []
        for count, name in zip(counts, names, strict=True):
            if count is not None:
                self.study.begin_count(count)
            trial = window_trial(
                self.windows,
                round_number,
                names,
                settings=LoaderSettings(num_workers=count or 0),
                cached=count is None,
            )
            windows.append(NamedWindow(name=name, trial=trial))
        figures = self.measure_windows(round_number, windows)
        figures_by_count = dict(zip(counts, figures, strict=True))
        self.study.report_round(round_number, figures_by_count)
        return figures_by_count

    def measure_windows(
        self, round_number: int, windows: Sequence[NamedWindow]
    ) -> list[WindowFigures]:
        """Return figures of consecutive windows, in the order of ``windows``.

        Args:
            round_number: Number of the round, from 0.
            windows: Windows of the round.

        Raises:
            WorkersDied: If DataLoader workers of a window ran out of host memory.
            OutOfTime: If a window is likely to end after the deadline.
            AutotuneError: If your code failed in a window, as ``window_failure`` says.
            Undecided: If a window failed for another reason.
        """
        trials = {
            window.name: (window.trial, f"{window.name}, round {round_number + 1}")
            for window in windows
        }
        outcomes = self.measurement.measure_round(
            round_number,
            trials,
            lambda name, outcome, seconds: self._check_window(outcome),
        )
        figures = []
        # Every other round ran backwards.
        for window in windows:
            outcome = outcomes[window.name]
            # ``_check_window`` raised otherwise.
            assert isinstance(outcome, Measured)
            figures.append(WindowFigures.of(outcome))
        return figures

    def _check_window(self, outcome: Outcome) -> None:
        """Check that the window that just ended has figures.

        Raises:
            WorkersDied: If its DataLoader workers ran out of host memory.
            AutotuneError: If your code failed, as ``window_failure`` says.
            Undecided: If it failed for another reason.
        """
        label = self.runner.finished[-1].label
        if workers_died(outcome):
            raise WorkersDied(f"{label}: {describe(outcome)}")
        functions = self.windows.subject.code().values()
        failure = window_failure(tuple(functions), label, outcome)
        if failure is not None:
            raise failure
        self.runner.require_measured(f"the window '{label}'", outcome)

    def _limit_to_tried_counts(
        self, counts: Sequence[Count], died: WorkersDied
    ) -> None:
        """Lower the limit to the counts that ran before, after workers died.

        Args:
            counts: Counts of the round in which workers died.
            died: Error that names the window in which they died.

        Raises:
            Undecided: If as many workers ran before, so that a lower limit would not
                help.
        """
        largest_count = max(count or 0 for count in counts)
        if largest_count <= self._largest_tried:
            raise Undecided(
                f"DataLoader workers died although as many ran before: {died}",
                next_step=(
                    "Request more memory for the job, or set a smaller --max-workers."
                ),
            ) from died
        self.study.fail_count(largest_count, str(died))
        self.max_workers = self._largest_tried
        self.max_workers_because = str(died)

    def _limit_by_measured_memory(self) -> None:
        """Lower the limit if workers need more memory than assumed.

        Counts that ran before stay within the limit.
        """
        worker_bytes = self.worker_bytes
        if worker_bytes is None or self._largest_tried >= self.max_workers:
            return
        shortage = self.limits.shortage(self.max_workers, worker_bytes)
        if shortage is None:
            return
        fitting = self.limits.largest_fitting(self.max_workers, worker_bytes)
        self.max_workers = max(self._largest_tried, fitting)
        self.max_workers_because = shortage

    @property
    def counts(self) -> list[int]:
        """Numbers of workers that were tried, in ascending order."""
        tried = set(itertools.chain.from_iterable(self.rounds))
        return sorted(count for count in tried if count is not None)

    @property
    def _largest_tried(self) -> int:
        """Most workers that were tried; 0 before the first round, which tries none."""
        counts = self.counts
        return counts[-1] if counts else 0

    @property
    def all_windows(self) -> list[WindowFigures]:
        """Figures of all windows of the complete rounds."""
        windows_by_round = (windows.values() for windows in self.rounds)
        return list(itertools.chain.from_iterable(windows_by_round))

    def windows_with(self, count: Count) -> list[WindowFigures]:
        """Return the figures of the windows with a count; None for cached batches."""
        return [windows[count] for windows in self.rounds if count in windows]

    @property
    def batch_bytes(self) -> int | None:
        """Size of the largest batch so far; None if none was measured."""
        return largest_known(figures.batch_bytes for figures in self.all_windows)

    @property
    def worker_bytes(self) -> int | None:
        """Memory of the largest DataLoader worker so far; None if none was measured."""
        return largest_known(figures.worker_bytes for figures in self.all_windows)


def _window_name(count: Count) -> str:
    """Return the name of a window with ``count`` workers, for people."""
    return "cached batches" if count is None else f"num_workers={count}"


def largest_known(sizes_bytes: Iterable[int | None]) -> int | None:
    """Return the largest size; None if no size could be read, or all are zero."""
    return max((size for size in sizes_bytes if size), default=None)
