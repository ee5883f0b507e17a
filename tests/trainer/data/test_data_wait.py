from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from trainer.data.data_wait import DataWait
from trainer.distributed.device_events import DeviceEvent

LOADING_S = 0.03
WORK_ENDED_S = 100.0
BATCH_CAME_S = 100.25


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


def busy_device(*answers):
    """Return an event at which the work of a device ends.

    It answers in turn whether the device has reached it.
    """
    return Mock(moment=WORK_ENDED_S, reached=Mock(side_effect=answers))


@pytest.mark.parametrize(
    ("answers", "count", "came_s", "waited_s"),
    [
        pytest.param([True], 1, BATCH_CAME_S, LOADING_S, id="nothing to do"),
        pytest.param(
            [True] * 3,
            3,
            BATCH_CAME_S,
            3 * LOADING_S,
            id="nothing to do for any micro-batch",
        ),
        pytest.param([False, False], 1, BATCH_CAME_S, 0.0, id="always at work"),
        pytest.param(
            [False, True],
            1,
            BATCH_CAME_S,
            BATCH_CAME_S - WORK_ENDED_S,
            id="ran out of work until the batch came",
        ),
        pytest.param(
            [False, False, False, True],
            3,
            BATCH_CAME_S,
            BATCH_CAME_S - WORK_ENDED_S + LOADING_S,
            id="ran out of work, and waited wholly for the next micro-batch",
        ),
        pytest.param(
            [False, True],
            1,
            WORK_ENDED_S - 0.001,
            0.0,
            id="clocks that differ by a little",
        ),
    ],
)
def test_data_wait_is_the_time_without_work(
    slow_loader, answers, count, came_s, waited_s
):
    wait = DataWait(lambda: DeviceEvent(came_s))
    wait.device_busy_until(busy_device(*answers))
    assert wait.take(slow_loader, count) == ["batch"] * count
    assert wait.take_waited_s() == pytest.approx(waited_s)
    assert wait.take_waited_s() == 0.0


def test_data_wait_before_the_first_step(slow_loader):
    wait = DataWait(lambda: DeviceEvent(BATCH_CAME_S))
    assert wait.take(slow_loader, 1) == ["batch"]
    assert wait.take_waited_s() == pytest.approx(LOADING_S)
    assert wait.take_waited_s() == 0.0


def test_idle_device_waits_until_it_gets_work(slow_loader):
    wait = DataWait(lambda: DeviceEvent(BATCH_CAME_S))
    wait.device_busy_until(busy_device(False, True))
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(BATCH_CAME_S - WORK_ENDED_S)
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(LOADING_S)


def test_cpu_waits_wholly_for_data(slow_loader):
    wait = DataWait(lambda: DeviceEvent(BATCH_CAME_S))
    wait.device_busy_until(DeviceEvent(1.0))  # of a CPU, which is always ready
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(LOADING_S)
