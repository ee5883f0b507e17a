"""Choice of the number of DataLoader workers from repeated windows, and of the rounds to measure next. Pure.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.statistics import estimate_windows, scaled_residuals, trimmed_mean
from autotune.base.units import format_share
from autotune.base.wording import format_bounds

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
    """Chosen number of DataLoader workers, the counts that noise leaves open, and the reasons."""

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
    return sorted(
        {0, max_count, *(2**exponent for exponent in range(max_count.bit_length()))}
    )


class WorkersRule:
    """Decision rule over the rounds so far, in their order, for counts up to the largest allowed."""

    def __init__(self, rounds: Sequence[Round], max_count: int) -> None:
        self._logs: dict[Count, dict[int, float]] = {}
        self._waits: dict[int, list[float]] = {}
        for number, one in enumerate(rounds):
            for count, figures in one.items():
                self._logs.setdefault(count, {})[number] = math.log(
                    figures.tokens_per_s
                )
                if count is not None:
                    self._waits.setdefault(count, []).append(figures.data_wait_share)
        self._max_count = max_count
        self._intervals: dict[tuple[int, Count], Interval] = {}
        self.seen = sorted(count for count in self._logs if count is not None)
        self._refuted = next(
            (count for count in reversed(self.seen) if self._is_refuted(count)), -1
        )
        self._best = self._best_count()

    def next_rounds(self) -> NextRounds | None:
        """Return the next rounds to measure; None if the count is decided."""
        if not self.seen:
            return NextRounds(counts=(None, 0), rounds=1)
        if (rung := self._next_rung()) is not None:
            return NextRounds(counts=(None, rung), rounds=1)
        candidate, below = self.candidate, self._below
        if young := [
            count
            for count in (below, candidate)
            if count is not None and self._is_young(count)
        ]:
            return NextRounds(counts=(None, *young), rounds=1)
        if (peak := self._unseen_peak()) is not None:
            return NextRounds(counts=(None, peak, candidate), rounds=FIRST_ROUNDS)
        if below is not None and below < candidate - 1:
            return NextRounds(
                counts=(None, self._probe(below, candidate), candidate),
                rounds=FIRST_ROUNDS,
            )
        open_counts = [candidate] if self.verdict(candidate) == "open" else []
        if below is not None and below > self._refuted:
            open_counts = [below, candidate]
        return self._more(open_counts) if open_counts else None

    @property
    def candidate(self) -> int:
        """Smallest measured count that seems sufficient."""
        likely = (
            count
            for count in self.seen
            if count > self._refuted and self._seems_enough(count)
        )
        return next(likely, self.seen[-1])

    @property
    def _below(self) -> int | None:
        return max(
            (count for count in self.seen if count < self.candidate), default=None
        )

    def choose(self) -> WorkersChoice:
        """Return the count to use, decided or not."""
        chosen = self.candidate
        verdicts = {count: self.verdict(count) for count in self.seen}
        larger = (
            count
            for count in self.seen
            if count >= chosen and verdicts[count] == "verified"
        )
        verified = next(larger, self._max_count)
        hopeless = max(
            (
                one
                for one in self.seen
                if one < chosen and self._is_hopeless(one, chosen)
            ),
            default=-1,
        )
        undecided = (max(self._refuted, hopeless) + 1, verified)
        decided = (
            verified == chosen
            and verdicts[chosen] == "verified"
            and self._refuted == chosen - 1
        )
        return WorkersChoice(
            workers=chosen,
            undecided_between=() if decided else undecided,
            ratios={count: self.interval(count, None) for count in self.seen},
            verdicts=verdicts,
            keeps_up=self._low(chosen) >= ENOUGH_SHARE
            or self._waits_too_little(chosen),
            proof=self._proof(chosen),
            next_smaller=self._next_smaller(),
        )

    def verdict(self, count: int) -> Verdict:
        """Return the verdict on a measured count."""
        if count <= self._refuted:
            return "refuted"
        if self._low(count) >= ENOUGH_SHARE or self._waits_too_little(count):
            return "verified"
        if self._explored and not self._is_young(count):
            rival = self._larger_rival(count)
            if rival is None or self._at_most(rival, count) <= 1 / ENOUGH_SHARE:
                return "verified"
        return "open"

    def interval(self, count: int, reference: Count) -> Interval:
        """Return the ratio of a count's throughput to that of another, or to that of cached batches."""
        key, differences = (count, reference), self._differences(count, reference)
        # Without a common round, only the ratios of both to cached batches are known.
        if not differences:
            return Interval(
                value=self._value(count, None) / self._value(reference or 0, None)
            )
        if key not in self._intervals:
            self._intervals[key] = self._about(differences, reference)
        return self._intervals[key]

    @property
    def _explored(self) -> bool:
        return self.seen[-1] == self._max_count

    def _next_rung(self) -> int | None:
        """Return the next count to try, until one seems to reach cached batches or the largest was tried."""
        if self._explored:
            return None
        candidate = self.candidate
        # A count that remains open relative to cached batches is compared with larger
        # ones.
        stuck = (
            self.verdict(candidate) == "open"
            and len(self._common(candidate, None)) >= STUCK_ROUNDS
        )
        if self._best is None and not stuck:
            return None
        return next(rung for rung in ladder(self._max_count) if rung > self.seen[-1])

    def _unseen_peak(self) -> int | None:
        """Return a count between the best and its neighbours that may be better, if none reaches cached batches."""
        best = self._best
        if best is None or not self._explored:
            return None
        rungs, place = ladder(self._max_count), self.seen.index(best)
        for low, high in itertools.pairwise(self.seen[max(0, place - 1) : place + 2]):
            # Once in each interval of the ladder; again only next to a best count found
            # this way.
            if high - low > 1 and (
                (low in rungs and high in rungs) or best not in rungs
            ):
                return (low + high) // 2
        return None

    def _best_count(self) -> Count:
        """Return the count to compare with: None (cached batches) while one seems to reach them, else the best."""
        rates = (
            (self._value(count, None), -count)
            for count in self.seen
            if count > self._refuted
        )
        value, best = max(rates, default=(1.0, 0))
        return None if value >= ENOUGH_SHARE else -best

    def _larger_rival(self, count: int) -> Count:
        """Return the larger count that may be the fastest: the next, the largest, or the one that seems best."""
        larger = [other for other in self.seen if other > count]
        if not larger:
            return None
        best = max(larger, key=lambda other: self._value(other, None))
        return max(
            (larger[0], best, larger[-1]), key=lambda other: self._at_most(other, count)
        )

    def _at_most(self, other: int, count: int) -> float:
        """Return the upper bound of another count's ratio to this one.

        By cached batches if they share few rounds.
        """
        if len(self._common(other, count)) >= FIRST_ROUNDS:
            return self.interval(other, count).high or math.inf
        return (self.interval(other, None).high or math.inf) / self._value(count, None)

    def _seems_enough(self, count: int) -> bool:
        if count == self._best or self.verdict(count) == "verified":
            return True
        if (
            self._best is not None
            and len(self._common(count, self._best)) < FIRST_ROUNDS
        ):
            return (
                self._value(count, None) / self._value(self._best, None) >= ENOUGH_SHARE
            )
        return self._value(count, self._best) >= ENOUGH_SHARE

    def _more(self, counts: Sequence[int]) -> NextRounds:
        candidate = counts[-1]
        best = self._larger_rival(candidate) if self._best == candidate else self._best
        # The best larger count decides unless cached batches do.
        rival = self._larger_rival(candidate) if self._explored else best
        together = tuple(dict.fromkeys((best, *counts, rival)))
        fewest = min(
            len(self._common(count, best)) for count in counts if count != best
        )
        return NextRounds(counts=together, rounds=max(1, round(GROWTH * fewest)))

    def _is_young(self, count: int) -> bool:
        return len(self._common(count, None)) < FIRST_ROUNDS

    def _probe(self, low: int, high: int) -> int:
        """Return a count between two: first the one that the lower one's speed suggests, then halfway."""
        rungs = ladder(self._max_count)
        if low in rungs and high in rungs and low >= 1:
            needed = math.ceil(ENOUGH_SHARE * low / self._value(low, None))
            return min(max(needed, low + 1), high - 1)
        return (low + high) // 2

    def _is_refuted(self, count: int) -> bool:
        differences = self._to_larger(count)
        if len(differences) < FIRST_ROUNDS or trimmed_mean(differences) >= math.log(
            ENOUGH_SHARE
        ):
            return False
        high = self._about(differences).high
        return high is not None and high < ENOUGH_SHARE

    def _to_larger(self, count: int) -> list[float]:
        """Return log ratios to the mean of larger counts of the same rounds: a single comparison avoids selection bias.

        The mean does not exceed the best of them, so a count below the mean is below
        the best.
        """
        differences = []
        for number, log in self._logs[count].items():
            larger = [
                self._logs[other][number]
                for other in self.seen
                if other > count and number in self._logs[other]
            ]
            if larger:
                differences.append(log - sum(larger) / len(larger))
        return differences

    def _about(self, differences: Sequence[float], reference: Count = None) -> Interval:
        residuals = None
        # Those of all counts, each about its own location.
        if len(differences) < OWN_RESIDUALS:
            groups = [
                self._differences(count, reference)
                for count in self.seen
                if count != reference
            ]
            residuals = [
                one
                for group in groups
                if len(group) >= FIRST_ROUNDS
                for one in scaled_residuals(group)
            ]
        found = estimate_windows(differences, scale="linear", residuals=residuals)
        return replace(found, value=math.exp(found.value), scale="log").ratio()

    def _is_hopeless(self, count: int, chosen: int) -> bool:
        """Return True if a count is far below another, even if it has too few rounds to be refuted."""
        high, low = self.interval(count, None).high, self.interval(chosen, None).low
        return high is not None and low is not None and high < HOPELESS_SHARE * low

    def _waits_too_little(self, count: int) -> bool:
        """Return True if it waits so little for data that more workers can gain no more than 2 %."""
        return (
            len(self._waits[count]) >= FIRST_ROUNDS
            and self._longest_wait(count) <= 1 - ENOUGH_SHARE
        )

    def _longest_wait(self, count: int) -> float:
        """Return the upper bound of the share of time that it waits for data."""
        found = estimate_windows(self._waits[count], scale="linear").interval(
            CONFIDENCE
        )
        return found.value if found.high is None else found.high

    def _value(self, count: int, reference: Count) -> float:
        differences = self._differences(count, reference)
        return math.exp(trimmed_mean(differences)) if differences else math.nan

    def _low(self, count: int) -> float:
        if self._is_young(count) or self._value(count, None) < ENOUGH_SHARE:
            return 0.0  # avoids the cost of an interval that cannot decide
        return self.interval(count, None).low or 0.0

    def _common(self, count: int, reference: Count) -> list[int]:
        return [
            number
            for number in self._logs[count]
            if number in self._logs.get(reference, {})
        ]

    def _differences(self, count: int, reference: Count) -> list[float]:
        return [
            self._logs[count][number] - self._logs[reference][number]
            for number in self._common(count, reference)
        ]

    def _proof(self, chosen: int) -> str:
        """Return the reason why the chosen count is sufficient, or the evidence so far."""
        low = self._low(chosen)
        if low >= ENOUGH_SHARE:
            return (
                f"at least {format_share(low)} of the throughput on cached batches, the"
                " upper bound"
            )
        if self._waits_too_little(chosen):
            most = self._longest_wait(chosen)
            return (
                f"the data wait is at most {100 * max(most, 0.0):.2f} % of the time, so"
                " more workers cannot help"
            )
        rival = self._larger_rival(chosen)
        verified = self.verdict(chosen) == "verified"
        if verified and rival is None:
            return "the fastest count, and the largest allowed"
        other = rival if verified or self._best is not None else None
        reference = (
            "cached batches"
            if other is None
            else f"num_workers={other}, the fastest larger count"
        )
        return (
            f"{_shown(self.interval(chosen, other))} of the throughput with {reference}"
        )

    def _next_smaller(self) -> str | None:
        """Return the result of the largest smaller count that was measured.

        None if there is none.
        """
        if (below := self._below) is None:
            return None
        if self._is_refuted(below):
            high = self._about(self._to_larger(below)).high or math.nan
            return (
                f"num_workers={below} is too few: at most {format_share(high)} of the"
                " throughput of larger counts"
            )
        if below <= self._refuted:
            return f"num_workers={below} is too few, because {self._refuted} is"
        shown = _shown(self.interval(below, None))
        return (
            f"num_workers={below} may be sufficient: {shown} of the throughput with"
            " cached batches"
        )


def _shown(one: Interval) -> str:
    between = format_bounds(one.low, one.high, format_share)
    return format_share(one.value) + (f" ({between})" if between else "")
