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
from autotune.memory.decide.largest_within import largest_below_gaps

GROWTH = 4
"""Factor by which sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Smallest difference of two peaks that shows a slope: more than three large pages of
the caching allocator."""
FIRST_ERROR_SHARE = 0.03
"""Share by which a prediction is assumed to be too low, once its size ran out of
memory."""
ERROR_GROWTH = 3
"""Growth of what a further size that runs out of memory adds to the share: the share is
3 % after one size, 3 + 9 % after two, 3 + 9 + 27 % after three."""
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
    """Sequences of a micro-batch; in a probe of your own step, any size."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """Measured peak memory of a size that fitted."""

    size: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """State of a search before its next trial."""

    budget_bytes: int
    """Memory that a size may use."""
    max_size: int
    """Largest size to try."""
    page_bytes: int
    """Largest amount by which an allocator rounds a peak up."""
    prediction: Prediction | None
    """Peak memory that was predicted before any trial."""
    known: Bracket
    """Both sides of the largest size that fits."""
    peaks: Sequence[_Peak]
    """Peak of each size that fitted, by ascending size."""
    decided_trials: int
    """Number of trials that fitted or ran out of memory."""

    @property
    def fits(self) -> int:
        """Largest size that fits; 0 if none does yet."""
        return self.known.feasible_max

    @property
    def excluded(self) -> int:
        """Smallest size that ran out of memory, or exceeds the largest to try."""
        if self.known.infeasible_min is None:
            return self.max_size + 1
        return self.known.infeasible_min

    @property
    def is_finished(self) -> bool:
        """True if no size is left to try."""
        nothing_fits = self.excluded == 1
        is_verified = self.known.infeasible_min == self.fits + 1
        largest_fits = self.fits >= self.max_size
        return nothing_fits or is_verified or largest_fits


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
    feasible_max = max(fitting) if fitting else 0
    return Bracket(feasible_max=feasible_max, infeasible_min=infeasible_min)


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
    known = bracket(tried)
    search = _Search(
        budget_bytes=budget_bytes,
        max_size=max_micro_batch_size,
        page_bytes=page_bytes,
        prediction=prediction,
        known=known,
        peaks=_peaks_by_size(tried, known.feasible_max),
        decided_trials=sum(trial.fits is not None for trial in tried),
    )
    if search.is_finished:
        return None
    return _clamped_size(_unclamped_size(search), search)


def _unclamped_size(search: _Search) -> int:
    """Choose a size, which may lie outside the bounds or next to one that was tried."""
    if search.prediction is not None and _grows(search.prediction, search.max_size):
        corrected_bytes = _corrected_prediction(search.peaks, search.prediction)
        return _predicted_size(search, corrected_bytes)
    # There is no prediction, or one that does not grow and so predicts nothing.
    line_bytes = _line_through_two_sizes(search.peaks, _slope_threshold(search))
    if line_bytes is None:
        return _size_without_slope(search)
    return _predicted_size(search, line_bytes)


def _grows(prediction: Prediction, max_size: int) -> bool:
    """Return whether the largest size is predicted to need more than one sequence."""
    return prediction.peak_bytes(max_size) > prediction.peak_bytes(1)


def _slope_threshold(search: _Search) -> int:
    """Return the smallest difference of two peaks, in bytes, that shows a slope."""
    if search.known.infeasible_min is None:
        # Nothing bounds the size yet: a slope that pages of the allocator blur could
        # lead far beyond the largest that fits.
        return SLOPE_BYTES
    # Between two verified bounds, any difference of peaks serves as a slope.
    return 1


def _size_without_slope(search: _Search) -> int:
    """Return a multiple of the largest size that fits, or the middle of the bounds."""
    if search.known.infeasible_min is None:
        return max(1, GROWTH * search.fits)
    return (search.fits + search.known.infeasible_min) // 2


def _predicted_size(search: _Search, corrected_bytes: BytesBySize) -> int:
    """Return the size to try by a corrected prediction of the peak of any size."""
    if not search.fits:
        # No size is known to fit, so every trial so far showed the prediction too low.
        too_low_share = _error_share(trials_out_of_memory=search.decided_trials)
        return _largest_predicted(
            search,
            lambda size: corrected_bytes(size) * (1 + too_low_share),
            search.budget_bytes,
        )
    size = _largest_predicted(search, corrected_bytes, search.budget_bytes)
    if size >= search.excluded:
        # A size that is predicted to fit ran out of memory, so that the correction is
        # off: try two thirds of the way up, on the side that the prediction favours.
        return (search.fits + 2 * search.excluded) // 3
    if size > search.fits:
        return size
    # The predicted largest size fitted already. If it is the only one that fitted, the
    # trial of the next size ends the search of a good prediction. If a second one
    # fitted, peaks may be rounded up, so that larger sizes fit too: try the middle of
    # the range that rounding leaves open, so that sizes do not creep up one by one.
    rounding_bytes = search.page_bytes if len(search.peaks) > 1 else 0
    largest_if_rounded = _largest_predicted(
        search, corrected_bytes, search.budget_bytes + rounding_bytes
    )
    return (search.fits + min(largest_if_rounded, search.excluded - 1) + 1) // 2


def _largest_predicted(
    search: _Search, predicted_bytes: BytesBySize, limit_bytes: int
) -> int:
    """Return the largest size that is predicted to stay within a limit.

    It is below sizes that are predicted to exceed it, as smaller sizes than the answer
    must fit, and at least the largest that fits.
    """
    largest = largest_below_gaps(predicted_bytes, limit_bytes, top=search.max_size)
    return max(search.fits, largest)


def _error_share(*, trials_out_of_memory: int) -> float:
    """Return the share by which a prediction is too low, if no trial has fitted yet.

    Each trial that ran out of memory adds a term of a geometric series, whose factor is
    ``ERROR_GROWTH``.
    """
    series_sum: float = (ERROR_GROWTH**trials_out_of_memory - 1) / (ERROR_GROWTH - 1)
    return FIRST_ERROR_SHARE * series_sum


def _clamped_size(size: int, search: _Search) -> int:
    """Move a size between the bounds, at least the smallest step away from both."""
    # Each trial narrows the range by at least this much.
    patience_step: int = 2 ** max(0, search.decided_trials - PATIENCE)
    smallest_step = min(patience_step, (search.excluded - search.fits) // 2)
    at_least = search.fits + smallest_step
    at_most = search.excluded - smallest_step
    return min(max(size, at_least), at_most)


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


def _peaks_by_size(tried: Sequence[SizeTrial], max_size: int) -> list[_Peak]:
    """Return the peak of each size that fitted, by ascending size.

    Args:
        tried: All trials so far; the last trial of a size counts.
        max_size: Largest size to return.
    """
    peak_by_size = {}
    for trial in tried:
        if trial.micro_batch_size > max_size:
            continue
        if trial.fits and trial.peak_bytes is not None:
            peak_by_size[trial.micro_batch_size] = trial.peak_bytes
    return [
        _Peak(size=size, peak_bytes=peak_bytes)
        for size, peak_bytes in sorted(peak_by_size.items())
    ]


def _line_through_two_sizes(
    peaks: Sequence[_Peak], min_difference_bytes: int
) -> BytesBySize | None:
    """Predict peaks by a line through two sizes that fitted, without a prediction.

    Args:
        peaks: Peak of each size that fitted, by ascending size.
        min_difference_bytes: Smallest difference of two peaks that shows a slope.

    Returns:
        None if no two sizes show a slope.
    """
    if not peaks:
        return None
    last = peaks[-1]
    far_peaks = [
        peak
        for peak in peaks
        if last.peak_bytes - peak.peak_bytes >= min_difference_bytes
    ]
    if not far_peaks:
        return None
    far = far_peaks[-1]
    slope = (last.peak_bytes - far.peak_bytes) / (last.size - far.size)
    return lambda size: last.peak_bytes + slope * (size - last.size)


def _corrected_prediction(
    peaks: Sequence[_Peak], prediction: Prediction
) -> BytesBySize:
    """Correct the offset and the slope of a prediction by trials.

    The largest size that fitted corrects the offset. With a smaller one that is far
    enough away, in its size and in its peak, it also corrects the slope.

    Args:
        peaks: Peak of each size that fitted, by ascending size.
        prediction: Peaks that were predicted before any trial.
    """
    predicted = prediction.peak_bytes
    if not peaks:
        # With its uncertainty, as no trial fitted yet.
        return lambda size: predicted(size) + prediction.unsure_bytes
    last = peaks[-1]
    max_far_size = (1 - FAR_SHARE) * last.size
    far_peaks = [
        peak
        for peak in peaks
        if last.peak_bytes - peak.peak_bytes >= SLOPE_BYTES
        and peak.size <= max_far_size
    ]
    slope = 0.0
    if far_peaks:
        # Between the two sizes, the growth that the prediction did not foresee.
        far = far_peaks[-1]
        measured_growth_bytes = last.peak_bytes - far.peak_bytes
        predicted_growth_bytes = predicted(last.size) - predicted(far.size)
        unforeseen_bytes = measured_growth_bytes - predicted_growth_bytes
        slope = unforeseen_bytes / (last.size - far.size)
    return lambda size: (
        last.peak_bytes
        + predicted(size)
        - predicted(last.size)
        + slope * (size - last.size)
    )
