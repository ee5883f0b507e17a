import time
from types import SimpleNamespace

import pytest

from trainer.health.time_budget import TimeBudget

START_S = 450.0
"""Time of the monotonic clock at which the process began."""
ELAPSED_S = 50.0
"""Time since then at the beginning of each test."""
STOP_AFTER_S = 100.0
"""Time limit of the run in ``budget``."""
LEFT_S = STOP_AFTER_S - ELAPSED_S
"""Time until that limit at the beginning of each test."""
EVALUATION_S = 5.0
SLOW_STEP_S = 9.0
STEP_S = 1.0
SAVE_S = 10.0
REMEMBERED_STEPS = 20
"""Number of last steps whose durations a budget remembers."""
RESERVED_STEPS = 4
"""Steps that a budget reserves, as the numbers of some are late."""
RESERVED_SAVES = 1.5
"""Saves that a budget reserves, as one may take longer than the last."""
EXIT_S = 2.0
"""Time that a budget reserves to exit."""
MOMENT_S = 0.1
"""Time by which a test is before, or after, the moment to stop."""


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, which stands still unless a test moves it."""
    clock = SimpleNamespace(now_s=START_S + ELAPSED_S)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def budget(clock):
    """A budget of ``STOP_AFTER_S``; its last evaluation took ``EVALUATION_S``."""
    budget = TimeBudget(STOP_AFTER_S, started_s=START_S)
    budget.evaluation_s = EVALUATION_S
    return budget


@pytest.mark.parametrize(
    ("stop_after_s", "job_left_s", "left_s"),
    [
        # The limit of the run counts from its start, 50 s ago.
        pytest.param(100.0, None, 50.0, id="limit of the run"),
        pytest.param(None, 30.0, 30.0, id="limit of the job"),
        pytest.param(100.0, 30.0, 30.0, id="limit of the job comes first"),
        pytest.param(70.0, 30.0, 20.0, id="limit of the run comes first"),
    ],
)
def test_budget_ends_in_time_for_a_save(clock, stop_after_s, job_left_s, left_s):
    budget = TimeBudget(stop_after_s, started_s=START_S, slurm_left_s=job_left_s)
    clock.now_s += left_s - RESERVED_SAVES * SAVE_S - EXIT_S - MOMENT_S
    assert not budget.is_over(save_s=SAVE_S, evaluation_due=False)
    clock.now_s += 2 * MOMENT_S
    assert budget.is_over(save_s=SAVE_S, evaluation_due=False)


def test_budget_without_limits_never_ends(clock):
    budget = TimeBudget(stop_after_s=None, started_s=START_S, slurm_left_s=None)
    assert not budget.is_over(save_s=SAVE_S, evaluation_due=False)
    clock.now_s += 1e12  # 30,000 years
    assert not budget.is_over(save_s=SAVE_S, evaluation_due=False)


def test_budget_reserves_time_for_an_evaluation(budget, clock):
    clock.now_s += LEFT_S - EXIT_S - EVALUATION_S + MOMENT_S
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert budget.is_over(save_s=0.0, evaluation_due=True)


def test_budget_reserves_time_for_the_slowest_step(budget, clock):
    budget.step_s.extend([SLOW_STEP_S, *[STEP_S] * (REMEMBERED_STEPS - 1)])
    clock.now_s += LEFT_S - RESERVED_STEPS * SLOW_STEP_S - EXIT_S - MOMENT_S
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert budget.is_over(save_s=0.0, evaluation_due=True)


def test_budget_forgets_slow_steps(budget, clock):
    budget.step_s.extend([SLOW_STEP_S, *[STEP_S] * REMEMBERED_STEPS])
    clock.now_s += LEFT_S - RESERVED_STEPS * STEP_S - EXIT_S - MOMENT_S
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    clock.now_s += 2 * MOMENT_S
    assert budget.is_over(save_s=0.0, evaluation_due=False)


def test_budget_reserves_steps_besides_an_evaluation(budget, clock):
    budget.step_s.extend([STEP_S] * REMEMBERED_STEPS)
    clock.now_s += LEFT_S - RESERVED_STEPS * STEP_S - EXIT_S - EVALUATION_S - MOMENT_S
    assert not budget.is_over(save_s=0.0, evaluation_due=True)
    clock.now_s += 2 * MOMENT_S
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert budget.is_over(save_s=0.0, evaluation_due=True)
