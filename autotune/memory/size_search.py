"""Search for the largest size of a step that fits, by trials: the largest that ran and the next that ran out of memory.

A subclass sets the limits of the step, makes the trial of a size, and reads its
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
from autotune.trials.runner import TrialRunner
from autotune.trials.values import (
    Contaminated,
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    Trial,
)

CLOSE_BYTES = 2**20
"""Usual difference between processes that run the same size."""


@dataclass(slots=True, kw_only=True)
class SizeSearch(abc.ABC):
    """State of a running search."""

    runner: TrialRunner
    name: str = field(init=False)
    """Name of the step, for progress."""
    budget_bytes: int = field(init=False)
    """Memory that a step may use."""
    max_size: int = field(init=False)
    """Largest size to try."""
    on_gpu: bool = field(init=False)
    """True if the caching allocator of a GPU rounds peaks."""
    tried: list[SizeTrial] = field(default_factory=list)
    prediction: Prediction | None = None
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

    def failed(self, size: int, outcome: Outcome) -> None:
        """Raise an error for a failure that is not to be tried again.

        By default none is raised.
        """
        del size, outcome

    def find(self) -> None:
        """Try sizes until the largest is verified on both sides."""
        budget = self.budget_bytes
        while True:
            size = next_size(
                self.tried,
                budget,
                self.max_size,
                self.prediction,
                PAGE_BYTES if self.on_gpu else 0,
            )
            if size is None:
                size = bracket(self.tried).feasible_max
                peaks = [
                    one.peak_bytes
                    for one in self.tried
                    if one.micro_batch_size == size and one.fits
                ]
                close = self.verified_twice or (
                    bool(peaks) and budget - (peaks[0] or 0) < self.close_bytes
                )
                if len(peaks) != 1 or peaks[0] is None or not close:
                    return
            self.try_size(size)

    def try_size(self, size: int) -> None:
        """Run a trial of a size.

        Raises:
            Undecided: If it failed too often for another reason than memory.
        """
        before = [one.fits for one in self.tried if one.micro_batch_size == size]
        label = self.words(size) + (f", attempt {len(before) + 1}" if before else "")
        try:
            outcome = self.runner.run(
                self.trial_of(size, len(before)), f"{self.name}: {label}"
            )
        except OutOfTime as error:
            found = bracket(self.tried)
            known = (
                f"{self.words(found.feasible_max)} fit"
                if found.feasible_max
                else "no size is verified yet"
            )
            known += (
                ""
                if found.infeasible_min is None
                else f", {found.infeasible_min} do not"
            )
            raise OutOfTime(
                f"{known}; {error.message}", next_step=error.next_step
            ) from error
        if isinstance(outcome, Measured):
            peak = self.peak_bytes_of(size, outcome)
            self.tried.append(
                SizeTrial(micro_batch_size=size, fits=True, peak_bytes=peak)
            )
        elif isinstance(outcome, OutOfMemory):
            self.tried.append(SizeTrial(micro_batch_size=size, fits=False))
        else:
            self.failed(size, outcome)
            if (
                not isinstance(outcome, Crashed | Contaminated)
                or before.count(None) >= MAX_FAILURES - 1
            ):
                self.runner.require_measured(f"the trial {label!r}", outcome)
            self.tried.append(SizeTrial(micro_batch_size=size, fits=None))
