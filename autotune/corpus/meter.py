"""How fast a stage goes."""

import time
from collections.abc import Callable

from autotune.core.units import format_bytes, format_count

Update = Callable[[float, float | None, str], None]
"""Called with (done, total or None, note)."""


class Meter:
    """Adds up what is done, and says at what rate; what an earlier run did counts as done, and not for the rate."""

    def __init__(self, update: Update, total: int, *, in_bytes: bool) -> None:
        self._update, self._total, self._in_bytes = update, total, in_bytes
        self._done = self._fresh = 0
        self._started_s = time.monotonic()

    def add(self, amount: int, *, fresh: bool) -> None:
        """Note that so much more is done."""
        self._done += amount
        self._fresh += amount if fresh else 0
        self._update(self._done, self._total, self._note())

    def finish(self) -> None:
        """The stage is over, even if not all of it was needed."""
        if self._done != self._total:
            self._update(self._done, self._done, self._note())

    def _note(self) -> str:
        seconds = time.monotonic() - self._started_s
        if not self._in_bytes:
            return f"{format_count(self._done)} of {format_count(self._total)} tasks"
        rate = f", {format_bytes(round(self._fresh / seconds))}/s" if self._fresh and seconds > 0 else ""
        return f"{format_bytes(self._done)} of {format_bytes(self._total)}{rate}"
