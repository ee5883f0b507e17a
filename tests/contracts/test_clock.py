"""One suite for every clock."""

from datetime import UTC, timedelta

import pytest

from autotune.measure.clock import Clock, SystemClock
from tests.fakes import FakeClock


@pytest.fixture(params=[SystemClock, FakeClock])
def clock(request) -> Clock:
    return request.param()


def test_monotonic_time_never_goes_back(clock):
    times = [clock.monotonic_s() for _ in range(100)]
    assert times == sorted(times)


def test_sleep_lasts_at_least_as_long_as_asked(clock):
    before_s = clock.monotonic_s()
    clock.sleep(0.03125)  # exact in binary, so that no rounding shortens it
    assert clock.monotonic_s() - before_s >= 0.03125


def test_calendar_moves_with_sleep(clock):
    before = clock.utc_now()
    clock.sleep(0.03125)  # exact in binary, so that no rounding shortens it
    assert clock.utc_now() - before >= timedelta(milliseconds=15)


def test_now_is_aware_of_utc(clock):
    assert clock.utc_now().tzinfo is UTC


def test_negative_sleep_is_refused(clock):
    with pytest.raises(ValueError, match="negative"):
        clock.sleep(-1)
