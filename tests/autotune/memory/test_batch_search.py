"""Choice of the sizes to try, and evaluation of a curve in few sizes."""

import bisect
import math
import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.memory.decide.batch_search import (
    MIB,
    PATIENCE,
    Bracket,
    Prediction,
    SizeTrial,
    bracket,
    largest_within,
    next_size,
    predict_bytes,
)

MAX_MICRO_BATCH_SIZE = 16_384
GB = 10**9
BUDGET_BYTES = 9_500_000_000
"""Budget of searches without a simulated machine."""


class Machine:
    """A machine whose memory grows evenly with the size, and a prediction of it.

    Args:
        fixed_bytes: Memory of no sequence.
        bytes_per_sequence: Memory of each sequence.
        budget_bytes: Memory that a size may use.
        page_bytes: Size to whose multiples the allocator rounds peaks up.
        slope_error: Relative error of the predicted memory of a sequence.
        constant_error: Relative error of the predicted fixed memory.
    """

    def __init__(
        self,
        *,
        fixed_bytes,
        bytes_per_sequence,
        budget_bytes,
        page_bytes=1,
        slope_error=0.0,
        constant_error=0.0,
    ) -> None:
        self._fixed_bytes = fixed_bytes
        self._bytes_per_sequence = bytes_per_sequence
        self._page_bytes = page_bytes
        self.budget_bytes = int(budget_bytes)
        self.prediction = Prediction(
            peak_bytes=lambda size: (
                fixed_bytes * (1 + constant_error)
                + bytes_per_sequence * (1 + slope_error) * size
            ),
            unsure_bytes=0.1 * fixed_bytes,
        )

    def peak_bytes(self, size: int) -> int:
        exact_bytes = int(self._fixed_bytes + self._bytes_per_sequence * size)
        # Two negations round the division up instead of down.
        return -(-exact_bytes // self._page_bytes) * self._page_bytes

    @property
    def true_largest(self) -> int:
        """Return the largest size that fits."""
        return bisect.bisect(
            range(1, MAX_MICRO_BATCH_SIZE + 1), self.budget_bytes, key=self.peak_bytes
        )

    def search(self, *, predicted: bool) -> list[SizeTrial]:
        return search_all(
            self.peak_bytes,
            self.budget_bytes,
            MAX_MICRO_BATCH_SIZE,
            self.prediction if predicted else None,
        )


def search_all(
    peak_bytes,
    budget_bytes,
    max_micro_batch_size,
    prediction,
    *,
    most_trials=99,
    fails=lambda size, attempts: False,
) -> list[SizeTrial]:
    """Return all trials of a search on a machine with such peaks.

    ``fails`` selects trials that fail for a reason unrelated to memory, by their size
    and the number of earlier attempts.
    """
    tried: list[SizeTrial] = []
    while True:
        size = next_size(tried, budget_bytes, max_micro_batch_size, prediction)
        if size is None:
            return tried
        assert 1 <= size <= max_micro_batch_size
        attempts = sum(trial.micro_batch_size == size for trial in tried)
        fits = None if fails(size, attempts) else peak_bytes(size) <= budget_bytes
        tried.append(
            SizeTrial(
                micro_batch_size=size,
                fits=fits,
                peak_bytes=peak_bytes(size) if fits else None,
            )
        )
        assert len(tried) <= most_trials


def decided_sizes(tried: list[SizeTrial]) -> list[int]:
    """Return the sizes of trials that fitted or ran out of memory, in their order."""
    return [trial.micro_batch_size for trial in tried if trial.fits is not None]


def fitted(size: int, peak_bytes: int) -> SizeTrial:
    return SizeTrial(micro_batch_size=size, fits=True, peak_bytes=peak_bytes)


def too_large(size: int) -> SizeTrial:
    return SizeTrial(micro_batch_size=size, fits=False)


def size_after(tried: list[SizeTrial], predicted_bytes=None) -> int | None:
    """Return the size to try next, given the predicted peak by size, if any."""
    prediction = None
    if predicted_bytes is not None:
        prediction = Prediction(peak_bytes=predicted_bytes)
    return next_size(tried, BUDGET_BYTES, MAX_MICRO_BATCH_SIZE, prediction)


@st.composite
def machines_with_any_prediction(draw):
    """Draw peaks that never fall, and a prediction that has nothing to do with them.

    The prediction may be flat, or fall.

    Returns:
        Largest size to try, budget, peak by size, and predicted peak by size.
    """
    max_size = draw(st.integers(1, MAX_MICRO_BATCH_SIZE))
    jumps = draw(
        st.lists(
            st.tuples(st.integers(0, max_size), st.integers(0, 2 * GB)),
            min_size=1,
            max_size=8,
        )
    )
    bytes_per_sequence = draw(st.integers(0, 50_000_000))
    uneven_bytes = draw(st.lists(st.floats(-1e11, 1e11), min_size=1, max_size=7))
    predicted_growth_bytes = draw(st.floats(-1e8, 1e9))
    budget_bytes = draw(st.integers(0, 20 * GB))

    def peak_bytes(size: int) -> int:
        return bytes_per_sequence * size + sum(
            jump_bytes for first_size, jump_bytes in jumps if size >= first_size
        )

    def predicted_bytes(size: int) -> float:
        return uneven_bytes[size % len(uneven_bytes)] + predicted_growth_bytes * size

    return max_size, budget_bytes, peak_bytes, predicted_bytes


SLOWLY_GROWING = (MAX_MICRO_BATCH_SIZE, 20 * GB, lambda size: 100_000 * size)
"""Largest size, budget and peaks of a machine on which every size fits."""
ANY_MACHINE = machines_with_any_prediction()


# Sizes without a prediction.


def test_two_sizes_show_a_slope():
    machine = Machine(fixed_bytes=5e8, bytes_per_sequence=3e7, budget_bytes=1e10)
    first, second, third, *others = decided_sizes(machine.search(predicted=False))
    assert (first, second) == (1, 4)
    assert abs(third - machine.true_largest) < 0.1 * machine.true_largest
    assert len(others) <= 3


def test_sizes_grow_until_they_show_a_slope():
    """Pages of the allocator hide the slope of small sizes."""
    machine = Machine(
        fixed_bytes=5e8, bytes_per_sequence=1e6, budget_bytes=1e10, page_bytes=20 * MIB
    )
    *growing, near = decided_sizes(machine.search(predicted=False))[:5]
    assert growing == [1, 4, 16, 64]
    assert abs(near - machine.true_largest) < machine.true_largest


def test_search_ends_if_one_sequence_does_not_fit():
    tried = [too_large(1)]
    assert bracket(tried) == Bracket(feasible_max=0, infeasible_min=1)
    assert size_after(tried) is None
    assert size_after(tried, lambda size: 1e9 + 1e7 * size) is None


# Sizes with a prediction.


def test_model_predicted_not_to_fit_is_tried():
    machine = Machine(
        fixed_bytes=1e9, bytes_per_sequence=1e7, budget_bytes=1.2e9, constant_error=9.0
    )
    first, second, *_ = decided_sizes(machine.search(predicted=True))
    assert first == 1
    assert abs(second - machine.true_largest) < machine.true_largest


def test_good_prediction_takes_few_trials():
    draw = random.Random(0)
    trial_counts = []
    for _ in range(300):
        machine = Machine(
            fixed_bytes=draw.uniform(1e9, 12e9),
            bytes_per_sequence=draw.uniform(3e7, 1.2e9),
            page_bytes=2 * MIB,
            budget_bytes=draw.choice([24e9, 80e9, 94e9, 141e9]),
            slope_error=draw.uniform(-0.01, 0.01),
            constant_error=draw.uniform(-0.01, 0.01),
        )
        tried = machine.search(predicted=True)
        assert bracket(tried).feasible_max == machine.true_largest
        trial_counts.append(len(tried))
    assert statistics.median(trial_counts) <= 3
    assert max(trial_counts) <= 6


def test_exact_prediction_takes_a_trial_on_each_side():
    machine = Machine(fixed_bytes=1e9, bytes_per_sequence=1e9, budget_bytes=9.5e9)
    assert len(machine.search(predicted=True)) == 2


def test_neighbouring_sizes_show_no_slope():
    """A jump that only the prediction has must not count as a slope.

    Between 417 and 418 sequences it would make memory seem to shrink with the size.
    """
    machine = Machine(
        fixed_bytes=10 * GB, bytes_per_sequence=0.21 * GB, budget_bytes=98.7 * GB
    )

    def predicted_bytes(size: int) -> float:
        return machine.peak_bytes(size) + (4 * GB if size >= 418 else 0)

    tried = search_all(
        machine.peak_bytes,
        machine.budget_bytes,
        MAX_MICRO_BATCH_SIZE,
        Prediction(peak_bytes=predicted_bytes),
    )
    # (98.7 - 10) / 0.21 = 422.4. The jump ends the first prediction at 417, and the
    # trial of 418 corrects it.
    assert decided_sizes(tried) == [417, 418, 422, 423]


def test_odd_prediction_stays_between_the_bounds():
    """A prediction that falls between two tried sizes does not lead out of them."""
    tried = [fitted(10, 9_400_000_000), too_large(14), too_large(12)]

    def predicted_bytes(size):
        falling = {10: 10e9, 11: 9.1e9, 12: 9.2e9}
        return falling.get(size, size * 1e9)

    assert bracket(tried) == Bracket(feasible_max=10, infeasible_min=12)
    assert size_after(tried, predicted_bytes) == 11


# Trials that contradict each other.


CONTRADICTED = [
    fitted(20, 6_650_000_000),
    fitted(35, BUDGET_BYTES),
    too_large(36),
    too_large(35),
]
"""35 sequences filled the budget exactly, and ran out of memory the next time.

The peaks of 20 and 35 are 2.85 GB and 0.19 GB a sequence.
"""


def test_larger_size_that_fitted_by_luck_is_ignored():
    tried = [too_large(30), fitted(40, 2 * GB)]
    assert bracket(tried) == Bracket(feasible_max=0, infeasible_min=30)
    assert size_after(tried, lambda size: 1e9 + 3e8 * size) in range(1, 30)


def test_size_that_failed_later_is_too_large():
    assert bracket(CONTRADICTED) == Bracket(feasible_max=20, infeasible_min=35)
    assert size_after(CONTRADICTED) in range(21, 35)


def test_size_below_a_contradicted_one_is_tried():
    predicted_next = size_after(CONTRADICTED, lambda size: 2.7e9 + 1.94e8 * size)
    assert predicted_next in {33, 34}


# Prediction of a peak by smaller sizes.


ROUGHLY_PREDICTED = Machine(
    fixed_bytes=1e9, bytes_per_sequence=1e8, budget_bytes=9e9, constant_error=0.05
)
SMALLER_TRIALS = [fitted(size, ROUGHLY_PREDICTED.peak_bytes(size)) for size in (2, 30)]


@pytest.mark.parametrize(
    "prediction",
    [
        pytest.param(ROUGHLY_PREDICTED.prediction, id="corrected prediction"),
        pytest.param(None, id="line through two trials"),
    ],
)
def test_peak_is_predicted_from_smaller_sizes(prediction):
    predicted_bytes = predict_bytes(SMALLER_TRIALS, 60, prediction)
    # Both are exact, as memory grows evenly.
    assert predicted_bytes == ROUGHLY_PREDICTED.peak_bytes(60)


def test_peak_is_not_predicted_from_other_trials():
    failed = SizeTrial(micro_batch_size=20, fits=None)
    tried = [*SMALLER_TRIALS, fitted(60, 8 * GB), too_large(61), failed]
    prediction = ROUGHLY_PREDICTED.prediction
    assert predict_bytes(tried, 60, prediction) == predict_bytes(
        SMALLER_TRIALS, 60, prediction
    )


def test_one_trial_takes_the_constant_error_out():
    true_bytes = ROUGHLY_PREDICTED.peak_bytes(60)
    before_bytes = predict_bytes([], 60, ROUGHLY_PREDICTED.prediction)
    after_bytes = predict_bytes(SMALLER_TRIALS[:1], 60, ROUGHLY_PREDICTED.prediction)
    # 5 % of the fixed memory of 1 GB.
    assert before_bytes == true_bytes + 50_000_000
    assert after_bytes == true_bytes


def test_one_trial_alone_predicts_nothing():
    assert predict_bytes([], 60, None) is None
    assert predict_bytes(SMALLER_TRIALS[:1], 60, None) is None


# Searches with any prediction.


@settings(deadline=None)
@given(machine=ANY_MACHINE, predicted=st.booleans())
@example(machine=(*SLOWLY_GROWING, lambda size: 1.2e5 * size), predicted=True)
@example(machine=(*SLOWLY_GROWING, None), predicted=False)
def test_any_prediction_ends_in_the_right_answer(machine, predicted):
    max_size, budget_bytes, peak_bytes, predicted_bytes = machine
    prediction = Prediction(peak_bytes=predicted_bytes) if predicted else None
    # A logarithm of the sizes.
    most_trials = PATIENCE + 2 * math.log2(max_size + 1) + 1
    tried = search_all(
        peak_bytes, budget_bytes, max_size, prediction, most_trials=most_trials
    )
    known = bracket(tried)
    true_largest = bisect.bisect(range(1, max_size + 1), budget_bytes, key=peak_bytes)
    assert known.feasible_max == true_largest
    if true_largest == max_size:
        assert known.infeasible_min is None
    else:
        assert known.infeasible_min == true_largest + 1


@settings(deadline=None)
@given(machine=ANY_MACHINE, predicted=st.booleans())
def test_only_failed_sizes_are_tried_again(machine, predicted):
    max_size, budget_bytes, peak_bytes, predicted_bytes = machine
    prediction = Prediction(peak_bytes=predicted_bytes) if predicted else None
    undisturbed = search_all(peak_bytes, budget_bytes, max_size, prediction)
    # Every third size fails twice.
    tried = search_all(
        peak_bytes,
        budget_bytes,
        max_size,
        prediction,
        fails=lambda size, attempts: size % 3 == 0 and attempts < 2,
    )
    assert decided_sizes(tried) == decided_sizes(undisturbed)
    assert len(set(decided_sizes(tried))) == len(decided_sizes(tried))
    for trial, following in pairwise(tried):
        if trial.fits is None:
            assert following.micro_batch_size == trial.micro_batch_size


# Evaluation of a curve.


def recorded(need_of, evaluated: list[int]):
    """Return a function that records the sizes of which it returns the need."""

    def need_of_recorded(size: int) -> float:
        evaluated.append(size)
        return need_of(size)

    return need_of_recorded


@given(
    fixed=st.floats(-1e9, 1e9),
    slope=st.floats(1e-3, 1e9),
    limit=st.floats(-1e12, 1e12),
    step=st.sampled_from([1, 7, 1000]),
    low=st.integers(0, 50),
    sizes_above_low=st.integers(0, 20_000),
)
def test_largest_within_evaluates_no_size_twice(
    fixed, slope, limit, step, low, sizes_above_low
):
    top = low + sizes_above_low
    evaluated: list[int] = []

    def need_of(size: int) -> float:
        return fixed + slope * (size // step)

    largest = largest_within(recorded(need_of, evaluated), limit, low=low, top=top)
    assert low <= largest <= top
    assert largest == low or need_of(largest) <= limit
    assert largest == top or need_of(largest + 1) > limit
    assert all(low < size <= top for size in evaluated)
    # Every fourth size halves the range, and halving 20,000 sizes takes 15 times.
    assert len(evaluated) == len(set(evaluated)) <= 4 * 15


def test_straight_line_takes_few_evaluations():
    evaluated: list[int] = []
    need_of = recorded(lambda size: 7e9 + 1.7e8 * size, evaluated)
    # (94 - 7) / 0.17 = 511.8
    assert largest_within(need_of, 94e9, low=3, top=16_384) == 511
    assert len(evaluated) <= 5


@pytest.mark.parametrize(
    ("need_of", "limit", "largest"),
    [
        pytest.param(lambda size: 5, 5, 100, id="flat within the limit"),
        pytest.param(lambda size: 5, 4, 3, id="flat above the limit"),
        pytest.param(lambda size: -float(size), 5, 100, id="falling"),
    ],
)
def test_largest_within_of_curves_that_do_not_grow(need_of, limit, largest):
    evaluated: list[int] = []
    need_of_recorded = recorded(need_of, evaluated)
    assert largest_within(need_of_recorded, limit, low=3, top=100) == largest
    # Every fourth size halves the range, and halving 97 sizes takes 7 times.
    assert len(evaluated) <= 4 * 7
