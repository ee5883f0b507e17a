"""One suite for every clock."""

from datetime import UTC, timedelta

import pytest

from autotune.measure.clock import Clock, SystemClock
from tests.fakes import FakeClock


@pytest.fixture(params=[SystemClock, FakeClock])
def clock(request) -> Clock:
    return request.param()


def test_time_never_goes_back_and_sleep_lasts_as_long_as_asked_by_clock_and_calendar(clock):
    times = [clock.monotonic_s() for _ in range(100)]
    assert times == sorted(times)
    before = clock.utc_now()
    assert before.tzinfo is UTC
    clock.sleep(0.03125)  # exact in binary, so that no rounding shortens it
    assert clock.monotonic_s() - times[-1] >= 0.03125
    assert clock.utc_now() - before >= timedelta(milliseconds=15)


def test_negative_sleep_is_refused(clock):
    with pytest.raises(ValueError, match="negative"):
        clock.sleep(-1)
