"""Find the largest micro-batch in few trials: predict by a straight line, then bracket, then prove both sides.

Memory is close to affine in the number of rows (parameters, gradients and optimizer state once, activations per row),
so two trials that fit predict the largest. The prediction only chooses what to try next: the answer is always a trial
that fitted next to one that was refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH = 4
"""How fast sizes grow until two of them show a slope: fast enough to get there, slow enough to fit nearly always."""
SLOPE_BYTES = 64 * 2**20
"""Points that differ by less than three of the caching allocator's 20 MiB segments do not show a slope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A micro-batch and whether it fitted; ``peak_bytes`` is known where it did."""

    rows: int
    fits: bool
    peak_bytes: int | None = None


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
    """Summarise trials. A refusal counts against every size from its own up, whatever fitted there by luck."""
    refused = [trial.rows for trial in tried if not trial.fits]
    infeasible_min = min(refused, default=None)
    fitted = [trial.rows for trial in tried if trial.fits and (infeasible_min is None or trial.rows < infeasible_min)]
    return Bracket(feasible_max=max(fitted, default=0), infeasible_min=infeasible_min)


def next_rows(tried: Sequence[Tried], budget_bytes: int, max_rows: int) -> int | None:
    """What to try next.

    Args:
        tried: Trials so far, in their order.
        budget_bytes: The budget that ``peak_bytes`` counts against.
        max_rows: Nothing above is tried.

    Returns:
        A number of rows, or None when the largest is proven, or nothing fits, or ``max_rows`` fits.
    """
    state = bracket(tried)
    low, high = state.feasible_max, state.infeasible_min
    if state.closed or high == 1 or low >= max_rows:
        return None
    if low == 0:
        return 1 if high is None else max(1, high // 2)
    top = max_rows if high is None else high - 1
    predicted = predict_rows(tried, budget_bytes)
    if predicted is None or (high is None and not _shows_slope(tried, budget_bytes)):
        return min(GROWTH * low, top)
    streak = _streak(tried)
    if predicted <= low or high is None or predicted < high:
        # A line that keeps promising too little must not cost a trial for each row.
        return min(max(predicted, low + (1 << max(0, streak - 3))), top)
    # The line promises what was refused. One less proves a good line right; a bad one needs a point nearby.
    return top if streak == 1 and not tried[-1].fits else max(low + 1, (low + 3 * top) // 4)


def _shows_slope(tried: Sequence[Tried], budget_bytes: int) -> bool:
    """Whether sizes that fitted lie so far apart in bytes that a line through them means something."""
    peaks = [trial.peak_bytes for trial in tried if trial.fits and trial.peak_bytes is not None]
    return max(peaks) - min(peaks) >= min(SLOPE_BYTES, budget_bytes // 16)


def _streak(tried: Sequence[Tried]) -> int:
    """How many of the last trials ended alike."""
    last = tried[-1].fits
    return next((number for number, trial in enumerate(reversed(tried)) if trial.fits != last), len(tried))


def predict_rows(tried: Sequence[Tried], budget_bytes: int) -> int | None:
    """The largest number of rows that a straight line through the two largest trials that fitted gives."""
    line = _line(tried)
    if line is None:
        return None
    intercept_bytes, bytes_per_row = line
    return int((budget_bytes - intercept_bytes) // bytes_per_row)


def predict_bytes(tried: Sequence[Tried], rows: int) -> int | None:
    """The peak of ``rows`` by the line through the two largest smaller trials that fitted."""
    line = _line([trial for trial in tried if trial.rows < rows])
    return None if line is None else round(line[0] + line[1] * rows)


def _line(tried: Sequence[Tried]) -> tuple[float, float] | None:
    peaks = {trial.rows: trial.peak_bytes for trial in tried if trial.fits and trial.peak_bytes is not None}
    points = sorted(peaks.items())
    if len(points) < 2:
        return None
    rows_2, bytes_2 = points[-1]
    # Allocator steps drown the slope between near neighbours, curvature bends that between far ones.
    apart = (point for point in reversed(points[:-1]) if bytes_2 - point[1] >= SLOPE_BYTES)
    rows_1, bytes_1 = next(apart, points[0])
    slope = (bytes_2 - bytes_1) / (rows_2 - rows_1)
    return (bytes_2 - slope * rows_2, slope) if slope > 0 else None
