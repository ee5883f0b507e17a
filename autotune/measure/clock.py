"""The clock as a port, so that what waits or stamps times can be tested without waiting."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def monotonic_s(self) -> float:
        """Seconds on CLOCK_MONOTONIC, the same for all processes of one boot."""
        ...

    def utc_now(self) -> datetime:
        """The date and time, aware of being UTC."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Wait at least this long.

        Raises:
            ValueError: If the duration is negative.
        """
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic_s(self) -> float:
        """Seconds on CLOCK_MONOTONIC."""
        return time.monotonic()

    def utc_now(self) -> datetime:
        """The date and time in UTC."""
        return datetime.now(UTC)

    def sleep(self, duration_s: float) -> None:
        """Wait; raises ``ValueError`` for a negative duration."""
        time.sleep(duration_s)


class FakeClock:
    """A clock that moves only when it is told to, or when someone sleeps.

    Args:
        monotonic_s: Where the monotonic clock starts.
        utc: Where the calendar starts.
    """

    def __init__(self, *, monotonic_s: float = 1000.0, utc: datetime = datetime(2025, 1, 1, tzinfo=UTC)) -> None:
        self._start_utc = utc
        self._start_s = monotonic_s
        self._now_s = monotonic_s

    def monotonic_s(self) -> float:
        """Seconds on the pretended CLOCK_MONOTONIC."""
        return self._now_s

    def utc_now(self) -> datetime:
        """The pretended date and time."""
        return self._start_utc + timedelta(seconds=self._now_s - self._start_s)

    def sleep(self, duration_s: float) -> None:
        """Move on at once; raises ``ValueError`` for a negative duration."""
        if duration_s < 0:
            raise ValueError(f"cannot sleep for {duration_s} s: the duration must not be negative")
        self._now_s += duration_s
