"""Choice of the micro-batch sizes to try."""

import bisect
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.memory.decide.batch_search import (
    PATIENCE,
    Bracket,
    Prediction,
    SizeTrial,
    bracket,
    next_size,
    predict_bytes,
)
from autotune.memory.decide.caching_allocator import LARGE_PAGE_BYTES, SMALL_PAGE_BYTES

MAX_MICRO_BATCH_SIZE = 16_384
GB = 10**9
BUDGET_BYTES = round(9.5 * GB)
"""Budget of single decisions, outside of a whole search."""
ENDLESS_TRIALS = 99
"""More trials than any search takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCase:
    """A search for a size, and the memory that its trials would measure."""

    peak_bytes: Callable[[int], int]
    """Peak by size; it never falls."""
    budget_bytes: int
    prediction: Prediction | None = None
    max_size: int = MAX_MICRO_BATCH_SIZE
    """Largest size to try."""

    @property
    def true_largest(self) -> int:
        """Largest size that fits."""
        sizes = range(1, self.max_size + 1)
        return bisect.bisect(sizes, self.budget_bytes, key=self.peak_bytes)

    def search(
        self, *, max_trials: float = ENDLESS_TRIALS, fails=lambda size, attempts: False
    ) -> list[SizeTrial]:
        """Return all trials of the search.

        Args:
            max_trials: Number of trials that the search must not exceed.
            fails: Selects trials that fail for a reason unrelated to memory, by their
                size and the number of earlier attempts.
        """
        tried: list[SizeTrial] = []
        while True:
            size = next_size(tried, self.budget_bytes, self.max_size, self.prediction)
            if size is None:
                return tried
            assert 1 <= size <= self.max_size
            attempts = sum(trial.micro_batch_size == size for trial in tried)
            peak_bytes = self.peak_bytes(size)
            if fails(size, attempts):
                tried.append(SizeTrial(micro_batch_size=size, fits=None))
            elif peak_bytes <= self.budget_bytes:
                tried.append(fitted(size, peak_bytes))
            else:
                tried.append(too_large(size))
            assert len(tried) <= max_trials


def even_case(
    *,
    fixed_bytes: float,
    bytes_per_sequence: float,
    budget_bytes: float,
    page_bytes: int = 1,
    prediction: Prediction | None = None,
) -> SearchCase:
    """Return a case whose memory grows evenly with the size.

    Args:
        fixed_bytes: Memory of no sequence.
        bytes_per_sequence: Memory of each sequence.
        budget_bytes: Memory that a size may use.
        page_bytes: Size to whose multiples the allocator rounds peaks up.
        prediction: Peaks that are predicted before any trial.
    """

    def peak_bytes(size: int) -> int:
        exact_bytes = int(fixed_bytes + bytes_per_sequence * size)
        # Two negations round the division up instead of down.
        return -(-exact_bytes // page_bytes) * page_bytes

    return SearchCase(
        peak_bytes=peak_bytes, budget_bytes=int(budget_bytes), prediction=prediction
    )


def even_prediction(
    *, fixed_bytes: float, bytes_per_sequence: float, unsure_bytes: float = 0.1 * GB
) -> Prediction:
    """Return a prediction that grows evenly with the size."""
    return Prediction(
        peak_bytes=lambda size: fixed_bytes + bytes_per_sequence * size,
        unsure_bytes=unsure_bytes,
    )


def decided_sizes(tried: list[SizeTrial]) -> list[int]:
    """Return the sizes of trials that fitted or ran out of memory, in their order."""
    return [trial.micro_batch_size for trial in tried if trial.fits is not None]


def fitted(size: int, peak_bytes: float) -> SizeTrial:
    return SizeTrial(micro_batch_size=size, fits=True, peak_bytes=round(peak_bytes))


def too_large(size: int) -> SizeTrial:
    return SizeTrial(micro_batch_size=size, fits=False)


def size_after(tried: list[SizeTrial], predicted_bytes=None) -> int | None:
    """Return the size to try next, given the predicted peak by size, if any."""
    prediction = None
    if predicted_bytes is not None:
        prediction = Prediction(peak_bytes=predicted_bytes)
    return next_size(tried, BUDGET_BYTES, MAX_MICRO_BATCH_SIZE, prediction)


@st.composite
def any_predictions(draw):
    """Draw a prediction that has nothing to do with any peaks.

    It may be flat, or fall.
    """
    uneven_bytes = draw(
        st.lists(st.floats(-100.0 * GB, 100.0 * GB), min_size=1, max_size=7)
    )
    bytes_per_sequence = draw(st.floats(-0.1 * GB, 1.0 * GB))

    def predicted_bytes(size: int) -> float:
        return uneven_bytes[size % len(uneven_bytes)] + bytes_per_sequence * size

    return Prediction(peak_bytes=predicted_bytes)


@st.composite
def search_cases(draw):
    """Draw peaks that never fall, with any prediction or none."""
    max_size = draw(st.integers(1, MAX_MICRO_BATCH_SIZE))
    jumps = draw(
        st.lists(
            st.tuples(st.integers(0, max_size), st.integers(0, 2 * GB)),
            min_size=1,
            max_size=8,
        )
    )
    bytes_per_sequence = draw(st.integers(0, GB // 20))

    def peak_bytes(size: int) -> int:
        return bytes_per_sequence * size + sum(
            jump_bytes for first_size, jump_bytes in jumps if size >= first_size
        )

    return SearchCase(
        peak_bytes=peak_bytes,
        budget_bytes=draw(st.integers(0, 20 * GB)),
        prediction=draw(st.none() | any_predictions()),
        max_size=max_size,
    )


def slowly_growing_case(prediction: Prediction | None) -> SearchCase:
    """Return a case in which every size fits."""
    return SearchCase(
        peak_bytes=lambda size: GB // 10_000 * size,
        budget_bytes=20 * GB,
        prediction=prediction,
    )


# Sizes without a prediction.


def test_two_sizes_show_a_slope():
    case = even_case(
        fixed_bytes=0.5 * GB, bytes_per_sequence=0.03 * GB, budget_bytes=10 * GB
    )
    first, second, third, *others = decided_sizes(case.search())
    assert (first, second) == (1, 4)
    assert abs(third - case.true_largest) < 0.1 * case.true_largest
    # Measured: 1, the size that runs out of memory; allows two corrections before it.
    assert len(others) <= 3


def test_sizes_grow_until_they_show_a_slope():
    """Pages of the allocator hide the slope of small sizes."""
    case = even_case(
        fixed_bytes=0.5 * GB,
        bytes_per_sequence=0.001 * GB,
        budget_bytes=10 * GB,
        page_bytes=LARGE_PAGE_BYTES,
    )
    *growing, near = decided_sizes(case.search())[:6]
    assert growing == [1, 4, 16, 64, 256]
    # Measured: 8 % below the largest, as pages blur the slope; allows a factor of 2.
    assert 0.5 * case.true_largest < near < 2 * case.true_largest


def test_search_ends_if_one_sequence_does_not_fit():
    tried = [too_large(1)]
    assert bracket(tried) == Bracket(feasible_max=0, infeasible_min=1)
    assert size_after(tried) is None
    assert size_after(tried, lambda size: 1 * GB + 0.01 * GB * size) is None


# Sizes with a prediction.


def test_model_predicted_not_to_fit_is_tried():
    case = even_case(
        fixed_bytes=1 * GB,
        bytes_per_sequence=0.01 * GB,
        budget_bytes=1.2 * GB,
        prediction=even_prediction(fixed_bytes=10 * GB, bytes_per_sequence=0.01 * GB),
    )
    first, second, *_ = decided_sizes(case.search())
    assert first == 1
    assert 0 < second < 2 * case.true_largest


def draw_case_with_good_prediction(draw: random.Random) -> SearchCase:
    """Draw a case whose fixed memory and slope are predicted to 1 %."""
    fixed_bytes = draw.uniform(1.0, 12.0) * GB
    bytes_per_sequence = draw.uniform(0.03, 1.2) * GB
    budget_bytes = draw.choice([24, 80, 94, 141]) * GB
    slope_error = draw.uniform(-0.01, 0.01)
    fixed_error = draw.uniform(-0.01, 0.01)
    return even_case(
        fixed_bytes=fixed_bytes,
        bytes_per_sequence=bytes_per_sequence,
        page_bytes=SMALL_PAGE_BYTES,
        budget_bytes=budget_bytes,
        prediction=even_prediction(
            fixed_bytes=fixed_bytes * (1 + fixed_error),
            bytes_per_sequence=bytes_per_sequence * (1 + slope_error),
            unsure_bytes=0.1 * fixed_bytes,
        ),
    )


def test_good_prediction_takes_few_trials():
    draw = random.Random(0)
    trial_counts = []
    for _ in range(300):
        case = draw_case_with_good_prediction(draw)
        tried = case.search()
        assert bracket(tried).feasible_max == case.true_largest
        trial_counts.append(len(tried))
    # Measured: a median of 3; allows no more, as the documentation says "2 or 3".
    assert statistics.median(trial_counts) <= 3
    # Measured: 5; allows 6, as the documentation says "at most 6".
    assert max(trial_counts) <= 6


def test_exact_prediction_takes_a_trial_on_each_side():
    case = even_case(
        fixed_bytes=1 * GB,
        bytes_per_sequence=1 * GB,
        budget_bytes=9.5 * GB,
        prediction=even_prediction(fixed_bytes=1 * GB, bytes_per_sequence=1 * GB),
    )
    assert decided_sizes(case.search()) == [8, 9]


def test_neighbouring_sizes_show_no_slope():
    """A jump that only the prediction has must not count as a slope.

    Between 417 and 418 sequences it would make memory seem to shrink with the size.
    """
    case = even_case(
        fixed_bytes=10 * GB, bytes_per_sequence=0.21 * GB, budget_bytes=98.7 * GB
    )

    def predicted_bytes(size: int) -> float:
        return case.peak_bytes(size) + (4 * GB if size >= 418 else 0)

    tried = replace(case, prediction=Prediction(peak_bytes=predicted_bytes)).search()
    # (98.7 - 10) / 0.21 = 422.4. The jump ends the first prediction at 417, and the
    # trial of 418 corrects it.
    assert decided_sizes(tried) == [417, 418, 422, 423]


def test_odd_prediction_stays_between_the_bounds():
    """A prediction that falls between two tried sizes does not lead out of them."""
    tried = [fitted(10, 9.4 * GB), too_large(14), too_large(12)]

    def predicted_bytes(size):
        falling_bytes = {10: 10.0 * GB, 11: 9.1 * GB, 12: 9.2 * GB}
        return falling_bytes.get(size, 1.0 * GB * size)

    assert bracket(tried) == Bracket(feasible_max=10, infeasible_min=12)
    assert size_after(tried, predicted_bytes) == 11


# Trials that contradict each other.


CONTRADICTED = [
    fitted(20, 6.5 * GB),
    fitted(35, BUDGET_BYTES),
    too_large(36),
    too_large(35),
]
"""35 sequences filled the budget exactly, and ran out of memory the next time.

The peaks of 20 and 35 are 2.5 GB and 0.2 GB a sequence.
"""


def test_larger_size_that_fitted_by_luck_is_ignored():
    tried = [too_large(30), fitted(40, 2 * GB)]
    assert bracket(tried) == Bracket(feasible_max=0, infeasible_min=30)
    assert size_after(tried, lambda size: 1 * GB + 0.3 * GB * size) in range(1, 30)


def test_size_that_failed_later_is_too_large():
    assert bracket(CONTRADICTED) == Bracket(feasible_max=20, infeasible_min=35)
    assert size_after(CONTRADICTED) in range(21, 35)


def test_size_below_a_contradicted_one_is_tried():
    predicted_next = size_after(CONTRADICTED, lambda size: 2 * GB + 0.21 * GB * size)
    # The peak of 20 corrects the constant: 20 + (9.5 - 6.5) / 0.21 = 34.3. A step
    # further below 35 would do as well.
    assert predicted_next in {33, 34}


# Prediction of a peak by smaller sizes.


EVEN_CASE = even_case(
    fixed_bytes=1 * GB, bytes_per_sequence=0.1 * GB, budget_bytes=9 * GB
)
ROUGH_PREDICTION = even_prediction(fixed_bytes=1.05 * GB, bytes_per_sequence=0.1 * GB)
"""Prediction of ``EVEN_CASE`` whose fixed memory is 5 % too high."""
SMALLER_TRIALS = [fitted(size, EVEN_CASE.peak_bytes(size)) for size in (2, 30)]


@pytest.mark.parametrize(
    "prediction",
    [
        pytest.param(ROUGH_PREDICTION, id="corrected prediction"),
        pytest.param(None, id="line through two trials"),
    ],
)
def test_peak_is_predicted_from_smaller_sizes(prediction):
    predicted_bytes = predict_bytes(SMALLER_TRIALS, 60, prediction)
    # Both are exact, as memory grows evenly.
    assert predicted_bytes == EVEN_CASE.peak_bytes(60)


def test_peak_is_not_predicted_from_other_trials():
    failed = SizeTrial(micro_batch_size=20, fits=None)
    tried = [*SMALLER_TRIALS, fitted(60, 8 * GB), too_large(61), failed]
    expected_bytes = predict_bytes(SMALLER_TRIALS, 60, ROUGH_PREDICTION)
    assert predict_bytes(tried, 60, ROUGH_PREDICTION) == expected_bytes


def test_one_trial_takes_the_constant_error_out():
    true_bytes = EVEN_CASE.peak_bytes(60)
    before_bytes = predict_bytes([], 60, ROUGH_PREDICTION)
    after_bytes = predict_bytes(SMALLER_TRIALS[:1], 60, ROUGH_PREDICTION)
    assert before_bytes == true_bytes + 0.05 * GB
    assert after_bytes == true_bytes


def test_one_trial_alone_predicts_nothing():
    assert predict_bytes([], 60, None) is None
    assert predict_bytes(SMALLER_TRIALS[:1], 60, None) is None


# Searches with any prediction.


@settings(deadline=None)
@given(case=search_cases())
@example(
    case=slowly_growing_case(Prediction(peak_bytes=lambda size: 1.2e-4 * GB * size))
)
@example(case=slowly_growing_case(None))
def test_any_prediction_ends_in_the_right_answer(case):
    # The smallest step is 1 for ``PATIENCE`` trials, and then doubles. It is half the
    # range after a logarithm of the sizes at most; after as many trials again, halving
    # has closed the range. One more rounds the logarithms up.
    max_trials = PATIENCE + 2 * math.log2(case.max_size + 1) + 1
    bounds = bracket(case.search(max_trials=max_trials))
    assert bounds.feasible_max == case.true_largest
    if case.true_largest == case.max_size:
        assert bounds.infeasible_min is None
    else:
        assert bounds.infeasible_min == case.true_largest + 1


def fails_twice_at_every_third_size(size: int, attempts: int) -> bool:
    return size % 3 == 0 and attempts < 2


@settings(deadline=None)
@given(case=search_cases())
def test_failures_do_not_change_the_decided_sizes(case):
    disturbed = case.search(fails=fails_twice_at_every_third_size)
    assert decided_sizes(disturbed) == decided_sizes(case.search())


@settings(deadline=None)
@given(case=search_cases())
def test_only_failed_sizes_are_tried_again(case):
    tried = case.search(fails=fails_twice_at_every_third_size)
    assert len(set(decided_sizes(tried))) == len(decided_sizes(tried))
    for trial, following in pairwise(tried):
        if trial.fits is None:
            assert following.micro_batch_size == trial.micro_batch_size
