"""How long steps wait for data: on a GPU only as far as the device had nothing to do meanwhile."""

import time
from collections.abc import Iterator

from trainer.feed import MicroBatch
from trainer.stopwatch import Mark


class DataWait:
    """Takes micro-batches from a loader and counts the wait for them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Since it was last set."""
        self._last: Mark | None = None

    def take(self, loader: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step."""
        batches = []
        for _ in range(count):
            idle_before, asked_s = self._idle(), time.perf_counter()
            batches.append(next(loader))
            waited_s = time.perf_counter() - asked_s
            # A device that was still at work until somewhere in between has waited for about half of it.
            self.seconds += waited_s if idle_before else waited_s / 2 if self._idle() else 0.0
        return batches

    def gave(self, last: Mark) -> None:
        """What the device was given ends there."""
        self._last = last

    def _idle(self) -> bool:
        """Whether the device has done all that it was given; a CPU is this process, which asks."""
        return self._last is None or self._last.reached()
