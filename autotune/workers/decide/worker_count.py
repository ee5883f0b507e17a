"""How many loader workers are enough, decided from repeated windows; and what to measure next until it is. Pure.

The answer is the smallest count whose throughput is proven to be 98 % of the best count's. A count is *proven* when the
lower bound of its ratio reaches that share (of the step on batches from memory, which no count can beat; or of the best
other count, once the largest was tried), or when it hardly waits for data. It is *refuted*, and smaller ones with it,
when the upper bound of its ratio to some larger count lies below. Only readings of the same round are compared, so that
what drifts between rounds cancels. Few differences of logarithms borrow the residuals of the others.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.statistics import location, of_windows, residuals_of

ENOUGH_SHARE = 0.98
"""Within two per cent of the best is as good as the best."""
OWN_RESIDUALS = 12
"""From so many differences on, a ratio's interval rests on its own residuals alone."""
HOPELESS_SHARE = 0.8
"""Counts so far below another are not what it is undecided between, though few rounds were spent on them."""
STUCK_ROUNDS = 24
"""A count that so many rounds beside the ceiling left open is held against larger ones as well."""
FIRST_ROUNDS = 3
"""Rounds of a new count before anything is said of it."""
GROWTH = 0.25
"""After a look, rounds grow by this part before the next: data that is nearly the same says nearly the same."""

Count = int | None
"""Loader workers of a rank; None for batches that lie in memory."""
Verdict = Literal["proven", "refuted", "open"]


class WindowFigures(NamedTuple):
    """What a window says about a count."""

    tokens_per_s: float
    data_wait_share: float


Round = Mapping[Count, WindowFigures]
"""Windows that were read one after the other."""


class NextRounds(NamedTuple):
    """What to measure next: so many rounds of these counts."""

    counts: tuple[Count, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersChoice:
    """The number of loader workers, the counts that noise hides, and why."""

    workers: int
    undecided_between: tuple[int, ...]
    """Least and most; empty when it is decided."""
    ratios: Mapping[int, Interval]
    """Of every measured count to the step on batches from memory, with bounds of ``CONFIDENCE``."""
    verdicts: Mapping[int, Verdict]
    keeps_up: bool
    """Whether the chosen count keeps the step fed: it is proven beside the ceiling, or by how little it waits."""
    proof: str
    refusal: str | None
    """What is known of the next smaller count that was measured; None where there is none."""


def ladder(max_count: int) -> list[int]:
    """0, 1, 2, 4, … and the largest allowed."""
    rungs = [0, *(2**exponent for exponent in range(max_count.bit_length()))]
    return sorted({rung for rung in rungs if rung <= max_count} | {max_count})


class WorkersRule:
    """What rounds, in their order, say so far of counts up to the largest that is allowed."""

    def __init__(self, rounds: Sequence[Round], max_count: int) -> None:
        self._logs: dict[Count, dict[int, float]] = {}
        self._waits: dict[int, list[float]] = {}
        for number, one in enumerate(rounds):
            for count, figures in one.items():
                self._logs.setdefault(count, {})[number] = math.log(figures.tokens_per_s)
                if count is not None:
                    self._waits.setdefault(count, []).append(figures.data_wait_share)
        self._max_count = max_count
        self._intervals: dict[tuple[int, Count], Interval] = {}
        self.seen = sorted(count for count in self._logs if count is not None)
        self._refuted = next((count for count in reversed(self.seen) if self._is_refuted(count)), -1)
        self._best = self._best_count()

    def next_rounds(self) -> NextRounds | None:
        """What to measure next; None when the count is decided."""
        if not self.seen:
            return NextRounds(counts=(None, 0), rounds=1)
        if (rung := self._next_rung()) is not None:
            return NextRounds(counts=(None, rung), rounds=1)
        candidate, below = self.candidate, self._below
        if young := [count for count in (below, candidate) if count is not None and self._is_young(count)]:
            return NextRounds(counts=(None, *young), rounds=1)
        if (peak := self._unseen_peak()) is not None:
            return NextRounds(counts=(None, peak, candidate), rounds=FIRST_ROUNDS)
        if below is not None and below < candidate - 1:
            return NextRounds(counts=(None, self._probe(below, candidate), candidate), rounds=FIRST_ROUNDS)
        if below is None and candidate > 0:
            return NextRounds(counts=(None, candidate - 1, candidate), rounds=FIRST_ROUNDS)
        open_counts = [candidate] if self.verdict(candidate) == "open" else []
        if below is not None and below > self._refuted:
            open_counts = [below, candidate]
        return self._more(open_counts) if open_counts else None

    @property
    def candidate(self) -> int:
        """The smallest measured count that seems to be enough."""
        likely = [count for count in self.seen if count > self._refuted and self._seems_enough(count)]
        return likely[0] if likely else self.seen[-1]

    @property
    def _below(self) -> int | None:
        """The largest measured count under the candidate."""
        return max((count for count in self.seen if count < self.candidate), default=None)

    def choose(self) -> WorkersChoice:
        """The count to use, whether or not it is decided yet."""
        chosen = self.candidate
        verdicts = {count: self.verdict(count) for count in self.seen}
        larger = (count for count in self.seen if count >= chosen and verdicts[count] == "proven")
        proven = next(larger, self._max_count)
        hopeless = max((one for one in self.seen if one < chosen and self._is_hopeless(one, chosen)), default=-1)
        undecided = (max(self._refuted, hopeless) + 1, proven)
        decided = proven == chosen and verdicts[chosen] == "proven" and self._refuted == chosen - 1
        return WorkersChoice(
            workers=chosen,
            undecided_between=() if decided else undecided,
            ratios={count: self.interval(count, None) for count in self.seen},
            verdicts=verdicts,
            keeps_up=self._low(chosen, None) >= ENOUGH_SHARE or self._waits_too_little(chosen),
            proof=self._proof(chosen),
            refusal=self._refusal(),
        )

    def verdict(self, count: int) -> Verdict:
        """What is known of a count that was measured."""
        if count <= self._refuted:
            return "refuted"
        if self._low(count, None) >= ENOUGH_SHARE or self._waits_too_little(count):
            return "proven"
        if self._explored and not self._is_young(count):
            rival = self._larger_rival(count)
            if rival is None or self._at_most(rival, count) <= 1 / ENOUGH_SHARE:
                return "proven"
        return "open"

    def interval(self, count: int, reference: Count) -> Interval:
        """The ratio of a count's throughput to that of another, or to that of cached batches."""
        key, differences = (count, reference), self._differences(count, reference)
        if not differences:  # they never met, so nothing but what each was to the ceiling is known
            return Interval(value=self._value(count, None) / self._value(reference or 0, None))
        if key not in self._intervals:
            self._intervals[key] = self._about(differences, reference)
        return self._intervals[key]

    @property
    def _explored(self) -> bool:
        return self.seen[-1] == self._max_count

    def _next_rung(self) -> int | None:
        """The next count of the climb: until one seems to reach the ceiling, or the largest was tried."""
        if self._explored:
            return None
        candidate = self.candidate
        # A count that can be proven neither enough nor too little beside the ceiling is held against larger ones.
        stuck = self.verdict(candidate) == "open" and len(self._common(candidate, None)) >= STUCK_ROUNDS
        if self._best is None and not stuck:
            return None
        return next(rung for rung in ladder(self._max_count) if rung > self.seen[-1])

    def _unseen_peak(self) -> int | None:
        """Where no count reaches the ceiling: one between the best and its neighbours that may be better still."""
        best = self._best
        if best is None or not self._explored:
            return None
        rungs, place = ladder(self._max_count), self.seen.index(best)
        for low, high in itertools.pairwise(self.seen[max(0, place - 1) : place + 2]):
            # Once in each interval of the climb; again only beside a best count that was found that way.
            if high - low > 1 and ((low in rungs and high in rungs) or best not in rungs):
                return (low + high) // 2
        return None

    def _best_count(self) -> Count:
        """What counts are held against: None, the ceiling, while one seems to reach it; else the best one."""
        if not self.seen:
            return None
        value, best = max((self._value(count, None), -count) for count in self.seen if count > self._refuted)
        return None if value >= ENOUGH_SHARE else -best

    def _larger_rival(self, count: int) -> Count:
        """The larger count that may be the furthest above: the next, the largest, or the one that seems best."""
        larger = [other for other in self.seen if other > count]
        if not larger:
            return None
        best = max(larger, key=lambda other: self._value(other, None))
        return max((larger[0], best, larger[-1]), key=lambda other: self._at_most(other, count))

    def _at_most(self, other: int, count: int) -> float:
        """The upper bound of another count's ratio to this one; through the ceiling where they have hardly met."""
        if len(self._common(other, count)) >= FIRST_ROUNDS:
            return self.interval(other, count).high or math.inf
        return (self.interval(other, None).high or math.inf) / self._value(count, None)

    def _seems_enough(self, count: int) -> bool:
        if count == self._best or self.verdict(count) == "proven":
            return True
        if self._best is None or len(self._common(count, self._best)) < FIRST_ROUNDS:
            value = self._value(count, None) / (1.0 if self._best is None else self._value(self._best, None))
        else:
            value = self._value(count, self._best)
        return value >= ENOUGH_SHARE

    def _more(self, counts: Sequence[int]) -> NextRounds:
        candidate = counts[-1]
        best = self._larger_rival(candidate) if self._best == candidate else self._best
        # What decides in the end is the best larger count, unless the ceiling does.
        rival = self._larger_rival(candidate) if self._explored else best
        together = tuple(dict.fromkeys((best, *counts, rival)))
        fewest = min(len(self._common(count, best)) for count in counts if count != best)
        return NextRounds(counts=together, rounds=max(1, round(GROWTH * fewest)))

    def _is_young(self, count: int) -> bool:
        return len(self._common(count, None)) < FIRST_ROUNDS

    def _probe(self, low: int, high: int) -> int:
        """A count between two: first where the speed of the lower one says, then halfway."""
        rungs = ladder(self._max_count)
        if low in rungs and high in rungs and low >= 1:
            needed = math.ceil(ENOUGH_SHARE * low / self._value(low, None))
            return min(max(needed, low + 1), high - 1)
        return (low + high) // 2

    def _is_refuted(self, count: int) -> bool:
        differences = self._to_larger(count)
        if len(differences) < FIRST_ROUNDS or location(differences) >= math.log(ENOUGH_SHARE):
            return False
        high = self._about(differences).high
        return high is not None and high < ENOUGH_SHARE

    def _to_larger(self, count: int) -> list[float]:
        """Logarithms of the ratios to the larger counts of the same rounds, all together: chance gets one try.

        Their mean is no more than the best of them, so what falls short of it falls short of the best.
        """
        differences = []
        for number, log in self._logs[count].items():
            larger = [self._logs[other][number] for other in self.seen if other > count and number in self._logs[other]]
            if larger:
                differences.append(log - sum(larger) / len(larger))
        return differences

    def _about(self, differences: Sequence[float], reference: Count = None) -> Interval:
        residuals = None if len(differences) >= OWN_RESIDUALS else self._pooled(reference)
        found = of_windows(differences, scale="linear", residuals=residuals)
        return replace(found, value=math.exp(found.value), scale="log").ratio()

    def _is_hopeless(self, count: int, chosen: int) -> bool:
        """Whether a count that nobody took time to refute is far below another all the same."""
        high, low = self.interval(count, None).high, self.interval(chosen, None).low
        return high is not None and low is not None and high < HOPELESS_SHARE * low

    def _waits_too_little(self, count: int) -> bool:
        """Whether all that more workers could win is less than what is asked."""
        return len(self._waits[count]) >= FIRST_ROUNDS and self._longest_wait(count) <= 1 - ENOUGH_SHARE

    def _longest_wait(self, count: int) -> float:
        """The upper bound of the share that it waits for data."""
        found = of_windows(self._waits[count], scale="linear").interval(CONFIDENCE)
        return found.value if found.high is None else found.high

    def _value(self, count: int, reference: Count) -> float:
        differences = self._differences(count, reference)
        return math.exp(location(differences)) if differences else math.nan

    def _low(self, count: int, reference: Count) -> float:
        if len(self._common(count, reference)) < FIRST_ROUNDS or self._value(count, reference) < ENOUGH_SHARE:
            return 0.0  # of no use, and an interval takes long
        return self.interval(count, reference).low or 0.0

    def _common(self, count: int, reference: Count) -> list[int]:
        others = self._logs.get(reference, {})
        return [number for number in self._logs[count] if number in others]

    def _differences(self, count: int, reference: Count) -> list[float]:
        return [self._logs[count][number] - self._logs[reference][number] for number in self._common(count, reference)]

    def _pooled(self, reference: Count) -> list[float]:
        """Residuals of all counts that were compared with the reference, each about its own location."""
        groups = [self._differences(count, reference) for count in self.seen if count != reference]
        return [one for group in groups if len(group) >= FIRST_ROUNDS for one in residuals_of(group)]

    def _proof(self, chosen: int) -> str:
        """Why the chosen count is enough, or how far that is known."""
        low = self._low(chosen, None)
        if low >= ENOUGH_SHARE:
            return f"at least {low:.1%} of the step on batches from memory, which no count can beat"
        if self._waits_too_little(chosen):
            most = self._longest_wait(chosen)
            return f"it waits for data at most {max(most, 0.0):.2%} of the time, and more workers could win no more"
        rival = self._larger_rival(chosen)
        proven = self.verdict(chosen) == "proven"
        if proven and rival is None:
            return "the best of all counts, and the largest that is allowed"
        other = rival if proven or self._best is not None else None
        what = "the step on batches from memory" if other is None else f"the larger count that may be best, {other}"
        return f"{_shown(self.interval(chosen, other))} of {what}"

    def _refusal(self) -> str | None:
        """What is known of the largest smaller count that was measured."""
        below = self._below
        if below is None:
            return None
        if self._is_refuted(below):
            high = self._about(self._to_larger(below)).high or math.nan
            return f"{below} was refused: it has at most {high:.1%} of the larger counts' throughput"
        if below <= self._refuted:
            return f"{below} was refused: {self._refuted} is too few"
        shown = _shown(self.interval(below, None))
        return f"{below} was not refused: it has {shown} of the step on batches from memory"


def _shown(one: Interval) -> str:
    return f"{one.value:.1%}" + ("" if one.low is None else f" ({one.low:.1%} to {one.high:.1%})")
