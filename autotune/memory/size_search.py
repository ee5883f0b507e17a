"""Search for the largest size of a step that fits, by trials.

The search ends with the largest size that ran, and the next one, which ran out of
memory. A subclass sets the limits of the step, makes the trial of a size, and reads its
figures.
"""

import abc
from dataclasses import dataclass, field

from autotune.base.wording import plural
from autotune.errors import OutOfTime
from autotune.memory.decide.batch_search import (
    MAX_FAILURES,
    PAGE_BYTES,
    Prediction,
    SizeTrial,
    bracket,
    next_size,
)
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
)
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial

CLOSE_BYTES = 2**20
"""Usual difference between processes that run the same size."""


@dataclass(slots=True, kw_only=True)
class SizeSearch(abc.ABC):
    """Searches for the largest size of a step, one trial after the other."""

    runner: TrialRunner
    name: str = field(init=False)
    """Name of the step, for progress."""
    budget_bytes: int = field(init=False)
    """Memory that a step may use."""
    max_size: int = field(init=False)
    """Largest size to try."""
    on_gpu: bool = field(init=False)
    """True on a GPU, whose caching allocator rounds peaks up."""
    tried: list[SizeTrial] = field(default_factory=list)
    """Trials so far."""
    prediction: Prediction | None = None
    """Peak memory that was predicted before any trial; None without a trace."""
    close_bytes: int = CLOSE_BYTES
    """Free memory below which the largest size is tried a second time, as processes
    differ slightly."""
    verified_twice: bool = False
    """True if the largest size always runs twice."""

    @abc.abstractmethod
    def trial_of(self, size: int, attempt: int) -> Trial:
        """Return the trial of a size."""

    @abc.abstractmethod
    def peak_bytes_of(self, size: int, outcome: Measured) -> int:
        """Return the peak of a trial that ran."""

    def words(self, size: int) -> str:
        """Return a size in words."""
        return plural(size, "sequence")

    def reject_failure(self, size: int, outcome: Outcome) -> None:
        """Raise an error for a failure that is not to be tried again.

        By default, every failure may be tried again.
        """
        del size, outcome

    def find(self) -> None:
        """Try sizes until the largest is verified on both sides."""
        while True:
            size = next_size(
                self.tried,
                self.budget_bytes,
                self.max_size,
                self.prediction,
                PAGE_BYTES if self.on_gpu else 0,
            )
            if size is None:
                size = bracket(self.tried).feasible_max
                if not self._needs_second_trial(size):
                    return
            self.try_size(size)

    def _needs_second_trial(self, size: int) -> bool:
        """Return whether the largest size ran once, and may not fit the next time."""
        peaks = [
            trial.peak_bytes
            for trial in self.tried
            if trial.micro_batch_size == size and trial.fits
        ]
        if len(peaks) != 1 or peaks[0] is None:
            return False
        free_bytes = self.budget_bytes - peaks[0]
        return self.verified_twice or free_bytes < self.close_bytes

    def try_size(self, size: int) -> None:
        """Run a trial of a size.

        Raises:
            Undecided: If it failed too often for another reason than memory.
            OutOfTime: If the time is up; with the sizes that are known so far.
        """
        earlier = [trial.fits for trial in self.tried if trial.micro_batch_size == size]
        label = self.words(size)
        if earlier:
            label += f", attempt {len(earlier) + 1}"
        outcome = self._run(self.trial_of(size, len(earlier)), label)
        if isinstance(outcome, Measured):
            peak_bytes = self.peak_bytes_of(size, outcome)
            trial = SizeTrial(micro_batch_size=size, fits=True, peak_bytes=peak_bytes)
        elif isinstance(outcome, OutOfMemory):
            trial = SizeTrial(micro_batch_size=size, fits=False)
        else:
            self.reject_failure(size, outcome)
            can_repeat = isinstance(outcome, Crashed | Contaminated)
            if not can_repeat or earlier.count(None) >= MAX_FAILURES - 1:
                # Raises an error, as nothing was measured.
                self.runner.require_measured(f"the trial {label!r}", outcome)
            trial = SizeTrial(micro_batch_size=size, fits=None)
        self.tried.append(trial)

    def _run(self, trial: Trial, label: str) -> Outcome:
        """Run a trial.

        Raises:
            OutOfTime: If the time is up; with the sizes that are known so far.
        """
        try:
            return self.runner.run(trial, f"{self.name}: {label}")
        except OutOfTime as error:
            raise OutOfTime(
                f"{self._known_words()}; {error.message}", next_step=error.next_step
            ) from error

    def _known_words(self) -> str:
        """Return the sizes that are known to fit and not to fit, in words."""
        known = bracket(self.tried)
        words = "no size is verified yet"
        if known.feasible_max:
            words = f"{self.words(known.feasible_max)} fit"
        if known.infeasible_min is not None:
            words += f", {known.infeasible_min} do not"
        return words
