import bisect
import math
import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.memory.decide import batch_search
from autotune.memory.decide.batch_search import (
    MIB,
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


class Machine:
    """A machine whose memory is affine in the size, with a prediction of it.

    Peaks are rounded up to steps of the allocator.
    """

    def __init__(
        self,
        *,
        fixed,
        bytes_per_sequence,
        budget,
        step=1,
        slope_error=0.0,
        constant_error=0.0,
    ) -> None:
        self._fixed = fixed
        self._bytes_per_sequence = bytes_per_sequence
        self._step = step
        self.budget = int(budget)
        self.prediction = Prediction(
            peak_bytes=lambda size: (
                fixed * (1 + constant_error)
                + bytes_per_sequence * (1 + slope_error) * size
            ),
            unsure_bytes=0.1 * fixed,
        )

    def peak(self, size: int) -> int:
        exact_bytes = int(self._fixed + self._bytes_per_sequence * size)
        # Two negations round the division up instead of down.
        return -(-exact_bytes // self._step) * self._step

    @property
    def truth(self) -> int:
        """Return the largest size that fits."""
        return bisect.bisect(
            range(1, MAX_MICRO_BATCH_SIZE + 1), self.budget, key=self.peak
        )

    def search(self, *, predicted: bool) -> list[SizeTrial]:
        return search_all(
            self.peak,
            self.budget,
            MAX_MICRO_BATCH_SIZE,
            self.prediction if predicted else None,
        )


def search_all(
    peak,
    budget,
    max_micro_batch_size,
    prediction,
    *,
    most_trials=99,
    fails=lambda size, attempts: False,
) -> list[SizeTrial]:
    """Return all trials of a search on a machine with such peaks.

    ``fails`` selects trials that fail, by their size and their number of attempts.
    """
    tried: list[SizeTrial] = []
    while True:
        size = next_size(tried, budget, max_micro_batch_size, prediction)
        if size is None:
            return tried
        assert 1 <= size <= max_micro_batch_size
        attempts = sum(trial.micro_batch_size == size for trial in tried)
        fits = None if fails(size, attempts) else peak(size) <= budget
        tried.append(
            SizeTrial(
                micro_batch_size=size,
                fits=fits,
                peak_bytes=peak(size) if fits else None,
            )
        )
        assert len(tried) <= most_trials


def decided_sizes(tried: list[SizeTrial]) -> list[int]:
    return [trial.micro_batch_size for trial in tried if trial.fits is not None]


def test_two_sizes_show_a_slope():
    machine = Machine(fixed=5e8, bytes_per_sequence=3e7, budget=1e10)
    first, second, third, *others = decided_sizes(machine.search(predicted=False))
    assert (first, second) == (1, 4)
    assert abs(third - machine.truth) < 0.1 * machine.truth
    assert len(others) <= 3


def test_sizes_grow_until_they_show_a_slope():
    """Pages of the allocator hide the slope of small sizes."""
    machine = Machine(fixed=5e8, bytes_per_sequence=1e6, budget=1e10, step=20 * MIB)
    *growing, near = decided_sizes(machine.search(predicted=False))[:5]
    assert growing == [1, 4, 16, 64]
    assert abs(near - machine.truth) < machine.truth


def test_model_predicted_not_to_fit_is_tried():
    machine = Machine(
        fixed=1e9, bytes_per_sequence=1e7, budget=1.2e9, constant_error=9.0
    )
    first, second, *_ = decided_sizes(machine.search(predicted=True))
    assert first == 1
    assert abs(second - machine.truth) < machine.truth


def trials(*peaks: tuple[int, int | None]) -> list[SizeTrial]:
    """Return trials of sizes with their peaks; None ran out of memory."""
    return [
        SizeTrial(micro_batch_size=size, fits=peak is not None, peak_bytes=peak)
        for size, peak in peaks
    ]


BUDGET = 95 * GB // 10
CONTRADICTED = trials((20, 665 * GB // 100), (35, BUDGET), (36, None), (35, None))
"""35 sequences fitted exactly, then did not; peaks are 2.85 GB and 0.19 GB a
sequence."""


def known_bracket(tried: list[SizeTrial]) -> Bracket:
    """Return what trials tell: sizes from the smallest out of memory on do not fit."""
    too_large = min(trial.micro_batch_size for trial in tried if not trial.fits)
    smaller = [
        trial.micro_batch_size for trial in tried if trial.micro_batch_size < too_large
    ]
    return Bracket(feasible_max=max(smaller, default=0), infeasible_min=too_large)


def size_after(tried: list[SizeTrial], predicted=None) -> int | None:
    """Return the size to try next, given the predicted peak by size, if any."""
    assert bracket(tried) == known_bracket(tried)
    prediction = None if predicted is None else Prediction(peak_bytes=predicted)
    return next_size(tried, BUDGET, MAX_MICRO_BATCH_SIZE, prediction)


def test_search_ends_if_one_sequence_does_not_fit():
    tried = trials((1, None))
    assert size_after(tried) is None
    assert size_after(tried, lambda size: 1e9 + 1e7 * size) is None


def test_larger_size_that_fitted_by_luck_is_ignored():
    tried = trials((30, None), (40, 2 * GB))
    assert size_after(tried, lambda size: 1e9 + 3e8 * size) in range(1, 30)


def test_size_that_failed_later_is_too_large():
    assert size_after(CONTRADICTED, lambda size: 2.7e9 + 1.94e8 * size) in {33, 34}
    assert size_after(CONTRADICTED) in range(21, 35)


def test_odd_prediction_stays_between_the_bounds():
    """A prediction that falls between two tried sizes does not lead out of them."""

    def odd(size):
        return {10: 10e9, 11: 9.1e9, 12: 9.2e9}.get(size, size * 1e9)

    assert size_after(trials((10, 94 * GB // 10), (14, None), (12, None)), odd) == 11


PREDICTED = Machine(fixed=1e9, bytes_per_sequence=1e8, budget=9e9, constant_error=0.05)
SMALLER = [
    SizeTrial(micro_batch_size=size, fits=True, peak_bytes=PREDICTED.peak(size))
    for size in (2, 30)
]


@pytest.mark.parametrize("prediction", [PREDICTED.prediction, None])
def test_peak_is_predicted_from_smaller_sizes(prediction):
    larger = trials((60, 8 * GB), (61, None))
    failed = SizeTrial(micro_batch_size=20, fits=None)
    predicted_bytes = predict_bytes([*SMALLER, *larger, failed], 60, prediction)
    assert predicted_bytes == predict_bytes(SMALLER, 60, prediction)
    assert predicted_bytes == pytest.approx(PREDICTED.peak(60), rel=0.01)


def test_one_trial_takes_the_constant_error_out():
    before = predict_bytes([], 60, PREDICTED.prediction)
    after = predict_bytes(SMALLER[:1], 60, PREDICTED.prediction)
    assert before == pytest.approx(PREDICTED.peak(60), rel=0.02)
    error = abs(after - PREDICTED.peak(60))
    assert error < 0.3 * abs(before - PREDICTED.peak(60))


def test_one_trial_predicts_nothing_by_itself():
    assert predict_bytes([], 60, None) is None
    assert predict_bytes(SMALLER[:1], 60, None) is None


def test_good_prediction_takes_few_trials():
    draw = random.Random(0)
    trial_counts = []
    for _ in range(300):
        machine = Machine(
            fixed=draw.uniform(1e9, 12e9),
            bytes_per_sequence=draw.uniform(3e7, 1.2e9),
            step=2 * MIB,
            budget=draw.choice([24e9, 80e9, 94e9, 141e9]),
            slope_error=draw.uniform(-0.01, 0.01),
            constant_error=draw.uniform(-0.01, 0.01),
        )
        tried = machine.search(predicted=True)
        assert bracket(tried).feasible_max == machine.truth
        trial_counts.append(len(tried))
    assert statistics.median(trial_counts) <= 3
    assert max(trial_counts) <= 6


def test_exact_prediction_takes_a_trial_on_each_side():
    machine = Machine(fixed=1e9, bytes_per_sequence=1e9, budget=9.5e9)
    assert len(machine.search(predicted=True)) == 2


def test_neighbouring_sizes_show_no_slope():
    """A step that the prediction sees where there is none would make memory seem to
    shrink with the size."""
    machine = Machine(fixed=10 * GB, bytes_per_sequence=0.21 * GB, budget=98.7 * GB)

    def uneven_bytes(size: int) -> float:
        return machine.peak(size) + (4 * GB if size >= 418 else 0)

    tried = search_all(
        machine.peak,
        machine.budget,
        MAX_MICRO_BATCH_SIZE,
        Prediction(peak_bytes=uneven_bytes),
    )
    assert decided_sizes(tried) == [417, 418, 422, 423]


@st.composite
def any_machine(draw):
    """Draw peaks that never fall, and a curve that has nothing to do with them.

    The curve may be flat, or fall.
    """
    max_size = draw(st.integers(1, MAX_MICRO_BATCH_SIZE))
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, max_size), st.integers(0, 2 * GB)),
            min_size=1,
            max_size=8,
        )
    )
    bytes_per_sequence = draw(st.integers(0, 50_000_000))
    curve = draw(st.lists(st.floats(-1e11, 1e11), min_size=1, max_size=7))
    tilt = draw(st.floats(-1e8, 1e9))
    budget = draw(st.integers(0, 20 * GB))

    def peak(size: int) -> int:
        return bytes_per_sequence * size + sum(
            step_bytes for start, step_bytes in steps if size >= start
        )

    return max_size, budget, peak, lambda size: curve[size % len(curve)] + tilt * size


@settings(deadline=None)
@given(machine=any_machine(), predicted=st.booleans())
@example(
    machine=(
        MAX_MICRO_BATCH_SIZE,
        20 * GB,
        lambda size: 100_000 * size,
        lambda size: 1.2e5 * size,
    ),
    predicted=True,
)
@example(
    machine=(MAX_MICRO_BATCH_SIZE, 20 * GB, lambda size: 100_000 * size, None),
    predicted=False,
)
def test_any_prediction_ends_in_the_right_answer(machine, predicted):
    max_size, budget, peak, curve = machine
    prediction = Prediction(peak_bytes=curve) if predicted else None
    # A logarithm of the sizes.
    most_trials = batch_search.PATIENCE + 2 * math.log2(max_size + 1) + 1
    smooth = search_all(peak, budget, max_size, prediction, most_trials=most_trials)
    known = bracket(smooth)
    true_max = bisect.bisect(range(1, max_size + 1), budget, key=peak)
    assert known.feasible_max == true_max
    if known.infeasible_min is None:
        assert known.feasible_max == max_size
    else:
        assert known.infeasible_min == known.feasible_max + 1
    # Only sizes that failed are tried twice, at once, and change nothing else.
    tried = search_all(
        peak,
        budget,
        max_size,
        prediction,
        fails=lambda size, attempts: size % 3 == 0 and attempts < 2,
    )
    assert decided_sizes(tried) == decided_sizes(smooth)
    assert len(set(decided_sizes(tried))) == len(decided_sizes(tried))
    for trial, following in pairwise(tried):
        if trial.fits is None:
            assert following.micro_batch_size == trial.micro_batch_size


@given(
    st.floats(-1e9, 1e9),
    st.floats(1e-3, 1e9),
    st.floats(-1e12, 1e12),
    st.sampled_from([1, 7, 1000]),
    st.integers(0, 50),
    st.integers(0, 20_000),
)
def test_largest_within_evaluates_no_size_twice(fixed, slope, limit, step, low, more):
    top = low + more
    evaluated: list[int] = []

    def needs(size: int) -> float:
        assert low < size <= top
        evaluated.append(size)
        return fixed + slope * (size // step)

    largest = largest_within(needs, limit, low=low, top=top)
    assert low <= largest <= top
    assert largest == low or fixed + slope * (largest // step) <= limit
    assert largest == top or fixed + slope * ((largest + 1) // step) > limit
    assert len(evaluated) == len(set(evaluated)) <= 60


def test_straight_line_takes_few_evaluations():
    evaluated: list[int] = []

    def needs(size: int) -> float:
        evaluated.append(size)
        return 7e9 + 1.7e8 * size

    # (94 - 7) / 0.17 = 511.8
    assert largest_within(needs, 94e9, low=3, top=16_384) == 511
    assert len(evaluated) <= 5


@pytest.mark.parametrize(
    ("needs", "limit", "largest"),
    [
        pytest.param(lambda size: 5, 5, 100, id="flat within the limit"),
        pytest.param(lambda size: 5, 4, 3, id="flat above the limit"),
        pytest.param(lambda size: -float(size), 5, 100, id="falling"),
    ],
)
def test_largest_within_of_curves_that_do_not_grow(needs, limit, largest):
    evaluated: list[int] = []

    def recorded(size: int) -> float:
        evaluated.append(size)
        return needs(size)

    assert largest_within(recorded, limit, low=3, top=100) == largest
    assert len(evaluated) <= 60
