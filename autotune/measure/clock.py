"""The clock as a port, so that what waits or stamps times can be tested without waiting."""

import time
from datetime import UTC, datetime
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
