"""The joint search over loader settings, after a sweep on a simulated feed."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotune.errors import OutOfTime
from autotune.evidence.workers import JointChoice, WorkersEvidence
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.joint_search import search_joint
from autotune.workers.measure import WorkerSweep
from autotune.workers.workers_evidence import workers_evidence
from testbed.examples.feeds import (
    CONFIG,
    DEAD_WORKER,
    LIMITS,
    ON_CPU,
    FeedMachine,
    knee_at,
    loader_settings,
    sweep_on,
)

FEW_WORKERS = replace(LIMITS, requested_workers=3)
SPEEDUP = 1.5
"""Speedup by the largest prefetch factor, if prefetching helps."""
TRIALS = 15
"""Number of settings to try, enough that the search finds the best ones."""
FEW_TRIALS = 6
"""Number of settings to try if there are no better ones to find."""


def prefetching_helps(data) -> float:
    """Return a rate that is half as high again with the largest prefetch factor."""
    rate = prefetching_is_useless(data)
    return SPEEDUP * rate if data.prefetch_factor == 8 else rate


def prefetching_is_useless(data) -> float:
    """Return a rate that depends on the number of workers only.

    It is the share of the throughput on cached batches, of which three workers reach
    61 %. Without workers it is not 0.
    """
    return 0.2 * data.num_workers + 0.01


def loader_arguments(measured: dict) -> dict:
    """Return the loader settings of a window's measured input."""
    names = ("num_workers", "prefetch_factor", "pin_memory")
    return {name: measured["loader"]["arguments"][name] for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSearch:
    """A joint search after a sweep of at most three workers, with its result."""

    sweep: WorkerSweep
    choice: WorkersChoice
    joint: JointChoice | None
    swept: WorkersEvidence
    """Evidence of the sweep before the search."""

    @property
    def measured(self) -> list[dict]:
        """Measured input of each window of the search, in their order."""
        finished = self.sweep.runner.finished[self.swept.windows :]
        return [window.trial.measured for window in finished]

    @property
    def settings(self) -> list[dict]:
        """Loader settings of each window of the search, in their order."""
        return [measured["loader"]["arguments"] for measured in self.measured]


def search(
    machine: FeedMachine,
    directory: Path,
    *,
    trials: int,
    limits: LoaderLimits = FEW_WORKERS,
) -> JointSearch:
    """Sweep on a machine, and search after it; the trial log is in a directory."""
    sweep = sweep_on(machine, directory, limits=limits)
    choice = sweep.run()
    swept = workers_evidence(sweep, choice, ON_CPU)
    joint = search_joint(sweep, choice, trials=trials)
    return JointSearch(sweep=sweep, choice=choice, joint=joint, swept=swept)


@pytest.fixture(scope="module")
def search_directory(tmp_path_factory):
    """Return the directory with the trial log of ``successful``."""
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def successful(search_directory):
    """Return a search on a machine on which prefetching helps."""
    return search(FeedMachine(prefetching_helps), search_directory, trials=TRIALS)


@pytest.fixture(scope="module")
def unsuccessful(tmp_path_factory):
    """Return a search on a machine on which only the number of workers matters."""
    directory = tmp_path_factory.mktemp("search")
    return search(FeedMachine(prefetching_is_useless), directory, trials=FEW_TRIALS)


def test_joint_search_adopts_faster_settings(successful):
    joint = successful.joint
    assert joint.adopted
    assert joint.num_workers == 3
    assert joint.prefetch_factor == 8
    # Windows have noise of up to 0.1 %.
    assert joint.ratio_to_workers_alone == pytest.approx(SPEEDUP, rel=0.01)
    assert 1 < joint.ratio_low <= joint.ratio_to_workers_alone


def test_joint_search_without_gpu_keeps_pinning(successful):
    assert CONFIG.data.pin_memory
    assert {data["pin_memory"] for data in successful.settings} == {True}


def test_joint_search_repeats_from_its_trial_log(successful, search_directory):
    machine = FeedMachine(prefetching_helps)
    again = search(machine, search_directory, trials=TRIALS)
    assert again.joint == successful.joint
    assert machine.trials == []


def test_gap_remains_if_no_count_suffices(unsuccessful):
    assert unsuccessful.choice.gap_remains


def test_no_gap_remains_if_a_count_suffices(tmp_path):
    sweep = sweep_on(FeedMachine(knee_at(2)), tmp_path)
    assert not sweep.run().gap_remains


def test_equally_slow_counts_leave_time_for_other_settings(tmp_path):
    noise = random.Random(0)

    def equally_slow(data) -> float:
        rate = 0.18 if data.num_workers and data.prefetch_factor == 8 else 0.12
        return rate * noise.uniform(0.95, 1.05)

    machine = FeedMachine(equally_slow)
    one_worker = replace(LIMITS, requested_workers=1)
    sweep = sweep_on(machine, tmp_path, limits=one_worker, budget_s=100.0)
    choice = sweep.run()
    assert choice.undecided_between == (0, 1)
    assert sweep.measurement.seconds <= 75
    joint = search_joint(sweep, choice)
    assert joint.adopted
    assert joint.prefetch_factor == 8


def test_joint_search_without_trials_chooses_nothing(tmp_path):
    machine = FeedMachine(prefetching_is_useless)
    assert search(machine, tmp_path, trials=0).joint is None


def test_joint_search_rejects_settings_that_are_not_faster(unsuccessful):
    assert not unsuccessful.joint.adopted


def test_joint_search_leaves_the_sweep_as_it_was(unsuccessful):
    swept = unsuccessful.swept
    after = workers_evidence(unsuccessful.sweep, unsuccessful.choice, ON_CPU)
    assert after.chosen == swept.chosen
    assert after.rows == swept.rows
    assert after.choice == swept.choice


def test_joint_search_pairs_trials_with_workers_alone(unsuccessful):
    first_round = len(unsuccessful.sweep.rounds)
    alone = {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}
    for number in range(FEW_TRIALS):
        windows = unsuccessful.measured[2 * number : 2 * number + 2]
        settings = [loader_arguments(window) for window in windows]
        assert not any(window["cached"] for window in windows)
        assert settings.count(alone) == 1
        # Rounds of the search follow those of the sweep.
        assert {window["round"] for window in windows} == {first_round + number}


def test_joint_search_skips_settings_that_exceed_memory(tmp_path):
    # Shared memory holds 16 batches, of which 90 % may be used: three workers fit with
    # a prefetch factor of 2, but not with 4 or 8.
    host = replace(LIMITS.host, shm_free_bytes=16 * LIMITS.batch_bytes)
    tight = replace(FEW_WORKERS, host=host)
    machine = FeedMachine(prefetching_helps)
    tight_search = search(machine, tmp_path, trials=TRIALS, limits=tight)
    for data in tight_search.settings:
        limits = replace(tight, prefetch_factor=data["prefetch_factor"])
        assert limits.shortage(data["num_workers"]) is None
    # Fewer workers fit with larger factors, so several factors are tried.
    assert len({data["prefetch_factor"] for data in tight_search.settings}) > 1


def test_joint_search_leaves_out_dying_workers(tmp_path):
    def die_by_prefetching(trial):
        return DEAD_WORKER if loader_settings(trial)["prefetch_factor"] == 8 else None

    machine = FeedMachine(prefetching_helps, die_by_prefetching)
    joint = search(machine, tmp_path, trials=TRIALS).joint
    assert joint.prefetch_factor != 8
    assert not joint.adopted


def test_deadline_in_the_comparison_keeps_its_rounds(tmp_path):
    sweep = sweep_on(FeedMachine(prefetching_helps), tmp_path, limits=FEW_WORKERS)
    choice = sweep.run()
    now_s = sweep.runner.clock.utc_now().timestamp()
    # Each window takes a second: time for six settings, and seven further rounds.
    sweep.runner.budget_ends_s = now_s + 2 * (FEW_TRIALS + 7) + 0.5
    joint = search_joint(sweep, choice, trials=FEW_TRIALS)
    assert joint.trials == FEW_TRIALS
    assert joint.num_workers == 3


def test_deadline_in_the_search_fails_its_trial(tmp_path):
    sweep = sweep_on(FeedMachine(prefetching_helps), tmp_path, limits=FEW_WORKERS)
    choice = sweep.run()
    now_s = sweep.runner.clock.utc_now().timestamp()
    sweep.runner.budget_ends_s = now_s + 2.5
    with pytest.raises(OutOfTime):
        search_joint(sweep, choice)
    last = sweep.study.study.study.trials[-1]
    assert last.state.name == "FAIL"
    assert "the next trial" in last.user_attrs["outcome"]
