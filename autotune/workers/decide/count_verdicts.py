"""Verdicts on numbers of DataLoader workers: refuted, verified or open. Pure.

A count is sufficient if it has at least 98 % of the best count's throughput. The first
of these rules that applies gives the verdict:

- A count is ``refuted`` if the upper bound of its throughput, as a ratio to that of
  larger counts, is below 98 %; smaller counts are then refuted too.
- It is ``verified`` if one of three conditions holds:

  - The lower bound of its throughput, as a ratio to cached batches, is at least 98 %.
  - It waits for data in at most 2 % of the time.
  - The largest allowed count was measured, and by its bounds the count has at least
    98 % of the throughput of every larger measured count.

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
"""A count is hopeless if the upper bound of its throughput is below this share of the
lower bound of the chosen count's throughput."""

Verdict = Literal["verified", "refuted", "open"]


class CountVerdicts:
    """Verdicts on all measured counts.

    Every count that is passed to a method must be one of ``counts``. ``candidate``,
    ``next_smaller`` and ``tried_largest`` require that a count was measured.

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
        # This needs ``largest_refuted``.
        self.reference = self._find_reference()
        """Count to compare others with: the best one, or None (cached batches) while a
        count seems to reach them."""

    def verdict(self, count: int) -> Verdict:
        """Return the verdict on a count."""
        if count <= self.largest_refuted:
            return "refuted"
        if self.keeps_up(count) or self._matches_larger_counts(count):
            return "verified"
        return "open"

    @property
    def candidate(self) -> int:
        """Smallest measured count that seems sufficient; the largest if none does."""
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

    def keeps_up(self, count: int) -> bool:
        """Return True if a count is verified without a comparison with larger ones.

        It then keeps up with the step, as shown by cached batches or its wait for data.
        """
        return self.verifying_bound(count) is not None or self.hardly_waits(count)

    def hardly_waits(self, count: int) -> bool:
        """Return True if a count waits for data in at most 2 % of the time.

        More workers can then save no more than that. The share of time is the upper
        bound of the measured one.
        """
        if self.statistics.number_of_windows(count) < FIRST_ROUNDS:
            return False
        return self.statistics.longest_wait_share(count) <= 1 - ENOUGH_SHARE

    def verifying_bound(self, count: int) -> float | None:
        """Return the lower bound, at least 98 %, of a count's ratio to cached batches.

        Returns:
            None if cached batches do not prove that the count is sufficient.
        """
        statistics = self.statistics
        if statistics.has_few_rounds(count):
            return None
        if statistics.ratio(count, None) < ENOUGH_SHARE:
            # The lower bound is smaller still: its interval need not be computed.
            return None
        low = statistics.interval(count, None).low
        if low is not None and low >= ENOUGH_SHARE:
            return low
        return None

    def _matches_larger_counts(self, count: int) -> bool:
        """Return True if a count has 98 % of the throughput of every larger count.

        Its ratios are taken at their bounds. Before the largest allowed count was
        measured, an untried one may be faster.
        """
        if not self.tried_largest or self.statistics.has_few_rounds(count):
            return False
        rival = self.larger_rival(count)
        if rival is None:
            return True
        rival_to_count = self.statistics.upper_bound(rival, count)
        # The inverse is the count's least ratio to its rival.
        return rival_to_count <= 1 / ENOUGH_SHARE

    def larger_rival(self, count: int) -> int | None:
        """Return the larger measured count that may be the fastest.

        Three are compared: the next larger count, the larger count that seems best, and
        the largest one. The rival is the one whose ratio to ``count`` has the highest
        upper bound.

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

    def refuting_bound(self, count: int) -> float | None:
        """Return the upper bound, below 98 %, of a count's ratio to larger counts.

        Returns:
            None if larger counts do not prove that the count is too few.
        """
        log_ratios = self.statistics.log_ratios_to_larger(count)
        if len(log_ratios) < FIRST_ROUNDS:
            return None
        if trimmed_mean(log_ratios) >= math.log(ENOUGH_SHARE):
            # The upper bound is larger still: its interval need not be computed.
            return None
        high = self.statistics.interval_to_larger(count).high
        if high is not None and high < ENOUGH_SHARE:
            return high
        return None

    def is_hopeless(self, count: int, chosen: int) -> bool:
        """Return True if a count is too far below the chosen one to be sufficient.

        Unlike a refutation, this holds after few rounds: it requires only that both
        ratios to cached batches have bounds.
        """
        high = self.statistics.interval(count, None).high
        low = self.statistics.interval(chosen, None).low
        return high is not None and low is not None and high < HOPELESS_SHARE * low

    def _find_largest_refuted(self) -> int:
        """Return the largest count that is too few; -1 if none is."""
        # Counts below a refuted one are refuted with it, so the first is enough.
        for count in reversed(self.counts):
            if self.refuting_bound(count) is not None:
                return count
        return -1
