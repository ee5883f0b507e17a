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
    """Memory that is affine in the rows, rounded up to allocator steps; and a
    prediction of it."""

    def __init__(
        self, *, fixed, per_row, budget, step=1, slope_error=0.0, constant_error=0.0
    ) -> None:
        self._fixed, self._per_row, self._step = fixed, per_row, step
        self.budget = int(budget)
        self.prediction = Prediction(
            peak_bytes=lambda rows: (
                fixed * (1 + constant_error) + per_row * (1 + slope_error) * rows
            ),
            unsure_bytes=0.1 * fixed,
        )

    def peak(self, rows: int) -> int:
        return -(-int(self._fixed + self._per_row * rows) // self._step) * self._step

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
    fails=lambda rows, again: False,
) -> list[SizeTrial]:
    """All trials of a search on a machine with such peaks.

    ``fails`` says which fail, by their rows and how often those were tried before.
    """
    tried: list[SizeTrial] = []
    while (
        rows := next_size(tried, budget, max_micro_batch_size, prediction)
    ) is not None:
        assert 1 <= rows <= max_micro_batch_size
        fits = (
            None
            if fails(rows, sum(one.micro_batch_size == rows for one in tried))
            else peak(rows) <= budget
        )
        tried.append(
            SizeTrial(
                micro_batch_size=rows,
                fits=fits,
                peak_bytes=peak(rows) if fits else None,
            )
        )
        assert len(tried) <= most_trials
    return tried


def told(tried: list[SizeTrial]) -> list[int]:
    return [one.micro_batch_size for one in tried if one.fits is not None]


@pytest.mark.parametrize(
    ("machine", "predicted", "first", "near_share"),
    [
        (Machine(fixed=5e8, per_row=3e7, budget=1e10), False, [1, 4], 0.1),
        (
            Machine(fixed=5e8, per_row=1e6, budget=1e10, step=20 * MIB),
            False,
            [1, 4, 16, 64],
            1.0,
        ),
        (
            Machine(fixed=1e9, per_row=1e7, budget=1.2e9, constant_error=9.0),
            True,
            [1],
            1.0,
        ),
    ],
    ids=["a line", "hidden by steps of the allocator", "predicted not to fit"],
)
def test_sizes_grow_until_they_show_a_slope_and_the_next_is_near_the_answer(
    machine, predicted, first, near_share
):
    tried = told(machine.search(predicted=predicted))
    assert tried[: len(first)] == first
    assert abs(tried[len(first)] - machine.truth) < near_share * machine.truth
    assert near_share == 1 or len(tried) <= 6


def trials(*peaks: tuple[int, int | None]) -> list[SizeTrial]:
    return [
        SizeTrial(micro_batch_size=rows, fits=peak is not None, peak_bytes=peak)
        for rows, peak in peaks
    ]


BUDGET = 95 * GB // 10
ODD = {10: 10e9, 11: 9.1e9, 12: 9.2e9}
REFUTED = trials((20, 665 * GB // 100), (35, BUDGET), (36, None), (35, None))


@pytest.mark.parametrize(
    ("tried", "known", "wanted"),
    [
        (trials((1, None)), None, {None}),
        (trials((1, None)), lambda rows: 1e9 + 1e7 * rows, {None}),
        (trials((30, None), (40, 2 * GB)), lambda rows: 1e9 + 3e8 * rows, range(1, 30)),
        (REFUTED, lambda rows: 2.7e9 + 1.94e8 * rows, {33, 34}),
        (REFUTED, None, range(21, 35)),
        (
            trials((10, 94 * GB // 10), (14, None), (12, None)),
            lambda rows: ODD.get(rows, rows * 1e9),
            {11},
        ),
    ],
    ids=[
        "no row",
        "no row as predicted",
        "fitted by luck",
        "refuted",
        "refuted without a prediction",
        "odd curve",
    ],
)
def test_the_next_size_follows_from_what_was_refused_and_what_fitted_below(
    tried, known, wanted
):
    assert (
        next_size(
            tried, BUDGET, MAX_MICRO_BATCH_SIZE, known and Prediction(peak_bytes=known)
        )
        in wanted
    )
    refused = min(one.micro_batch_size for one in tried if not one.fits)
    fitting = max(
        (one.micro_batch_size for one in tried if one.micro_batch_size < refused),
        default=0,
    )
    assert bracket(tried) == Bracket(feasible_max=fitting, infeasible_min=refused)


@pytest.mark.parametrize("predicted", [True, False])
def test_a_peak_is_predicted_by_two_smaller_sizes_or_by_what_is_known_beforehand(
    predicted,
):
    machine = Machine(fixed=1e9, per_row=1e8, budget=9e9, constant_error=0.05)
    prediction = machine.prediction if predicted else None
    smaller = [
        SizeTrial(micro_batch_size=rows, fits=True, peak_bytes=machine.peak(rows))
        for rows in (2, 30)
    ]
    others = [
        *trials((60, 8 * GB), (61, None)),
        SizeTrial(micro_batch_size=20, fits=None),
    ]
    predict_bytes = batch_search.predict_bytes
    found = predict_bytes([*smaller, *others], 60, prediction)
    assert found == predict_bytes(smaller, 60, prediction)
    assert found == pytest.approx(machine.peak(60), rel=0.01)
    before, after = (
        predict_bytes(tried, 60, prediction) for tried in ([], smaller[:1])
    )
    if predicted:  # one trial takes the constant error out
        assert before == pytest.approx(machine.peak(60), rel=0.02)
        assert abs(after - machine.peak(60)) < 0.3 * abs(before - machine.peak(60))
    else:
        assert before is after is None


def test_a_prediction_that_is_right_to_one_per_cent_takes_three_trials_and_never_more_than_six():
    draw = random.Random(0)
    trials = []
    for _ in range(300):
        machine = Machine(
            fixed=draw.uniform(1e9, 12e9),
            per_row=draw.uniform(3e7, 1.2e9),
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
    # Of an exact one.
    assert (
        len(Machine(fixed=1e9, per_row=1e9, budget=9.5e9).search(predicted=True)) == 2
    )


def test_sizes_next_to_each_other_do_not_tell_the_slope_of_an_uneven_prediction():
    """A step that the prediction sees where there is none would make memory seem to
    shrink with the size."""
    law = Machine(fixed=10 * GB, per_row=0.21 * GB, budget=98.7 * GB)
    uneven = Prediction(peak_bytes=lambda rows: law.peak(rows) + 4 * GB * (rows >= 418))
    assert told(search_all(law.peak, law.budget, MAX_MICRO_BATCH_SIZE, uneven)) == [
        417,
        418,
        422,
        423,
    ]


@st.composite
def any_machine(draw):
    """Peaks that never fall, and a curve that has nothing to do with them, is flat, or
    falls."""
    most = draw(st.integers(1, MAX_MICRO_BATCH_SIZE))
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, most), st.integers(0, 2 * GB)),
            min_size=1,
            max_size=8,
        )
    )
    per_row = draw(st.integers(0, 50_000_000))
    curve = draw(st.lists(st.floats(-1e11, 1e11), min_size=1, max_size=7))
    tilt = draw(st.floats(-1e8, 1e9))
    budget = draw(st.integers(0, 20 * GB))

    def peak(rows: int) -> int:
        return per_row * rows + sum(size for start, size in steps if rows >= start)

    return most, budget, peak, lambda rows: curve[rows % len(curve)] + tilt * rows


@settings(deadline=None)
@given(machine=any_machine(), predicted=st.booleans())
@example(
    machine=(
        MAX_MICRO_BATCH_SIZE,
        20 * GB,
        lambda rows: 100_000 * rows,
        lambda rows: 1.2e5 * rows,
    ),
    predicted=True,
)
@example(
    machine=(MAX_MICRO_BATCH_SIZE, 20 * GB, lambda rows: 100_000 * rows, None),
    predicted=False,
)
def test_any_curve_ends_in_the_right_answer_within_a_logarithm_of_the_sizes_and_only_failures_are_tried_twice(
    machine, predicted
):
    most, budget, peak, curve = machine
    prediction = Prediction(peak_bytes=curve) if predicted else None
    most_trials = batch_search.PATIENCE + 2 * math.log2(most + 1) + 1
    smooth = search_all(peak, budget, most, prediction, most_trials=most_trials)
    found = bracket(smooth)
    assert found.feasible_max == bisect.bisect(range(1, most + 1), budget, key=peak)
    assert (found.feasible_max, found.infeasible_min) == (
        most,
        None,
    ) or found.infeasible_min == found.feasible_max + 1
    tried = search_all(
        peak,
        budget,
        most,
        prediction,
        fails=lambda rows, again: rows % 3 == 0 and again < 2,
    )
    assert told(tried) == told(smooth)
    assert len(set(told(tried))) == len(told(tried))
    followed = [(one, later) for one, later in pairwise(tried) if one.fits is None]
    assert all(
        later.micro_batch_size == one.micro_batch_size for one, later in followed
    )


@given(
    st.floats(-1e9, 1e9),
    st.floats(1e-3, 1e9),
    st.floats(-1e12, 1e12),
    st.sampled_from([1, 7, 1000]),
    st.integers(0, 50),
    st.integers(0, 20_000),
)
def test_the_answer_is_that_of_looking_at_every_size_and_no_size_is_asked_about_twice(
    fixed, slope, limit, step, low, more
):
    top = low + more
    asked: list[int] = []

    def needs(size: int) -> float:
        assert low < size <= top
        asked.append(size)
        return fixed + slope * (size // step)

    found = largest_within(needs, limit, low=low, top=top)
    assert low <= found <= top
    assert found == low or fixed + slope * (found // step) <= limit
    assert found == top or fixed + slope * ((found + 1) // step) > limit
    assert len(asked) == len(set(asked)) <= 60


@pytest.mark.parametrize(
    ("needs", "limit", "top", "largest", "most_asked"),
    [
        (lambda size: 7e9 + 1.7e8 * size, 94e9, 16_384, 511, 5),
        (lambda _: 5, 5, 100, 100, 60),
        (lambda _: 5, 4, 100, 3, 60),
        (lambda size: -float(size), 5, 100, 100, 60),
    ],
    ids=["straight", "flat within", "flat beyond", "falling"],
)
def test_a_straight_law_takes_a_few_questions_and_one_that_does_not_grow_ends_at_either_end(
    needs, limit, top, largest, most_asked
):
    asked: list[int] = []
    assert (
        largest_within(
            lambda size: asked.append(size) or needs(size), limit, low=3, top=top
        )
        == largest
    )
    assert len(asked) <= most_asked
