"""The clock of code that waits or reads the time; tests replace it by a fake."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Source of the time and of waiting.

    The methods here are those of the machine's own clock; a fake replaces them.
    """

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
