"""Choice of the number of DataLoader workers from repeated windows. Pure.

The rule also names the rounds to measure next, until the choice is decided.

The result is the smallest count verified to have 98 % of the best count's throughput. A
count is ``verified`` if the lower bound of its ratio reaches that share (of cached
batches, the upper bound; or of the best other count, once the largest was tried), or if
it hardly waits for data. It is ``refuted``, together with smaller ones, if the upper
bound of its ratio to larger counts is below. Only windows of the same round are
compared, so that drift between rounds cancels. Intervals from few rounds use the
residuals of all counts.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.units import format_share
from autotune.base.window_statistics import (
    estimate_windows,
    scaled_residuals,
    trimmed_mean,
)
from autotune.base.wording import format_bounds, format_times

ENOUGH_SHARE = 0.98
"""Share of the best throughput that counts as sufficient."""
OWN_RESIDUALS = 12
"""Least number of differences at which a ratio's interval uses its own residuals
only."""
HOPELESS_SHARE = 0.8
"""Share of the chosen count's throughput below which a count is ruled out, even after
few rounds."""
STUCK_ROUNDS = 24
"""Rounds with cached batches after which an open count is also compared with larger
ones."""
FIRST_ROUNDS = 3
"""Rounds of a new count before it is judged."""
GROWTH = 0.25
"""Share by which rounds grow before the next decision."""

Count = int | None
"""DataLoader workers of a rank; None for cached batches."""
Verdict = Literal["verified", "refuted", "open"]


class WindowFigures(NamedTuple):
    """Figures of one window with one count."""

    tokens_per_s: float
    data_wait_share: float


Round = Mapping[Count, WindowFigures]
"""Windows, by count, that were measured one after the other."""


class NextRounds(NamedTuple):
    """Counts to measure next, and for how many rounds."""

    counts: tuple[Count, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersChoice:
    """Chosen number of DataLoader workers, and the counts that noise leaves open."""

    workers: int
    undecided_between: tuple[int, ...]
    """Fewest and most workers that may be sufficient; empty if it is decided."""
    ratios: Mapping[int, Interval]
    """Ratio of each measured count to the step on cached batches, with bounds of
    ``CONFIDENCE``."""
    verdicts: Mapping[int, Verdict]
    keeps_up: bool
    """True if the chosen count keeps up with the step, relative to cached batches or by
    its wait for data."""
    proof: str
    next_smaller: str | None
    """Result of the next smaller count that was measured; None if there is none."""


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
        self._log_rates: dict[Count, dict[int, float]] = {}
        self._wait_shares: dict[int, list[float]] = {}
        for number, windows in enumerate(rounds):
            for count, figures in windows.items():
                log_rates = self._log_rates.setdefault(count, {})
                log_rates[number] = math.log(figures.tokens_per_s)
                if count is not None:
                    wait_shares = self._wait_shares.setdefault(count, [])
                    wait_shares.append(figures.data_wait_share)
        self._max_count = max_count
        self._intervals: dict[tuple[int, Count], Interval] = {}
        self._counts = sorted(count for count in self._log_rates if count is not None)
        refuted = (count for count in reversed(self._counts) if self._is_refuted(count))
        # Smaller counts than a refuted one are refuted with it; -1 refutes none.
        self._largest_refuted = next(refuted, -1)
        self._reference = self._reference_count()

    def next_rounds(self) -> NextRounds | None:
        """Return the next rounds to measure; None if the count is decided."""
        if not self._counts:
            return NextRounds(counts=(None, 0), rounds=1)
        rung = self._next_rung()
        if rung is not None:
            return NextRounds(counts=(None, rung), rounds=1)
        candidate = self.candidate
        smaller = self._next_smaller_count
        unjudged = [
            count
            for count in (smaller, candidate)
            if count is not None and self._has_few_rounds(count)
        ]
        if unjudged:
            return NextRounds(counts=(None, *unjudged), rounds=1)
        peak = self._untried_peak()
        if peak is not None:
            return NextRounds(counts=(None, peak, candidate), rounds=FIRST_ROUNDS)
        if smaller is not None and smaller < candidate - 1:
            between = self._count_between(smaller, candidate)
            return NextRounds(counts=(None, between, candidate), rounds=FIRST_ROUNDS)
        if smaller is not None and smaller > self._largest_refuted:
            return self._further_rounds([smaller, candidate])
        if self.verdict(candidate) == "open":
            return self._further_rounds([candidate])
        return None

    @property
    def candidate(self) -> int:
        """Smallest measured count that seems sufficient."""
        for count in self._counts:
            if count > self._largest_refuted and self._seems_sufficient(count):
                return count
        return self._counts[-1]

    @property
    def _next_smaller_count(self) -> int | None:
        """Largest measured count below the candidate."""
        smaller = (count for count in self._counts if count < self.candidate)
        return max(smaller, default=None)

    def choose(self) -> WorkersChoice:
        """Return the count to use, decided or not."""
        chosen = self.candidate
        verdicts = {count: self.verdict(count) for count in self._counts}
        verified = (
            count
            for count in self._counts
            if count >= chosen and verdicts[count] == "verified"
        )
        largest_needed = next(verified, self._max_count)
        hopeless = (
            count
            for count in self._counts
            if count < chosen and self._is_hopeless(count, chosen)
        )
        largest_too_few = max(self._largest_refuted, max(hopeless, default=-1))
        is_decided = (
            largest_needed == chosen
            and verdicts[chosen] == "verified"
            and self._largest_refuted == chosen - 1
        )
        return WorkersChoice(
            workers=chosen,
            undecided_between=(
                () if is_decided else (largest_too_few + 1, largest_needed)
            ),
            ratios={count: self.interval(count, None) for count in self._counts},
            verdicts=verdicts,
            keeps_up=self._keeps_up(chosen),
            proof=self._proof(chosen),
            next_smaller=self._next_smaller_result(),
        )

    def verdict(self, count: int) -> Verdict:
        """Return the verdict on a measured count."""
        if count <= self._largest_refuted:
            return "refuted"
        if self._keeps_up(count):
            return "verified"
        if self._tried_largest and not self._has_few_rounds(count):
            rival = self._larger_rival(count)
            if rival is None or self._upper_bound(rival, count) <= 1 / ENOUGH_SHARE:
                return "verified"
        return "open"

    def interval(self, count: int, reference: Count) -> Interval:
        """Return the ratio of a count's throughput to that of a reference.

        Args:
            count: A measured count.
            reference: Another measured count; None for cached batches.
        """
        log_ratios = self._log_ratios(count, reference)
        if not log_ratios:
            # Without a common round, only the ratios of both to cached batches are
            # known.
            ratio = self._ratio(count, None) / self._ratio(reference or 0, None)
            return Interval(value=ratio)
        key = (count, reference)
        if key not in self._intervals:
            self._intervals[key] = self._ratio_interval(log_ratios, reference)
        return self._intervals[key]

    # Search for the count: the ladder first, then between its rungs.

    @property
    def _tried_largest(self) -> bool:
        return self._counts[-1] == self._max_count

    def _next_rung(self) -> int | None:
        """Return the next rung of the ladder to try.

        Returns:
            None if a count seems to reach cached batches, or the largest was tried.
        """
        if self._tried_largest:
            return None
        candidate = self.candidate
        # A count that remains open relative to cached batches is compared with larger
        # ones.
        is_stuck = (
            self.verdict(candidate) == "open"
            and len(self._common_rounds(candidate, None)) >= STUCK_ROUNDS
        )
        if self._reference is None and not is_stuck:
            return None
        rungs = ladder(self._max_count)
        return next(rung for rung in rungs if rung > self._counts[-1])

    def _untried_peak(self) -> int | None:
        """Return a count between the best and a neighbour that may be better.

        Returns:
            None if a count reaches cached batches, or there is no such count.
        """
        best = self._reference
        if best is None or not self._tried_largest:
            return None
        rungs = ladder(self._max_count)
        index = self._counts.index(best)
        best_with_neighbours = self._counts[max(0, index - 1) : index + 2]
        for low, high in itertools.pairwise(best_with_neighbours):
            # Once in each interval of the ladder; again only next to a best count found
            # this way.
            is_whole_interval = low in rungs and high in rungs
            if high - low > 1 and (is_whole_interval or best not in rungs):
                return (low + high) // 2
        return None

    def _count_between(self, low: int, high: int) -> int:
        """Return a count between two.

        Between rungs of the ladder it is the count that the lower one's throughput
        suggests, later the one halfway.
        """
        rungs = ladder(self._max_count)
        if low in rungs and high in rungs and low >= 1:
            # As if each worker adds the same throughput.
            needed = math.ceil(ENOUGH_SHARE * low / self._ratio(low, None))
            return min(max(needed, low + 1), high - 1)
        return (low + high) // 2

    def _further_rounds(self, counts: Sequence[int]) -> NextRounds:
        """Return further rounds of open counts, the last of which is the candidate."""
        candidate = counts[-1]
        best = self._reference
        if best == candidate:
            best = self._larger_rival(candidate)
        # The best larger count decides unless cached batches do.
        rival = self._larger_rival(candidate) if self._tried_largest else best
        fewest_rounds = min(
            len(self._common_rounds(count, best)) for count in counts if count != best
        )
        return NextRounds(
            counts=tuple(dict.fromkeys((best, *counts, rival))),
            rounds=max(1, round(GROWTH * fewest_rounds)),
        )

    # Verdicts on a count.

    def _reference_count(self) -> Count:
        """Return the count to compare with.

        Returns:
            None (cached batches) while a count seems to reach them; else the best one.
        """
        not_refuted = [count for count in self._counts if count > self._largest_refuted]
        if not not_refuted:
            return None
        best = max(not_refuted, key=lambda count: self._ratio(count, None))
        return None if self._ratio(best, None) >= ENOUGH_SHARE else best

    def _larger_rival(self, count: int) -> Count:
        """Return the larger count that may be the fastest.

        It is the next, the largest, or the one that seems best.
        """
        larger = [other for other in self._counts if other > count]
        if not larger:
            return None
        best = max(larger, key=lambda other: self._ratio(other, None))
        return max(
            (larger[0], best, larger[-1]),
            key=lambda other: self._upper_bound(other, count),
        )

    def _has_few_rounds(self, count: int) -> bool:
        return len(self._common_rounds(count, None)) < FIRST_ROUNDS

    def _seems_sufficient(self, count: int) -> bool:
        best = self._reference
        if count == best or self.verdict(count) == "verified":
            return True
        if best is None:
            return self._ratio(count, None) >= ENOUGH_SHARE
        if len(self._common_rounds(count, best)) < FIRST_ROUNDS:
            ratio_by_cached = self._ratio(count, None) / self._ratio(best, None)
            return ratio_by_cached >= ENOUGH_SHARE
        return self._ratio(count, best) >= ENOUGH_SHARE

    def _keeps_up(self, count: int) -> bool:
        return self._lower_bound(count) >= ENOUGH_SHARE or self._hardly_waits(count)

    def _hardly_waits(self, count: int) -> bool:
        """Return True if a count waits so little that more workers gain at most 2 %."""
        if len(self._wait_shares[count]) < FIRST_ROUNDS:
            return False
        return self._longest_wait(count) <= 1 - ENOUGH_SHARE

    def _is_refuted(self, count: int) -> bool:
        log_ratios = self._log_ratios_to_larger(count)
        if len(log_ratios) < FIRST_ROUNDS:
            return False
        if trimmed_mean(log_ratios) >= math.log(ENOUGH_SHARE):
            return False
        high = self._ratio_interval(log_ratios).high
        return high is not None and high < ENOUGH_SHARE

    def _is_hopeless(self, count: int, chosen: int) -> bool:
        """Return True if a count is far below another.

        It may have too few rounds to be refuted.
        """
        high = self.interval(count, None).high
        low = self.interval(chosen, None).low
        return high is not None and low is not None and high < HOPELESS_SHARE * low

    # Ratios of throughput, with their bounds.

    def _common_rounds(self, count: int, reference: Count) -> list[int]:
        reference_log_rates = self._log_rates.get(reference, {})
        return [
            number for number in self._log_rates[count] if number in reference_log_rates
        ]

    def _log_ratios(self, count: int, reference: Count) -> list[float]:
        """Return the log ratio of throughput in each common round."""
        return [
            self._log_rates[count][number] - self._log_rates[reference][number]
            for number in self._common_rounds(count, reference)
        ]

    def _log_ratios_to_larger(self, count: int) -> list[float]:
        """Return log ratios to the mean of larger counts of the same rounds.

        A single comparison avoids selection bias. The mean does not exceed the best of
        the larger counts, so a count below the mean is below the best.
        """
        log_ratios = []
        for number, log_rate in self._log_rates[count].items():
            larger = [
                self._log_rates[other][number]
                for other in self._counts
                if other > count and number in self._log_rates[other]
            ]
            if larger:
                log_ratios.append(log_rate - sum(larger) / len(larger))
        return log_ratios

    def _ratio(self, count: int, reference: Count) -> float:
        log_ratios = self._log_ratios(count, reference)
        return math.exp(trimmed_mean(log_ratios)) if log_ratios else math.nan

    def _ratio_interval(
        self, log_ratios: Sequence[float], reference: Count = None
    ) -> Interval:
        """Return the ratio with its bounds, from log ratios of the same rounds."""
        residuals = None
        if len(log_ratios) < OWN_RESIDUALS:
            residuals = self._residuals_of_all_counts(reference)
        estimate = estimate_windows(log_ratios, scale="linear", residuals=residuals)
        return replace(estimate, value=math.exp(estimate.value), scale="log").ratio()

    def _residuals_of_all_counts(self, reference: Count) -> list[float]:
        """Return residuals of all counts, each about its own location."""
        residuals: list[float] = []
        for count in self._counts:
            log_ratios = (
                [] if count == reference else self._log_ratios(count, reference)
            )
            if len(log_ratios) >= FIRST_ROUNDS:
                residuals += scaled_residuals(log_ratios)
        return residuals

    def _lower_bound(self, count: int) -> float:
        """Return the lower bound of a count's ratio to cached batches; 0 if unknown."""
        if self._has_few_rounds(count) or self._ratio(count, None) < ENOUGH_SHARE:
            # Avoids the cost of an interval that cannot decide.
            return 0.0
        return self.interval(count, None).low or 0.0

    def _upper_bound(self, other: int, count: int) -> float:
        """Return the upper bound of another count's ratio to this one.

        It is taken by way of cached batches if the counts share few rounds.
        """
        if len(self._common_rounds(other, count)) >= FIRST_ROUNDS:
            return self.interval(other, count).high or math.inf
        bound_to_cached = self.interval(other, None).high or math.inf
        return bound_to_cached / self._ratio(count, None)

    def _longest_wait(self, count: int) -> float:
        """Return the upper bound of the share of time that a count waits for data."""
        estimate = estimate_windows(self._wait_shares[count], scale="linear")
        interval = estimate.interval(CONFIDENCE)
        return interval.value if interval.high is None else interval.high

    # Reasons, in words.

    def _proof(self, chosen: int) -> str:
        """Return why the chosen count is sufficient, or the evidence so far."""
        low = self._lower_bound(chosen)
        if low >= ENOUGH_SHARE:
            return (
                f"at least {format_share(low)} of the throughput on cached batches, the"
                " upper bound"
            )
        if self._hardly_waits(chosen):
            wait_percent = 100 * max(self._longest_wait(chosen), 0.0)
            return (
                f"the data wait is at most {wait_percent:.2f} % of the time, so"
                " more workers cannot help"
            )
        rival = self._larger_rival(chosen)
        is_verified = self.verdict(chosen) == "verified"
        if is_verified and rival is None:
            return "the fastest count, and the largest allowed"
        reference = None
        if is_verified or self._reference is not None:
            reference = rival
        interval = self.interval(chosen, reference)
        if reference is None:
            share = _ratio_text(interval, format_share)
            return f"{share} of the throughput with cached batches"
        times = _ratio_text(interval, format_times)
        return (
            f"{times} the throughput with num_workers={reference}, the fastest larger"
            " count, in the same rounds"
        )

    def _next_smaller_result(self) -> str | None:
        """Return the result of the largest smaller count that was measured.

        Returns:
            None if no smaller count was measured.
        """
        smaller = self._next_smaller_count
        if smaller is None:
            return None
        if self._is_refuted(smaller):
            log_ratios = self._log_ratios_to_larger(smaller)
            high = self._ratio_interval(log_ratios).high or math.nan
            return (
                f"num_workers={smaller} is too few: at most {format_times(high)} the"
                " throughput of larger counts in the same rounds"
            )
        if smaller <= self._largest_refuted:
            return (
                f"num_workers={smaller} is too few, because {self._largest_refuted} is"
            )
        ratio = _ratio_text(self.interval(smaller, None), format_share)
        return (
            f"num_workers={smaller} may be sufficient: {ratio} of the throughput with"
            " cached batches"
        )


def _ratio_text(ratio: Interval, form: Callable[[float], str]) -> str:
    """Return a ratio with its bounds.

    A throughput is shown as a share of the one with cached batches, its upper bound,
    and as a multiple of the one with another number of workers.
    """
    between = format_bounds(ratio.low, ratio.high, form)
    value = form(ratio.value)
    return value if between is None else f"{value} ({between})"
