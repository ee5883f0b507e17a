import shutil
import subprocess
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.health.time_budget import TimeBudget, parse_slurm_time_s, slurm_left_s

START_S = 450.0
"""Time of the monotonic clock at which the process began."""
ELAPSED_S = 50.0
"""Seconds since then at the beginning of each test."""
STOP_AFTER_S = 100.0
"""Time limit of the run in ``budget``."""
LEFT_S = STOP_AFTER_S - ELAPSED_S
"""Seconds until that at the beginning of each test."""
EVALUATION_S = 5.0
SLOW_STEP_S = 9.0
STEP_S = 1.0
REMEMBERED_STEPS = 20
"""Number of last steps whose durations a budget remembers."""
RESERVED_STEPS = 4
"""Steps that a budget reserves, as the numbers of some are late."""
RESERVED_SAVES = 1.5
"""Saves that a budget reserves, as one may take longer than the last."""
EXIT_S = 2.0
"""Seconds that every budget reserves to exit."""
MOMENT_S = 0.1
"""Time by which a test is before, or after, the moment to stop."""
WALL_CLOCK_OFFSET_S = 1e9
"""Difference between the wall clock and the monotonic clock."""


@pytest.fixture
def clock(monkeypatch):
    """Both clocks, which stand still until they are moved."""
    clock = SimpleNamespace(now_s=START_S + ELAPSED_S)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(time, "time", lambda: clock.now_s + WALL_CLOCK_OFFSET_S)
    return clock


@pytest.fixture
def budget(clock):
    """A budget of ``STOP_AFTER_S``; its last evaluation took ``EVALUATION_S``."""
    budget = TimeBudget(STOP_AFTER_S, START_S)
    budget.evaluation_s = EVALUATION_S
    return budget


@pytest.mark.parametrize(
    ("stop_after_s", "job_left_s", "left_s"),
    [
        pytest.param(100.0, None, 50, id="limit of the run"),
        pytest.param(None, 30.0, 30, id="limit of the job"),
        pytest.param(100.0, 30.0, 30, id="limit of the job comes first"),
        pytest.param(70.0, 30.0, 20, id="limit of the run comes first"),
    ],
)
def test_budget_ends_in_time_for_a_save(clock, stop_after_s, job_left_s, left_s):
    budget = TimeBudget(stop_after_s, START_S, job_left_s)
    save_s = 10.0
    clock.now_s += left_s - RESERVED_SAVES * save_s - EXIT_S - MOMENT_S
    assert not budget.is_over(save_s=save_s, evaluation_due=False)
    clock.now_s += 2 * MOMENT_S
    assert budget.is_over(save_s=save_s, evaluation_due=False)


def test_budget_without_limits_never_ends(clock):
    budget = TimeBudget(None, START_S, None)
    assert not budget.is_over(save_s=10.0, evaluation_due=False)
    clock.now_s += 1e12
    assert not budget.is_over(save_s=10.0, evaluation_due=False)


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


@pytest.fixture
def squeue(monkeypatch):
    """A mock of the call of ``squeue``, which answers that 90 seconds are left."""
    run = Mock(return_value=SimpleNamespace(stdout="  1:30\n"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return run


@pytest.mark.usefixtures("clock")
def test_end_of_job_is_read_from_the_environment(squeue):
    end_s = WALL_CLOCK_OFFSET_S + START_S + ELAPSED_S + 60
    assert slurm_left_s({"SLURM_JOB_END_TIME": str(end_s)}) == 60
    assert squeue.call_count == 0


@pytest.mark.usefixtures("squeue")
def test_end_of_job_that_is_no_number_is_unknown():
    assert slurm_left_s({"SLURM_JOB_END_TIME": "soon"}) is None


@pytest.mark.usefixtures("clock")
def test_end_of_job_is_requested_from_older_slurm(squeue):
    assert slurm_left_s({"SLURM_JOB_ID": "17"}) == 90
    command = squeue.call_args.args[0]
    assert command[0] == "/bin/squeue"
    assert "17" in command


@pytest.mark.usefixtures("clock")
def test_end_of_job_is_unknown_if_squeue_fails(squeue):
    squeue.side_effect = OSError
    assert slurm_left_s({"SLURM_JOB_ID": "17"}) is None
    assert squeue.call_count == 1


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"SLURM_JOB_ID": "17; rm"}, id="not a number"),
        pytest.param({}, id="no job"),
    ],
)
def test_end_of_job_is_unknown_without_a_job_number(squeue, environment):
    assert slurm_left_s(environment) is None
    assert squeue.call_count == 0


@given(
    days=st.integers(1, 400),
    hours=st.integers(0, 23),
    minutes=st.integers(0, 59),
    seconds=st.integers(0, 59),
)
def test_parses_times_of_slurm(days, hours, minutes, seconds):
    assert parse_slurm_time_s(f"{seconds:02}") == seconds
    minutes_s = 60 * minutes + seconds
    assert parse_slurm_time_s(f"{minutes}:{seconds:02}") == minutes_s
    hours_s = 3600 * hours + minutes_s
    assert parse_slurm_time_s(f"{hours}:{minutes:02}:{seconds:02}") == hours_s
    days_s = 86_400 * days + hours_s
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    assert parse_slurm_time_s(text) == days_s


@pytest.mark.parametrize(
    "text", ["UNLIMITED", "NOT_SET", "INVALID", "", "1-", "1:2:3:4", "-5"]
)
def test_other_texts_are_no_time_limit(text):
    assert parse_slurm_time_s(text) is None
