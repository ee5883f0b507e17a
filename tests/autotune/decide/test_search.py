import bisect
import math
import random
import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.decide.search import (
    MIB,
    PATIENCE,
    Bracket,
    Prediction,
    Tried,
    bracket,
    largest_within,
    next_rows,
    predict_bytes,
)
from tests.simulators.memory import SimulatedMachine, search

MAX_ROWS = 16_384
GB = 10**9
Fails = Callable[[int, int], bool]


class Machine:
    """Memory that is affine in the rows, slightly curved, rounded up to allocator steps; and a prediction of it."""

    def __init__(self, *, fixed, per_row, budget, step=1, curve=0.0, slope_error=0.0, constant_error=0.0) -> None:
        self._fixed, self._per_row, self._step, self._curve = fixed, per_row, step, curve
        self.budget = int(budget)
        self.prediction = Prediction(
            peak_bytes=lambda rows: fixed * (1 + constant_error) + per_row * (1 + slope_error) * rows,
            unsure_bytes=0.1 * fixed,
        )

    def peak(self, rows: int) -> int:
        return -(-int(self._fixed + self._per_row * rows * (1 + self._curve * rows)) // self._step) * self._step

    @property
    def truth(self) -> int:
        return bisect.bisect(range(1, MAX_ROWS + 1), self.budget, key=self.peak)

    def search(
        self, *, predicted: bool, max_rows: int = MAX_ROWS, fails: Fails = lambda rows, again: False
    ) -> list[Tried]:
        """All trials; ``fails`` says which fail, by their rows and how often those were tried before."""
        return search_all(self.peak, self.budget, max_rows, self.prediction if predicted else None, fails=fails)


def search_all(peak, budget, max_rows, prediction, *, most_trials=99, fails=lambda rows, again: False) -> list[Tried]:
    """All trials of a search on a machine with such peaks."""
    tried: list[Tried] = []
    while (rows := next_rows(tried, budget, max_rows, prediction)) is not None:
        assert 1 <= rows <= max_rows
        failed = fails(rows, sum(one.rows == rows for one in tried))
        fits = None if failed else peak(rows) <= budget
        tried.append(Tried(rows=rows, fits=fits, peak_bytes=peak(rows) if fits else None))
        assert len(tried) <= most_trials
    return tried


def told(tried: list[Tried]) -> list[int]:
    return [one.rows for one in tried if one.fits is not None]


MACHINES = st.builds(
    Machine,
    fixed=st.floats(0, 6e9),
    per_row=st.floats(1e5, 1e9),
    budget=st.floats(1e8, 2e10),
    step=st.sampled_from([1, 512, 4096, 2 * MIB, 20 * MIB]),
    curve=st.floats(0, 0.001),
    slope_error=st.floats(-0.2, 0.2),
    constant_error=st.floats(-0.5, 0.5),
)


@settings(deadline=None)
@given(machine=MACHINES, predicted=st.booleans())
@example(machine=Machine(fixed=0.0, per_row=1e5, budget=2e10), predicted=False)
@example(machine=Machine(fixed=0.0, per_row=1e5, budget=2e10, slope_error=0.2), predicted=True)
def test_the_answer_is_exact_on_any_machine_however_wrong_the_prediction(machine, predicted):
    for max_rows in (MAX_ROWS, 60, 7):
        found = bracket(machine.search(predicted=predicted, max_rows=max_rows))
        assert found.feasible_max == min(machine.truth, max_rows)
        assert found.closed or (found.feasible_max, found.infeasible_min) == (max_rows, None)


@settings(deadline=None)
@given(machine=MACHINES, predicted=st.booleans())
def test_no_size_is_tried_twice_unless_it_failed(machine, predicted):
    tried = machine.search(predicted=predicted, fails=lambda rows, again: rows % 3 == 0 and again < 2)
    assert len(set(told(tried))) == len(told(tried))
    for one, following in pairwise(tried):
        assert one.fits is not None or following.rows == one.rows
    assert told(tried) == told(machine.search(predicted=predicted))


def test_simulated_machines_take_few_trials_and_are_never_answered_wrongly():
    found = [search(SimulatedMachine(seed), predicted=True) for seed in range(30)]
    assert all(right for _, right in found)
    trials = [count for count, _ in found]
    assert statistics.median(trials) <= 4
    assert max(trials) <= 10


def test_without_a_prediction_two_sizes_show_a_line_and_the_third_is_near_the_answer():
    machine = Machine(fixed=5e8, per_row=3e7, budget=1e10)
    tried = machine.search(predicted=False)
    assert told(tried)[:2] == [1, 4]
    assert abs(told(tried)[2] - machine.truth) < 0.1 * machine.truth
    assert len(tried) <= 6


def test_without_a_prediction_sizes_grow_until_allocator_steps_no_longer_hide_the_slope():
    machine = Machine(fixed=5e8, per_row=1e6, budget=1e10, step=20 * MIB)
    assert told(machine.search(predicted=False))[:4] == [1, 4, 16, 64]


def test_a_prediction_of_more_than_the_budget_for_one_row_still_tries_one_row():
    machine = Machine(fixed=1e9, per_row=1e7, budget=1.2e9, constant_error=9.0)
    tried = machine.search(predicted=True)
    assert told(tried)[0] == 1
    assert bracket(tried).feasible_max == machine.truth


@pytest.mark.parametrize("predicted", [True, False])
def test_one_row_that_does_not_fit_ends_the_search(predicted):
    prediction = Machine(fixed=1e9, per_row=1e7, budget=5e9).prediction if predicted else None
    assert next_rows([Tried(rows=1, fits=False)], 5 * GB, MAX_ROWS, prediction) is None


@pytest.mark.parametrize("predicted", [True, False])
def test_a_size_that_fitted_and_was_then_refused_is_refused_and_the_search_goes_on_below(predicted):
    machine = Machine(fixed=1e9, per_row=1e8, budget=5e9)
    tried = [*machine.search(predicted=predicted), Tried(rows=machine.truth, fits=False)]
    assert bracket(tried).infeasible_min == machine.truth
    following = next_rows(tried, machine.budget, MAX_ROWS, machine.prediction if predicted else None)
    assert bracket(tried).closed if following is None else following < machine.truth


def test_a_refusal_counts_against_larger_sizes_that_fitted_by_luck():
    tried = [Tried(rows=30, fits=False), Tried(rows=40, fits=True, peak_bytes=2 * GB)]
    assert bracket(tried) == Bracket(feasible_max=0, infeasible_min=30)
    prediction = Machine(fixed=1e9, per_row=1e8, budget=5e9).prediction
    following = next_rows(tried, 5 * GB, MAX_ROWS, prediction)
    assert following is not None
    assert following < 30


@pytest.mark.parametrize("predicted", [True, False])
def test_the_prediction_of_a_peak_uses_smaller_sizes_alone(predicted):
    machine = Machine(fixed=1e9, per_row=1e8, budget=9e9, constant_error=0.05)
    prediction = machine.prediction if predicted else None
    smaller = [Tried(rows=rows, fits=True, peak_bytes=machine.peak(rows)) for rows in (2, 30)]
    others = [Tried(rows=60, fits=True, peak_bytes=8 * GB), Tried(rows=61, fits=False), Tried(rows=20, fits=None)]
    found = predict_bytes([*smaller, *others], 60, prediction)
    assert found == predict_bytes(smaller, 60, prediction)
    assert found == pytest.approx(machine.peak(60), rel=0.01)


def test_the_prediction_of_a_peak_needs_two_sizes_that_fitted_or_something_known_beforehand():
    one = [Tried(rows=1, fits=True, peak_bytes=GB)]
    machine = Machine(fixed=1e9, per_row=1e8, budget=9e9)
    assert predict_bytes(one, 40, None) is None
    assert predict_bytes([], 40, machine.prediction) == pytest.approx(machine.peak(40), rel=0.02)


def test_a_trial_takes_the_constant_error_out_of_a_prediction():
    machine = Machine(fixed=2e9, per_row=1e8, budget=2e10, constant_error=0.15)
    first = Tried(rows=20, fits=True, peak_bytes=machine.peak(20))
    before, after = (predict_bytes(tried, 40, machine.prediction) for tried in ([], [first]))
    assert before is not None
    assert after is not None
    assert abs(after - machine.peak(40)) < 0.3 * abs(before - machine.peak(40))


def test_a_fit_that_a_second_try_refuted_does_not_spoil_what_other_trials_told():
    machine = Machine(fixed=3e8, per_row=2e7, budget=1e9, slope_error=0.02, constant_error=-0.05)
    told_before = [
        Tried(rows=20, fits=True, peak_bytes=700_000_000),
        Tried(rows=35, fits=True, peak_bytes=1_000_000_000),
        Tried(rows=36, fits=False),
        Tried(rows=35, fits=False),
    ]
    assert next_rows(told_before, machine.budget, MAX_ROWS, machine.prediction) in (33, 34)


def test_a_prediction_that_is_right_to_one_per_cent_takes_three_trials_and_never_more_than_six():
    draw = random.Random(0)
    trials = []
    for _ in range(300):
        fixed, per_row = draw.uniform(1e9, 12e9), draw.uniform(3e7, 1.2e9)
        machine = Machine(
            fixed=fixed,
            per_row=per_row,
            budget=draw.choice([24e9, 80e9, 94e9, 141e9]),
            step=2 * MIB,
            slope_error=draw.uniform(-0.01, 0.01),
            constant_error=draw.uniform(-0.01, 0.01),
        )
        tried = machine.search(predicted=True)
        assert bracket(tried).feasible_max == machine.truth
        trials.append(len(tried))
    assert statistics.median(trials) <= 3
    assert max(trials) <= 6
    assert len(Machine(fixed=1e9, per_row=1e9, budget=9.5e9).search(predicted=True)) == 2  # of an exact one


def test_the_smallest_curve_that_once_ended_in_an_error_has_a_next_size():
    tried = [Tried(rows=10, fits=True, peak_bytes=int(9.4e9)), Tried(rows=14, fits=False), Tried(rows=12, fits=False)]
    prediction = Prediction(peak_bytes=lambda n: {10: 10e9, 11: 9.1e9, 12: 9.2e9}.get(n, n * 1e9))
    assert next_rows(tried, int(9.5e9), 100, prediction) == 11


@st.composite
def any_machine(draw):
    """Peaks that never fall, and a curve that has nothing to do with them, is flat, or falls."""
    most = draw(st.integers(1, 3000))
    steps = draw(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2 * GB)), min_size=1, max_size=8))
    per_row = draw(st.integers(0, 50_000_000))
    curve = draw(st.lists(st.floats(-1e11, 1e11), min_size=1, max_size=7))
    tilt = draw(st.floats(-1e8, 1e9))
    budget = draw(st.integers(0, 20 * GB))

    def peak(rows: int) -> int:
        return per_row * rows + sum(size for start, size in steps if rows >= start)

    return most, budget, peak, lambda rows: curve[rows % len(curve)] + tilt * rows


@settings(deadline=None)
@given(machine=any_machine(), predicted=st.booleans())
def test_any_curve_ends_in_the_right_answer_within_a_logarithm_of_the_sizes(machine, predicted):
    most, budget, peak, curve = machine
    prediction = Prediction(peak_bytes=curve) if predicted else None
    most_trials = PATIENCE + 2 * math.log2(most + 1) + 1
    found = bracket(search_all(peak, budget, most, prediction, most_trials=most_trials))
    assert found.feasible_max == sum(peak(rows) <= budget for rows in range(1, most + 1))
    assert found.closed or found.feasible_max == most


@given(
    fixed=st.floats(-1e9, 1e9),
    slope=st.floats(1e-3, 1e9),
    limit=st.floats(-1e12, 1e12),
    step=st.sampled_from([1, 7, 1000]),
    low=st.integers(0, 50),
    more=st.integers(0, 20_000),
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


def test_a_straight_law_takes_a_few_questions():
    asked: list[int] = []

    def needs(size: int) -> float:
        asked.append(size)
        return 7e9 + 1.7e8 * size

    assert largest_within(needs, 94e9, low=0, top=16_384) == 511
    assert len(asked) <= 5


@pytest.mark.parametrize(
    ("needs", "limit", "largest"), [(lambda _: 5, 5, 100), (lambda _: 5, 4, 3), (lambda size: -float(size), 5, 100)]
)
def test_needs_that_do_not_grow_end_at_either_end(needs, limit, largest):
    assert largest_within(needs, limit, low=3, top=100) == largest
