import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.decide.search import Bracket, Tried, bracket, next_rows, predict_bytes, predict_rows

MAX_ROWS = 16384


def simulate(fixed: float, per_row: float, budget: float, step: int = 1, curve: float = 0.0) -> list[Tried]:
    """Search on a machine whose memory is affine, rounded up to allocator steps, and slightly curved."""
    tried: list[Tried] = []
    while (rows := next_rows(tried, int(budget), MAX_ROWS)) is not None:
        peak = -(-int(fixed + per_row * rows * (1 + curve * rows)) // step) * step
        tried.append(Tried(rows=rows, fits=peak <= budget, peak_bytes=peak if peak <= budget else None))
        assert len(tried) < 100
    return tried


def truth(fixed: float, per_row: float, budget: float, step: int = 1, curve: float = 0.0) -> int:
    rows = 0
    while rows < MAX_ROWS and -(-int(fixed + per_row * (rows + 1) * (1 + curve * (rows + 1))) // step) * step <= budget:
        rows += 1
    return rows


machines = st.fixed_dictionaries(
    {
        "fixed": st.floats(0, 1e9),
        "per_row": st.floats(1e5, 1e9),
        "budget": st.floats(1e8, 2e10),
        "step": st.sampled_from([1, 512, 2 * 2**20, 20 * 2**20]),
        "curve": st.floats(-0.0001, 0.001),
    }
)


@given(machine=machines)
@example(machine={"fixed": 0.0, "per_row": 1e5, "budget": 2e10, "step": 1, "curve": 0.0})
def test_the_answer_is_exact_on_any_machine(machine):
    if machine["curve"] < 0:  # memory that falls with more rows is no machine
        machine |= {"curve": 0.0}
    assert bracket(simulate(**machine)).feasible_max == truth(**machine)


@given(machine=machines)
def test_the_answer_is_proven_on_both_sides(machine):
    found = bracket(simulate(**machine | {"curve": 0.0}))
    assert found.closed or found.feasible_max == MAX_ROWS


def test_an_affine_machine_takes_four_trials_and_a_stepped_one_few_more():
    assert len(simulate(5e8, 3e7, 1e10)) == 4
    counts = [
        len(simulate(5e8, per_row, budget, step=20 * 2**20))
        for per_row in (2e6, 1e7, 3.3e7, 9e7, 2e8)
        for budget in (2e9, 7e9, 2e10)
    ]
    assert statistics.median(counts) <= 6
    assert max(counts) <= 12


def test_no_size_is_tried_twice():
    tried = [trial.rows for trial in simulate(1e8, 7e6, 3e9, step=20 * 2**20)]
    assert len(set(tried)) == len(tried)


def test_a_search_that_meets_its_upper_limit_claims_no_refusal():
    tried = [
        Tried(rows=1, fits=True, peak_bytes=10),
        Tried(rows=4, fits=True, peak_bytes=40),
        Tried(rows=8, fits=True, peak_bytes=80),
    ]
    assert next_rows(tried, 10**9, 8) is None
    assert bracket(tried) == Bracket(feasible_max=8, infeasible_min=None)


def test_one_row_that_does_not_fit_ends_the_search():
    assert next_rows([Tried(rows=1, fits=False)], 100, MAX_ROWS) is None


def test_a_size_that_failed_its_verification_is_refused_and_the_search_goes_on_below():
    tried = [*simulate(0, 10, 100), Tried(rows=10, fits=False)]
    assert bracket(tried).infeasible_min == 10
    following = next_rows(tried, 100, MAX_ROWS)
    assert following is not None
    assert following < 10


def test_predictions_need_two_sizes_that_fitted():
    assert predict_rows([Tried(rows=1, fits=True, peak_bytes=10)], 100) is None
    assert predict_rows([Tried(rows=1, fits=True, peak_bytes=10), Tried(rows=3, fits=True, peak_bytes=30)], 100) == 10


def test_the_prediction_of_a_peak_does_not_use_that_peak():
    tried = [
        Tried(rows=1, fits=True, peak_bytes=10),
        Tried(rows=3, fits=True, peak_bytes=30),
        Tried(rows=5, fits=True, peak_bytes=99),
    ]
    assert predict_bytes(tried, 5) == pytest.approx(50)
