"""Throughput by the number of DataLoader workers, from repeated windows. Pure.

Counts are compared within rounds, so that drift between rounds cancels. The bounds of a
ratio from few rounds rest on the residuals of all counts, which share the same noise.
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
"""Rounds of a new count before it is judged."""
OWN_RESIDUALS = 12
"""Fewest log ratios of which an interval uses their own residuals only."""

Count = int | None
"""DataLoader workers of a rank; None for cached batches."""


class WindowFigures(NamedTuple):
    """Figures of one window with one count."""

    tokens_per_s: float
    """Rate by which counts are compared."""
    data_wait_share: float
    """Share of the window in which the GPU waited for data."""


Round = Mapping[Count, WindowFigures]
"""Windows, by count, that were measured one after the other."""


class CountStatistics:
    """Ratios of throughput between counts, and their waits for data.

    Args:
        rounds: Rounds in the order in which they were measured.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._log_rates: dict[Count, dict[int, float]] = {}
        """Logarithm of tokens/s by count and number of the round."""
        self._wait_shares: dict[int, list[float]] = {}
        """Share of each window in which GPUs waited for data, by count."""
        for number, windows in enumerate(rounds):
            for count, figures in windows.items():
                log_rates = self._log_rates.setdefault(count, {})
                log_rates[number] = math.log(figures.tokens_per_s)
                if count is not None:
                    wait_shares = self._wait_shares.setdefault(count, [])
                    wait_shares.append(figures.data_wait_share)
        self.counts = sorted(count for count in self._log_rates if count is not None)
        """Measured counts, in ascending order."""
        self._intervals: dict[tuple[int, Count], Interval] = {}
        """Cache of ``interval``, by count and reference."""

    # Number of rounds.

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

    # Ratios of throughput.

    def ratio(self, count: int, reference: Count) -> float:
        """Return the ratio of two counts' throughput, without bounds.

        Returns:
            NaN without a common round.
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
            self._intervals[key] = self._interval(log_ratios, reference)
        return self._intervals[key]

    def upper_bound(self, other: int, count: int) -> float:
        """Return the upper bound of another count's ratio to this one.

        If the counts share few rounds, both are compared with cached batches.

        Returns:
            Infinity without a bound.
        """
        if self.common_rounds(other, count) >= FIRST_ROUNDS:
            high = self.interval(other, count).high
            return math.inf if high is None else high
        high_to_cached = self.interval(other, None).high
        if high_to_cached is None:
            return math.inf
        return high_to_cached / self.ratio(count, None)

    def log_ratios_to_larger(self, count: int) -> list[float]:
        """Return log ratios to the mean of larger counts of the same rounds.

        A single comparison avoids selection bias. The mean does not exceed the best of
        the larger counts, so a count below the mean is below the best.
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
        """Return the ratio to the mean of larger counts of the same rounds."""
        # The residuals to cached batches stand in for few of its own.
        return self._interval(self.log_ratios_to_larger(count), None)

    def _log_ratios(self, count: int, reference: Count) -> list[float]:
        """Return the log ratio of throughput in each common round."""
        return [
            self._log_rates[count][number] - self._log_rates[reference][number]
            for number in self._numbers_of_common_rounds(count, reference)
        ]

    def _interval(self, log_ratios: Sequence[float], reference: Count) -> Interval:
        """Return the ratio with its bounds, from log ratios within rounds.

        Args:
            log_ratios: Log ratio of each round.
            reference: Count relative to which the residuals of all counts are taken if
                the log ratios are few.
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
        """Return residuals of all counts, each about its own trimmed mean."""
        residuals: list[float] = []
        for count in self.counts:
            # A count has no residuals relative to itself.
            if count == reference:
                continue
            log_ratios = self._log_ratios(count, reference)
            if len(log_ratios) >= FIRST_ROUNDS:
                residuals += scaled_residuals(log_ratios)
        return residuals

    # Waits for data.

    def window_count(self, count: int) -> int:
        """Return the number of windows of which a count's wait for data is known."""
        return len(self._wait_shares[count])

    def longest_wait_share(self, count: int) -> float:
        """Return the upper bound of the share of time that a count waits for data.

        Returns:
            The share itself if its windows are too few for a bound.
        """
        estimate = estimate_windows(self._wait_shares[count], scale="linear")
        interval = estimate.interval(CONFIDENCE)
        return interval.value if interval.high is None else interval.high
