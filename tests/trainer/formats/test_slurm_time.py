"""Time until a SLURM job ends, from its environment or from ``squeue``."""

import shutil
import subprocess
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.formats.slurm_time import parse_slurm_time_s, slurm_left_s

NOW_S = 1e9
"""Time of the wall clock in all tests that read it."""


@pytest.fixture
def wall_clock(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW_S)


@pytest.fixture
def squeue(monkeypatch):
    """A mock of the call of ``squeue``, which answers that a minute and a half is left.

    It is the program of older versions of SLURM, which set no end in the environment.
    """
    run = Mock(return_value=SimpleNamespace(stdout="  1:30\n"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return run


@pytest.mark.usefixtures("wall_clock")
def test_end_of_job_is_read_from_the_environment(squeue):
    end_s = NOW_S + 60
    assert slurm_left_s({"SLURM_JOB_END_TIME": str(end_s)}) == 60
    assert squeue.call_count == 0


@pytest.mark.usefixtures("squeue")
def test_end_of_job_must_be_a_number():
    assert slurm_left_s({"SLURM_JOB_END_TIME": "soon"}) is None


def test_end_of_job_is_requested_from_older_slurm(squeue):
    assert slurm_left_s({"SLURM_JOB_ID": "17"}) == 90
    command = squeue.call_args.args[0]
    assert command[0] == "/bin/squeue"
    assert "17" in command


def test_end_of_job_is_unknown_if_squeue_fails(squeue):
    squeue.side_effect = OSError
    assert slurm_left_s({"SLURM_JOB_ID": "17"}) is None
    assert squeue.call_count == 1


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"SLURM_JOB_ID": "17; rm"}, id="not a number"),
        pytest.param({}, id="no job"),
    ],
)
def test_end_of_job_requires_a_job_number(squeue, environment):
    assert slurm_left_s(environment) is None
    assert squeue.call_count == 0


@given(
    days=st.integers(1, 400),
    hours=st.integers(0, 23),
    minutes=st.integers(0, 59),
    seconds=st.integers(0, 59),
)
def test_parses_times_of_slurm(days, hours, minutes, seconds):
    seconds_text = f"{seconds:02}"
    expected_s = seconds
    assert parse_slurm_time_s(seconds_text) == expected_s
    expected_s += 60 * minutes
    assert parse_slurm_time_s(f"{minutes}:{seconds_text}") == expected_s
    expected_s += 3600 * hours
    minutes_text = f"{minutes:02}:{seconds_text}"
    assert parse_slurm_time_s(f"{hours}:{minutes_text}") == expected_s
    expected_s += 86_400 * days
    assert parse_slurm_time_s(f"{days}-{hours:02}:{minutes_text}") == expected_s


@pytest.mark.parametrize(
    "text", ["UNLIMITED", "NOT_SET", "INVALID", "", "1-", "1:2:3:4", "-5"]
)
def test_other_texts_are_no_time_limit(text):
    assert parse_slurm_time_s(text) is None
