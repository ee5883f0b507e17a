"""The clock as a port, so that what waits or stamps times can be tested without waiting."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where time comes from: the machine's own clock."""

    def monotonic_s(self) -> float:
        """Return seconds on CLOCK_MONOTONIC, the same for all processes of one boot."""
        return time.monotonic()

    def utc_now(self) -> datetime:
        """Return the date and time, aware of being UTC."""
        return datetime.now(UTC)

    def sleep(self, duration_s: float) -> None:
        """Wait at least this long; raises ``ValueError`` if the duration is negative."""
        time.sleep(duration_s)


class SystemClock(Clock):
    """The machine's own clock."""
