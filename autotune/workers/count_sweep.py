"""Sweep of a number of DataLoader workers, by windows in rounds.

The sweep ends when the smallest sufficient count is decided, or its time budget is used
up. A subclass builds the trial of a window and reads its figures.
"""

import abc
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from autotune.base.units import format_seconds
from autotune.errors import AutotuneError, OutOfTime, Undecided
from autotune.trials.decide.gpu_activity import combine_known
from autotune.trials.job_figures import GpuUse, LoadedWindow
from autotune.trials.outcomes import Measured, Outcome, describe
from autotune.trials.runner import Rounds, TrialRunner
from autotune.trials.values import Trial
from autotune.workers.decide.count_statistics import (
    FIRST_ROUNDS,
    Count,
    WindowFigures,
)
from autotune.workers.decide.dead_workers import WorkersDied, workers_died
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.decide.worker_count import (
    NextRounds,
    WorkersChoice,
    WorkersRule,
)

FiguresT = TypeVar("FiguresT", bound=LoadedWindow)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWindow:
    """Window to measure."""

    name: str
    """Name for people, unique in its round."""
    trial: Trial
    """Trial that measures it."""


@dataclass(slots=True, kw_only=True)
class CountSweep(abc.ABC, Generic[FiguresT]):
    """Measure numbers of DataLoader workers until the smallest sufficient one is known.

    Each round has a window with each count that may be sufficient. ``WorkersRule``
    decides from the complete rounds which counts the next rounds need.
    """

    runner: TrialRunner
    """Runner of the windows, with their trial log."""
    budget_s: float
    """Time budget of all windows."""
    rounds: list[dict[Count, FiguresT]] = field(default_factory=list)
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

    # What differs between the trainer's loader and your own.

    @property
    @abc.abstractmethod
    def limits(self) -> LoaderLimits:
        """Limits of the workers of a rank."""

    @abc.abstractmethod
    def window_trial(
        self, count: Count, round_number: int, names: Sequence[str]
    ) -> Trial:
        """Return the trial of a window with ``count`` workers.

        Args:
            count: DataLoader workers; None for cached batches.
            round_number: Number of the window's round, from 0.
            names: Names of all windows of the round.
        """

    @abc.abstractmethod
    def read_figures(self, outcome: Measured) -> FiguresT:
        """Return the figures of a window that was measured."""

    def compared_rate(self, figures: FiguresT) -> float:
        """Return the rate of a window by which counts are compared."""
        return figures.tokens_per_s

    def known_failure(self, label: str, outcome: Outcome) -> AutotuneError | None:
        """Return an error that explains why a window failed.

        Args:
            label: Name of the window, with its round and attempt.
            outcome: Outcome of the window, which may have succeeded.

        Returns:
            None if the window did not fail, or its failure has no better explanation
            than its outcome.
        """
        return None

    # Measuring.

    def run(self) -> WorkersChoice:
        """Measure until the count is decided or the budget is used up.

        Raises:
            Undecided: If a window fails.
        """
        while not self.time_is_over:
            next_rounds = self._rule().next_rounds()
            if next_rounds is None:
                break
            self._measure_rounds(next_rounds)
            self._limit_by_measured_memory()
        return self._rule().choose()

    def _measure_rounds(self, next_rounds: NextRounds) -> None:
        """Measure rounds until the time is over, or their largest count does not fit.

        Raises:
            OutOfTime: If no time is left for the rounds that are always measured.
            Undecided: If a window fails.
        """
        for _ in range(next_rounds.rounds):
            try:
                self.rounds.append(self._measure_round(next_rounds.counts))
            except OutOfTime:
                self._ran_out_of_time = True
                if not self.time_is_over:
                    raise
            except WorkersDied as died:
                self._limit_to_tried_counts(next_rounds.counts, died)
                return
            if self.time_is_over:
                return

    def _measure_round(self, counts: Sequence[Count]) -> dict[Count, FiguresT]:
        """Return the figures of a round, by count."""
        round_number = len(self.rounds)
        names = [_window_name(count) for count in counts]
        windows = []
        for count, name in zip(counts, names, strict=True):
            trial = self.window_trial(count, round_number, names)
            windows.append(NamedWindow(name=name, trial=trial))
        figures = self.measure_windows(round_number, windows)
        return dict(zip(counts, figures, strict=True))

    def measure_windows(
        self, round_number: int, windows: Sequence[NamedWindow]
    ) -> list[FiguresT]:
        """Return figures of consecutive windows, in the order of ``windows``.

        Args:
            round_number: Number of the round, from 0.
            windows: Windows of the round.

        Raises:
            WorkersDied: If host memory ran out.
            Undecided: If a window failed for another reason.
        """
        trials = {
            window.name: (window.trial, f"{window.name}, round {round_number + 1}")
            for window in windows
        }
        outcomes = self.measurement.measure_round(
            round_number, trials, self._reject_failure
        )
        figures = []
        # Every other round ran backwards.
        for window in windows:
            outcome = outcomes[window.name]
            # ``_reject_failure`` raised otherwise.
            assert isinstance(outcome, Measured)
            figures.append(self.read_figures(outcome))
        return figures

    def _reject_failure(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Raise an error if the window that just ended has no figures.

        Args:
            name: Name of the window. It is ignored: unlike it, the label of the
                finished trial says its round and attempt.
            outcome: Outcome of the window.
            seconds: Time of the window, which makes no difference.
        """
        label = self.runner.finished[-1].label
        if workers_died(outcome):
            raise WorkersDied(f"{label}: {describe(outcome)}")
        failure = self.known_failure(label, outcome)
        if failure is not None:
            raise failure
        self.runner.require_measured(f"the window '{label}'", outcome)

    # The limit of workers.

    def _limit_to_tried_counts(
        self, counts: Sequence[Count], died: WorkersDied
    ) -> None:
        """Lower the limit to the counts that ran before, after workers died.

        Raises:
            Undecided: If as many workers ran before, so that a lower limit would not
                help.
        """
        largest_tried = max(self.counts, default=0)
        largest_count = max(count or 0 for count in counts)
        if largest_count <= largest_tried:
            raise Undecided(
                f"DataLoader workers died although as many ran before: {died}",
                next_step=(
                    "Request more memory for the job, or set a smaller --max-workers."
                ),
            ) from died
        self.max_workers = largest_tried
        self.max_workers_because = str(died)

    def _limit_by_measured_memory(self) -> None:
        """Lower the limit if workers need more memory than assumed."""
        worker_bytes = self.worker_bytes
        largest_tried = max(self.counts)
        if worker_bytes is None or largest_tried >= self.max_workers:
            return
        shortage = self.limits.shortage(self.max_workers, worker_bytes)
        if shortage is None:
            return
        fitting = self.limits.largest_fitting(self.max_workers, worker_bytes)
        self.max_workers = max(largest_tried, fitting)
        self.max_workers_because = shortage

    # Results so far.

    @property
    def time_is_over(self) -> bool:
        """True if the budget is used up; three rounds are always measured."""
        if len(self.rounds) < FIRST_ROUNDS:
            return False
        return self._ran_out_of_time or self.measurement.seconds >= self.budget_s

    def _rule(self) -> WorkersRule:
        """Return the rule on the complete rounds so far."""
        rounds = []
        for windows in self.rounds:
            compared = {
                count: WindowFigures(
                    tokens_per_s=self.compared_rate(figures),
                    data_wait_share=figures.data_wait_share,
                )
                for count, figures in windows.items()
            }
            rounds.append(compared)
        return WorkersRule(rounds, self.max_workers)

    @property
    def counts(self) -> list[int]:
        """Numbers of workers that were tried."""
        tried = set(itertools.chain.from_iterable(self.rounds))
        return sorted(count for count in tried if count is not None)

    @property
    def all_windows(self) -> list[FiguresT]:
        """Figures of all windows of the complete rounds."""
        windows_by_round = (windows.values() for windows in self.rounds)
        return list(itertools.chain.from_iterable(windows_by_round))

    def windows_with(self, count: Count) -> list[FiguresT]:
        """Return the figures of the windows with a count; None for cached batches."""
        return [windows[count] for windows in self.rounds if count in windows]

    @property
    def worker_bytes(self) -> int | None:
        """Memory of the largest DataLoader worker so far; None if none was measured."""
        return _largest_known(figures.worker_bytes for figures in self.all_windows)

    def evidence_fields(self, choice: WorkersChoice) -> dict[str, Any]:
        """Return the fields of ``CountEvidence`` that the sweep knows."""
        return {
            "chosen": choice.workers,
            "undecided_between": list(choice.undecided_between),
            "keeps_up": choice.keeps_up,
            "choice": self._reason(choice),
            "next_smaller": choice.next_smaller,
            "max_workers": self.max_workers,
            "max_workers_because": self.max_workers_because,
            **self.measurement.totals,
        }

    def _reason(self, choice: WorkersChoice) -> str:
        """Return the reason for the chosen count, and what is undecided, in words."""
        if not choice.undecided_between:
            return choice.proof
        between = " and ".join(map(str, choice.undecided_between))
        after = ""
        if self.time_is_over:
            after = f" after {format_seconds(self.budget_s)}"
        return (
            f"undecided between {between}{after};"
            f" num_workers={choice.workers}: {choice.proof}"
        )

    def row_fields(self, count: int, choice: WorkersChoice) -> dict[str, Any]:
        """Return the fields of a ``CountRow`` about the windows with a count."""
        windows = self.windows_with(count)
        ratio = choice.ratios[count]
        return {
            "num_workers": count,
            "ratio_to_cached": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "verdict": choice.verdicts[count],
            "gpu": mean_gpu_use(windows),
            "data_wait_share": statistics.median(
                window.data_wait_share for window in windows
            ),
            "memory_bytes": _largest_known(window.memory_bytes for window in windows),
        }


def mean_gpu_use(windows: Sequence[LoadedWindow]) -> GpuUse | None:
    """Return means over windows and GPUs; None without a GPU."""
    gpus = [gpu for window in windows for gpu in window.gpus]
    if not gpus:
        return None
    means = {
        name: combine_known(statistics.fmean, (getattr(gpu, name) for gpu in gpus))
        for name in GpuUse.model_fields
    }
    return GpuUse(**means)


def _window_name(count: Count) -> str:
    """Return the name of a window with ``count`` workers, for people."""
    return "cached batches" if count is None else f"num_workers={count}"


def _largest_known(sizes_bytes: Iterable[int | None]) -> int | None:
    """Return the largest size; None if no size could be read, or all are zero."""
    return max((size for size in sizes_bytes if size), default=None)
