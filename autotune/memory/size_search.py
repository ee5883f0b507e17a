"""Search for the largest size of a step that fits, by trials.

The search ends with the largest size that ran, and the next one, which ran out of
memory. A subclass sets the limits of the step, makes the trial of a size, and reads the
trial's figures.
"""

import abc
from dataclasses import dataclass, field

from autotune.base.wording import plural
from autotune.errors import OutOfTime
from autotune.memory.decide.batch_search import (
    MAX_FAILURES,
    Prediction,
    SizeTrial,
    bracket,
    next_size,
)
from autotune.memory.decide.caching_allocator import LARGE_PAGE_BYTES
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
    """Searches for the largest size of a step, one trial after the other.

    The constructor does not take the name, the budget, the largest size and the kind of
    device: a subclass sets these fields in ``__post_init__``, from its own description
    of the step.
    """

    runner: TrialRunner
    name: str = field(init=False)
    """Name of the step, for labels of trials and for errors."""
    budget_bytes: int = field(init=False)
    """Memory that a step may use."""
    max_size: int = field(init=False)
    """Largest size to try; a size counts sequences, unless ``words`` says otherwise."""
    on_gpu: bool = field(init=False)
    """True on a GPU, whose caching allocator rounds peaks up."""
    tried: list[SizeTrial] = field(default_factory=list)
    """Trials so far, in their order."""
    prediction: Prediction | None = None
    """Peak memory that was predicted before any trial; None without a trace."""
    close_bytes: int = CLOSE_BYTES
    """Free memory below which the largest size is tried a second time, as processes
    differ slightly."""
    verified_twice: bool = False
    """True if the largest size always runs twice."""

    @abc.abstractmethod
    def trial_of(self, size: int, attempt: int) -> Trial:
        """Return the trial of a size; each attempt, from 0 on, is another trial."""

    @abc.abstractmethod
    def peak_bytes_of(self, size: int, outcome: Measured) -> int:
        """Return the peak memory of a trial of this size that ran."""

    def words(self, size: int) -> str:
        """Return a size with its unit, in words."""
        return plural(size, "sequence")

    def reject_failure(self, size: int, outcome: Outcome) -> None:
        """Raise an error if repeating a failed trial of a size would not help.

        A subclass may override it; by default, nothing is raised.
        """
        del size, outcome  # Only an override reads them.

    def find(self) -> None:
        """Try sizes until the largest is verified on both sides.

        Raises:
            Undecided: If a size failed too often for another reason than memory.
            OutOfTime: If the time is up.
        """
        page_bytes = LARGE_PAGE_BYTES if self.on_gpu else 0
        while True:
            size = next_size(
                self.tried,
                self.budget_bytes,
                self.max_size,
                self.prediction,
                page_bytes,
            )
            if size is None:
                # The search has its answer; it may have to be confirmed.
                size = bracket(self.tried).feasible_max
                if not self._needs_second_trial(size):
                    return
            self.try_size(size)

    def _needs_second_trial(self, size: int) -> bool:
        """Return whether the largest size ran only once, and might not fit again."""
        peaks_bytes = [
            trial.peak_bytes
            for trial in self._attempts_of(size)
            if trial.peak_bytes is not None
        ]
        if len(peaks_bytes) != 1:
            return False
        free_bytes = self.budget_bytes - peaks_bytes[0]
        return self.verified_twice or free_bytes < self.close_bytes

    def try_size(self, size: int) -> None:
        """Run a trial of a size, and add its result to ``tried``.

        Raises:
            Undecided: If the size failed too often for another reason than memory.
            OutOfTime: If the time is up; its message has the sizes known so far.
        """
        attempt = len(self._attempts_of(size))
        label = self.words(size)
        if attempt:
            label += f", attempt {attempt + 1}"
        outcome = self._run(self.trial_of(size, attempt), label)
        self.tried.append(self._result(size, outcome, label))

    def _attempts_of(self, size: int) -> list[SizeTrial]:
        """Return all trials of a size so far."""
        return [trial for trial in self.tried if trial.micro_batch_size == size]

    def _result(self, size: int, outcome: Outcome, label: str) -> SizeTrial:
        """Return what an outcome shows about a size.

        Raises:
            Undecided: If the size failed for another reason than memory, and repeating
                the trial would not help.
        """
        if isinstance(outcome, Measured):
            peak_bytes = self.peak_bytes_of(size, outcome)
            return SizeTrial(micro_batch_size=size, fits=True, peak_bytes=peak_bytes)
        if isinstance(outcome, OutOfMemory):
            return SizeTrial(micro_batch_size=size, fits=False)
        self.reject_failure(size, outcome)
        can_repeat = isinstance(outcome, Crashed | Contaminated)
        earlier_failures = [
            trial for trial in self._attempts_of(size) if trial.fits is None
        ]
        if not can_repeat or 1 + len(earlier_failures) >= MAX_FAILURES:
            # Nothing was measured, so this raises the error of such an outcome.
            self.runner.require_measured(f"the trial {label!r}", outcome)
        return SizeTrial(micro_batch_size=size, fits=None)

    def _run(self, trial: Trial, label: str) -> Outcome:
        """Run a trial.

        Raises:
            OutOfTime: If the time is up; its message has the sizes known so far.
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
