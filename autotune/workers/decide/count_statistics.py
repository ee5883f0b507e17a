"""Throughput by the number of DataLoader workers, from repeated windows. Pure.

Counts are compared within rounds, so that drift between rounds cancels. If a ratio has
few rounds, its bounds rest on the residuals of all counts, which share the same noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.window_statistics import (
    estimate_windows,
    scaled_residuals,
    trimmed_mean,
)

FIRST_ROUNDS = 3
"""Rounds of a new count before it is judged: the fewest that show a spread."""
OWN_RESIDUALS = 12
"""Number of rounds from which on the bounds of a ratio use its own residuals only."""

Count = int | None
"""DataLoader workers of a rank; None for cached batches."""


class CountWindow(NamedTuple):
    """Figures of one window with one count."""

    units_per_s: float
    """Rate by which counts are compared."""
    data_wait_share: float
    """Share of the window in which the GPU waited for data."""


Round = Mapping[Count, CountWindow]
"""Windows, by count, that were measured one after the other."""


class CountStatistics:
    """Ratios of throughput between counts, and their waits for data.

    Every count that is passed to a method must have been measured.

    Args:
        rounds: Rounds in the order in which they were measured.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._log_rates: dict[Count, dict[int, float]] = {}
        """Logarithm of tokens/s, by count and number of the round."""
        self._wait_shares: dict[int, list[float]] = {}
        """Share of each window in which GPUs waited for data, by count."""
        for number, windows in enumerate(rounds):
            for count, figures in windows.items():
                log_rates = self._log_rates.setdefault(count, {})
                log_rates[number] = math.log(figures.units_per_s)
                if count is not None:
                    wait_shares = self._wait_shares.setdefault(count, [])
                    wait_shares.append(figures.data_wait_share)
        self.counts = sorted(count for count in self._log_rates if count is not None)
        """Measured counts, in ascending order."""
        self._intervals: dict[tuple[int, Count], Interval] = {}
        """Cache of ``interval``, by count and reference."""

    def common_rounds(self, count: int, reference: Count) -> int:
        """Return the number of rounds with both counts."""
        return len(self._numbers_of_common_rounds(count, reference))

    def has_few_rounds(self, count: int) -> bool:
        """Return True if a count shares too few rounds with cached batches."""
        return self.common_rounds(count, None) < FIRST_ROUNDS

    def _numbers_of_common_rounds(self, count: int, reference: Count) -> list[int]:
        """Return the numbers of the rounds with both counts, in ascending order."""
        reference_log_rates = self._log_rates.get(reference, {})
        return [
            number for number in self._log_rates[count] if number in reference_log_rates
        ]

    def ratio(self, count: int, reference: Count) -> float:
        """Return the ratio of a count's throughput to that of a reference.

        Returns:
            The ratio; NaN without a common round.
        """
        log_ratios = self._log_ratios(count, reference)
        return math.exp(trimmed_mean(log_ratios)) if log_ratios else math.nan

    def interval(self, count: int, reference: Count) -> Interval:
        """Return the ratio of a count's throughput to that of a reference, with bounds.

        Args:
            count: A measured count.
            reference: Another measured count; None for cached batches.

        Returns:
            The ratio; without bounds if the rounds are too few for them.
        """
        log_ratios = self._log_ratios(count, reference)
        if not log_ratios:
            # Without a common round, only the ratios of both to cached batches are
            # known.
            ratio = self.ratio(count, None)
            if reference is not None:
                ratio /= self.ratio(reference, None)
            return Interval(value=ratio)
        key = (count, reference)
        if key not in self._intervals:
            self._intervals[key] = self._bounded_ratio(log_ratios, reference)
        return self._intervals[key]

    def upper_bound(self, count: int, reference: int) -> float:
        """Return the upper bound of the ratio of a count's throughput to another's.

        If the counts share few rounds, both are compared with cached batches.

        Returns:
            The bound; infinity if the rounds are too few for one.
        """
        if self.common_rounds(count, reference) >= FIRST_ROUNDS:
            high = self.interval(count, reference).high
            return math.inf if high is None else high
        high_to_cached = self.interval(count, None).high
        if high_to_cached is None:
            return math.inf
        return high_to_cached / self.ratio(reference, None)

    def log_ratios_to_larger(self, count: int) -> list[float]:
        """Return the log ratio to the mean of larger counts, for each round with any.

        The mean makes a single comparison, which avoids selection bias. It does not
        exceed the best of the larger counts, so a count below it is below the best.
        """
        log_ratios = []
        for number, log_rate in self._log_rates[count].items():
            larger = [
                self._log_rates[other][number]
                for other in self.counts
                if other > count and number in self._log_rates[other]
            ]
            if larger:
                log_ratios.append(log_rate - sum(larger) / len(larger))
        return log_ratios

    def interval_to_larger(self, count: int) -> Interval:
        """Return the ratio to the mean of larger counts of the same rounds.

        A round with a larger count is required.
        """
        # Few rounds borrow the residuals of ratios to cached batches.
        return self._bounded_ratio(self.log_ratios_to_larger(count), None)

    def _log_ratios(self, count: int, reference: Count) -> list[float]:
        """Return the log ratio of throughput in each common round."""
        return [
            self._log_rates[count][number] - self._log_rates[reference][number]
            for number in self._numbers_of_common_rounds(count, reference)
        ]

    def _bounded_ratio(self, log_ratios: Sequence[float], reference: Count) -> Interval:
        """Return a ratio with its bounds.

        Args:
            log_ratios: Logarithm of the ratio in each round, at least one.
            reference: Count that the residuals of all counts are relative to, if the
                rounds are too few to use their own.
        """
        residuals = None
        if len(log_ratios) < OWN_RESIDUALS:
            residuals = self._residuals_of_all_counts(reference)
        estimate = estimate_windows(log_ratios, scale="linear", residuals=residuals)
        # The values are logarithms already, so the mean was taken on the linear scale;
        # as a ratio it is on the log scale.
        ratio = replace(estimate, value=math.exp(estimate.value), scale="log")
        return ratio.interval_of_comparison()

    def _residuals_of_all_counts(self, reference: Count) -> list[float]:
        """Return residuals of all counts, each about the trimmed mean of its ratios."""
        residuals: list[float] = []
        for count in self.counts:
            # A count has no residuals relative to itself.
            if count == reference:
                continue
            log_ratios = self._log_ratios(count, reference)
            if len(log_ratios) >= FIRST_ROUNDS:
                residuals += scaled_residuals(log_ratios)
        return residuals

    def number_of_windows(self, count: int) -> int:
        """Return the number of windows with a count, each of which has its wait."""
        return len(self._wait_shares[count])

    def longest_wait_share(self, count: int) -> float:
        """Return the upper bound of the share of time that a count waits for data.

        Returns:
            The bound; the share itself if its windows are too few for one.
        """
        estimate = estimate_windows(self._wait_shares[count], scale="linear")
        interval = estimate.interval(CONFIDENCE)
        return interval.value if interval.high is None else interval.high
