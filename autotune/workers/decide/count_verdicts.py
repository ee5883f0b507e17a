"""Verdicts on numbers of DataLoader workers: sufficient, too few or open. Pure.

A count is sufficient if it has 98 % of the best count's throughput. It is ``verified``
if the lower bound of its ratio reaches that share (of cached batches, the upper bound;
or of the best other count, once the largest was tried), or if it hardly waits for data.
It is ``refuted``, together with smaller ones, if the upper bound of its ratio to larger
counts is below.
"""

import math
from typing import Literal

from autotune.base.window_statistics import trimmed_mean
from autotune.workers.decide.count_statistics import (
    FIRST_ROUNDS,
    Count,
    CountStatistics,
)

ENOUGH_SHARE = 0.98
"""Share of the best throughput that counts as sufficient."""
HOPELESS_SHARE = 0.8
"""Share of the chosen count's throughput below which a count is ruled out, even after
few rounds."""

Verdict = Literal["verified", "refuted", "open"]


class CountVerdicts:
    """Verdicts on all measured counts.

    Args:
        statistics: Throughput of the counts.
        max_count: Largest number of workers allowed.
    """

    def __init__(self, statistics: CountStatistics, max_count: int) -> None:
        self.statistics = statistics
        self.counts = statistics.counts
        """Measured counts, in ascending order."""
        self._max_count = max_count
        self.largest_refuted = self._find_largest_refuted()
        """Largest count that is too few; -1 if none is."""
        self.reference = self._find_reference()
        """Count to compare others with: None (cached batches) while a count seems to
        reach them; else the best one."""

    def verdict(self, count: int) -> Verdict:
        """Return the verdict on a measured count."""
        if count <= self.largest_refuted:
            return "refuted"
        if self.keeps_up(count) or self._equals_larger_counts(count):
            return "verified"
        return "open"

    @property
    def candidate(self) -> int:
        """Smallest measured count that seems sufficient."""
        for count in self.counts:
            if count > self.largest_refuted and self._seems_sufficient(count):
                return count
        return self.counts[-1]

    @property
    def next_smaller(self) -> int | None:
        """Largest measured count below the candidate; None if there is none."""
        candidate = self.candidate
        smaller = (count for count in self.counts if count < candidate)
        return max(smaller, default=None)

    @property
    def tried_largest(self) -> bool:
        """True if the largest number of workers allowed was measured."""
        return self.counts[-1] == self._max_count

    # Verified counts.

    def keeps_up(self, count: int) -> bool:
        """Return True if a count keeps up with the step."""
        return self.lower_bound(count) >= ENOUGH_SHARE or self.hardly_waits(count)

    def hardly_waits(self, count: int) -> bool:
        """Return True if a count waits so little that more workers gain at most 2 %."""
        if self.statistics.window_count(count) < FIRST_ROUNDS:
            return False
        return self.statistics.longest_wait_share(count) <= 1 - ENOUGH_SHARE

    def lower_bound(self, count: int) -> float:
        """Return the lower bound of a count's ratio to cached batches; 0 if unknown."""
        statistics = self.statistics
        if statistics.has_few_rounds(count):
            return 0.0
        if statistics.ratio(count, None) < ENOUGH_SHARE:
            # Avoids the cost of an interval that cannot decide.
            return 0.0
        return statistics.interval(count, None).low or 0.0

    def _equals_larger_counts(self, count: int) -> bool:
        """Return True if no larger count, of all allowed, is faster by enough."""
        if not self.tried_largest or self.statistics.has_few_rounds(count):
            return False
        rival = self.larger_rival(count)
        if rival is None:
            return True
        return self.statistics.upper_bound(rival, count) <= 1 / ENOUGH_SHARE

    def larger_rival(self, count: int) -> Count:
        """Return the larger count that may be the fastest; None if none is larger.

        It is the next, the largest, or the one that seems best.
        """
        larger = [other for other in self.counts if other > count]
        if not larger:
            return None
        best = max(larger, key=lambda other: self.statistics.ratio(other, None))
        return max(
            (larger[0], best, larger[-1]),
            key=lambda other: self.statistics.upper_bound(other, count),
        )

    def _seems_sufficient(self, count: int) -> bool:
        statistics = self.statistics
        best = self.reference
        if count == best or self.verdict(count) == "verified":
            return True
        if best is None:
            return statistics.ratio(count, None) >= ENOUGH_SHARE
        if statistics.common_rounds(count, best) < FIRST_ROUNDS:
            by_cached = statistics.ratio(count, None) / statistics.ratio(best, None)
            return by_cached >= ENOUGH_SHARE
        return statistics.ratio(count, best) >= ENOUGH_SHARE

    def _find_reference(self) -> Count:
        """Return the count to compare others with."""
        not_refuted = [count for count in self.counts if count > self.largest_refuted]
        if not not_refuted:
            return None
        best = max(not_refuted, key=lambda count: self.statistics.ratio(count, None))
        return None if self.statistics.ratio(best, None) >= ENOUGH_SHARE else best

    # Counts that are too few.

    def is_refuted(self, count: int) -> bool:
        """Return True if larger counts prove that a count is too few."""
        log_ratios = self.statistics.log_ratios_to_larger(count)
        if len(log_ratios) < FIRST_ROUNDS:
            return False
        if trimmed_mean(log_ratios) >= math.log(ENOUGH_SHARE):
            return False
        high = self.statistics.interval_to_larger(count).high
        return high is not None and high < ENOUGH_SHARE

    def is_hopeless(self, count: int, chosen: int) -> bool:
        """Return True if a count is far below the chosen one.

        It may have too few rounds to be refuted.
        """
        high = self.statistics.interval(count, None).high
        low = self.statistics.interval(chosen, None).low
        return high is not None and low is not None and high < HOPELESS_SHARE * low

    def _find_largest_refuted(self) -> int:
        # Smaller counts than a refuted one are refuted with it.
        for count in reversed(self.counts):
            if self.is_refuted(count):
                return count
        return -1
