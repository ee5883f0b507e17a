"""Find the largest micro-batch in few trials: predict, correct the prediction by each trial, prove both sides.

Predictions only choose what to try. The answer is a trial that fitted beside one that ran out of memory: a fit proves
every smaller size, an out of memory every larger one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from autotune.decide.largest import largest_within

MIB = 2**20
GROWTH = 4
"""How fast sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Peaks that differ by less than three of the caching allocator's 20 MiB segments do not show a slope."""
SEGMENT_BYTES, FEW = 20 * MIB, 2
"""How far an allocator may round a peak up; considered once more than ``FEW`` sizes fitted."""
PREDICTED_SHARE, SLOPE_SHARE, PEAK_SHARE = 0.03, 0.03, 0.001
"""First guess of how far off a prediction, its slope beyond a measured peak, and that peak itself may be."""
WIDER, WIDENINGS = 3, 16
"""By how much that guess grows while trials contradict it, and how often."""
PATIENCE = 6
"""Trials after which the least step to either side doubles with each, so that any search ends in O(log) trials."""
MAX_FAILURES = 3
"""A size that failed so often in ways that say nothing about memory is given up, and so is the search."""

Bytes = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A micro-batch and whether it fitted; ``peak_bytes`` is known if it did."""

    rows: int
    fits: bool | None
    """None: the trial failed in a way that says nothing about memory."""
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of the peak before any trial."""

    peak_bytes: Bytes
    """By rows; any curve will do, the better it is the fewer trials follow."""
    unsure_bytes: float = 0.0
    """How far off may be what does not grow with rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """What trials have shown: ``feasible_max`` fits (0: nothing yet), ``infeasible_min`` does not (None: none yet)."""

    feasible_max: int
    infeasible_min: int | None

    @property
    def closed(self) -> bool:
        """Whether the two touch."""
        return self.infeasible_min == self.feasible_max + 1


def bracket(tried: Sequence[Tried]) -> Bracket:
    """Summarise trials. An out of memory counts against every size from its own up, whatever fitted there by luck."""
    refused = [trial.rows for trial in tried if trial.fits is False]
    infeasible_min = min(refused, default=None)
    fitted = [trial.rows for trial in tried if trial.fits and (infeasible_min is None or trial.rows < infeasible_min)]
    return Bracket(feasible_max=max(fitted, default=0), infeasible_min=infeasible_min)


def next_rows(
    tried: Sequence[Tried], budget_bytes: int, max_rows: int, prediction: Prediction | None = None
) -> int | None:
    """Choose the size to try next.

    Args:
        tried: Trials so far, in their order.
        budget_bytes: The budget that ``peak_bytes`` counts against.
        max_rows: Nothing above is tried.
        prediction: What is known beforehand; without it two trials make one.

    Returns:
        A number of rows, or None when the largest is proven, or nothing fits, or ``max_rows`` fits.
    """
    if tried and tried[-1].fits is None:
        return tried[-1].rows
    state = bracket(tried)
    low, high = state.feasible_max, state.infeasible_min or max_rows + 1
    if state.closed or high == 1 or low >= max_rows:
        return None
    if prediction and prediction.peak_bytes(max_rows) <= prediction.peak_bytes(1):
        prediction = None
    law = _law(_peaks(tried, low), prediction, SLOPE_BYTES if prediction or state.infeasible_min is None else 1)
    if law is not None:
        wish = _wish(law, partial(largest_within, limit=budget_bytes, low=low, top=max_rows), low, high)
    else:
        wish = max(1, GROWTH * low) if state.infeasible_min is None else (low + high) // 2
    least: int = min(2 ** max(0, sum(one.fits is not None for one in tried) - PATIENCE), (high - low) // 2)
    return min(max(wish, low + least), high - least)


def predict_bytes(tried: Sequence[Tried], rows: int, prediction: Prediction | None) -> int | None:
    """Predict the peak of ``rows`` from smaller trials that fitted and what was known before them."""
    law = _law(_peaks(tried, rows - 1), prediction, SLOPE_BYTES if prediction else 1)
    return None if law is None else round(law.expected(rows) if law.fits else law.grows(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """How the peak grows with rows, the peaks that were measured, and how far off what follows from both may be."""

    grows: Bytes
    fits: list[tuple[int, int]]
    """Rows and peak, by rows."""
    unsure_bytes: float

    def expected(self, rows: int) -> float:
        """By the offset that the largest trial measured; before any, with what is unsure: a fit tells more."""
        return self._by(self.fits[-1], rows) if self.fits else self.grows(rows) + self.unsure_bytes

    def most(self, rows: int, errors: float) -> float:
        """If it is off upwards by so many times its error."""
        if not self.fits:
            return self.expected(rows) * (1 + errors * PREDICTED_SHARE) + errors * self.unsure_bytes
        return min(self._by(fit, rows) + errors * self._error(fit, rows) for fit in self.fits)

    def least(self, rows: int, errors: float) -> float:
        """If it is off downwards."""
        return max(self._by(fit, rows) - errors * self._error(fit, rows) for fit in self.fits) - self._hidden_bytes

    def agrees(self, errors: float) -> bool:
        """Whether all peaks can be right."""
        rows, peak_bytes = self.fits[-1]
        hidden = self._hidden_bytes
        return all(
            abs(self._by(fit, rows) - peak_bytes) <= hidden + errors * self._error(fit, rows) for fit in self.fits
        )

    @property
    def _hidden_bytes(self) -> int:
        return SEGMENT_BYTES if len(self.fits) > FEW else 0

    def _by(self, fit: tuple[int, int], rows: int) -> float:
        return self.grows(rows) + fit[1] - self.grows(fit[0])

    def _error(self, fit: tuple[int, int], rows: int) -> float:
        return PEAK_SHARE * fit[1] + SLOPE_SHARE * abs(self.grows(rows) - self.grows(fit[0]))


def _wish(law: _Law, largest: Callable[[Bytes], int], low: int, high: int) -> int:
    """The largest size by the corrected prediction; if that was tried, one that its error leaves open."""
    guess = largest(law.expected)
    if low < guess < high or not (guess or law.fits):
        return guess
    if law.fits and guess > low:  # it ran out of memory: the largest although the correction is off, or the middle
        safe = largest(partial(law.most, errors=1))
        return safe if low < safe < high else (low + high) // 2
    for errors in (WIDER**number for number in range(WIDENINGS)):
        if not law.fits:  # everything ran out of memory: the largest although the prediction is off
            safe = largest(partial(law.most, errors=errors))
            if safe < high:
                return safe
        elif law.agrees(errors):  # it fits: refute the middle of what its error leaves open above it
            top: int = min(largest(partial(law.least, errors=errors)), high - 1, low + 3 ** len(law.fits))
            return low + max(1, (top - low + 1) // 2)
    return (low + high) // 2


def _peaks(tried: Sequence[Tried], most_rows: int) -> list[tuple[int, int]]:
    """Sizes that fitted and their peaks, by size."""
    fitted = [one for one in tried if one.fits and one.rows <= most_rows]
    return sorted({one.rows: one.peak_bytes for one in fitted if one.peak_bytes is not None}.items())


def _law(fits: list[tuple[int, int]], prediction: Prediction | None, apart_bytes: int) -> _Law | None:
    """As predicted, the slope corrected by two peaks that are so far apart; None with neither."""
    known: Bytes = prediction.peak_bytes if prediction else lambda rows: 0.0
    unsure_bytes = prediction.unsure_bytes if prediction else 0.0
    far = [one for one in fits if fits[-1][1] - one[1] >= apart_bytes]
    if not far:
        return _Law(grows=known, fits=fits, unsure_bytes=unsure_bytes) if prediction else None
    (rows_1, bytes_1), (rows_2, bytes_2) = far[-1], fits[-1]
    slope = (bytes_2 - known(rows_2) - bytes_1 + known(rows_1)) / (rows_2 - rows_1)
    return _Law(grows=lambda rows: known(rows) + slope * rows, fits=fits, unsure_bytes=unsure_bytes)
