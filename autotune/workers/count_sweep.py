"""Sweep of a number of DataLoader workers, by windows in rounds.

It ends when the smallest sufficient count is decided. A subclass says how a window is
made, and which of its figures are compared.
"""

import abc
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from autotune.base.units import format_seconds
from autotune.errors import OutOfTime, Undecided
from autotune.trials.decide.contamination import combine_known
from autotune.trials.runner import Rounds, TrialRunner
from autotune.trials.values import (
    Crashed,
    GpuUse,
    HostOutOfMemory,
    LoadedWindow,
    Measured,
    Outcome,
    Trial,
    describe,
)
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.decide.worker_count import (
    FIRST_ROUNDS,
    Count,
    WindowFigures,
    WorkersChoice,
    WorkersRule,
)


class WorkersDied(Exception):
    """Raised if DataLoader workers of a window ran out of host memory."""


_DEAD_WORKER_MESSAGES = (
    "killed by signal",
    "exited unexpectedly",
    "Bus error",
    "No space left on device",
    "Cannot allocate memory",
)
"""Messages of torch's DataLoader about workers that were killed or found no shared
memory."""
_ENDED_BY_CODE_MESSAGE = "exited unexpectedly with exit code"
"""Its message about a worker that your code ended."""

FiguresT = TypeVar("FiguresT", bound=LoadedWindow)


def gpu_use(windows: Sequence[LoadedWindow]) -> GpuUse | None:
    """Return means over windows and GPUs; None without a GPU."""
    gpus = [gpu for window in windows for gpu in window.gpus]
    if not gpus:
        return None
    means = {
        name: combine_known(statistics.fmean, (getattr(gpu, name) for gpu in gpus))
        for name in GpuUse.model_fields
    }
    return GpuUse(**means)


@dataclass(slots=True, kw_only=True)
class CountSweep(abc.ABC, Generic[FiguresT]):
    """State of a sweep."""

    runner: TrialRunner
    budget_s: float
    """Time budget of all windows."""
    figures: type[FiguresT]
    """Type of a window's figures."""
    rate: str = "tokens_per_s"
    """Name of the figure to compare."""
    rounds: list[dict[Count, FiguresT]] = field(default_factory=list)
    """Figures of the complete rounds so far, by count."""
    max_workers: int = field(init=False)
    """Most DataLoader workers of a rank."""
    max_workers_because: str = field(init=False)
    """Reason for ``max_workers``."""
    measurement: Rounds = field(init=False)
    _was_late: bool = False
    """True if no time was left for a window."""

    def __post_init__(self) -> None:
        self.measurement = Rounds(runner=self.runner)
        self.max_workers, self.max_workers_because = self.limits.max_workers()

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

    def raise_failure(self, label: str, outcome: Outcome) -> None:
        """Raise a better error than that a window could not be measured.

        By default none is raised.
        """
        del label, outcome

    def run(self) -> WorkersChoice:
        """Measure until the count is decided or the budget is used up.

        Raises:
            Undecided: If a window fails.
        """
        while not self.time_is_over:
            next_rounds = self._rule().next_rounds()
            if next_rounds is None:
                break
            for _ in range(next_rounds.rounds):
                if not self._measure_round(next_rounds.counts) or self.time_is_over:
                    break
            self._lower_limit()
        return self._rule().choose()

    def _lower_limit(self) -> None:
        """Lower the limit if workers need more memory than assumed."""
        largest_tried = max(self.counts)
        worker_bytes = self.worker_bytes
        shortage = self.limits.shortage(self.max_workers, worker_bytes)
        if (
            worker_bytes is None
            or shortage is None
            or largest_tried >= self.max_workers
        ):
            return
        fitting = self.limits.largest_fitting(self.max_workers, worker_bytes)
        self.max_workers = max(largest_tried, fitting)
        self.max_workers_because = shortage

    @property
    def time_is_over(self) -> bool:
        """True if the budget is used up; three rounds are always measured."""
        if len(self.rounds) < FIRST_ROUNDS:
            return False
        return self._was_late or self.measurement.seconds >= self.budget_s

    def measure_windows(
        self, round_number: int, windows: Sequence[tuple[Trial, str]]
    ) -> list[FiguresT]:
        """Return figures of consecutive windows.

        Args:
            round_number: Number of the round, from 0.
            windows: Trial and name of each window.

        Raises:
            WorkersDied: If host memory ran out.
            Undecided: If a window failed for another reason.
        """
        trials = {
            index: (trial, f"{name}, round {round_number + 1}")
            for index, (trial, name) in enumerate(windows)
        }

        def require_figures(index: int, outcome: Outcome, seconds: float) -> None:
            label = self.runner.finished[-1].label
            if _workers_died(outcome):
                raise WorkersDied(f"{label}: {describe(outcome)}")
            self.raise_failure(label, outcome)
            self.runner.require_measured(f"the window '{label}'", outcome)

        outcomes = self.measurement.measure_round(round_number, trials, require_figures)
        # Every other round runs backwards; the figures come in the given order.
        return [
            self.figures.of(outcome)
            for _, outcome in sorted(outcomes.items())
            if isinstance(outcome, Measured)
        ]

    def _rule(self) -> WorkersRule:
        rounds = [
            {count: self._compared(figures) for count, figures in windows.items()}
            for windows in self.rounds
        ]
        return WorkersRule(rounds, self.max_workers)

    def _compared(self, figures: FiguresT) -> WindowFigures:
        return WindowFigures(
            tokens_per_s=getattr(figures, self.rate),
            data_wait_share=figures.data_wait_share,
        )

    def _measure_round(self, counts: Sequence[Count]) -> bool:
        """Measure a round.

        Returns:
            False if its largest count does not fit, or the budget is used up.
        """
        names = [
            "cached batches" if count is None else f"num_workers={count}"
            for count in counts
        ]
        round_number = len(self.rounds)
        windows = [
            (self.window_trial(count, round_number, names), name)
            for count, name in zip(counts, names, strict=True)
        ]
        try:
            figures = self.measure_windows(round_number, windows)
        except OutOfTime:
            self._was_late = True
            if not self.time_is_over:
                raise
            return False
        except WorkersDied as died:
            largest_tried = max(self.counts, default=0)
            # As many ran before, so a lower limit would not help.
            if max(count or 0 for count in counts) <= largest_tried:
                raise Undecided(
                    f"DataLoader workers died although as many ran before: {died}",
                    next_step=(
                        "Request more memory for the job, or set a smaller"
                        " --max-workers."
                    ),
                ) from died
            self.max_workers = largest_tried
            self.max_workers_because = str(died)
            return False
        self.rounds.append(dict(zip(counts, figures, strict=True)))
        return True

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
        """Memory of the largest DataLoader worker so far.

        None before one was measured.
        """
        known_bytes = (figures.worker_bytes for figures in self.all_windows)
        return max(filter(None, known_bytes), default=None)

    def evidence_fields(self, choice: WorkersChoice) -> dict[str, Any]:
        """Return the fields of ``CountEvidence`` that the sweep knows."""
        reason = choice.proof
        if choice.undecided_between:
            between = " and ".join(map(str, choice.undecided_between))
            after = ""
            if self.time_is_over:
                after = f" after {format_seconds(self.budget_s)}"
            reason = (
                f"undecided between {between}{after};"
                f" num_workers={choice.workers}: {choice.proof}"
            )
        return {
            "chosen": choice.workers,
            "undecided_between": list(choice.undecided_between),
            "keeps_up": choice.keeps_up,
            "choice": reason,
            "next_smaller": choice.next_smaller,
            "max_workers": self.max_workers,
            "max_workers_because": self.max_workers_because,
            **self.measurement.totals,
        }

    def row_fields(self, count: int, choice: WorkersChoice) -> dict[str, Any]:
        """Return the fields of a ``CountRow`` about the windows with a count."""
        windows = self.windows_with(count)
        ratio = choice.ratios[count]
        memory_bytes = (window.memory_bytes for window in windows)
        return {
            "num_workers": count,
            "ratio_to_cached": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "verdict": choice.verdicts[count],
            "gpu": gpu_use(windows),
            "data_wait_share": statistics.median(
                window.data_wait_share for window in windows
            ),
            "memory_bytes": max(filter(None, memory_bytes), default=None),
        }


def _workers_died(outcome: Outcome) -> bool:
    """Return True if DataLoader workers were killed or found no memory."""
    if isinstance(outcome, HostOutOfMemory):
        return True
    if not isinstance(outcome, Crashed) or "DataLoader" not in outcome.detail:
        return False
    if _ENDED_BY_CODE_MESSAGE in outcome.detail:
        return False
    return any(message in outcome.detail for message in _DEAD_WORKER_MESSAGES)
