import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.decide.posterior import MIB, Prediction, Tried
from autotune.decide.search import Bracket, bracket, next_rows, predict_bytes
from benchmarks.estimate import search
from benchmarks.simulated import SimulatedMachine

MAX_ROWS = 16_384
GB = 10**9


class Machine:
    """Memory that is affine in the rows, slightly curved, rounded up to allocator steps; and a prediction of it."""

    def __init__(
        self,
        *,
        fixed: float,
        per_row: float,
        budget: float,
        step: int = 1,
        curve: float = 0.0,
        slope_error: float = 0.0,
        constant_error: float = 0.0,
    ) -> None:
        self._fixed, self._per_row, self._step, self._curve = fixed, per_row, step, curve
        self.budget = int(budget)
        self.prediction = Prediction(
            peak_bytes=lambda rows: fixed * (1 + constant_error) + per_row * (1 + slope_error) * rows,
            slope_sigma=0.03,
            constant_sigma_bytes=max(1.0, 0.1 * fixed),
        )

    def peak(self, rows: int) -> int:
        return -(-int(self._fixed + self._per_row * rows * (1 + self._curve * rows)) // self._step) * self._step

    @property
    def truth(self) -> int:
        low, high = 0, MAX_ROWS + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle) <= self.budget else (low, middle)
        return low

    def search(
        self,
        *,
        predicted: bool,
        max_rows: int = MAX_ROWS,
        fails: Callable[[int, int], bool] = lambda rows, again: False,
    ) -> list[Tried]:
        """All trials; ``fails`` says which fail, by their rows and how often those were tried before."""
        tried: list[Tried] = []
        prediction = self.prediction if predicted else None
        while (rows := next_rows(tried, self.budget, max_rows, prediction)) is not None:
            assert 1 <= rows <= max_rows
            peak = self.peak(rows)
            if fails(rows, sum(one.rows == rows for one in tried)):
                tried.append(Tried(rows=rows, fits=None))
            elif peak <= self.budget:
                tried.append(Tried(rows=rows, fits=True, peak_bytes=peak))
            else:
                tried.append(Tried(rows=rows, fits=False))
            assert len(tried) < 100
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
    found = bracket(machine.search(predicted=predicted))
    assert found.feasible_max == machine.truth
    assert found.closed or found.feasible_max == MAX_ROWS


@settings(deadline=None)
@given(machine=MACHINES, predicted=st.booleans())
def test_no_size_is_tried_twice_unless_it_failed(machine, predicted):
    tried = machine.search(predicted=predicted, fails=lambda rows, again: rows % 3 == 0 and again == 0)
    assert len(set(told(tried))) == len(told(tried))
    for one, following in pairwise(tried):
        assert one.fits is not None or following.rows == one.rows
    assert bracket(tried).feasible_max == machine.truth


@settings(deadline=None)
@given(machine=MACHINES, predicted=st.booleans(), max_rows=st.integers(1, 60))
def test_nothing_above_the_limit_is_tried(machine, predicted, max_rows):
    tried = machine.search(predicted=predicted, max_rows=max_rows)
    assert bracket(tried).feasible_max == min(machine.truth, max_rows)


def test_an_exact_prediction_takes_the_two_trials_that_prove_it():
    for fixed, per_row, budget in ((5e8, 3e7, 1e10), (2e9, 3.3e8, 2e10), (1e8, 7e6, 3e9)):
        tried = Machine(fixed=fixed, per_row=per_row, budget=budget).search(predicted=True)
        assert len(tried) <= 4
    assert len(Machine(fixed=1e9, per_row=1e9, budget=9.5e9).search(predicted=True)) == 2


def test_simulated_machines_take_few_trials_and_are_never_answered_wrongly():
    found = [search(SimulatedMachine(seed), predicted=True) for seed in range(30)]
    assert all(right for _, right in found)
    trials = [count for count, _ in found]
    assert statistics.median(trials) <= 4
    assert max(trials) <= 8


@pytest.mark.slow
def test_without_a_prediction_simulated_machines_take_more_trials_and_are_answered_rightly_too():
    seeds = range(60)
    with_one, without = (
        [search(SimulatedMachine(seed), predicted=predicted) for seed in seeds] for predicted in (True, False)
    )
    assert all(right for _, right in without)
    assert statistics.mean(count for count, _ in without) > statistics.mean(count for count, _ in with_one)


def test_without_a_prediction_two_sizes_show_a_line_and_the_third_is_near_the_answer():
    machine = Machine(fixed=5e8, per_row=3e7, budget=1e10)
    tried = machine.search(predicted=False)
    assert told(tried)[:2] == [1, 4]
    assert abs(told(tried)[2] - machine.truth) < 0.1 * machine.truth
    assert len(tried) <= 6


def test_without_a_prediction_sizes_grow_until_allocator_steps_no_longer_hide_the_slope():
    machine = Machine(fixed=5e8, per_row=1e6, budget=1e10, step=20 * MIB)
    assert told(machine.search(predicted=False))[:4] == [1, 4, 16, 64]


@pytest.mark.parametrize("predicted", [True, False])
def test_a_size_that_failed_is_tried_again_at_once(predicted):
    machine = Machine(fixed=5e8, per_row=3e7, budget=1e10)
    undisturbed = machine.search(predicted=predicted)
    tried = machine.search(predicted=predicted, fails=lambda rows, again: again < 2)
    assert told(tried) == told(undisturbed)
    assert len(tried) == 3 * len(undisturbed)


def test_a_prediction_that_is_far_too_high_does_not_stop_the_search_above_it():
    machine = Machine(fixed=1e9, per_row=1e7, budget=2e10, slope_error=9.0)
    assert bracket(machine.search(predicted=True)).feasible_max == machine.truth


def test_a_prediction_of_more_than_the_budget_for_one_row_still_tries_one_row():
    machine = Machine(fixed=1e9, per_row=1e7, budget=1.2e9, constant_error=9.0)
    tried = machine.search(predicted=True)
    assert told(tried)[0] == 1
    assert bracket(tried).feasible_max == machine.truth


@pytest.mark.slow
def test_the_first_trial_is_more_likely_to_fit_than_not():
    fitted = 0
    for seed in range(100):
        machine = SimulatedMachine(seed)
        prediction = Prediction(
            peak_bytes=machine.predicted_bytes,
            slope_sigma=0.03,
            constant_sigma_bytes=0.1 * machine.predicted_bytes(0),
        )
        rows = next_rows([], machine.budget_bytes, MAX_ROWS, prediction)
        fitted += rows is not None and rows <= machine.truth
    assert 70 <= fitted <= 98


def test_a_search_that_meets_its_upper_limit_claims_no_refusal():
    tried = [
        Tried(rows=1, fits=True, peak_bytes=10),
        Tried(rows=4, fits=True, peak_bytes=40),
        Tried(rows=8, fits=True, peak_bytes=80),
    ]
    assert next_rows(tried, GB, 8) is None
    assert bracket(tried) == Bracket(feasible_max=8, infeasible_min=None)


def test_nothing_was_shown_before_the_first_trial():
    assert bracket([]) == Bracket(feasible_max=0, infeasible_min=None)
    assert not bracket([]).closed
    assert next_rows([], GB, 8) == 1


def test_failures_show_nothing():
    assert bracket([Tried(rows=5, fits=None)]) == Bracket(feasible_max=0, infeasible_min=None)


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


@pytest.mark.parametrize("slope", [0, -(10**7)])
def test_a_prediction_that_does_not_grow_leaves_a_search_that_ends(slope):
    # As of an allocator that reserves the same for several sizes.
    prediction = Prediction(
        peak_bytes=lambda rows: 5 * GB + slope * rows, slope_sigma=0.03, constant_sigma_bytes=0.1 * GB
    )
    machine = Machine(fixed=1e9, per_row=1e8, budget=5e9)
    tried: list[Tried] = []
    while (rows := next_rows(tried, machine.budget, 64, prediction)) is not None:
        fits = machine.peak(rows) <= machine.budget
        tried.append(Tried(rows=rows, fits=fits, peak_bytes=machine.peak(rows) if fits else None))
        assert len(tried) <= 64
    assert bracket(tried).feasible_max == machine.truth


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
