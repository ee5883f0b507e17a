"""Choice of the number of DataLoader workers from repeated windows. Pure.

The choice is the smallest count that ``count_verdicts`` verifies to be sufficient.
Until it is decided, the rule returns the rounds to measure next, in four phases:

1. Climb a ladder of counts.
2. Repeat the two rungs that the answer seems to lie between.
3. Search between them.
4. Repeat the counts that are open.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autotune.base.interval import Interval
from autotune.evidence.workers import VERDICT_WORDS
from autotune.workers.decide.count_reasons import (
    reason_against_next_smaller,
    reason_for,
)
from autotune.workers.decide.count_statistics import (
    FIRST_ROUNDS,
    Count,
    CountStatistics,
    Round,
)
from autotune.workers.decide.count_verdicts import (
    ENOUGH_SHARE,
    CountVerdicts,
    Verdict,
)

STUCK_ROUNDS = 24
"""Rounds with cached batches after which a count that is still open is compared with
larger ones too."""
GROWTH = 0.25
"""Share by which the rounds of an open count grow before the next decision."""


class NextRounds(NamedTuple):
    """Rounds to measure next."""

    counts: tuple[Count, ...]
    """Counts of which each of the rounds has a window; None for cached batches."""
    rounds: int
    """Number of rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersChoice:
    """Chosen number of DataLoader workers, and the counts that noise leaves open."""

    workers: int
    """Chosen number of DataLoader workers of a rank."""
    undecided_between: tuple[int, ...]
    """Fewest and most workers that may be sufficient; empty if it is decided."""
    ratios: Mapping[int, Interval]
    """Ratio of each measured count to the step on cached batches, with bounds of
    ``CONFIDENCE``."""
    verdicts: Mapping[int, Verdict]
    """Verdict on each measured count."""
    keeps_up: bool
    """True if the chosen count keeps up with the step, relative to cached batches or by
    its wait for data."""
    proof: str
    """Reason for the chosen count, or the evidence so far, in words."""
    next_smaller: str | None
    """Result of the next smaller count that was measured, in words; None if there is
    none."""

    @property
    def gap_remains(self) -> bool:
        """True if no number of workers closes the gap to cached batches.

        At 98 % confidence, the fastest number is too slow. The chosen one waits for
        data.
        """
        best = max(self.ratios.values(), key=lambda ratio: ratio.value)
        too_slow = best.high is not None and best.high < ENOUGH_SHARE
        return too_slow and not self.keeps_up

    def verdict_words(self, count: int) -> str:
        """Return the verdict on a count in the words that users read."""
        return VERDICT_WORDS[self.verdicts[count]]


def ladder(max_count: int) -> list[int]:
    """Return the counts 0, 1, 2, 4, … and the largest allowed."""
    powers_of_two = (2**exponent for exponent in range(max_count.bit_length()))
    return sorted({0, max_count, *powers_of_two})


class WorkersRule:
    """Decision rule over the rounds so far.

    Args:
        rounds: Rounds in the order in which they were measured.
        max_count: Largest number of workers allowed.
    """

    def __init__(self, rounds: Sequence[Round], max_count: int) -> None:
        self._max_count = max_count
        self._statistics = CountStatistics(rounds)
        self._verdicts = CountVerdicts(self._statistics, max_count)
        self._counts = self._statistics.counts

    def choose(self) -> WorkersChoice:
        """Return the count to use, decided or not.

        At least one round is required.
        """
        chosen = self._verdicts.candidate
        verdicts = {count: self._verdicts.verdict(count) for count in self._counts}
        return WorkersChoice(
            workers=chosen,
            undecided_between=self._undecided_between(chosen, verdicts),
            ratios={
                count: self._statistics.interval(count, None) for count in self._counts
            },
            verdicts=verdicts,
            keeps_up=self._verdicts.keeps_up(chosen),
            proof=reason_for(self._verdicts, chosen),
            next_smaller=reason_against_next_smaller(self._verdicts),
        )

    def _undecided_between(
        self, chosen: int, verdicts: Mapping[int, Verdict]
    ) -> tuple[int, ...]:
        """Return the fewest and most workers of which one may be the answer.

        The fewest are above all counts that are refuted or hopeless. The most are the
        smallest verified count, or the largest allowed if none is verified.

        Returns:
            An empty tuple if the chosen count is decided.
        """
        is_verified = verdicts[chosen] == "verified"
        largest_refuted = self._verdicts.largest_refuted
        if is_verified and largest_refuted == chosen - 1:
            return ()
        most_workers = self._max_count
        for count in self._counts:
            if count >= chosen and verdicts[count] == "verified":
                most_workers = count
                break
        largest_too_few = largest_refuted
        for count in self._counts:
            if count < chosen and self._verdicts.is_hopeless(count, chosen):
                largest_too_few = max(largest_too_few, count)
        return (largest_too_few + 1, most_workers)

    def next_rounds(self) -> NextRounds | None:
        """Return the next rounds to measure; None if the count is decided."""
        if not self._counts:
            return NextRounds(counts=(None, 0), rounds=1)
        phases = (
            self._climb_ladder,
            self._repeat_new_counts,
            self._search_between_counts,
            self._repeat_open_counts,
        )
        for phase in phases:
            next_rounds = phase()
            if next_rounds is not None:
                return next_rounds
        return None

    def _climb_ladder(self) -> NextRounds | None:
        """Return a round of the next rung; None if the ladder is climbed."""
        rung = self._next_rung()
        if rung is None:
            return None
        return NextRounds(counts=(None, rung), rounds=1)

    def _repeat_new_counts(self) -> NextRounds | None:
        """Return a round of the candidate and the next smaller count if they are new.

        The ladder measures each count once, which is too little to search between two.

        Returns:
            None if both have enough rounds to be judged.
        """
        new_counts = [
            count
            for count in (self._verdicts.next_smaller, self._verdicts.candidate)
            if count is not None and self._statistics.has_few_rounds(count)
        ]
        if not new_counts:
            return None
        return NextRounds(counts=(None, *new_counts), rounds=1)

    def _search_between_counts(self) -> NextRounds | None:
        """Return the first rounds of a count that was not tried, with the candidate.

        Returns:
            None if no count between others needs to be tried.
        """
        candidate = self._verdicts.candidate
        smaller = self._verdicts.next_smaller
        untried = self._untried_peak()
        if untried is None and smaller is not None and smaller < candidate - 1:
            untried = self._count_between(smaller, candidate)
        if untried is None:
            return None
        return NextRounds(counts=(None, untried, candidate), rounds=FIRST_ROUNDS)

    def _repeat_open_counts(self) -> NextRounds | None:
        """Return further rounds of the counts that are open; None if none is."""
        candidate = self._verdicts.candidate
        smaller = self._verdicts.next_smaller
        if smaller is not None and smaller > self._verdicts.largest_refuted:
            return self._further_rounds(candidate, [smaller, candidate])
        if self._verdicts.verdict(candidate) == "open":
            return self._further_rounds(candidate, [candidate])
        return None

    def _next_rung(self) -> int | None:
        """Return the next rung of the ladder to try.

        Returns:
            None if the largest allowed count was tried, or if a count seems to reach
            cached batches and has not remained open for long.
        """
        if self._verdicts.tried_largest:
            return None
        candidate = self._verdicts.candidate
        # A count that cached batches leave open for so long is compared with larger
        # ones, which may decide it.
        is_stuck = (
            self._verdicts.verdict(candidate) == "open"
            and self._statistics.common_rounds(candidate, None) >= STUCK_ROUNDS
        )
        if self._verdicts.reference is None and not is_stuck:
            return None
        rungs = ladder(self._max_count)
        return next(rung for rung in rungs if rung > self._counts[-1])

    def _untried_peak(self) -> int | None:
        """Return a count between the best and a neighbour that may be better.

        Returns:
            None if a count seems to reach cached batches, if the ladder is not climbed
            to its end, or if the counts between were tried.
        """
        best = self._verdicts.reference
        if best is None or not self._verdicts.tried_largest:
            return None
        rungs = ladder(self._max_count)
        index = self._counts.index(best)
        best_with_neighbours = self._counts[max(0, index - 1) : index + 2]
        for low, high in itertools.pairwise(best_with_neighbours):
            if high - low <= 1:
                continue
            # The interval between two rungs is halved once. It is halved again only if
            # the count halfway is the best.
            is_between_rungs = low in rungs and high in rungs
            if is_between_rungs or best not in rungs:
                return (low + high) // 2
        return None

    def _count_between(self, low: int, high: int) -> int:
        """Return a count between two measured ones, to be measured next.

        Between two rungs, it follows from the throughput of the lower rung. Otherwise
        it is halfway.
        """
        rungs = ladder(self._max_count)
        if low in rungs and high in rungs and low >= 1:
            # Suppose that each worker adds as much throughput as those of ``low``.
            needed = math.ceil(ENOUGH_SHARE * low / self._statistics.ratio(low, None))
            return min(max(needed, low + 1), high - 1)
        return (low + high) // 2

    def _further_rounds(self, candidate: int, counts: Sequence[int]) -> NextRounds:
        """Return further rounds of counts, with the count that they are compared with.

        Args:
            candidate: The candidate.
            counts: The candidate, after the next smaller count if that is open.
        """
        reference = self._verdicts.reference
        if reference == candidate:
            # It cannot be compared with itself. If no larger count was measured, the
            # reference is None, which is cached batches.
            reference = self._verdicts.larger_rival(candidate)
        fewest_rounds = min(
            self._statistics.common_rounds(count, reference)
            for count in counts
            if count != reference
        )
        compared = [reference, *counts]
        if self._verdicts.tried_largest:
            # The fastest larger count decides unless cached batches do.
            compared.append(self._verdicts.larger_rival(candidate))
        return NextRounds(
            counts=tuple(dict.fromkeys(compared)),
            rounds=max(1, round(GROWTH * fewest_rounds)),
        )
