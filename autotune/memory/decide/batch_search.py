"""Search for the largest micro-batch in few trials.

``next_size`` chooses each size to try. It predicts the peak of any size, corrects the
prediction by each trial, and ends when the largest size is verified on both sides: it
fits, and one sequence more runs out of memory.

A prediction only chooses sizes; the answer comes from trials. If a size fits, all
smaller ones are assumed to fit; if it runs out of memory, all larger ones are assumed
to run out of memory too.
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
FIRST_ERROR_SHARE = 0.03
"""Share by which a prediction is assumed to be too low, once its size ran out of
memory."""
ERROR_GROWTH = 3
"""Factor by which the share grows more with each further size that runs out of memory:
it is 3 %, then 3 + 9 %, then 3 + 9 + 27 %."""
FAR_SHARE = 1 / 16
"""Distance of two sizes, as a share of the larger, from which they show a prediction's
slope, not its unevenness."""
PATIENCE = 6
"""Trials after which the smallest step doubles with each trial, so that any search ends
in O(log n) trials."""
FIRST_SIZE = 32
"""Size that ``largest_within`` evaluates first."""
MAX_FAILURES = 3
"""Failures of one size, unrelated to memory, after which the search stops."""
BytesBySize = Callable[[int], float]
"""Memory of a micro-batch, by its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTrial:
    """Result of one trial of a micro-batch size."""

    micro_batch_size: int
    fits: bool | None
    """True if the size fitted, False if it ran out of memory; None if the trial failed
    for a reason unrelated to memory."""
    peak_bytes: int | None = None
    """Peak memory; None unless the size fitted."""


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
    """Both sides of the largest size that fits, as far as trials show them."""

    feasible_max: int
    """Largest size that fits; 0 if none does yet."""
    infeasible_min: int | None
    """Smallest size that ran out of memory; None if none did yet."""


def bracket(tried: Sequence[SizeTrial]) -> Bracket:
    """Return the bounds that trials show for the largest size that fits.

    Once a size ran out of memory, it and all larger ones count as too large, even if
    one of them fitted in another trial.
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
        tried: All trials so far, in their order.
        budget_bytes: Memory that a size may use.
        max_micro_batch_size: Largest size to try.
        prediction: Peak memory that was predicted before any trial.
        page_bytes: Largest amount by which an allocator rounds a peak up.

    Returns:
        The size; None if the search has ended, because the largest size is verified,
        nothing fits, or ``max_micro_batch_size`` fits.
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
    decided_trials = sum(trial.fits is not None for trial in tried)
    peaks = _peaks_by_size(tried, low)
    min_difference_bytes = SLOPE_BYTES
    if prediction is None and known.infeasible_min is not None:
        # Between two verified bounds, any difference of peaks serves as a slope.
        min_difference_bytes = 1
    corrected_bytes = _correct(peaks, prediction, min_difference_bytes)
    if corrected_bytes is not None:
        size = _predicted_size(
            corrected_bytes,
            budget_bytes,
            low=low,
            high=high,
            max_micro_batch_size=max_micro_batch_size,
            decided_trials=decided_trials,
            rounded_bytes=page_bytes if len(peaks) > 1 else 0,
        )
    elif known.infeasible_min is None:
        size = max(1, GROWTH * low)
    else:
        size = (low + high) // 2
    # Each trial narrows the range by at least this much.
    smallest_step: int = min(2 ** max(0, decided_trials - PATIENCE), (high - low) // 2)
    return min(max(size, low + smallest_step), high - smallest_step)


def _grows(prediction: Prediction, max_micro_batch_size: int) -> bool:
    """Return whether the largest size is predicted to need more than one sequence."""
    largest_bytes = prediction.peak_bytes(max_micro_batch_size)
    return largest_bytes > prediction.peak_bytes(1)


def _predicted_size(
    corrected_bytes: BytesBySize,
    budget_bytes: int,
    *,
    low: int,
    high: int,
    max_micro_batch_size: int,
    decided_trials: int,
    rounded_bytes: int,
) -> int:
    """Return the size to try by a corrected prediction.

    Args:
        corrected_bytes: Predicted peak by size.
        budget_bytes: Memory that a size may use.
        low: Largest size that fits; 0 if none does yet.
        high: Smallest size that ran out of memory, or one above the largest to try.
        max_micro_batch_size: Largest size to try.
        decided_trials: Number of trials that fitted or ran out of memory.
        rounded_bytes: Largest amount by which an allocator rounds a peak up.
    """
    # If every trial ran out of memory, the prediction is too low, and by a growing
    # share: the sum of the geometric series of ``ERROR_GROWTH``.
    error_share = 0.0
    if not low:
        series_sum = (ERROR_GROWTH**decided_trials - 1) / (ERROR_GROWTH - 1)
        error_share = FIRST_ERROR_SHARE * series_sum

    def largest_predicted(limit_bytes: int) -> int:
        return largest_within(
            lambda size: corrected_bytes(size) * (1 + error_share),
            limit_bytes,
            low=low,
            top=max_micro_batch_size,
        )

    size = largest_predicted(budget_bytes)
    if low and size >= high:
        # A size that is predicted to fit ran out of memory, so that the correction is
        # off: try two thirds of the way up to the bound.
        return (low + 2 * high) // 3
    if low and size == low:
        # The predicted largest size fitted already. Its peak may be rounded up, so that
        # larger ones fit too: try the middle of the range that rounding leaves open.
        largest_if_rounded = largest_predicted(budget_bytes + rounded_bytes)
        return (low + min(largest_if_rounded, high - 1) + 1) // 2
    return size


def predict_bytes(
    tried: Sequence[SizeTrial], micro_batch_size: int, prediction: Prediction | None
) -> int | None:
    """Predict the peak of a size from trials of smaller sizes that fitted.

    They correct the prediction that was made before any trial. Without one, a line
    through two of them is the prediction.

    Returns:
        None without a prediction, if smaller sizes show no slope either.
    """
    peaks = _peaks_by_size(tried, micro_batch_size - 1)
    if prediction and not peaks:
        return round(prediction.peak_bytes(micro_batch_size))
    min_difference_bytes = SLOPE_BYTES if prediction else 1
    corrected_bytes = _correct(peaks, prediction, min_difference_bytes)
    if corrected_bytes is None:
        return None
    return round(corrected_bytes(micro_batch_size))


def _peaks_by_size(
    tried: Sequence[SizeTrial], max_micro_batch_size: int
) -> list[tuple[int, int]]:
    """Return each size that fitted with its peak, by ascending size."""
    peaks = {}
    for trial in tried:
        if trial.micro_batch_size > max_micro_batch_size:
            continue
        if trial.fits and trial.peak_bytes is not None:
            peaks[trial.micro_batch_size] = trial.peak_bytes
    return sorted(peaks.items())


def _correct(
    peaks: list[tuple[int, int]],
    prediction: Prediction | None,
    min_difference_bytes: int,
) -> BytesBySize | None:
    """Correct the offset and the slope of a prediction by trials.

    The largest size that fitted corrects the offset. With a smaller one that is far
    enough away, it also corrects the slope.

    Args:
        peaks: Each size that fitted with its peak, by ascending size.
        prediction: Peaks that were predicted before any trial. Without one, a line
            through two sizes is the result.
        min_difference_bytes: Smallest difference of two peaks that shows a slope. With
            a prediction, the sizes must also differ by ``FAR_SHARE``.

    Returns:
        None without a prediction, if no two sizes show a slope.
    """
    if not peaks:
        if prediction is None:
            return None
        # With its uncertainty, as no trial fitted yet.
        predicted_bytes = prediction.peak_bytes
        unsure_bytes = prediction.unsure_bytes
        return lambda size: predicted_bytes(size) + unsure_bytes

    def predicted(size: int) -> float:
        return prediction.peak_bytes(size) if prediction else 0.0

    last_size, last_bytes = peaks[-1]
    max_far_size = (1 - FAR_SHARE) * last_size if prediction else last_size
    far_peaks = [
        (size, peak)
        for size, peak in peaks
        if last_bytes - peak >= min_difference_bytes and size <= max_far_size
    ]
    if not far_peaks and prediction is None:
        return None
    slope = 0.0
    if far_peaks:
        # Between the two sizes, the growth that the prediction did not foresee.
        far_size, far_bytes = far_peaks[-1]
        grown = last_bytes - predicted(last_size) - far_bytes + predicted(far_size)
        slope = grown / (last_size - far_size)
    return lambda size: (
        last_bytes + predicted(size) - predicted(last_size) + slope * (size - last_size)
    )


def largest_within(
    need_of: Callable[[int], float], limit: float, *, low: int, top: int
) -> int:
    """Return the largest size whose need is within a limit, in few evaluations.

    Args:
        need_of: Need by size, which should grow roughly linearly; it is called once for
            a size. If it crosses the limit several times, one crossing is found.
        limit: Largest need.
        low: Smallest possible answer, which is not evaluated.
        top: Largest size to consider.

    Returns:
        ``low`` if no larger size is found.
    """
    need_by_size: dict[int, float] = {}
    high = top + 1
    size = min(max(FIRST_SIZE, low + 1), top)
    while high - low > 1:
        need_by_size[size] = need_of(size)
        is_within = need_by_size[size] <= limit
        if is_within:
            low = size
        else:
            high = size
        halving = (low + high) // 2
        doubling = 2 * low
        # A line lands next to the answer; halving then closes the rest.
        next_to_evaluate = _where_line_meets(limit, need_by_size)
        if next_to_evaluate is None:
            next_to_evaluate = doubling if is_within else halving
        # Every fourth size ignores the line, so that needs far from any line still cost
        # no more than a multiple of halving.
        if len(need_by_size) % 4 == 0:
            next_to_evaluate = doubling if high > top else halving
        size = min(max(next_to_evaluate, low + 1), high - 1)
    return low


def _where_line_meets(limit: float, need_by_size: Mapping[int, float]) -> int | None:
    """Return the size at which a line meets a limit.

    The line goes through the two sizes whose needs are nearest to the limit.

    Returns:
        None if there are not yet two sizes, or their needs are equal.
    """
    if len(need_by_size) < 2:
        return None
    nearest = sorted(need_by_size, key=lambda size: abs(need_by_size[size] - limit))
    first, second = nearest[:2]
    if need_by_size[first] == need_by_size[second]:
        return None
    slope = (need_by_size[first] - need_by_size[second]) / (first - second)
    return first + int((limit - need_by_size[first]) // slope)
