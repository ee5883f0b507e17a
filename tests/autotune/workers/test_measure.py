"""The sweep of the trainer's own DataLoader, on a machine whose feed is simulated."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import OutOfTime, Undecided
from autotune.machine.values import DiskFacts
from autotune.trials.outcomes import Contaminated, Crashed, Measured
from autotune.trials.runner import ATTEMPTS
from autotune.workers.measure import evidence
from testbed.examples.feeds import (
    CACHED_TOKENS_PER_S,
    DEAD_WORKER,
    LIMITS,
    ON_CPU,
    FeedMachine,
    figures_of,
    knee_at,
    loader_settings,
    sweep_on,
)
from testbed.fakes import FakeMachine

LUSTRE = DiskFacts(
    path="data", filesystem_type="lustre", free_bytes=None, is_network=True
)
ON_LUSTRE = replace(ON_CPU, host=replace(ON_CPU.host, disks=(LUSTRE,)))
STORAGE = "nfs:40"
"""Storage of the dataset, as trials name it: file system and device number."""
WINDOW_S = 1.0
"""Time of every window on the simulated clock."""


def evidence_of(sweep, site=ON_CPU):
    """Run a sweep, and return its evidence."""
    return evidence(sweep, sweep.run(), site)


# The result of a sweep.


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
    workers = evidence_of(sweep_on(FeedMachine(knee_at(1)), tmp_path))
    # Windows have noise of 0.2 %.
    for tokens_per_s in workers.cached_padded_tokens_per_s:
        assert tokens_per_s == pytest.approx(CACHED_TOKENS_PER_S, rel=0.01)


def test_every_other_round_runs_backwards(tmp_path):
    machine = FeedMachine(knee_at(1))
    sweep_on(machine, tmp_path).run()
    # Cached batches and no workers; then the next count of the ladder, backwards.
    assert machine.counts[:4] == [None, 0, 1, None]
    rounds = [trial.measured["round"] for trial in machine.trials]
    assert rounds == sorted(rounds)


@pytest.fixture
def replay(tmp_path):
    """Return a sweep of a replayed step on 2 ranks with slow samples."""
    return sweep_on(
        FeedMachine(knee_at(1)),
        tmp_path,
        replayed_step_s=0.06,
        sample_delay_s=0.001,
        limits=replace(LIMITS, local_ranks=2),
    )


def test_trials_have_the_settings_of_the_request(replay):
    replay.run()
    for trial in replay.runner.machine.trials:
        assert trial.measured["sample_delay_s"] == 0.001
        assert trial.measured["replayed_step_s"] == 0.06
        assert trial.local["data_dir"] == str(Path("data").resolve())


def test_every_window_is_a_trial_of_its_own(replay):
    workers = evidence_of(replay)
    trials = replay.runner.machine.trials
    keys = {trial.key for trial in trials}
    assert len(keys) == len(trials) == workers.windows
    assert workers.seconds == WINDOW_S * len(trials)


def test_evidence_counts_its_windows(replay):
    workers = evidence_of(replay)
    windows_of_rows = sum(len(row.padded_tokens_per_s) for row in workers.rows)
    cached_windows = len(workers.cached_padded_tokens_per_s)
    assert workers.windows == windows_of_rows + cached_windows


def test_evidence_names_the_consumer(replay):
    workers = evidence_of(replay)
    assert workers.consumer == "a replayed step of 60 ms, each sample delayed by 1 ms"
    assert workers.local_ranks == 2


def test_evidence_has_the_limit_with_its_reason(replay):
    workers = evidence_of(replay)
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


# Sweeps that are interrupted or out of time.


@pytest.fixture
def interrupted(tmp_path):
    """Return the directory of a sweep that was interrupted in its sixth trial."""
    trial_numbers = itertools.count(1)

    def interrupt(trial):
        if next(trial_numbers) == 6:
            raise KeyboardInterrupt

    sweep = sweep_on(FeedMachine(knee_at(2), interrupt), tmp_path, storage=STORAGE)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    return tmp_path


@pytest.fixture
def uninterrupted(tmp_path):
    return sweep_on(FeedMachine(knee_at(2)), tmp_path / "other", storage=STORAGE)


def count_trials(sweep):
    return len(sweep.runner.machine.trials)


def test_interrupted_sweep_resumes_from_complete_rounds(interrupted, uninterrupted):
    resumed = sweep_on(FeedMachine(knee_at(2)), interrupted, storage=STORAGE)
    assert evidence_of(resumed) == evidence_of(uninterrupted)
    # Five trials ended, of which the complete rounds have four. The window of the round
    # that was cut in two is measured again: windows of a round follow each other.
    assert count_trials(resumed) == count_trials(uninterrupted) - 4


def test_starts_again_on_another_file_system(interrupted, uninterrupted):
    moved = sweep_on(FeedMachine(knee_at(2)), interrupted, storage="ext4:2")
    moved.run()
    uninterrupted.run()
    assert count_trials(moved) == count_trials(uninterrupted)


NOISE = [1.04, 0.96, 1.10, 1.02, 0.94, 1.08, 1.00, 0.92, 1.06, 0.98, 0.90]
"""Factors of the rates of consecutive windows, in a loop. Their number is prime, so
that no window of a round always gets the same one."""


def noisy_machine(knee: int) -> FeedMachine:
    """Return a machine so noisy that a short budget decides nothing."""
    noise = itertools.cycle(NOISE)

    def disturb(trial):
        figures = figures_of(trial, knee_at(knee))
        figures["padded_tokens_per_s"] *= next(noise)
        return Measured(figures=figures)

    return FeedMachine(knee_at(knee), disturb)


def test_budget_ends_an_undecided_sweep(tmp_path):
    sweep = sweep_on(noisy_machine(3), tmp_path, budget_s=12 * WINDOW_S)
    workers = evidence_of(sweep)
    assert sweep.time_is_over
    # The last round, of up to four windows, began within the budget and is completed.
    assert 12 <= len(sweep.runner.machine.trials) <= 12 + 3
    low, high = workers.undecided_between
    assert low <= 3 <= high
    assert workers.choice.startswith(
        f"undecided between {low} and {high} after 12 s; num_workers={workers.chosen}: "
    )


def test_windows_from_the_trial_log_count_towards_budget(tmp_path):
    first = evidence_of(sweep_on(noisy_machine(3), tmp_path, budget_s=12 * WINDOW_S))
    again = sweep_on(noisy_machine(3), tmp_path, budget_s=12 * WINDOW_S)
    assert evidence_of(again) == first
    assert again.runner.machine.trials == []


def test_small_budget_still_measures_three_rounds(tmp_path):
    sweep = sweep_on(noisy_machine(1), tmp_path, budget_s=WINDOW_S / 2)
    sweep.run()
    assert len(sweep.rounds) == 3


def sweep_with_time_for(windows: int, directory: Path):
    """Return a noisy sweep whose deadline is half a window after some windows."""
    sweep = sweep_on(noisy_machine(3), directory)
    now_s = sweep.runner.clock.utc_now().timestamp()
    sweep.runner.budget_ends_s = now_s + (windows + 0.5) * WINDOW_S
    return sweep


def test_deadline_after_three_rounds_keeps_their_result(tmp_path):
    sweep = sweep_with_time_for(13, tmp_path)
    assert evidence_of(sweep).undecided_between
    assert len(sweep.runner.machine.trials) == 13
    assert sweep.time_is_over


def test_deadline_before_three_rounds_fails(tmp_path):
    # The first three rounds have two windows each.
    with pytest.raises(OutOfTime):
        sweep_with_time_for(4, tmp_path).run()


# Windows that fail.


def contaminated(times: int) -> FeedMachine:
    """Return a machine that disturbs each window with workers ``times`` times."""
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


# The limit of workers.


@pytest.mark.parametrize(
    ("requested", "limit_at_first"),
    [
        pytest.param(None, 8, id="limited by CPUs"),
        pytest.param(6, 6, id="limited by request"),
    ],
)
def test_large_workers_lower_the_limit(tmp_path, requested, limit_at_first):
    # Of the free memory, 90 % may be used, so that 3 of these workers fit.
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
