"""Search for the largest micro-batch in few trials.

The search predicts, corrects the prediction by each trial, and verifies both sides.

Predictions only choose sizes. If a size fits, all smaller ones do; if it runs out of
memory, all larger ones do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MIB = 2**20
GROWTH = 4
"""Factor by which sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Smallest difference of two peaks that shows a slope: more than three 20 MiB pages of
the caching allocator."""
PAGE_BYTES = 20 * MIB
"""Page of the caching allocator on a GPU."""
PREDICTED_SHARE = 0.03
"""Assumed error of a prediction if its size ran out of memory."""
WIDER = 3
"""Growth of that error with each further size that runs out of memory."""
FAR_SHARE = 1 / 16
"""Distance of two sizes, as a share of the larger, from which they show a prediction's
slope, not its unevenness."""
PATIENCE = 6
"""Trials after which the smallest step doubles with each trial, so that any search ends
in O(log n) trials."""
FIRST_SIZE = 32
"""Size that is evaluated first in the search on a curve; the second gives a line."""
MAX_FAILURES = 3
"""Failures of one size, unrelated to memory, after which the search stops."""
BytesBySize = Callable[[int], float]
"""Memory of a micro-batch, by its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTrial:
    """A trial of a micro-batch size; ``peak_bytes`` is known if it fitted."""

    micro_batch_size: int
    fits: bool | None
    """True if the size fits; None if the trial failed for a reason unrelated to
    memory."""
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted peak memory, before any trial."""

    peak_bytes: BytesBySize
    """Peak by micro-batch size. Any curve works; a more accurate one needs fewer
    trials."""
    unsure_bytes: float = 0.0
    """Uncertainty of the part that does not grow with the micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Result of trials."""

    feasible_max: int
    """Largest size that fits; 0 if none does yet."""
    infeasible_min: int | None
    """Smallest size that ran out of memory; None if none did yet."""


def bracket(tried: Sequence[SizeTrial]) -> Bracket:
    """Summarise trials.

    Once a size ran out of memory, it and all larger ones are too large, even if one
    fitted.
    """
    too_large = [trial.micro_batch_size for trial in tried if trial.fits is False]
    fitting = [trial.micro_batch_size for trial in tried if trial.fits]
    infeasible_min = min(too_large, default=None)
    if infeasible_min is not None:
        fitting = [size for size in fitting if size < infeasible_min]
    return Bracket(feasible_max=max(fitting, default=0), infeasible_min=infeasible_min)


def next_size(
    tried: Sequence[SizeTrial],
    budget_bytes: int,
    max_micro_batch_size: int,
    prediction: Prediction | None = None,
    page_bytes: int = PAGE_BYTES,
) -> int | None:
    """Choose the size to try next.

    Args:
        tried: All trials so far.
        budget_bytes: Memory that a size may use.
        max_micro_batch_size: Largest size to try.
        prediction: Peak memory that was predicted before any trial.
        page_bytes: Largest amount by which an allocator rounds a peak up.

    Returns:
        None if the largest is verified, nothing fits, or ``max_micro_batch_size`` fits.
    """
    # The last trial failed for a reason unrelated to memory: its size is tried again.
    if tried and tried[-1].fits is None:
        return tried[-1].micro_batch_size
    known = bracket(tried)
    low = known.feasible_max
    high = known.infeasible_min or max_micro_batch_size + 1
    is_verified = known.infeasible_min == low + 1
    if is_verified or high == 1 or low >= max_micro_batch_size:
        return None
    # A prediction that does not grow with the size predicts nothing.
    if prediction is not None and not _grows(prediction, max_micro_batch_size):
        prediction = None
    decided = sum(trial.fits is not None for trial in tried)
    peaks = _peaks(tried, low)
    apart_bytes = SLOPE_BYTES
    if prediction is None and known.infeasible_min is not None:
        # Between two verified bounds, any difference of peaks serves as a slope.
        apart_bytes = 1
    corrected = _corrected(peaks, prediction, apart_bytes)
    if corrected is not None:
        size = _predicted_size(
            corrected,
            budget_bytes,
            low=low,
            high=high,
            max_micro_batch_size=max_micro_batch_size,
            decided=decided,
            rounded_bytes=page_bytes if len(peaks) > 1 else 0,
        )
    elif known.infeasible_min is None:
        size = max(1, GROWTH * low)
    else:
        size = (low + high) // 2
    # Each trial narrows the range by at least this much.
    smallest_step: int = min(2 ** max(0, decided - PATIENCE), (high - low) // 2)
    return min(max(size, low + smallest_step), high - smallest_step)


def _grows(prediction: Prediction, max_micro_batch_size: int) -> bool:
    largest_bytes = prediction.peak_bytes(max_micro_batch_size)
    return largest_bytes > prediction.peak_bytes(1)


def _predicted_size(
    corrected: BytesBySize,
    budget_bytes: int,
    *,
    low: int,
    high: int,
    max_micro_batch_size: int,
    decided: int,
    rounded_bytes: int,
) -> int:
    """Return the size to try by a corrected prediction.

    Args:
        corrected: Predicted peak by size.
        budget_bytes: Memory that a size may use.
        low: Largest size that fits; 0 if none does yet.
        high: Smallest size that ran out of memory, or one above the largest to try.
        max_micro_batch_size: Largest size to try.
        decided: Number of trials that fitted or ran out of memory.
        rounded_bytes: Largest amount by which an allocator rounds a peak up.
    """
    # If everything ran out of memory, a size that fits although the prediction is off;
    # further off each time.
    error_share = 0.0
    if not low:
        error_share = PREDICTED_SHARE * (WIDER**decided - 1) / (WIDER - 1)

    def largest(limit_bytes: int) -> int:
        return largest_within(
            lambda size: corrected(size) * (1 + error_share),
            limit_bytes,
            low=low,
            top=max_micro_batch_size,
        )

    size = largest(budget_bytes)
    if low and size >= high:
        # It ran out of memory: the correction is off.
        return (low + 2 * high) // 3
    if low and size == low:
        # It fitted: try the middle of the range that rounding leaves open.
        largest_if_rounded = min(largest(budget_bytes + rounded_bytes), high - 1)
        return (low + largest_if_rounded + 1) // 2
    return size


def predict_bytes(
    tried: Sequence[SizeTrial], micro_batch_size: int, prediction: Prediction | None
) -> int | None:
    """Predict the peak of a size from smaller trials that fitted.

    They correct the prediction that was made before any trial.

    Returns:
        None if there is no such prediction, and smaller trials show no slope.
    """
    peaks = _peaks(tried, micro_batch_size - 1)
    if prediction and not peaks:
        return round(prediction.peak_bytes(micro_batch_size))
    corrected = _corrected(peaks, prediction, SLOPE_BYTES if prediction else 1)
    return None if corrected is None else round(corrected(micro_batch_size))


def _peaks(
    tried: Sequence[SizeTrial], max_micro_batch_size: int
) -> list[tuple[int, int]]:
    """Return the sizes that fitted with their peaks, ascending."""
    peaks = {}
    for trial in tried:
        if trial.micro_batch_size > max_micro_batch_size:
            continue
        if trial.fits and trial.peak_bytes is not None:
            peaks[trial.micro_batch_size] = trial.peak_bytes
    return sorted(peaks.items())


def _corrected(
    peaks: list[tuple[int, int]], prediction: Prediction | None, apart_bytes: int
) -> BytesBySize | None:
    """Correct the offset and the slope of a prediction by trials.

    The offset is corrected by the largest size that fitted, the slope by two that are
    far apart: they differ by at least ``apart_bytes``, and beside a prediction by
    ``FAR_SHARE`` of the size.

    Returns:
        A line through the trials without a prediction; None if they show no slope.
    """
    if not peaks:
        if prediction is None:
            return None
        # With its uncertainty, as no trial fitted yet.
        predicted_bytes, unsure_bytes = prediction.peak_bytes, prediction.unsure_bytes
        return lambda size: predicted_bytes(size) + unsure_bytes

    def predicted(size: int) -> float:
        return prediction.peak_bytes(size) if prediction else 0.0

    last_size, last_bytes = peaks[-1]
    near_size = (1 - FAR_SHARE) * last_size if prediction else last_size
    far = [
        (size, peak)
        for size, peak in peaks
        if last_bytes - peak >= apart_bytes and size <= near_size
    ]
    if not far and prediction is None:
        return None
    slope = 0.0
    if far:
        # Between the two sizes, the growth that the prediction did not foresee.
        far_size, far_bytes = far[-1]
        grown = last_bytes - predicted(last_size) - far_bytes + predicted(far_size)
        slope = grown / (last_size - far_size)
    return lambda size: (
        last_bytes + predicted(size) - predicted(last_size) + slope * (size - last_size)
    )


def largest_within(
    needs: Callable[[int], float], limit: float, *, low: int, top: int
) -> int:
    """Return the largest size up to ``top`` that needs no more than a limit.

    Each size is evaluated once. Needs should grow roughly linearly; of several
    crossings of the limit, one is found.

    Returns:
        ``low`` if nothing above it does.
    """
    evaluated: dict[int, float] = {}
    high = top + 1
    size = min(max(FIRST_SIZE, low + 1), top)
    while high - low > 1:
        evaluated[size] = needs(size)
        is_within = evaluated[size] <= limit
        if is_within:
            low = size
        else:
            high = size
        halving = (low + high) // 2
        doubling = 2 * low
        # A line lands next to the answer; halving then closes the rest.
        chosen = _where_line_meets(limit, evaluated)
        if chosen is None:
            chosen = doubling if is_within else halving
        # One in four is not on the line, so that uneven needs cost no more than halving
        # does.
        if len(evaluated) % 4 == 0:
            chosen = doubling if high > top else halving
        size = min(max(chosen, low + 1), high - 1)
    return low


def _where_line_meets(limit: float, evaluated: Mapping[int, float]) -> int | None:
    """Return the size at which a line meets a limit; None if there is no line.

    The line goes through the two sizes whose needs are nearest to the limit.
    """
    if len(evaluated) < 2:
        return None
    nearest = sorted(evaluated, key=lambda size: abs(evaluated[size] - limit))
    first, second = nearest[:2]
    if evaluated[first] == evaluated[second]:
        return None
    slope = (evaluated[first] - evaluated[second]) / (first - second)
    return first + int((limit - evaluated[first]) // slope)
