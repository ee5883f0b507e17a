"""The sweep of the trainer's own DataLoader, on a machine whose feed is simulated."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import OutOfTime, Undecided
from autotune.machine.values import DiskFacts
from autotune.trials.job_figures import GpuUseFigures, TrainingFigures
from autotune.trials.outcomes import Contaminated, Crashed, Measured
from autotune.trials.runner import ATTEMPTS
from autotune.workers.measure import evidence, gpu_source
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
from testbed.examples.trials import TRAINING_FIGURES
from testbed.fakes import FakeMachine
from tests.autotune.machine.test_measured_device import H200

GPU = {
    "samples": 10,
    "utilisation_share": 0.9,
    "power_w": 400.0,
    "sm_clock_mhz": 1500.0,
    "power_capped_share": 0.5,
    "gpm_windows": 2,
    "gpm_tensor_share": 0.4,
    "series": {"time_s": [1.0]},
}

ON_GPU = replace(ON_CPU, device="cuda", gpus=(H200,), gpu_absent=None)
LUSTRE = DiskFacts(
    path="data", filesystem_type="lustre", free_bytes=None, is_network=True
)
ON_LUSTRE = replace(ON_CPU, host=replace(ON_CPU.host, disks=(LUSTRE,)))


def evidence_of(sweep, site=ON_CPU):
    """Run a sweep, and return its evidence."""
    return evidence(sweep, sweep.run(), site)


@pytest.mark.parametrize("needed", [0, 1, 3, 6])
def test_finds_the_smallest_sufficient_count(tmp_path, needed):
    workers = evidence_of(sweep_on(FeedMachine(knee_at(needed)), tmp_path))
    assert workers.chosen == needed
    assert workers.undecided_between == []
    rows = {row.num_workers: row for row in workers.rows}
    assert rows[needed].verdict == "verified"
    assert rows[needed].ratio_to_cached == pytest.approx(1.0, abs=0.01)
    assert all(rows[count].verdict == "refuted" for count in rows if count < needed)
    assert workers.cached_padded_tokens_per_s[0] == pytest.approx(
        CACHED_TOKENS_PER_S, rel=0.01
    )


def test_every_other_round_runs_backwards(tmp_path):
    machine = FeedMachine(knee_at(1))
    sweep_on(machine, tmp_path).run()
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
    # Each trial takes a second of the simulated clock.
    assert len(keys) == len(trials) == workers.windows == workers.seconds


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


@pytest.fixture
def interrupted(tmp_path):
    """Return the directory of a sweep that was interrupted in its sixth trial."""
    trial_numbers = itertools.count()

    def interrupt(trial):
        if next(trial_numbers) == 5:
            raise KeyboardInterrupt

    sweep = sweep_on(FeedMachine(knee_at(2), interrupt), tmp_path, storage="nfs:40")
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    return tmp_path


@pytest.fixture
def uninterrupted(tmp_path):
    return sweep_on(FeedMachine(knee_at(2)), tmp_path / "other", storage="nfs:40")


def count_trials(sweep):
    return len(sweep.runner.machine.trials)


def test_interrupted_sweep_resumes_from_complete_rounds(interrupted, uninterrupted):
    resumed = sweep_on(FeedMachine(knee_at(2)), interrupted, storage="nfs:40")
    assert evidence_of(resumed) == evidence_of(uninterrupted)
    # Five trials ended, of which the complete rounds have four. The window of the round
    # that was cut in two is measured again: windows of a round follow each other.
    assert count_trials(resumed) == count_trials(uninterrupted) - 4


def test_starts_again_on_another_file_system(interrupted, uninterrupted):
    moved = sweep_on(FeedMachine(knee_at(2)), interrupted, storage="ext4:2")
    moved.run()
    uninterrupted.run()
    assert count_trials(moved) == count_trials(uninterrupted)


def noisy_machine(knee: int) -> FeedMachine:
    """Return a machine so noisy that a short budget decides nothing."""
    window_numbers = itertools.count(1)

    def disturb(trial):
        # Factors from 0.9 to 1.1 in a shuffled order that repeats after 11 windows.
        factor = 1 + 0.1 * ((7 * next(window_numbers)) % 11 - 5) / 5
        figures = figures_of(trial, knee_at(knee))
        figures["padded_tokens_per_s"] *= factor
        return Measured(figures=figures)

    return FeedMachine(knee_at(knee), disturb)


def test_budget_ends_an_undecided_sweep(tmp_path):
    sweep = sweep_on(noisy_machine(3), tmp_path, budget_s=12.0)
    workers = evidence_of(sweep)
    assert sweep.time_is_over
    # A window takes a second, and the last round is completed.
    assert 12 <= len(sweep.runner.machine.trials) <= 12 + 3
    low, high = workers.undecided_between
    assert low <= 3 <= high
    assert workers.choice.startswith(
        f"undecided between {low} and {high} after 12 s; num_workers={workers.chosen}: "
    )


def test_windows_from_the_trial_log_count_towards_budget(tmp_path):
    first = evidence_of(sweep_on(noisy_machine(3), tmp_path, budget_s=12.0))
    again = sweep_on(noisy_machine(3), tmp_path, budget_s=12.0)
    assert evidence_of(again) == first
    assert again.runner.machine.trials == []


def test_small_budget_still_measures_three_rounds(tmp_path):
    sweep = sweep_on(noisy_machine(1), tmp_path, budget_s=0.5)
    sweep.run()
    assert len(sweep.rounds) == 3


def sweep_that_ends_after(seconds: float, directory: Path):
    """Return a noisy sweep with a deadline, of windows that take a second."""
    sweep = sweep_on(noisy_machine(3), directory)
    now_s = sweep.runner.clock.utc_now().timestamp()
    sweep.runner.budget_ends_s = now_s + seconds
    return sweep


def test_deadline_after_three_rounds_keeps_their_result(tmp_path):
    sweep = sweep_that_ends_after(13.5, tmp_path)
    assert evidence_of(sweep).undecided_between
    assert len(sweep.runner.machine.trials) == 13
    assert sweep.time_is_over


def test_deadline_before_three_rounds_fails(tmp_path):
    with pytest.raises(OutOfTime):
        sweep_that_ends_after(4.5, tmp_path).run()


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


def test_gpu_use_is_a_mean_over_gpus(tmp_path):
    gpus = [GPU, GPU | {"utilisation_share": 0.7, "gpm_tensor_share": None}]
    machine = FeedMachine(knee_at(1), gpus=gpus)
    workers = evidence_of(sweep_on(machine, tmp_path), ON_GPU)
    for row in workers.rows:
        assert row.gpu.utilisation_share == pytest.approx(0.8)
        assert row.gpu.gpm_tensor_share == pytest.approx(0.4)
        assert row.gpu.gpm_dram_share is None
    assert (
        workers.operating_state
        == "400 W, SM clock 1,500 MHz, at the power cap in 50 % of samples"
    )


@pytest.mark.parametrize(
    ("requested", "limit_at_first"),
    [
        pytest.param(None, 8, id="limited by CPUs"),
        pytest.param(6, 6, id="limited by request"),
    ],
)
def test_large_workers_lower_the_limit(tmp_path, requested, limit_at_first):
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
    assert "num_workers=8" in workers.max_workers_because


@pytest.mark.parametrize(
    ("site", "gpu_figures", "replayed", "words", "absent"),
    [
        pytest.param(
            ON_CPU, None, False, ["n/a (CPU run: no driver)"], "NVML", id="cpu"
        ),
        pytest.param(
            ON_GPU, None, True, ["n/a (simulated step)"], "NVML", id="replayed step"
        ),
        pytest.param(
            ON_GPU,
            None,
            False,
            ["NVML utilisation: n/a (no samples)", "GPM: n/a (no counters)"],
            "MFU",
            id="no samples",
        ),
        pytest.param(
            ON_GPU,
            {"lacking": "lost", "gpm_windows": 1},
            False,
            ["NVML utilisation: n/a (lost)"],
            "MFU",
            id="no NVML",
        ),
        pytest.param(
            ON_GPU,
            {"samples": 3, "gpm_lacking": "no Hopper"},
            False,
            ["GPM: n/a (no Hopper)"],
            "GPM counters",
            id="no GPM",
        ),
        pytest.param(
            ON_GPU,
            {"samples": 3, "utilisation_share": 0.9, "gpm_windows": 1},
            False,
            ["NVIDIA H200; NVML utilisation", "GPM counters"],
            "n/a",
            id="both",
        ),
    ],
)
def test_names_the_source_of_gpu_figures(site, gpu_figures, replayed, words, absent):
    window = TrainingFigures.of(Measured(figures=TRAINING_FIGURES))
    if gpu_figures is not None:
        window = replace(window, gpus=(GpuUseFigures(**gpu_figures),))
    source = gpu_source(site, [window], replayed=replayed)
    assert all(word in source for word in words)
    assert absent not in source
