"""Time for which a device waits for data, with simulated clocks of host and device."""

import math
from types import SimpleNamespace

import pytest

from trainer.runtime.data_wait import DataWait
from trainer.runtime.device_events import DeviceEvent

LOADING_S = 0.03
"""Time that a micro-batch takes to load, by the host's clock."""
WORK_ENDED_S = 100.0
"""Time at which the device ran out of work, by the device's clock."""
BATCH_CAME_S = 100.25
"""Time at which the device reached the next micro-batch, by the device's clock."""
IDLE_S = BATCH_CAME_S - WORK_ENDED_S


class SlowLoader:
    """Endless loader with the host's clock, which advances only while it loads."""

    def __init__(self) -> None:
        self._now_s = 5.0

    def now_s(self) -> float:
        return self._now_s

    def __iter__(self):
        return self

    def __next__(self) -> str:
        self._now_s += LOADING_S
        return "batch"

    def work_for(self, micro_batches: float) -> SimpleNamespace:
        """Return the event at which a device ends its work.

        Args:
            micro_batches: Number of micro-batches that are loaded meanwhile. With 1.5,
                the work ends while the second one is loaded.
        """
        end_s = self._now_s + micro_batches * LOADING_S
        return SimpleNamespace(
            moment=WORK_ENDED_S, reached=lambda: self._now_s >= end_s
        )


@pytest.fixture
def loader() -> SlowLoader:
    return SlowLoader()


def make_wait(
    loader: SlowLoader, end_of_work=None, *, batch_came_s=BATCH_CAME_S
) -> DataWait:
    """Return the timer of a device that works until an event, if it has any work."""
    wait = DataWait(mark_now=lambda: DeviceEvent(batch_came_s), now_s=loader.now_s)
    if end_of_work is not None:
        wait.device_busy_until(end_of_work)
    return wait


def test_returns_the_requested_micro_batches(loader):
    assert make_wait(loader).take(loader, 3) == ["batch"] * 3


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_idle_device_waits_while_data_is_loaded(loader, micro_batches):
    wait = make_wait(loader, loader.work_for(0))
    wait.take(loader, micro_batches)
    assert wait.take_waited_s() == pytest.approx(micro_batches * LOADING_S)


def test_device_waits_for_the_first_step(loader):
    wait = make_wait(loader)
    wait.take(loader, 1)
    assert wait.take_waited_s() == pytest.approx(LOADING_S)


def test_cpu_waits_wholly_for_data(loader):
    # The events of a CPU are reached at once.
    wait = make_wait(loader, DeviceEvent(1.0))
    wait.take(loader, 1)
    assert wait.take_waited_s() == pytest.approx(LOADING_S)


def test_busy_device_does_not_wait(loader):
    wait = make_wait(loader, loader.work_for(math.inf))
    wait.take(loader, 3)
    assert wait.take_waited_s() == 0.0


def test_device_waits_from_end_of_work(loader):
    wait = make_wait(loader, loader.work_for(0.5))
    wait.take(loader, 1)
    assert wait.take_waited_s() == pytest.approx(IDLE_S)


def test_device_without_work_waits_for_later_batches(loader):
    # Its work ends during the second micro-batch, so it has none during the third.
    wait = make_wait(loader, loader.work_for(1.5))
    wait.take(loader, 3)
    assert wait.take_waited_s() == pytest.approx(IDLE_S + LOADING_S)


def test_idle_device_waits_until_it_gets_work(loader):
    wait = make_wait(loader, loader.work_for(0.5))
    wait.take(loader, 1)
    assert wait.take_waited_s() == pytest.approx(IDLE_S)
    wait.take(loader, 1)
    assert wait.take_waited_s() == pytest.approx(LOADING_S)


def test_clocks_that_differ_a_little_give_no_wait(loader):
    wait = make_wait(loader, loader.work_for(0.5), batch_came_s=WORK_ENDED_S - 0.001)
    wait.take(loader, 1)
    assert wait.take_waited_s() == 0.0


def test_waited_time_counts_once(loader):
    wait = make_wait(loader, loader.work_for(1.5))
    wait.take(loader, 3)
    assert wait.take_waited_s() > 0.0
    assert wait.take_waited_s() == 0.0
