"""The fork server waits for ranks until they have ended, or have to be ended.

Ranks and clock are scripted, so that no test depends on the speed of the machine.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from autotune.trials.jobs import supervision
from autotune.trials.jobs.supervision import (
    GRACE_S,
    POLL_S,
    Ending,
    RankProcess,
    wait_for_ranks,
)
from testbed.fakes import FakeClock

TIME_LIMIT_S = 60.0
NEVER_S = math.inf
"""Duration of a rank that hangs, and time of a parent that stays."""


@dataclass(slots=True, kw_only=True)
class ScriptedRank(RankProcess):
    """Rank without a process, which ends at a scripted time with a scripted code."""

    clock: FakeClock
    ends_s: float
    """Time of the clock at which the rank ends."""
    final_code: int
    """Exit code of the rank."""

    def poll(self):
        if self.clock.monotonic_s() >= self.ends_s:
            self.exit_code = self.final_code
        return self.exit_code


class RanksScenario:
    """Ranks that begin now, their parent, and the clock that scripts both."""

    def __init__(self, monkeypatch):
        self.clock = FakeClock()
        self.began_s = self.clock.monotonic_s()
        self.parent_ends_s = NEVER_S
        scripted_time = SimpleNamespace(monotonic=self.clock.monotonic_s)
        monkeypatch.setattr(supervision, "time", scripted_time)

    def rank(self, lasts_s, exit_code=0) -> ScriptedRank:
        return ScriptedRank(
            pid=0,
            clock=self.clock,
            ends_s=self.began_s + lasts_s,
            final_code=exit_code,
        )

    def wait(self, *ranks) -> Ending:
        return wait_for_ranks(ranks, TIME_LIMIT_S, self._parent_gone)

    def _parent_gone(self, within_s: float) -> bool:
        self.clock.sleep(within_s)
        return self.waited_s >= self.parent_ends_s

    @property
    def waited_s(self) -> float:
        return self.clock.monotonic_s() - self.began_s


@pytest.fixture
def scenario(monkeypatch):
    return RanksScenario(monkeypatch)


def about(seconds):
    """Compare with a time of waiting.

    It may be three polls off: of the rank that ends, of the time that is over, and one
    for rounding of their sum.
    """
    return pytest.approx(seconds, abs=3 * POLL_S)


def test_waits_for_the_last_rank(scenario):
    assert scenario.wait(scenario.rank(1.0), scenario.rank(5.0)) is Ending.ALL_ENDED
    assert scenario.waited_s == about(5.0)


def test_hanging_ranks_are_waited_for_until_the_limit(scenario):
    assert scenario.wait(scenario.rank(1.0), scenario.rank(NEVER_S)) is Ending.TIMED_OUT
    assert scenario.waited_s == about(TIME_LIMIT_S)


def test_failure_leaves_others_a_time_of_grace(scenario):
    failed = scenario.rank(1.0, exit_code=1)
    assert scenario.wait(failed, scenario.rank(NEVER_S)) is Ending.RANK_FAILED
    assert scenario.waited_s == about(1.0 + GRACE_S)


def test_rank_that_notices_a_failure_ends_in_time(scenario):
    failed = scenario.rank(1.0, exit_code=1)
    noticing = scenario.rank(1.0 + GRACE_S / 2, exit_code=1)
    assert scenario.wait(failed, noticing) is Ending.ALL_ENDED
    assert scenario.waited_s == about(1.0 + GRACE_S / 2)


def test_second_failure_does_not_prolong_the_grace(scenario):
    failed = scenario.rank(1.0, exit_code=1)
    failed_later = scenario.rank(1.0 + GRACE_S / 2, exit_code=1)
    ending = scenario.wait(failed, failed_later, scenario.rank(NEVER_S))
    assert ending is Ending.RANK_FAILED
    assert scenario.waited_s == about(1.0 + GRACE_S)


def test_stops_once_the_parent_is_gone(scenario):
    scenario.parent_ends_s = 2.0
    assert scenario.wait(scenario.rank(NEVER_S)) is Ending.PARENT_GONE
    assert scenario.waited_s == about(2.0)
