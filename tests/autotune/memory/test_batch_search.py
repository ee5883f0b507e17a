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
        return (
            -(-int(self._fixed + self._bytes_per_sequence * size) // self._step)
            * self._step
        )

    @property
    def truth(self) -> int:
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


@pytest.mark.parametrize(
    ("machine", "predicted", "first", "near_share"),
    [
        (Machine(fixed=5e8, bytes_per_sequence=3e7, budget=1e10), False, [1, 4], 0.1),
        (
            Machine(fixed=5e8, bytes_per_sequence=1e6, budget=1e10, step=20 * MIB),
            False,
            [1, 4, 16, 64],
            1.0,
        ),
        (
            Machine(
                fixed=1e9, bytes_per_sequence=1e7, budget=1.2e9, constant_error=9.0
            ),
            True,
            [1],
            1.0,
        ),
    ],
    ids=["a line", "hidden by steps of the allocator", "predicted not to fit"],
)
def test_sizes_grow_until_they_show_a_slope(machine, predicted, first, near_share):
    tried = decided_sizes(machine.search(predicted=predicted))
    assert tried[: len(first)] == first
    assert abs(tried[len(first)] - machine.truth) < near_share * machine.truth
    assert near_share == 1 or len(tried) <= 6


def trials(*peaks: tuple[int, int | None]) -> list[SizeTrial]:
    return [
        SizeTrial(micro_batch_size=size, fits=peak is not None, peak_bytes=peak)
        for size, peak in peaks
    ]


BUDGET = 95 * GB // 10
ODD = {10: 10e9, 11: 9.1e9, 12: 9.2e9}
CONTRADICTED = trials((20, 665 * GB // 100), (35, BUDGET), (36, None), (35, None))


@pytest.mark.parametrize(
    ("tried", "known", "wanted"),
    [
        (trials((1, None)), None, {None}),
        (trials((1, None)), lambda size: 1e9 + 1e7 * size, {None}),
        (trials((30, None), (40, 2 * GB)), lambda size: 1e9 + 3e8 * size, range(1, 30)),
        (CONTRADICTED, lambda size: 2.7e9 + 1.94e8 * size, {33, 34}),
        (CONTRADICTED, None, range(21, 35)),
        (
            trials((10, 94 * GB // 10), (14, None), (12, None)),
            lambda size: ODD.get(size, size * 1e9),
            {11},
        ),
    ],
    ids=[
        "no size",
        "no size as predicted",
        "fitted by luck",
        "contradicted",
        "contradicted without a prediction",
        "odd curve",
    ],
)
def test_next_size_respects_sizes_out_of_memory(tried, known, wanted):
    assert (
        next_size(
            tried, BUDGET, MAX_MICRO_BATCH_SIZE, known and Prediction(peak_bytes=known)
        )
        in wanted
    )
    too_large = min(trial.micro_batch_size for trial in tried if not trial.fits)
    sizes = [trial.micro_batch_size for trial in tried]
    fitting = max((size for size in sizes if size < too_large), default=0)
    assert bracket(tried) == Bracket(feasible_max=fitting, infeasible_min=too_large)


@pytest.mark.parametrize("predicted", [True, False])
def test_peak_is_predicted_from_smaller_sizes(
    predicted,
):
    machine = Machine(
        fixed=1e9, bytes_per_sequence=1e8, budget=9e9, constant_error=0.05
    )
    prediction = machine.prediction if predicted else None
    smaller = [
        SizeTrial(micro_batch_size=size, fits=True, peak_bytes=machine.peak(size))
        for size in (2, 30)
    ]
    others = [
        *trials((60, 8 * GB), (61, None)),
        SizeTrial(micro_batch_size=20, fits=None),
    ]
    predict_bytes = batch_search.predict_bytes
    predicted_bytes = predict_bytes([*smaller, *others], 60, prediction)
    assert predicted_bytes == predict_bytes(smaller, 60, prediction)
    assert predicted_bytes == pytest.approx(machine.peak(60), rel=0.01)
    before, after = (
        predict_bytes(tried, 60, prediction) for tried in ([], smaller[:1])
    )
    if predicted:  # one trial takes the constant error out
        assert before == pytest.approx(machine.peak(60), rel=0.02)
        assert abs(after - machine.peak(60)) < 0.3 * abs(before - machine.peak(60))
    else:
        assert before is after is None


def test_good_prediction_takes_few_trials():
    draw = random.Random(0)
    trials = []
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
        trials.append(len(tried))
    assert statistics.median(trials) <= 3
    assert max(trials) <= 6
    # An exact prediction takes one trial on each side.
    assert (
        len(
            Machine(fixed=1e9, bytes_per_sequence=1e9, budget=9.5e9).search(
                predicted=True
            )
        )
        == 2
    )


def test_neighbouring_sizes_show_no_slope():
    """A step that the prediction sees where there is none would make memory seem to
    shrink with the size."""
    machine = Machine(fixed=10 * GB, bytes_per_sequence=0.21 * GB, budget=98.7 * GB)
    uneven = Prediction(
        peak_bytes=lambda size: machine.peak(size) + 4 * GB * (size >= 418)
    )
    assert decided_sizes(
        search_all(machine.peak, machine.budget, MAX_MICRO_BATCH_SIZE, uneven)
    ) == [
        417,
        418,
        422,
        423,
    ]


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


@pytest.mark.parametrize(
    ("needs", "limit", "top", "largest", "max_evaluated"),
    [
        (lambda size: 7e9 + 1.7e8 * size, 94e9, 16_384, 511, 5),
        (lambda _: 5, 5, 100, 100, 60),
        (lambda _: 5, 4, 100, 3, 60),
        (lambda size: -float(size), 5, 100, 100, 60),
    ],
    ids=["straight", "flat within", "flat beyond", "falling"],
)
def test_largest_within_of_special_curves(needs, limit, top, largest, max_evaluated):
    evaluated: list[int] = []
    assert (
        largest_within(
            lambda size: evaluated.append(size) or needs(size), limit, low=3, top=top
        )
        == largest
    )
    assert len(evaluated) <= max_evaluated
