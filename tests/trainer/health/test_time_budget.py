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
"""Time of the monotonic clock at which the process began, 50 s ago."""


@pytest.fixture
def clock(monkeypatch):
    """Both clocks, which stand still until they are moved."""
    clock = SimpleNamespace(now_s=START_S + 50)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(time, "time", lambda: clock.now_s + 1e9)
    return clock


@pytest.mark.parametrize(
    ("stop_after_s", "job_left_s", "left_s"),
    [
        (100.0, None, 50),
        (None, 30.0, 30),
        (100.0, 30.0, 30),
        (70.0, 30.0, 20),
    ],
)
def test_budget_ends_in_time_for_a_save(clock, stop_after_s, job_left_s, left_s):
    budget = TimeBudget(stop_after_s, START_S, job_left_s)
    # One and a half saves of 10 s, and 2 s to exit.
    clock.now_s += left_s - 17.1
    assert not budget.is_over(save_s=10.0, evaluation_due=False)
    clock.now_s += 0.2
    assert budget.is_over(save_s=10.0, evaluation_due=False)


def test_budget_without_limits_never_ends(clock):
    budget = TimeBudget(None, START_S, None)
    assert not budget.is_over(save_s=10.0, evaluation_due=False)
    clock.now_s += 1e12
    assert not budget.is_over(save_s=10.0, evaluation_due=False)


def test_budget_reserves_time_for_an_evaluation(clock):
    budget = TimeBudget(100.0, START_S)
    budget.evaluation_s = 5.0
    clock.now_s += 50 - 2 - 5 + 0.1
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert budget.is_over(save_s=0.0, evaluation_due=True)


def test_budget_reserves_time_for_the_slowest_step(clock):
    budget = TimeBudget(100.0, START_S)
    budget.step_s.extend([9.0, *[1.0] * 19])
    budget.evaluation_s = 5.0
    # Four times the step, as the numbers of some are late, and 2 s to exit.
    clock.now_s += 50 - 38 - 0.1
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert budget.is_over(save_s=0.0, evaluation_due=True)


def test_budget_forgets_slow_steps(clock):
    budget = TimeBudget(100.0, START_S)
    budget.step_s.extend([9.0, *[1.0] * 19])
    budget.evaluation_s = 5.0
    budget.step_s.append(1.0)
    clock.now_s += 50 - 38 - 0.1 + 27
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert not budget.is_over(save_s=0.0, evaluation_due=True)
    clock.now_s += 3
    assert not budget.is_over(save_s=0.0, evaluation_due=False)
    assert budget.is_over(save_s=0.0, evaluation_due=True)


@pytest.fixture
def squeue(monkeypatch):
    """A mock of the call of ``squeue``, which answers once and then fails."""
    answer = SimpleNamespace(stdout="  1:30\n")
    run = Mock(side_effect=[answer, OSError])
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return run


@pytest.mark.usefixtures("clock")
def test_end_of_job_is_read_from_the_environment(squeue):
    assert slurm_left_s({"SLURM_JOB_END_TIME": "1000000560.0"}) == 60
    assert slurm_left_s({"SLURM_JOB_END_TIME": "soon"}) is None
    assert squeue.call_count == 0


@pytest.mark.usefixtures("clock")
def test_end_of_job_is_requested_from_older_slurm(squeue):
    assert slurm_left_s({"SLURM_JOB_ID": "17"}) == 90
    assert "17" in squeue.call_args_list[0].args[0]
    assert slurm_left_s({"SLURM_JOB_ID": "17"}) is None  # it fails
    assert squeue.call_count == 2


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("environment", [{"SLURM_JOB_ID": "17; rm"}, {}])
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
