"""Sweeps with windows that fail, and the limit of workers that these show."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from autotune.errors import Undecided
from autotune.trials.outcomes import Contaminated, Crashed
from autotune.trials.rounds import ATTEMPTS
from testbed.examples.feeds import (
    DEAD_WORKER,
    LIMITS,
    FeedMachine,
    evidence_of,
    knee_at,
    loader_settings,
    sweep_on,
)
from testbed.fakes import FakeMachine


def contaminated(times: int) -> FeedMachine:
    """Return a machine on which each window is contaminated ``times`` times.

    Windows on cached batches are not.
    """
    attempts = Counter[str]()

    def disturb(trial):
        if trial.measured["cached"]:
            return None
        attempts[trial.key] += 1
        if attempts[trial.key] > times:
            return None
        return Contaminated(detail="somebody else was on it")

    return FeedMachine(knee_at(1), disturb)


def test_contaminated_window_is_measured_again(tmp_path):
    workers = evidence_of(sweep_on(contaminated(ATTEMPTS - 1), tmp_path))
    assert workers.chosen == 1
    assert workers.undecided_between == []


def test_persistent_contamination_ends_the_sweep(tmp_path):
    machine = contaminated(ATTEMPTS)
    with pytest.raises(Undecided, match="somebody else was on it") as caught:
        sweep_on(machine, tmp_path).run()
    assert machine.counts.count(0) == ATTEMPTS
    assert "resumes from" in caught.value.next_step


def test_crashed_window_is_not_tried_again(tmp_path):
    machine = FakeMachine(lambda trial: Crashed(detail="boom"))
    with pytest.raises(Undecided, match="boom"):
        sweep_on(machine, tmp_path).run()
    assert len(machine.trials) == 1


@pytest.mark.parametrize(
    ("requested", "limit_at_first"),
    [
        pytest.param(None, 8, id="limited by CPUs"),
        pytest.param(6, 6, id="limited by request"),
    ],
)
def test_large_workers_lower_the_limit(tmp_path, requested, limit_at_first):
    # Of the free 4 GiB, 90 % may be used, so that 3 workers of 1 GiB fit.
    host = replace(LIMITS.host, ram_available_bytes=4 * 2**30)
    limits = replace(LIMITS, host=host, requested_workers=requested)
    machine = FeedMachine(knee_at(20), worker_bytes=2**30)
    sweep = sweep_on(machine, tmp_path, limits=limits)
    assert sweep.max_workers == limit_at_first
    workers = evidence_of(sweep)
    assert max(count or 0 for count in machine.counts) == 3
    assert workers.max_workers == 3
    assert workers.chosen == 3
    assert "(measured)" in workers.max_workers_because


def test_dying_workers_lower_the_limit(tmp_path):
    def die_beyond_four_workers(trial):
        return DEAD_WORKER if loader_settings(trial)["num_workers"] > 4 else None

    machine = FeedMachine(knee_at(20), die_beyond_four_workers)
    workers = evidence_of(sweep_on(machine, tmp_path))
    assert workers.max_workers == 4
    assert workers.chosen == 4
    # The next count of the ladder, whose workers died.
    assert "num_workers=8" in workers.max_workers_because


def test_death_of_workers_that_ran_before_is_undecided(tmp_path):
    rounds_with_one_worker = itertools.count(1)

    def die_in_second_round_with_one_worker(trial):
        if loader_settings(trial)["num_workers"] != 1:
            return None
        return DEAD_WORKER if next(rounds_with_one_worker) == 2 else None

    machine = FeedMachine(knee_at(1), die_in_second_round_with_one_worker)
    with pytest.raises(Undecided, match="died although as many ran before"):
        sweep_on(machine, tmp_path).run()
