"""A clock as a port: code that waits or stamps times is tested without waiting."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Source of the time and of waiting; by default the machine's own clock."""

    def monotonic_s(self) -> float:
        """Return seconds on CLOCK_MONOTONIC, the same for all processes of one boot."""
        return time.monotonic()

    def utc_now(self) -> datetime:
        """Return the current date and time, with UTC as its time zone."""
        return datetime.now(UTC)

    def sleep(self, duration_s: float) -> None:
        """Wait at least this long.

        Raises:
            ValueError: If the duration is negative.
        """
        time.sleep(duration_s)


class SystemClock(Clock):
    """The machine's own clock."""
