"""Sweep of a number of DataLoader workers: windows in rounds, until the smallest sufficient count is decided.

A subclass says how a window is made, and which of its figures are compared.
"""

import abc
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
    Count,
    WindowFigures,
    WorkersChoice,
    WorkersRule,
)


class WorkersDied(Exception):
    """Raised if DataLoader workers of a window ran out of host memory."""


_DIED = (
    "killed by signal",
    "exited unexpectedly",
    "Bus error",
    "No space left on device",
    "Cannot allocate memory",
)
"""Messages of torch's DataLoader about workers that were killed or found no shared
memory."""
_ENDED = "exited unexpectedly with exit code"
"""Its message about a worker that your code ended."""

FiguresT = TypeVar("FiguresT", bound=LoadedWindow)


def gpu_use(windows: Sequence[LoadedWindow]) -> GpuUse | None:
    """Return means over windows and GPUs; None without a GPU."""
    gpus = [gpu for one in windows for gpu in one.gpus]
    means = {
        name: combine_known(statistics.fmean, (getattr(gpu, name) for gpu in gpus))
        for name in GpuUse.model_fields
    }
    return GpuUse(**means) if gpus else None


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
    limit: tuple[int, str] = field(init=False)
    """Most DataLoader workers of a rank, and the reason for the limit."""
    reading: Rounds = field(init=False)
    _late: bool = False
    """True if no time was left for a window."""

    def __post_init__(self) -> None:
        self.reading = Rounds(runner=self.runner)
        self.limit = self.limits.most()

    @property
    @abc.abstractmethod
    def limits(self) -> LoaderLimits:
        """Limits of the workers of a rank."""

    @abc.abstractmethod
    def window_of(self, count: Count, number: int, names: Sequence[str]) -> Trial:
        """Return the trial of a window in round ``number`` with the named windows."""

    def failed(self, label: str, outcome: Outcome) -> None:
        """Raise a better error than that a window could not be measured.

        By default none is raised.
        """
        del label, outcome

    def run(self) -> WorkersChoice:
        """Measure until the count is decided or the budget is used up.

        Raises:
            Undecided: If a window fails.
        """
        while (
            todo := self._rule().next_rounds()
        ) is not None and not self.time_is_over:
            for _ in range(todo.rounds):
                if not self._measure_round(todo.counts) or self.time_is_over:
                    break
            # Workers may need more memory than assumed.
            tried, known_bytes = max(self.counts), self.worker_bytes
            refusal = self.limits.refusal(self.max_workers, known_bytes)
            if (
                known_bytes is not None
                and refusal is not None
                and tried < self.max_workers
            ):
                self.limit = (
                    max(tried, self.limits.fitting(self.max_workers, known_bytes)),
                    refusal,
                )
        return self._rule().choose()

    @property
    def max_workers(self) -> int:
        """Most DataLoader workers of a rank."""
        return self.limit[0]

    @property
    def time_is_over(self) -> bool:
        """True if the budget is used up; three rounds are always measured."""
        return len(self.rounds) > 2 and (
            self._late or self.reading.seconds >= self.budget_s
        )

    def read_windows(
        self, number: int, asked: Sequence[tuple[Trial, str]]
    ) -> list[FiguresT]:
        """Return figures of consecutive windows, each a trial with its name.

        Raise ``WorkersDied`` if host memory ran out, ``Undecided`` if a window failed
        for another reason.
        """
        trials = {
            place: (trial, f"{name}, round {number + 1}")
            for place, (trial, name) in enumerate(asked)
        }

        def check(place: int, outcome: Outcome, seconds: float) -> None:
            label = self.runner.finished[-1].label
            detail = outcome.detail if isinstance(outcome, Crashed) else ""
            died = (
                "DataLoader" in detail
                and any(text in detail for text in _DIED)
                and _ENDED not in detail
            )
            if died or isinstance(outcome, HostOutOfMemory):
                raise WorkersDied(f"{label}: {describe(outcome)}")
            self.failed(label, outcome)
            self.runner.require_measured(f"the window '{label}'", outcome)

        found = self.reading.read(number, trials, check)
        return [
            self.figures.of(one)
            for _, one in sorted(found.items())
            if isinstance(one, Measured)
        ]

    def _rule(self) -> WorkersRule:
        rounds = [
            {
                count: WindowFigures(getattr(one, self.rate), one.data_wait_share)
                for count, one in figures.items()
            }
            for figures in self.rounds
        ]
        return WorkersRule(rounds, self.max_workers)

    def _measure_round(self, counts: Sequence[Count]) -> bool:
        """Measure a round.

        Return False if its largest count does not fit, or the budget is used up.
        """
        names = [
            "cached batches" if count is None else f"num_workers={count}"
            for count in counts
        ]
        number = len(self.rounds)
        asked = [
            (self.window_of(count, number, names), name)
            for count, name in zip(counts, names, strict=True)
        ]
        try:
            figures = self.read_windows(number, asked)
        except OutOfTime:
            self._late = True
            if not self.time_is_over:
                raise
            return False
        except WorkersDied as died:
            tried = max(self.counts, default=0)
            if max(count or 0 for count in counts) <= tried:
                raise Undecided(
                    f"DataLoader workers died although as many ran before: {died}",
                    next_step=(
                        "Request more memory for the job, or set a smaller"
                        " --max-workers."
                    ),
                ) from died
            self.limit = tried, str(died)
            return False
        self.rounds.append(dict(zip(counts, figures, strict=True)))
        return True

    @property
    def counts(self) -> list[int]:
        """Numbers of workers that were tried."""
        return sorted(
            {count for one in self.rounds for count in one if count is not None}
        )

    @property
    def worker_bytes(self) -> int | None:
        """Memory of the largest DataLoader worker so far.

        None before one was measured.
        """
        known = (
            figures.worker_bytes for one in self.rounds for figures in one.values()
        )
        return max(filter(None, known), default=None)

    def evidence_of(self, choice: WorkersChoice) -> dict[str, Any]:
        """Return the fields of ``CountEvidence`` that the sweep knows."""
        between = " and ".join(map(str, choice.undecided_between))
        over = f" after {format_seconds(self.budget_s)}" if self.time_is_over else ""
        doubt = (
            f"undecided between {between}{over}; num_workers={choice.workers}: "
            if between
            else ""
        )
        return {
            "chosen": choice.workers,
            "undecided_between": list(choice.undecided_between),
            "keeps_up": choice.keeps_up,
            "choice": doubt + choice.proof,
            "next_smaller": choice.next_smaller,
            "max_workers": self.limit[0],
            "max_workers_because": self.limit[1],
            **self.reading.taken,
        }

    def row_of(
        self, count: int, choice: WorkersChoice
    ) -> tuple[dict[str, Any], list[FiguresT]]:
        """Return the fields of a ``CountRow``, and the windows with that count."""
        windows, ratio = (
            [one[count] for one in self.rounds if count in one],
            choice.ratios[count],
        )
        return {
            "num_workers": count,
            "ratio_to_cached": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "verdict": choice.verdicts[count],
            "gpu": gpu_use(windows),
            "data_wait_share": statistics.median(
                one.data_wait_share for one in windows
            ),
            "memory_bytes": max(
                (one.memory_bytes for one in windows if one.memory_bytes), default=None
            ),
        }, windows
