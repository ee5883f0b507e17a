"""How long steps wait for data: on a GPU only as far as the device had nothing to do meanwhile."""

import time
from collections.abc import Callable, Iterator

from trainer.feed import MicroBatch
from trainer.stopwatch import Mark


class DataWait:
    """Takes micro-batches from a loader and counts the wait for them.

    Args:
        now: This moment in the device's queue.
    """

    def __init__(self, now: Callable[[], Mark]) -> None:
        self._now = now
        self._last: Mark | None = None
        self._waited_s = 0.0
        self._gaps: list[tuple[Mark, Mark]] = []

    def take(self, loader: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step."""
        batches = []
        for _ in range(count):
            last = self._last
            idle_before, asked_s = last is None or last.reached(), time.perf_counter()
            batches.append(next(loader))
            if idle_before or last is None:
                self._waited_s += time.perf_counter() - asked_s
            elif last.reached():
                # The device came to its end somewhere in between, and has waited from there to a mark that it reaches
                # at once.
                self._gaps.append((last, self._now()))
                self._last = None
        return batches

    def gave(self, last: Mark) -> None:
        """What the device was given ends there."""
        self._last = last

    def read(self) -> float:
        """Seconds since the last call; on a GPU it waits for the moment at which the last batch came, if at all."""
        for _, came in self._gaps:
            came.wait()
        waited_s = self._waited_s + sum(max(0.0, came.seconds_since(ended)) for ended, came in self._gaps)
        self._waited_s, self._gaps = 0.0, []
        return waited_s
