"""The evidence of a sweep, on a machine whose feed is simulated."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.machine.values import DiskFacts
from testbed.examples.feeds import (
    CACHED_TOKENS_PER_S,
    LIMITS,
    ON_CPU,
    FeedMachine,
    evidence_of,
    knee_at,
    sweep_on,
)

LUSTRE = DiskFacts(
    path="data", filesystem_type="lustre", free_bytes=None, is_network=True
)
ON_LUSTRE = replace(ON_CPU, host=replace(ON_CPU.host, disks=(LUSTRE,)))
WINDOW_S = 1.0
"""Time of every window on the simulated clock."""


@pytest.mark.parametrize("needed", [0, 1, 3, 6])
def test_finds_the_smallest_sufficient_count(tmp_path, needed):
    workers = evidence_of(sweep_on(FeedMachine(knee_at(needed)), tmp_path))
    assert workers.chosen == needed
    assert workers.undecided_between == []
    rows = {row.num_workers: row for row in workers.rows}
    assert rows[needed].verdict == "verified"
    assert rows[needed].ratio_to_cached == pytest.approx(1.0, abs=0.01)
    assert all(rows[count].verdict == "refuted" for count in rows if count < needed)


def test_evidence_has_the_rates_on_cached_batches(tmp_path):
    sweep = sweep_on(FeedMachine(knee_at(1)), tmp_path)
    rates = evidence_of(sweep).cached_units_per_s
    # Every round has a window on cached batches, with noise of 0.2 %.
    assert rates == pytest.approx([CACHED_TOKENS_PER_S] * len(sweep.rounds), rel=0.01)
    assert len(rates) >= 3


def test_every_other_round_runs_backwards(tmp_path):
    machine = FeedMachine(knee_at(1))
    sweep_on(machine, tmp_path).run()
    # Cached batches and no workers; then the next count of the ladder, backwards.
    assert machine.counts[:4] == [None, 0, 1, None]
    rounds = [trial.measured["round"] for trial in machine.trials]
    assert rounds == sorted(rounds)


REPLAYED_STEP_S = 0.06
SAMPLE_DELAY_S = 0.001


@pytest.fixture
def replay(tmp_path):
    """Return a sweep of a replayed step on 2 ranks with slow samples."""
    return sweep_on(
        FeedMachine(knee_at(1)),
        tmp_path,
        replayed_step_s=REPLAYED_STEP_S,
        sample_delay_s=SAMPLE_DELAY_S,
        limits=replace(LIMITS, local_ranks=2),
    )


def test_trials_have_the_settings_of_the_request(replay):
    replay.run()
    trials = replay.runner.machine.trials
    assert {trial.measured["replayed_step_s"] for trial in trials} == {REPLAYED_STEP_S}
    assert {
        trial.loader_arguments["sample_delay_s"]
        for trial in trials
        if not trial.measured["cached"]
    } == {SAMPLE_DELAY_S}
    directory = str(Path("data").resolve())
    assert {trial.local["inputs"]["data_dir"] for trial in trials} == {directory}


def test_every_window_is_a_trial_of_its_own(replay):
    workers = evidence_of(replay)
    trials = replay.runner.machine.trials
    keys = {trial.key for trial in trials}
    assert len(keys) == len(trials) == workers.windows
    assert workers.seconds == WINDOW_S * len(trials)


def test_evidence_counts_its_windows(replay):
    workers = evidence_of(replay)
    windows_of_rows = sum(len(row.units_per_s) for row in workers.rows)
    cached_windows = len(workers.cached_units_per_s)
    assert workers.windows == windows_of_rows + cached_windows


def test_evidence_names_the_consumer(replay):
    workers = evidence_of(replay)
    assert workers.consumer == "a replayed step of 60 ms, each sample delayed by 1 ms"
    assert workers.local_ranks == 2


def test_evidence_has_the_limit_with_its_reason(replay):
    workers = evidence_of(replay)
    # Eight CPU cores, shared by two ranks.
    assert workers.max_workers == 4
    assert workers.max_workers_because == "8 available CPU cores, 2 local ranks"


def test_evidence_describes_the_file_system(replay):
    workers = evidence_of(replay, ON_LUSTRE)
    assert workers.data_filesystem == "lustre"
    assert workers.data_on_network


def test_rows_have_memory_and_storage_of_windows(replay):
    row = evidence_of(replay).rows[1]
    # As every window of the machine reports.
    assert row.memory_bytes == 2**30
    assert row.storage_bytes_per_s == 1e6


def test_evidence_without_gpu_has_no_gpu_figures(replay):
    workers = evidence_of(replay)
    assert {row.gpu for row in workers.rows} == {None}
    assert workers.operating_state is None
