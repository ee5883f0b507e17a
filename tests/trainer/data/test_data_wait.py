from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from trainer.data.data_wait import DataWait
from trainer.distributed.device_events import DeviceEvent

LOADING_S = 0.03
"""Time that the loader takes for a micro-batch, by the host's clock."""
WORK_ENDED_S = 100.0
"""Moment at which the device ran out of work, by its own clock."""
BATCH_CAME_S = 100.25
"""Moment at which it reached the mark of the next micro-batch, by the same clock."""
IDLE_S = BATCH_CAME_S - WORK_ENDED_S


@pytest.fixture
def slow_loader(monkeypatch):
    """A loader; the host's clock advances only while it loads."""
    clock = SimpleNamespace(now_s=5.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr("trainer.data.data_wait.time", clock)

    def load() -> Iterator[str]:
        while True:
            clock.now_s += LOADING_S
            yield "batch"

    return load()


def end_of_work(*has_reached):
    """Return an event at which the work of a device ends.

    It answers in turn whether the device has reached it. A device is asked before a
    micro-batch is taken, and if it is still busy then, after that as well.
    """
    return Mock(moment=WORK_ENDED_S, reached=Mock(side_effect=has_reached))


def waited_s(loader, work, *, micro_batches=1, batch_came_s=BATCH_CAME_S):
    """Take micro-batches for a device with some work, and return how long it waited."""
    wait = DataWait(lambda: DeviceEvent(batch_came_s))
    wait.device_busy_until(work)
    assert wait.take(loader, micro_batches) == ["batch"] * micro_batches
    waited = wait.take_waited_s()
    assert wait.take_waited_s() == 0.0
    return waited


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_idle_device_waits_while_data_is_loaded(slow_loader, micro_batches):
    work = end_of_work(*[True] * micro_batches)
    waited = waited_s(slow_loader, work, micro_batches=micro_batches)
    assert waited == pytest.approx(micro_batches * LOADING_S)


def test_busy_device_does_not_wait(slow_loader):
    assert waited_s(slow_loader, end_of_work(False, False)) == 0.0


def test_device_waits_from_its_last_work_to_the_batch(slow_loader):
    work = end_of_work(False, True)
    assert waited_s(slow_loader, work) == pytest.approx(IDLE_S)


def test_device_that_ran_out_of_work_waits_for_later_batches(slow_loader):
    # It is busy during the first micro-batch, runs out of work during the second, and
    # has none during the third.
    work = end_of_work(False, False, False, True)
    waited = waited_s(slow_loader, work, micro_batches=3)
    assert waited == pytest.approx(IDLE_S + LOADING_S)


def test_clocks_that_differ_a_little_give_no_wait(slow_loader):
    work = end_of_work(False, True)
    assert waited_s(slow_loader, work, batch_came_s=WORK_ENDED_S - 0.001) == 0.0


def test_device_waits_for_the_first_step(slow_loader):
    wait = DataWait(lambda: DeviceEvent(BATCH_CAME_S))
    assert wait.take(slow_loader, 1) == ["batch"]
    assert wait.take_waited_s() == pytest.approx(LOADING_S)
    assert wait.take_waited_s() == 0.0


def test_idle_device_waits_until_it_gets_work(slow_loader):
    wait = DataWait(lambda: DeviceEvent(BATCH_CAME_S))
    wait.device_busy_until(end_of_work(False, True))
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(IDLE_S)
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(LOADING_S)


def test_cpu_waits_wholly_for_data(slow_loader):
    # The events of a CPU are reached at once.
    assert waited_s(slow_loader, DeviceEvent(1.0)) == pytest.approx(LOADING_S)
