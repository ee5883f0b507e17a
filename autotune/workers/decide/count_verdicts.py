"""Verdicts on numbers of DataLoader workers: refuted, verified or open. Pure.

A count is sufficient if it has at least 98 % of the best count's throughput. The first
of these rules that applies gives the verdict:

- A count is ``refuted`` if the upper bound of its throughput, as a ratio to that of
  larger counts, is below 98 %; smaller counts are then refuted too.
- It is ``verified`` if one of three conditions holds:

  - The lower bound of its throughput, as a ratio to cached batches, is at least 98 %.
  - It waits for data in at most 2 % of the time.
  - The largest allowed count was measured, and no larger measured count can be more
    than 1 / 0.98 times as fast.

- It is ``open`` otherwise, as every new count is in its first rounds.
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
"""Share of the lower bound of the chosen count's throughput, below which a count is
ruled out even after few rounds."""

Verdict = Literal["verified", "refuted", "open"]


class CountVerdicts:
    """Verdicts on all measured counts.

    ``largest_refuted``, ``reference`` and ``candidate`` are computed in this order,
    because each needs the former. Verdicts need ``largest_refuted``, and ``candidate``
    needs them.

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
        """Count to compare others with: the best one, or None (cached batches) while a
        count seems to reach them."""

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
        """Return True if a count is verified without a comparison with larger ones.

        It then keeps up with the step, as shown by cached batches or its wait for data.
        """
        low = self.lower_bound(count)
        reaches_cached_batches = low is not None and low >= ENOUGH_SHARE
        return reaches_cached_batches or self.hardly_waits(count)

    def hardly_waits(self, count: int) -> bool:
        """Return True if a count waits for data in at most 2 % of the time.

        More workers can then save no more than that.
        """
        if self.statistics.window_count(count) < FIRST_ROUNDS:
            return False
        return self.statistics.longest_wait_share(count) <= 1 - ENOUGH_SHARE

    def lower_bound(self, count: int) -> float | None:
        """Return the lower bound of a count's ratio to cached batches.

        Returns:
            None if the rounds are too few for a bound, or if the ratio itself is below
            98 %, so that its lower bound cannot verify the count.
        """
        statistics = self.statistics
        if statistics.has_few_rounds(count):
            return None
        if statistics.ratio(count, None) < ENOUGH_SHARE:
            # Avoids the cost of an interval that cannot decide.
            return None
        return statistics.interval(count, None).low

    def _equals_larger_counts(self, count: int) -> bool:
        """Return True if no larger measured count can be faster by more than 2 %.

        Before the largest allowed count was measured, an untried one may be faster.
        """
        if not self.tried_largest or self.statistics.has_few_rounds(count):
            return False
        rival = self.larger_rival(count)
        if rival is None:
            return True
        return self.statistics.upper_bound(rival, count) <= 1 / ENOUGH_SHARE

    def larger_rival(self, count: int) -> int | None:
        """Return the larger measured count that may be the fastest.

        Of the next larger count, the one that seems best and the largest, it is the one
        whose ratio to ``count`` has the highest upper bound.

        Returns:
            None if no larger count was measured.
        """
        larger = [other for other in self.counts if other > count]
        if not larger:
            return None
        best = max(larger, key=lambda other: self.statistics.ratio(other, None))
        return max(
            (larger[0], best, larger[-1]),
            key=lambda other: self.statistics.upper_bound(other, count),
        )

    # Counts that seem sufficient, by ratios without bounds.

    def _seems_sufficient(self, count: int) -> bool:
        """Return True if a count is verified or has 98 % of the reference's throughput.

        The ratio is taken without its bounds, so that noise may mislead it.
        """
        statistics = self.statistics
        reference = self.reference
        if count == reference or self.verdict(count) == "verified":
            return True
        if reference is None:
            return statistics.ratio(count, None) >= ENOUGH_SHARE
        if statistics.common_rounds(count, reference) < FIRST_ROUNDS:
            # They share too few rounds for a direct ratio, so both are compared with
            # cached batches.
            ratio_via_cached = statistics.ratio(count, None)
            ratio_via_cached /= statistics.ratio(reference, None)
            return ratio_via_cached >= ENOUGH_SHARE
        return statistics.ratio(count, reference) >= ENOUGH_SHARE

    def _find_reference(self) -> Count:
        """Return the count to compare others with.

        Returns:
            The count that seems best. None, for cached batches, if that count seems to
            reach them, or if no count was measured yet.
        """
        not_refuted = [count for count in self.counts if count > self.largest_refuted]
        if not not_refuted:
            # No count was measured yet. The largest measured count is never refuted,
            # because only larger counts can refute it.
            return None
        best = max(not_refuted, key=lambda count: self.statistics.ratio(count, None))
        if self.statistics.ratio(best, None) >= ENOUGH_SHARE:
            return None
        return best

    # Counts that are too few.

    def refuting_bound(self, count: int) -> float | None:
        """Return the upper bound, below 98 %, of a count's ratio to larger counts.

        Returns:
            None if larger counts do not prove that the count is too few.
        """
        log_ratios = self.statistics.log_ratios_to_larger(count)
        if len(log_ratios) < FIRST_ROUNDS:
            return None
        if trimmed_mean(log_ratios) >= math.log(ENOUGH_SHARE):
            # Avoids the cost of an interval that cannot decide.
            return None
        high = self.statistics.interval_to_larger(count).high
        if high is not None and high < ENOUGH_SHARE:
            return high
        return None

    def is_hopeless(self, count: int, chosen: int) -> bool:
        """Return True if a count is far slower than the chosen one.

        It may not be refuted yet, because its rounds are still few.
        """
        high = self.statistics.interval(count, None).high
        low = self.statistics.interval(chosen, None).low
        return high is not None and low is not None and high < HOPELESS_SHARE * low

    def _find_largest_refuted(self) -> int:
        """Return the largest count that is too few; -1 if none is."""
        # Smaller counts than a refuted one are refuted with it, so the first is enough.
        for count in reversed(self.counts):
            if self.refuting_bound(count) is not None:
                return count
        return -1
