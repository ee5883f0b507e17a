"""Time for which a device waits for data.

The host submits work to a GPU ahead of its execution, so a slow loader costs nothing as
long as the GPU still has work.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from trainer.runtime.device_events import DeviceEvent

BatchT = TypeVar("BatchT")


class DataWait:
    """Timer of data loading.

    It takes micro-batches from a loader and adds up the time for which the device had
    to wait for them.

    Args:
        mark_now: Function that returns an event at the end of the device's queue.
        now_s: Clock of the host, in seconds.
    """

    def __init__(
        self,
        mark_now: Callable[[], DeviceEvent],
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mark_now = mark_now
        self._now_s = now_s
        self._end_of_work: DeviceEvent | None = None
        self._waited_s = 0.0
        self._gaps: list[_Gap] = []

    def take(self, loader: Iterator[BatchT], count: int) -> list[BatchT]:
        """Return the micro-batches of one optimizer step."""
        batches = []
        for _ in range(count):
            end_of_work = self._end_of_work
            if end_of_work is None or end_of_work.reached():
                batches.append(self._take_while_idle(loader))
            else:
                batches.append(self._take_while_busy(loader, end_of_work))
        return batches

    def _take_while_idle(self, loader: Iterator[BatchT]) -> BatchT:
        """Take a micro-batch for a device without work, which waits all the time."""
        began_s = self._now_s()
        batch = next(loader)
        self._waited_s += self._now_s() - began_s
        return batch

    def _take_while_busy(
        self, loader: Iterator[BatchT], end_of_work: DeviceEvent
    ) -> BatchT:
        """Take a micro-batch for a device that may run out of work meanwhile.

        Such a device waits from the end of its work until it reaches a mark that is
        submitted with the micro-batch. The gap is measured later, as reading it would
        make the host wait.
        """
        batch = next(loader)
        if end_of_work.reached():
            self._gaps.append(_Gap(began=end_of_work, ended=self._mark_now()))
            self._end_of_work = None
        return batch

    def device_busy_until(self, end_of_work: DeviceEvent) -> None:
        """Note the event at which the device's work so far ends."""
        self._end_of_work = end_of_work

    def take_waited_s(self) -> float:
        """Return the seconds waited since the last call.

        If a GPU ran out of work, wait until it has passed that point.
        """
        waited_s = self._waited_s + sum(gap.measure_s() for gap in self._gaps)
        self._waited_s = 0.0
        self._gaps = []
        return waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Time in which a device had no work."""

    began: DeviceEvent
    ended: DeviceEvent

    def measure_s(self) -> float:
        """Wait for the end of the gap, and return its length in seconds."""
        self.ended.wait()
        # The clocks of events differ a little: a very short gap may seem negative.
        return max(0.0, self.ended.seconds_since(self.began))
