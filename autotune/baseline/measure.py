"""Compare tuned settings with baselines, in interleaved windows of training.

A window of the bundled trainer has at most four micro-batches per optimizer step. So a
recipe with small micro-batches has more optimizer steps and gradient synchronisations
per token in a window than in training.

Rates of the bundled trainer are in non-padding tokens: all tokens of a window times the
dataset's average share of non-padding tokens, so that the samples of a short window add
no noise. If that average is not known, the non-padding units of the window itself
count.
"""

import statistics
from dataclasses import dataclass, field, replace

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.units import format_bytes
from autotune.base.window_statistics import MIN_WINDOWS, estimate_windows, paired_ratio
from autotune.baseline.contender import Contender
from autotune.baseline.decide.common_unit import common_unit
from autotune.baseline.decide.precision import is_precise
from autotune.errors import BadInput, OutOfTime
from autotune.evidence.baseline import TUNED, BaselineEvidence, BaselineRow
from autotune.subjects.decide import error_line, window_failure
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import (
    Crashed,
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    describe,
)
from autotune.trials.rounds import Rounds
from autotune.trials.sweep_request import SweepRequest

RoundFigures = dict[str, WindowFigures]
"""Figures of one round's windows, without those of contenders that failed."""


@dataclass(slots=True, kw_only=True)
class BaselineRunner:
    """Measurement of contenders in rounds of windows, until speedups are precise."""

    contenders: dict[str, Contender]
    """Contenders, the tuned settings first. A baseline that does not fit is
    replaced by one of a smaller size."""
    request: SweepRequest
    """Length of the windows, and their time budget."""
    local_ranks: int
    """Ranks of all windows."""
    max_rounds: int
    """Maximum number of rounds."""
    memory_budget_bytes: int | None
    """Memory budget of the profile, under which sizes must fit; None if it has none, so
    that nothing is checked."""
    windows: Rounds
    """Measurement of the windows, with their time."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reason for the failure of each contender that failed. Later rounds leave it
    out."""
    rounds: list[RoundFigures] = field(default_factory=list)
    """Figures of the rounds so far."""

    def run(self) -> BaselineEvidence:
        """Measure the contenders that fit until the speedups are precise.

        Raises:
            Undecided: If the tuned settings fail.
            BadInput: If your code fails with the tuned settings, or the contenders
                count in different units.
            OutOfTime: If there is no time for three rounds.
        """
        for name in self._remaining_baselines():
            self._make_fit(name)
        try:
            while self._needs_another_round():
                self._measure_round()
        except OutOfTime:
            # The runner raises this before a window that would likely end after the
            # deadline. The windows of the begun round are then not used.
            if len(self.rounds) < MIN_WINDOWS:
                raise
        return BaselineEvidence(
            rows=[self._row(name) for name in reversed(self.contenders)],
            unit=self._unit(),
            counted_by_size=any(
                self.contenders[name].counts_by_size(window)
                for name in self.contenders
                for window in self._windows_of(name)[:1]
            ),
            local_ranks=self.local_ranks,
            window_s=self.request.window_s,
            windows=sum(len(figures) for figures in self.rounds),
            seconds=round(self.windows.runner.seconds, 3),
        )

    def _remaining(self) -> list[str]:
        """Return the contenders that have not failed."""
        return [name for name in self.contenders if name not in self.failures]

    def _remaining_baselines(self) -> list[str]:
        """Return the contenders that have not failed, except for the tuned one."""
        return [name for name in self._remaining() if name != TUNED]

    def _needs_another_round(self) -> bool:
        """Return True until the speedups are precise, or rounds or time are used up."""
        rounds = len(self.rounds)
        if rounds == 0:
            # The tuned settings are measured even if no baseline fits.
            return True
        if rounds >= self.max_rounds or not self._remaining_baselines():
            return False
        if rounds < MIN_WINDOWS:
            return True
        has_time = self.windows.runner.seconds < self.request.budget_s
        return has_time and not self._is_precise()

    def _is_precise(self) -> bool:
        """Return True if all speedups are precise and all rates have bounds."""
        speedups_are_precise = all(
            is_precise(self._speedup(name)) for name in self._remaining_baselines()
        )
        rates_have_bounds = all(
            estimate_windows(self._rates(name)).interval().low is not None
            for name in self._remaining()
        )
        return speedups_are_precise and rates_have_bounds

    def _make_fit(self, name: str) -> None:
        """Halve a baseline's size until it fits the memory budget of the profile.

        If not even one fits, or if the check itself fails, the reason is recorded in
        ``failures``.
        """
        while True:
            contender = self.contenders[name]
            baseline = contender.baseline
            size, budget_bytes = baseline.size, self.memory_budget_bytes
            if baseline.fit_choice is None or size is None or budget_bytes is None:
                return
            noun = baseline.subject.size.name.replace("_size", "").replace("_", "-")
            try:
                outcome = self.windows.measure_window(
                    contender.fit_trial(budget_bytes),
                    f"{name}: check that {noun} {size} fits",
                )
            except BadInput as error:
                self.failures[name] = error.message
                return
            if isinstance(outcome, Measured):
                return
            if not isinstance(outcome, OutOfMemory | HostOutOfMemory):
                self.failures[name] = f"{_why(outcome)} with {noun} {size}"
                return
            if size == 1:
                one = baseline.subject.size.noun or noun
                self.failures[name] = f"{describe(outcome)} even with one {one}"
                return
            reason = f"{size} does not fit {format_bytes(budget_bytes)}"
            self.contenders[name] = replace(
                contender, baseline=baseline.with_size(size // 2, reason)
            )

    def _measure_round(self) -> None:
        """Measure a window of each remaining contender; those that fail drop out."""
        number = len(self.rounds)
        names = self._remaining()
        trials = {
            name: (
                self.contenders[name].trial(number, names),
                f"{name}, round {number + 1}",
            )
            for name in names
        }
        outcomes = self.windows.measure_round(
            number, trials, self._check_tuned, self._reject
        )
        figures: RoundFigures = {}
        for name, outcome in outcomes.items():
            if isinstance(outcome, Measured):
                figures[name] = WindowFigures.of(outcome)
            else:
                self.failures[name] = f"{_why(outcome)} in round {number + 1}"
        self.rounds.append(figures)
        # Before further rounds, as different units cannot be compared.
        self._unit()

    def _check_tuned(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Check that a window has figures if it is one of the tuned settings.

        Args:
            name: Contender of the window.
            outcome: Outcome of the window.
            seconds: Time of the window, which ``Rounds`` passes. It is ignored.

        Raises:
            AutotuneError: If your code failed, as ``window_failure`` says.
            Undecided: If a window of the tuned settings failed for another reason.
        """
        if name != TUNED:
            return
        functions = self.contenders[name].baseline.subject.code().values()
        label = self.windows.runner.finished[-1].label
        failure = window_failure(tuple(functions), label, outcome)
        if failure is not None:
            raise failure
        self.windows.runner.require_measured("a window of the tuned settings", outcome)

    def _reject(self, name: str, error: BadInput) -> None:
        """Record that a baseline cannot be measured; raise the error of tuned ones."""
        if name == TUNED:
            raise error
        self.failures[name] = error.message

    def _unit(self) -> str:
        """Return the unit in which all contenders that ran are compared.

        Raises:
            BadInput: If they have none in common.
        """
        first_windows: dict[str, WindowFigures] = {}
        for figures in reversed(self.rounds):
            first_windows |= figures
        return common_unit(
            {
                name: self.contenders[name].rates(first_windows[name])
                for name in self.contenders
                if name in first_windows
            }
        )

    def _windows_of(self, name: str) -> list[WindowFigures]:
        """Return the figures of a contender's windows so far."""
        return [figures[name] for figures in self.rounds if name in figures]

    def _rates(self, name: str) -> list[float]:
        """Return the units/s of a contender's windows."""
        unit = self._unit()
        windows = self._windows_of(name)
        return [self.contenders[name].rates(window)[unit] for window in windows]

    def _speedup(self, name: str) -> Interval:
        """Return the tuned settings' speedup over a contender that was measured."""
        unit = self._unit()
        # Windows of the same round only, as the machine may change between rounds.
        pairs = [
            (
                self.contenders[TUNED].rates(figures[TUNED])[unit],
                self.contenders[name].rates(figures[name])[unit],
            )
            for figures in self.rounds
            if name in figures
        ]
        return paired_ratio(pairs, confidence=SHOWN_CONFIDENCE)

    def _row(self, name: str) -> BaselineRow:
        """Return a contender's row of the evidence."""
        baseline = self.contenders[name].baseline
        subject = f"{baseline.subject.kind}: {baseline.subject.words}"
        windows = self._windows_of(name)
        if not windows:
            return BaselineRow(
                name=name,
                subject=subject,
                differences=list(baseline.differences),
                units_per_s=[],
                outcome=self.failures[name],
            )
        speedup = self._speedup(name)
        if name == TUNED:
            # The tuned settings have no noise against themselves.
            speedup = Interval(value=speedup.value)
        return BaselineRow(
            name=name,
            subject=subject,
            differences=list(baseline.differences),
            units_per_s=self._rates(name),
            speedup=speedup.value,
            speedup_low=speedup.low,
            speedup_high=speedup.high,
            data_wait_share=statistics.median(
                window.data_wait_share for window in windows
            ),
            outcome=self.failures.get(name, "ran"),
        )


def _why(outcome: Outcome) -> str:
    """Return an outcome in words; of a crash, with its exception."""
    if isinstance(outcome, Crashed) and outcome.detail.strip():
        return f"{describe(outcome)} ({error_line(outcome.detail)})"
    return describe(outcome)
