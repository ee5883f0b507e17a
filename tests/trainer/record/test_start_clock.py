import time
from types import SimpleNamespace

import pytest

from trainer.record.start_clock import StartClock

WALL_CLOCK_OFFSET_S = 500.0
"""Difference between the wall clock and the monotonic clock."""
PROCESS_BEGAN_S = 990.0
"""Start of the process on the wall clock."""
IMPORT_S = 10.0


@pytest.fixture
def wall_clock(monkeypatch):
    """The wall clock, which tests move by its ``now_s``; it begins after the imports.

    The monotonic clock moves with it.
    """
    clock = SimpleNamespace(now_s=PROCESS_BEGAN_S + IMPORT_S)
    monkeypatch.setattr(time, "time", lambda: clock.now_s)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s - WALL_CLOCK_OFFSET_S)
    return clock


@pytest.fixture
def start_clock(wall_clock):
    return StartClock(began_s=PROCESS_BEGAN_S)


@pytest.fixture
def start(wall_clock, start_clock):
    """Let phases of a start pass, of which the build has two parts."""

    def end_phase_after(seconds, phase):
        wall_clock.now_s += seconds
        start_clock.ended(phase)

    end_phase_after(0, "import")
    end_phase_after(2, "staging")
    end_phase_after(1, "build")
    end_phase_after(1, "first_batch")
    end_phase_after(2, "build")
    end_phase_after(4, "first_step")


@pytest.mark.usefixtures("start")
def test_every_second_of_startup_belongs_to_a_phase(wall_clock, start_clock):
    wall_clock.now_s += 50  # later steps are no part of the start
    startup = start_clock.startup().model_dump()
    assert {name: seconds for name, seconds in startup.items() if seconds} == {
        "import_s": IMPORT_S,
        "staging_s": 2,
        "build_s": 1 + 2,
        "first_batch_s": 1,
        "first_step_s": 4,
        "total_s": 20,
    }


@pytest.mark.usefixtures("start")
def test_total_time_includes_later_steps(wall_clock, start_clock):
    startup_s = 20
    assert start_clock.total_s() == startup_s
    wall_clock.now_s += 50
    assert start_clock.total_s() == startup_s + 50


def test_process_start_is_on_the_monotonic_clock(start_clock):
    expected_s = PROCESS_BEGAN_S - WALL_CLOCK_OFFSET_S
    assert start_clock.monotonic_start_s == expected_s
