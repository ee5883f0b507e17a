"""Windows of training with the chosen micro-batch and its rivals.

Each window is a separate process, which trains with the loader and the DataLoader
workers of the profile.
"""

from dataclasses import dataclass, field

from autotune.base.estimates import Estimate
from autotune.base.units import format_count
from autotune.base.window_statistics import MIN_WINDOWS
from autotune.confirm.decide import fastest_split, is_precise, promise
from autotune.confirm.training import ConfirmedTraining
from autotune.errors import OutOfTime
from autotune.evidence.confirm import TOKENS, SplitRates
from autotune.subjects.decide import window_failure
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured, Outcome, describe
from autotune.trials.rounds import Rounds


@dataclass(slots=True, kw_only=True)
class SplitRunner:
    """Measurement of splits in rounds, until the promised rate is precise."""

    training: ConfirmedTraining
    """The profile's training."""
    windows: Rounds
    """Measurement of the windows, with their time."""
    budget_s: float
    """Time of all windows, after three rounds."""
    max_rounds: int
    """Most rounds of windows."""
    rates_by_size: dict[int, list[float]] = field(default_factory=dict)
    """Units/s of every round, by micro-batch size."""
    micro_batches_by_size: dict[int, int] = field(default_factory=dict)
    """Micro-batches of each rank in a step of a window, by micro-batch size."""
    unit: str = TOKENS
    """Unit of the rates, as windows count it."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reason for the failure of each rival that failed. Later rounds leave it out."""

    def run(self) -> int:
        """Measure rounds, and return the micro-batch size to use.

        Raises:
            Undecided: If a window of the chosen split failed.
            OutOfTime: If there is no time for three rounds.
        """
        self.rates_by_size = {size: [] for size in self.training.sizes}
        rounds = 0
        try:
            while self._needs_another_round(rounds):
                self._measure_round(rounds)
                rounds += 1
        except OutOfTime:
            if rounds < MIN_WINDOWS:
                raise
        return self._fastest_size()

    def rows(self, used_size: int) -> list[SplitRates]:
        """Return the splits that were measured, the used one first."""
        sizes = sorted(self._measured_rates(), key=lambda size: size != used_size)
        return [
            SplitRates(
                micro_batch_size=size,
                gradient_accumulation_steps=(
                    self.training.accumulation_steps(size)
                    or self.micro_batches_by_size[size]
                ),
                micro_batches_measured=self.micro_batches_by_size[size],
                tokens_per_s=self.rates_by_size[size],
            )
            for size in sizes
        ]

    def promised(self, used_size: int) -> Estimate:
        """Return the rate to expect of a training with this micro-batch size."""
        return promise(self._measured_rates(), used_size)

    def _measured_rates(self) -> dict[int, list[float]]:
        return {size: rates for size, rates in self.rates_by_size.items() if rates}

    def _fastest_size(self) -> int:
        chosen_size = self.training.sizes[0]
        complete = {
            size: rates
            for size, rates in self._measured_rates().items()
            if len(rates) >= MIN_WINDOWS
        }
        return fastest_split(complete, chosen_size)

    def _needs_another_round(self, rounds: int) -> bool:
        """Return True until the promise is precise, or rounds or time are used up."""
        if rounds < MIN_WINDOWS:
            return True
        if rounds >= self.max_rounds:
            return False
        has_time = self.windows.runner.seconds < self.budget_s
        return has_time and not is_precise(self.promised(self._fastest_size()))

    def _measure_round(self, number: int) -> None:
        """Measure a window of each split; a rival that fails drops out."""
        sizes = [size for size in self.training.sizes if size not in self.failures]
        names = [f"{self.training.size_name} {size}" for size in sizes]
        trials = {}
        for size, name in zip(sizes, names, strict=True):
            trial = self.training.window(size, number, names)
            trials[size] = (trial, f"{name}, round {number + 1}")
        outcomes = self.windows.measure_round(number, trials, self._check_chosen)
        for size, outcome in outcomes.items():
            if isinstance(outcome, Measured):
                figures = WindowFigures.of(outcome)
                self.rates_by_size[size].append(self.training.rate(size, figures))
                self.micro_batches_by_size[size] = figures.gradient_accumulation_steps
                self.unit = figures.unit
            else:
                self.failures[size] = describe(outcome)

    def _check_chosen(self, size: int, outcome: Outcome, seconds: float) -> None:
        """Check that a window of the chosen split has figures.

        Args:
            size: Micro-batch size of the window.
            outcome: Outcome of the window.
            seconds: Time of the window, which ``Rounds`` passes. It is ignored.

        Raises:
            Undecided: If a window of the chosen split failed.
        """
        if size != self.training.sizes[0]:
            return
        functions = list(self.training.windows.subject.code().values())
        label = f"a window with {self.training.size_name} {format_count(size)}"
        failure = window_failure(functions, label, outcome)
        if failure is not None:
            raise failure
        self.windows.runner.require_measured(label, outcome)
