"""Windows of training with the chosen split of the global batch and its rivals.

Each window is a separate process, which trains on the dataset with the profile's
DataLoader workers.
"""

from dataclasses import dataclass, field

from autotune.base.estimates import Estimate
from autotune.base.units import format_count
from autotune.base.window_statistics import MIN_WINDOWS
from autotune.confirm.decide import (
    fastest_split,
    is_precise,
    micro_batches_of_window,
    promise,
)
from autotune.errors import OutOfTime
from autotune.evidence.confirm import SplitRates
from autotune.evidence.probe import ProbeEvidence
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import training_trial
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured, Outcome, describe
from autotune.trials.rounds import Rounds
from autotune.workers.windows import SubjectWindows

MIN_STEPS = 2
"""Fewest optimizer steps of a window."""


@dataclass(slots=True, kw_only=True)
class SplitRunner:
    """Measurement of splits in rounds, until the promised rate is precise."""

    training: SubjectWindows[MlmSubject]
    """Request for windows of the profile's training."""
    probe: ProbeEvidence
    """Evidence of the profile's probe."""
    sizes: list[int]
    """Micro-batch sizes to measure, the chosen one first."""
    windows: Rounds
    """Measurement of the windows, with their time."""
    max_rounds: int
    """Most rounds of windows."""
    rates_by_size: dict[int, list[float]] = field(default_factory=dict)
    """Non-padding tokens/s of every round, by micro-batch size."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reason for the failure of each rival that failed. Later rounds leave it out."""

    def run(self) -> int:
        """Measure rounds, and return the micro-batch size to use.

        Raises:
            Undecided: If a window of the chosen split failed.
            OutOfTime: If there is no time for three rounds.
        """
        self.rates_by_size = {size: [] for size in self.sizes}
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
                gradient_accumulation_steps=self._accumulation_steps(size),
                micro_batches_measured=self._micro_batches(size),
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
        chosen_size = self.sizes[0]
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
        has_time = self.windows.runner.seconds < self.training.request.budget_s
        return has_time and not is_precise(self.promised(self._fastest_size()))

    def _measure_round(self, number: int) -> None:
        """Measure a window of each split; a rival that fails drops out."""
        sizes = [size for size in self.sizes if size not in self.failures]
        names = [f"micro-batch {size}" for size in sizes]
        trials = {}
        for size, name in zip(sizes, names, strict=True):
            config = self.training.subject.config.model_copy(
                update={"micro_batch_size": size}
            )
            trial = training_trial(
                self.training,
                config,
                number,
                names,
                min_steps=MIN_STEPS,
                most_micro_batches=self._micro_batches(size),
            )
            trials[size] = (trial, f"{name}, round {number + 1}")
        outcomes = self.windows.measure_round(number, trials, self._check_chosen)
        for size, outcome in outcomes.items():
            if isinstance(outcome, Measured):
                figures = WindowFigures.of(outcome)
                self.rates_by_size[size].append(self._rate(size, figures))
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
        if size == self.sizes[0]:
            self.windows.runner.require_measured(
                f"a window with micro-batch {format_count(size)}", outcome
            )

    def _accumulation_steps(self, size: int) -> int:
        """Return the micro-batches of each rank in a step of training."""
        ranks = self.training.limits.local_ranks
        global_batch_size = max(self.training.subject.config.global_batch_size, ranks)
        split = split_global_batch(global_batch_size, size, ranks)
        return split.gradient_accumulation_steps

    def _micro_batches(self, size: int) -> int:
        """Return the micro-batches of each rank in a step of a window."""
        return micro_batches_of_window(
            self._accumulation_steps(size), size, self.probe.curve
        )

    def _rate(self, size: int, figures: WindowFigures) -> float:
        """Return the non-padding tokens/s of training that a window shows.

        A step of training may have empty sequences, which a window has not. Its tokens
        are those of average sequences, so that the samples of a window add no noise.
        """
        config = self.training.subject.config
        ranks = self.training.limits.local_ranks
        sequences = self._accumulation_steps(size) * size * ranks
        non_empty_share = config.global_batch_size / sequences
        non_padding_share = self.probe.tokens_per_sequence / config.seq_length_tokens
        return figures.padded_units_per_s * non_empty_share * non_padding_share
