"""Search for the largest micro-batch in few trials.

``next_size`` chooses each size to try. It predicts the peak of any size, corrects the
prediction by each trial, and ends when the largest size is verified on both sides: it
fits, and one sequence more runs out of memory.

A prediction only chooses sizes; the answer comes from trials. If a size fits, all
smaller ones are assumed to fit; if it runs out of memory, all larger ones are assumed
to run out of memory too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.base.units import MIB
from autotune.memory.decide.caching_allocator import LARGE_PAGE_BYTES
from autotune.memory.decide.largest_within import largest_within

GROWTH = 4
"""Factor by which sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Smallest difference of two peaks that shows a slope: more than three large pages of
the caching allocator."""
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
    page_bytes: int = LARGE_PAGE_BYTES,
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
    bounds = bracket(tried)
    if _is_finished(bounds, max_micro_batch_size):
        return None
    decided_trials = sum(trial.fits is not None for trial in tried)
    size = _unclamped_size(
        _peaks_by_size(tried, bounds.feasible_max),
        budget_bytes,
        bounds,
        max_micro_batch_size=max_micro_batch_size,
        prediction=prediction,
        decided_trials=decided_trials,
        page_bytes=page_bytes,
    )
    return _clamped_size(size, bounds, max_micro_batch_size, decided_trials)


def _is_finished(bounds: Bracket, max_micro_batch_size: int) -> bool:
    """Return whether no size is left to try."""
    low = bounds.feasible_max
    high = _smallest_excluded(bounds, max_micro_batch_size)
    nothing_fits = high == 1
    is_verified = bounds.infeasible_min == low + 1
    largest_fits = low >= max_micro_batch_size
    return nothing_fits or is_verified or largest_fits


def _smallest_excluded(bounds: Bracket, max_micro_batch_size: int) -> int:
    """Return the smallest size that ran out of memory or exceeds the largest to try."""
    if bounds.infeasible_min is None:
        return max_micro_batch_size + 1
    return bounds.infeasible_min


def _unclamped_size(
    peaks: list[tuple[int, int]],
    budget_bytes: int,
    bounds: Bracket,
    *,
    max_micro_batch_size: int,
    prediction: Prediction | None,
    decided_trials: int,
    page_bytes: int,
) -> int:
    """Choose a size, which may lie outside the bounds or next to one that was tried.

    Args:
        peaks: Each size that fitted with its peak, by ascending size.
        budget_bytes: Memory that a size may use.
        bounds: Both sides of the largest size that fits.
        max_micro_batch_size: Largest size to try.
        prediction: Peak memory that was predicted before any trial.
        decided_trials: Number of trials that fitted or ran out of memory.
        page_bytes: Largest amount by which an allocator rounds a peak up.
    """
    # A prediction that does not grow with the size predicts nothing.
    if prediction is not None and _grows(prediction, max_micro_batch_size):
        corrected_bytes = _corrected_prediction(peaks, prediction)
    else:
        line_bytes = _line_through_two_sizes(peaks, _slope_threshold(bounds))
        if line_bytes is None:
            return _size_without_slope(bounds)
        corrected_bytes = line_bytes
    # If the only size that fitted is also the largest that is predicted to fit, a good
    # prediction ends with the trial of the next size. Once a second size fitted,
    # rounding of peaks is allowed for, so that sizes do not creep up one by one.
    several_fitted = len(peaks) > 1
    return _predicted_size(
        corrected_bytes,
        budget_bytes,
        bounds,
        max_micro_batch_size=max_micro_batch_size,
        decided_trials=decided_trials,
        rounding_bytes=page_bytes if several_fitted else 0,
    )


def _grows(prediction: Prediction, max_micro_batch_size: int) -> bool:
    """Return whether the largest size is predicted to need more than one sequence."""
    largest_bytes = prediction.peak_bytes(max_micro_batch_size)
    return largest_bytes > prediction.peak_bytes(1)


def _slope_threshold(bounds: Bracket) -> int:
    """Return the smallest difference of two peaks, in bytes, that shows a slope."""
    if bounds.infeasible_min is None:
        # Nothing bounds the size yet: a slope that pages of the allocator blur could
        # lead far beyond the largest that fits.
        return SLOPE_BYTES
    # Between two verified bounds, any difference of peaks serves as a slope.
    return 1


def _size_without_slope(bounds: Bracket) -> int:
    """Return a multiple of the largest size that fits, or the middle of the bounds."""
    if bounds.infeasible_min is None:
        return max(1, GROWTH * bounds.feasible_max)
    return (bounds.feasible_max + bounds.infeasible_min) // 2


def _predicted_size(
    corrected_bytes: BytesBySize,
    budget_bytes: int,
    bounds: Bracket,
    *,
    max_micro_batch_size: int,
    decided_trials: int,
    rounding_bytes: int,
) -> int:
    """Return the size to try by a corrected prediction.

    Args:
        corrected_bytes: Predicted peak by size.
        budget_bytes: Memory that a size may use.
        bounds: Both sides of the largest size that fits.
        max_micro_batch_size: Largest size to try.
        decided_trials: Number of trials that fitted or ran out of memory.
        rounding_bytes: Amount by which measured peaks may have been rounded up.
    """
    low = bounds.feasible_max
    high = _smallest_excluded(bounds, max_micro_batch_size)
    error_share = 0.0 if low else _error_share(decided_trials)

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
        largest_if_rounded = largest_predicted(budget_bytes + rounding_bytes)
        return (low + min(largest_if_rounded, high - 1) + 1) // 2
    return size


def _error_share(trials_out_of_memory: int) -> float:
    """Return the share by which a prediction is too low, if no trial has fitted yet.

    Each trial that ran out of memory adds a term of a geometric series, whose factor is
    ``ERROR_GROWTH``.
    """
    series_sum: float = (ERROR_GROWTH**trials_out_of_memory - 1) / (ERROR_GROWTH - 1)
    return FIRST_ERROR_SHARE * series_sum


def _clamped_size(
    size: int, bounds: Bracket, max_micro_batch_size: int, decided_trials: int
) -> int:
    """Move a size between the bounds, at least the smallest step away from both."""
    low = bounds.feasible_max
    high = _smallest_excluded(bounds, max_micro_batch_size)
    # Each trial narrows the range by at least this much.
    smallest_step: int = min(2 ** max(0, decided_trials - PATIENCE), (high - low) // 2)
    return min(max(size, low + smallest_step), high - smallest_step)


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
    if prediction is None:
        # Unlike in the search, the smallest difference of peaks shows a slope: the
        # result is reported beside the measured peak, and no trial depends on it.
        line_bytes = _line_through_two_sizes(peaks, min_difference_bytes=1)
        return None if line_bytes is None else round(line_bytes(micro_batch_size))
    if not peaks:
        # Without its uncertainty, which is for choosing a first size that fits.
        return round(prediction.peak_bytes(micro_batch_size))
    corrected_bytes = _corrected_prediction(peaks, prediction)
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


def _line_through_two_sizes(
    peaks: list[tuple[int, int]], min_difference_bytes: int
) -> BytesBySize | None:
    """Predict peaks by a line through two sizes that fitted, without a prediction.

    Args:
        peaks: Each size that fitted with its peak, by ascending size.
        min_difference_bytes: Smallest difference of two peaks that shows a slope.

    Returns:
        None if no two sizes show a slope.
    """
    if not peaks:
        return None
    last_size, last_bytes = peaks[-1]
    far_peaks = [
        (size, peak_bytes)
        for size, peak_bytes in peaks
        if last_bytes - peak_bytes >= min_difference_bytes
    ]
    if not far_peaks:
        return None
    far_size, far_bytes = far_peaks[-1]
    slope = (last_bytes - far_bytes) / (last_size - far_size)
    return lambda size: last_bytes + slope * (size - last_size)


def _corrected_prediction(
    peaks: list[tuple[int, int]], prediction: Prediction
) -> BytesBySize:
    """Correct the offset and the slope of a prediction by trials.

    The largest size that fitted corrects the offset. With a smaller one that is far
    enough away, in its size and in its peak, it also corrects the slope.

    Args:
        peaks: Each size that fitted with its peak, by ascending size.
        prediction: Peaks that were predicted before any trial.
    """
    predicted = prediction.peak_bytes
    if not peaks:
        # With its uncertainty, as no trial fitted yet.
        return lambda size: predicted(size) + prediction.unsure_bytes
    last_size, last_bytes = peaks[-1]
    max_far_size = (1 - FAR_SHARE) * last_size
    far_peaks = [
        (size, peak_bytes)
        for size, peak_bytes in peaks
        if last_bytes - peak_bytes >= SLOPE_BYTES and size <= max_far_size
    ]
    slope = 0.0
    if far_peaks:
        # Between the two sizes, the growth that the prediction did not foresee.
        far_size, far_bytes = far_peaks[-1]
        measured_growth_bytes = last_bytes - far_bytes
        predicted_growth_bytes = predicted(last_size) - predicted(far_size)
        unforeseen_bytes = measured_growth_bytes - predicted_growth_bytes
        slope = unforeseen_bytes / (last_size - far_size)
    return lambda size: (
        last_bytes + predicted(size) - predicted(last_size) + slope * (size - last_size)
    )
