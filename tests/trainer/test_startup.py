import time

import pytest

from trainer.record import StartClock


@pytest.fixture
def now(monkeypatch):
    """A clock that stands until it is moved."""
    moment = [1000.0]
    monkeypatch.setattr(time, "time", lambda: moment[0])
    return moment


def test_every_second_until_the_first_step_belongs_to_one_phase(now):
    clock = StartClock(began_s=990.0)
    for phase, seconds in (("import", 0), ("staging", 2), ("build", 3), ("first_batch", 1), ("first_step", 4)):
        now[0] += seconds
        clock.ended(phase)
    now[0] += 50
    startup = clock.startup()
    assert (startup.import_s, startup.staging_s, startup.build_s) == (10, 2, 3)
    assert (startup.first_batch_s, startup.first_step_s) == (1, 4)
    assert (startup.process_group_s, startup.restore_s, startup.compile_s) == (0, 0, 0)
    assert startup.total_s == 20
    assert clock.total_s() == 70
    assert sum(startup.model_dump(exclude={"total_s"}).values()) == pytest.approx(startup.total_s)


def test_a_phase_that_comes_twice_is_added_up(now):
    clock = StartClock()
    for _ in range(2):
        now[0] += 1
        clock.ended("build")
    assert clock.startup().build_s == 2


def test_the_beginning_is_known_by_the_other_clock_too():
    clock = StartClock(began_s=time.time() - 100)
    assert time.monotonic() - clock.monotonic_start_s == pytest.approx(100, abs=1)
