import pytest

from autotune.errors import MachineLacks, OutOfTime, StartAgain, Undecided
from autotune.trials.runner import LEAVING_S
from autotune.trials.trial_log import TrialLog, made_on, read_trial_records
from autotune.trials.values import Measured, Trial
from testbed.examples.feeds import runner_on
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeMachine

TRIAL = Trial(job="trace", measured={"n": 1}, timeout_s=60.0)


def runner(tmp_path, *, figures=None, left_s=None, **changes):
    clock = FakeClock()
    ends_s = None if left_s is None else clock.utc_now().timestamp() + left_s
    return runner_on(
        FakeMachine(lambda trial: Measured(figures=figures or {})),
        tmp_path,
        clock,
        ends_s=ends_s,
        **changes,
    )


def test_a_trial_begins_only_if_its_limit_fits_before_the_end_of_the_job_or_it_is_known(
    tmp_path,
):
    late = runner(tmp_path, left_s=60.0)
    with pytest.raises(StartAgain, match=r"ends in 60 s.*may take 60 s") as stopped:
        late.run(TRIAL, "t")
    assert "same command again" in stopped.value.next_step
    assert late.machine.trials == []
    assert isinstance(
        runner(tmp_path, left_s=60.0 + LEAVING_S).run(TRIAL, "t"), Measured
    )
    assert isinstance(runner(tmp_path, left_s=1.0).run(TRIAL, "t"), Measured)


def test_no_trial_begins_that_is_likely_to_end_after_the_budget(tmp_path):
    within = runner(tmp_path)
    within.machine = FakeMachine(
        lambda trial: within.clock.sleep(40.0) or Measured(figures={})
    )
    within.budget_ends_s = within.clock.utc_now().timestamp() + 60.0
    within.run(TRIAL, "first")
    with pytest.raises(
        OutOfTime,
        match=r"20 s are left, but the next trial \(second\) takes about 40 s",
    ):
        within.run(TRIAL, "second", remeasure=True)


def test_where_a_trial_was_measured_is_kept_and_ledgers_without_it_are_read(tmp_path):
    runner(tmp_path, made_on=made_on(FINGERPRINT)).run(TRIAL, "t")
    [kept], corrupt = read_trial_records(tmp_path)
    assert (kept.made_on, corrupt) == (made_on(FINGERPRINT), 0)
    TrialLog(tmp_path / "old", "w").append(
        kept.model_dump(mode="json", exclude={"made_on"})
    )
    [old], _ = read_trial_records(tmp_path / "old")
    assert old.made_on is None


ON_GPU = made_on(FINGERPRINT).model_copy(
    update={"gpu_name": "NVIDIA H100 NVL", "driver": "580.1"}
)
FAST = {"matmul_flops_per_s": [8.6e15]}
LINKS = Trial(job="links", measured={}, timeout_s=60.0)


def test_a_rate_that_the_gpu_cannot_reach_is_not_kept_and_one_of_the_ledger_is_measured_again(
    tmp_path,
):
    with pytest.raises(Undecided, match=r"8,600 TFLOP/s .* NVIDIA H100 NVL"):
        runner(tmp_path, made_on=ON_GPU, figures=FAST).run(LINKS, "t")
    assert read_trial_records(tmp_path) == ([], 0)
    runner(tmp_path, figures=FAST).run(LINKS, "t")
    possible = {"matmul_flops_per_s": [600e12]}
    again = runner(tmp_path, made_on=ON_GPU, figures=possible)
    assert again.run(LINKS, "t") == Measured(figures=possible)
    assert not again.finished[0].from_trial_log


def test_a_step_is_checked_where_its_rate_is_taken(tmp_path):
    measuring = runner(
        tmp_path,
        made_on=ON_GPU,
        figures=STEP_FIGURES | {"step_s": [1.0], "model_flops_per_step": 1e15},
    )
    step = Trial(job="step", measured={"config": {"precision": "bf16"}}, timeout_s=60.0)
    with pytest.raises(Undecided, match="1,000 TFLOP/s"):
        measuring.run(step, "t", timed=True)
    assert read_trial_records(tmp_path) == ([], 0)
    assert isinstance(measuring.run(step, "t"), Measured)


@pytest.mark.parametrize("job", ["training", "links", "gradient_sync"])
def test_no_rate_is_measured_on_a_pretended_gpu(tmp_path, job):
    measuring = runner(
        tmp_path, made_on=ON_GPU.model_copy(update={"driver": "0.0 (nullgpu)"})
    )
    with pytest.raises(MachineLacks, match="pretended NVIDIA H100 NVL"):
        measuring.run(Trial(job=job, measured={}, timeout_s=60.0), "t")
    assert measuring.machine.trials == []
