"""Search for the largest micro-batch in few trials: predict, correct the prediction by each trial, verify both sides.

Predictions only choose sizes. If a size fits, all smaller ones do; if it runs out of
memory, all larger ones do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

MIB = 2**20
GROWTH = 4
"""Factor by which sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Smallest difference of two peaks that shows a slope: more than three 20 MiB pages of
the caching allocator."""
PAGE_BYTES = 20 * MIB
"""Page of the caching allocator on a GPU."""
PREDICTED_SHARE, WIDER = 0.03, 3
"""Assumed error of a prediction if its size ran out of memory, and its growth with each
further out of memory."""
FAR_SHARE = 1 / 16
"""Distance of two sizes, as a share of the larger, from which they show a prediction's
slope, not its unevenness."""
PATIENCE = 6
"""Trials after which the smallest step doubles with each trial, so that any search ends
in O(log n) trials."""
MAX_FAILURES = 3
"""Failures of one size, unrelated to memory, after which the search stops."""
Bytes = Callable[[int], float]


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

    peak_bytes: Bytes
    """Peak by micro-batch size. Any curve works; a more accurate one needs fewer
    trials."""
    unsure_bytes: float = 0.0
    """Uncertainty of the part that does not grow with the micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Result of trials: ``feasible_max`` fits (0: nothing yet), ``infeasible_min`` does not (None: none yet)."""

    feasible_max: int
    infeasible_min: int | None


def bracket(tried: Sequence[SizeTrial]) -> Bracket:
    """Summarise trials.

    Once a size ran out of memory, it and all larger ones are too large, even if one
    fitted.
    """
    failed, fitted = (
        [one.micro_batch_size for one in tried if one.fits is fits]
        for fits in (False, True)
    )
    infeasible_min = min(failed, default=None)
    below = [rows for rows in fitted if infeasible_min is None or rows < infeasible_min]
    return Bracket(feasible_max=max(below, default=0), infeasible_min=infeasible_min)


def next_size(
    tried: Sequence[SizeTrial],
    budget_bytes: int,
    max_micro_batch_size: int,
    prediction: Prediction | None = None,
    page_bytes: int = PAGE_BYTES,
) -> int | None:
    """Choose the size to try next.

    None if the largest is verified, nothing fits, or ``max_micro_batch_size`` fits.

    ``page_bytes`` is the largest amount by which an allocator rounds a peak up.
    """
    if tried and tried[-1].fits is None:
        return tried[-1].micro_batch_size
    state = bracket(tried)
    low, high = state.feasible_max, state.infeasible_min or max_micro_batch_size + 1
    if state.infeasible_min == low + 1 or high == 1 or low >= max_micro_batch_size:
        return None
    if prediction and prediction.peak_bytes(
        max_micro_batch_size
    ) <= prediction.peak_bytes(1):
        prediction = None
    decided = sum(one.fits is not None for one in tried)
    fits = _peaks(tried, low)
    fit = _corrected(
        fits,
        prediction,
        SLOPE_BYTES if prediction or state.infeasible_min is None else 1,
    )
    if fit is None:
        wish = (
            max(1, GROWTH * low) if state.infeasible_min is None else (low + high) // 2
        )
    else:
        # If everything ran out of memory, a size that fits although the prediction is
        # off; further off each time.
        off = 0 if low else PREDICTED_SHARE * (WIDER**decided - 1) / (WIDER - 1)
        largest = partial(
            largest_within,
            lambda rows: fit(rows) * (1 + off),
            low=low,
            top=max_micro_batch_size,
        )
        wish = largest(budget_bytes)
        if low and wish >= high:  # it ran out of memory: the correction is off
            wish = (low + 2 * high) // 3
        # It fitted: try the middle of the range that rounding leaves open.
        elif low and wish == low:
            rounded_bytes = page_bytes if len(fits) > 1 else 0
            wish = (low + min(largest(budget_bytes + rounded_bytes), high - 1) + 1) // 2
    least: int = min(2 ** max(0, decided - PATIENCE), (high - low) // 2)
    return min(max(wish, low + least), high - least)


def predict_bytes(
    tried: Sequence[SizeTrial], rows: int, prediction: Prediction | None
) -> int | None:
    """Predict the peak of ``rows`` sequences from smaller trials that fitted and the prediction made before them."""
    fits = _peaks(tried, rows - 1)
    if prediction and not fits:
        return round(prediction.peak_bytes(rows))
    fit = _corrected(fits, prediction, SLOPE_BYTES if prediction else 1)
    return None if fit is None else round(fit(rows))


def _peaks(
    tried: Sequence[SizeTrial], max_micro_batch_size: int
) -> list[tuple[int, int]]:
    """Return the sizes that fitted with their peaks, ascending."""
    fitted = [
        one
        for one in tried
        if one.fits and one.micro_batch_size <= max_micro_batch_size
    ]
    return sorted(
        {
            one.micro_batch_size: one.peak_bytes
            for one in fitted
            if one.peak_bytes is not None
        }.items()
    )


def _corrected(
    fits: list[tuple[int, int]], prediction: Prediction | None, apart_bytes: int
) -> Bytes | None:
    """Correct a prediction's offset by the largest fit, and its slope by two that are far apart.

    They differ by at least ``apart_bytes``, and beside a prediction by ``FAR_SHARE`` of
    the size.
    """
    known: Bytes = prediction.peak_bytes if prediction else lambda rows: 0.0
    if not fits:  # with its uncertainty, as no trial fitted yet
        return (
            None
            if prediction is None
            else lambda rows: known(rows) + prediction.unsure_bytes
        )
    rows_2, bytes_2 = fits[-1]
    near = (1 - FAR_SHARE) * rows_2 if prediction else rows_2
    far = [
        (rows, peak)
        for rows, peak in fits
        if bytes_2 - peak >= apart_bytes and rows <= near
    ]
    if not far and prediction is None:
        return None
    slope = 0.0
    if far:
        rows_1, bytes_1 = far[-1]
        slope = (bytes_2 - known(rows_2) - bytes_1 + known(rows_1)) / (rows_2 - rows_1)
    return lambda rows: bytes_2 + known(rows) - known(rows_2) + slope * (rows - rows_2)


def largest_within(
    needs: Callable[[int], float], limit: float, *, low: int, top: int
) -> int:
    """Return the largest size up to ``top`` that needs no more than a limit.

    ``low`` if nothing above it does.

    Each size is evaluated once. Needs should grow roughly linearly; of several
    crossings of the limit, one is found.
    """
    known: dict[int, float] = {}
    high = top + 1
    guess = min(max(32, low + 1), top)
    while high - low > 1:
        known[guess] = needs(guess)
        if known[guess] <= limit:
            low = guess
        else:
            high = guess
        # A line lands next to the answer; halving then closes the rest.
        near = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
        straight = (low + high) // 2
        if len(near) == 2 and known[near[0]] != known[near[1]]:
            slope = (known[near[0]] - known[near[1]]) / (near[0] - near[1])
            straight = near[0] + int((limit - known[near[0]]) // slope)
        elif low == guess:
            straight = 2 * low
        middle = (low + high) // 2 if high <= top else 2 * low
        # One in four is the middle, or twice the last, so that uneven needs cost no
        # more than halving does.
        guess = min(max(straight if len(known) % 4 else middle, low + 1), high - 1)
    return low
