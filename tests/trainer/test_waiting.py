from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from trainer import waiting
from trainer.feed import DataWait
from trainer.stopwatch import Mark

SLOW_S = 0.03
ENDED_S, CAME_S = 100.0, 100.25


@dataclass(frozen=True)
class Scripted(Mark):
    """A moment in a device's queue that is reached when a script says so."""

    moment: float = ENDED_S
    answers: Iterator[bool] = field(default_factory=lambda: iter(()))

    def reached(self) -> bool:
        return next(self.answers)


class Clock:
    """The host's clock, which passes while the loader is slow, and not otherwise."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def slow_loader() -> Iterator[str]:
    while True:
        waiting.time.now_s += SLOW_S
        yield "batch"


def waited(*answers: bool, count: int = 1) -> float:
    """What is counted, by whether the device had come to its end whenever it is asked; its clock stands at two moments.

    Without an answer it was given nothing yet.
    """
    wait = DataWait(lambda: Mark(CAME_S))
    if answers:
        wait.gave(Scripted(answers=iter(answers)))
    assert wait.take(slow_loader(), count) == ["batch"] * count
    return wait.read()


def test_before_the_first_step_all_of_the_wait_counts():
    assert waited() == pytest.approx(SLOW_S)


def test_a_device_that_had_nothing_to_do_waited_all_the_time():
    assert waited(True) == pytest.approx(SLOW_S)


def test_a_device_that_was_at_work_all_the_time_waited_for_nothing():
    assert waited(False, False) == 0.0


def test_a_device_that_ran_dry_meanwhile_waited_from_its_end_until_the_batch_came():
    assert waited(False, True) == pytest.approx(CAME_S - ENDED_S)


def test_waits_of_all_micro_batches_of_a_step_add_up():
    assert waited(True, True, True, count=3) == pytest.approx(3 * SLOW_S)


def test_a_device_that_ran_dry_waits_wholly_for_the_other_micro_batches_of_the_step():
    assert waited(False, False, False, True, count=3) == pytest.approx(CAME_S - ENDED_S + SLOW_S)


def test_clocks_that_disagree_by_a_little_give_no_negative_wait():
    wait = DataWait(lambda: Mark(ENDED_S - 0.001))
    wait.gave(Scripted(answers=iter((False, True))))
    wait.take(iter(["batch"]), 1)
    assert wait.read() == 0.0


def test_what_was_read_is_not_counted_again():
    wait = DataWait(lambda: Mark(CAME_S))
    wait.gave(Scripted(answers=iter((False, True))))
    wait.take(slow_loader(), 1)
    assert wait.read() == pytest.approx(CAME_S - ENDED_S)
    assert wait.read() == 0.0
    wait.take(slow_loader(), 1)
    assert wait.read() == pytest.approx(SLOW_S)


def test_a_cpu_is_always_ready_for_the_next_batch():
    wait = DataWait(lambda: Mark(1.0))
    wait.gave(Mark(1.0))
    wait.take(slow_loader(), 1)
    assert wait.read() == pytest.approx(SLOW_S)
