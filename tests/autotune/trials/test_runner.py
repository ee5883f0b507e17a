"""Trials are run in time, kept in the trial log, and reused from it."""

import pytest

from autotune.errors import MachineLacks, OutOfTime, StartAgain, Undecided
from autotune.trials.outcomes import Measured
from autotune.trials.runner import EXIT_S
from autotune.trials.trial_bench import site_facts
from autotune.trials.trial_log import TrialLog, read_trial_records
from autotune.trials.values import Trial
from testbed.examples.feeds import runner_on
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeMachine
from trainer.formats.errors import UnreadableFile

TRIAL = Trial(job="trace", measured={"n": 1}, timeout_s=60.0)
LINKS_TRIAL = Trial(job="links", measured={}, timeout_s=60.0)
ON_CPU = site_facts(FINGERPRINT)
ON_GPU = ON_CPU.model_copy(update={"gpu_name": "NVIDIA H100 NVL", "driver": "580.1"})
IMPOSSIBLE_FIGURES = {"matmul_flops_per_s": [8.6e15]}
"""Ten times the peak of an H100 NVL in bf16."""


def make_runner(tmp_path, *, figures=None, job_left_s=None, lasts_s=0.0, **fields):
    """Return a runner on a fake machine.

    Args:
        tmp_path: Directory of the trial log.
        figures: Figures of each trial.
        job_left_s: Time until the cluster's job ends; None if there is no job.
        lasts_s: Time that each trial takes.
        fields: Further fields of the runner.
    """
    clock = FakeClock()

    def simulate(trial):
        clock.sleep(lasts_s)
        return Measured(figures=figures or {})

    job_ends_s = None
    if job_left_s is not None:
        job_ends_s = clock.utc_now().timestamp() + job_left_s
    return runner_on(
        FakeMachine(simulate), tmp_path, clock, job_ends_s=job_ends_s, **fields
    )


def test_no_trial_starts_that_may_outlast_job(tmp_path):
    runner = make_runner(tmp_path, job_left_s=TRIAL.timeout_s)
    with pytest.raises(StartAgain, match=r"ends in 60 s.*may take 60 s") as stopped:
        runner.run(TRIAL, "t")
    assert "same command again" in stopped.value.next_step
    assert runner.machine.trials == []


def test_trial_that_fits_before_the_end_starts(tmp_path):
    runner = make_runner(tmp_path, job_left_s=TRIAL.timeout_s + EXIT_S)
    assert isinstance(runner.run(TRIAL, "t"), Measured)


def test_known_trial_takes_no_time(tmp_path):
    make_runner(tmp_path).run(TRIAL, "t")
    runner = make_runner(tmp_path, job_left_s=1.0)
    assert isinstance(runner.run(TRIAL, "t"), Measured)
    assert runner.machine.trials == []


def test_no_trial_starts_that_likely_exceeds_budget(tmp_path):
    runner = make_runner(tmp_path, lasts_s=40.0)
    runner.budget_ends_s = runner.clock.utc_now().timestamp() + 60.0
    runner.run(TRIAL, "first")
    with pytest.raises(
        OutOfTime,
        match=r"20 s are left, but the next trial \(second\) takes about 40 s",
    ):
        runner.run(TRIAL, "second", remeasure=True)


def test_log_keeps_where_a_trial_was_made(tmp_path):
    make_runner(tmp_path, made_on=ON_CPU).run(TRIAL, "t")
    (trial_record,), corrupt_lines = read_trial_records(tmp_path)
    assert trial_record.made_on == ON_CPU
    assert corrupt_lines == 0


def test_reads_log_without_origin_of_trials(tmp_path):
    make_runner(tmp_path, made_on=ON_CPU).run(TRIAL, "t")
    (trial_record,), _ = read_trial_records(tmp_path)
    old_entry = trial_record.model_dump(mode="json", exclude={"made_on"})
    TrialLog(tmp_path / "old", "w").append(old_entry)
    (old_record,), _ = read_trial_records(tmp_path / "old")
    assert old_record.made_on is None


def test_log_without_permission_is_not_corrupt(tmp_path, deny_reading):
    make_runner(tmp_path, made_on=ON_CPU).run(TRIAL, "t")
    (path,) = tmp_path.glob("*.jsonl")
    deny_reading(path.name)
    with pytest.raises(UnreadableFile, match="Permission denied"):
        read_trial_records(tmp_path)


def test_impossible_rate_is_not_kept(tmp_path):
    runner = make_runner(tmp_path, made_on=ON_GPU, figures=IMPOSSIBLE_FIGURES)
    with pytest.raises(Undecided, match=r"8,600 TFLOP/s .* NVIDIA H100 NVL"):
        runner.run(LINKS_TRIAL, "t")
    assert read_trial_records(tmp_path) == ([], 0)


def test_impossible_rate_in_the_log_is_measured_again(tmp_path):
    # A runner that does not know its GPU keeps any rate.
    make_runner(tmp_path, figures=IMPOSSIBLE_FIGURES).run(LINKS_TRIAL, "t")
    possible = {"matmul_flops_per_s": [600e12]}
    runner = make_runner(tmp_path, made_on=ON_GPU, figures=possible)
    assert runner.run(LINKS_TRIAL, "t") == Measured(figures=possible)
    (finished,) = runner.finished
    assert not finished.from_trial_log


@pytest.fixture
def step_runner(tmp_path):
    """Return a runner whose steps have an impossible rate."""
    figures = STEP_FIGURES | {"step_s": [1.0], "model_flops_per_step": 1e15}
    return make_runner(tmp_path, made_on=ON_GPU, figures=figures)


STEP_TRIAL = Trial(
    job="step", measured={"config": {"precision": "bf16"}}, timeout_s=60.0
)


def test_impossible_rate_of_timed_step_is_not_kept(tmp_path, step_runner):
    with pytest.raises(Undecided, match="1,000 TFLOP/s"):
        step_runner.run(STEP_TRIAL, "t", timed=True)
    assert read_trial_records(tmp_path) == ([], 0)


def test_rate_of_untimed_step_does_not_matter(step_runner):
    assert isinstance(step_runner.run(STEP_TRIAL, "t"), Measured)


@pytest.mark.parametrize("job", ["window", "links", "gradient_sync"])
def test_measures_no_rate_on_a_pretended_gpu(tmp_path, job):
    pretended = ON_GPU.model_copy(update={"driver": "0.0 (nullgpu)"})
    runner = make_runner(tmp_path, made_on=pretended)
    with pytest.raises(MachineLacks, match="pretended NVIDIA H100 NVL"):
        runner.run(Trial(job=job, measured={}, timeout_s=60.0), "t")
    assert runner.machine.trials == []
