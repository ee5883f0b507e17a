import datetime
from dataclasses import replace

import pytest

from autotune.core.outcome import Measured
from autotune.core.trial import Trial, TrialRecord
from autotune.errors import MachineLacks, OutOfTime, StartAgain, Undecided
from autotune.search.trials import LEAVING_S, TrialRunner, made_on
from autotune.store import Ledger, read_ledger
from tests.autotune.profiles import FINGERPRINT
from tests.fakes import FakeClock, FakeMachine

TRIAL = Trial(job="trace", measured={"n": 1}, timeout_s=60.0)
START_S = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()


def runner(tmp_path, left_s):
    clock = FakeClock()
    return TrialRunner(
        machine=FakeMachine(lambda trial: Measured(figures={"x": 1.0})),
        ledger=Ledger(tmp_path, "w"),
        site="here",
        clock=clock,
        ends_s=None if left_s is None else clock.utc_now().timestamp() + left_s,
    )


@pytest.mark.parametrize("left_s", [None, 60.0 + LEAVING_S])
def test_a_trial_begins_when_its_limit_fits_before_the_end_of_the_job(tmp_path, left_s):
    assert isinstance(runner(tmp_path, left_s).run(TRIAL, "t"), Measured)


def test_a_trial_that_may_not_be_over_in_time_is_left_to_the_same_command_started_again(tmp_path):
    late = runner(tmp_path, 60.0)
    with pytest.raises(StartAgain, match=r"ends in 60 s.*may take 60 s") as stopped:
        late.run(TRIAL, "t")
    assert "same command again" in stopped.value.next_step
    assert late.machine.trials == []


def test_what_is_in_the_ledger_needs_no_time(tmp_path):
    runner(tmp_path, None).run(TRIAL, "t")
    assert isinstance(runner(tmp_path, 1.0).run(TRIAL, "t"), Measured)


def test_no_trial_begins_that_is_likely_to_end_after_the_budget(tmp_path):
    within = runner(tmp_path, None)
    began_s = within.clock.utc_now().timestamp()
    within.machine = FakeMachine(lambda trial: within.clock.sleep(40.0) or Measured(figures={}))
    within.budget_ends_s = began_s + 60.0
    assert within.usual_trial_s is None
    within.run(TRIAL, "first")
    assert within.usual_trial_s == 40.0
    with pytest.raises(OutOfTime, match=r"20 s are left, and the next trial \(second\) takes about 40 s"):
        within.run(TRIAL, "second", anew=True)


def test_where_a_trial_was_measured_is_kept_and_ledgers_without_it_are_read(tmp_path):
    measuring = runner(tmp_path, None)
    measuring.made_on = made_on(FINGERPRINT)
    measuring.run(TRIAL, "t")
    [kept] = measuring.every_record()
    assert kept.made_on == made_on(FINGERPRINT)
    old = kept.model_dump(mode="json", exclude={"made_on"})
    Ledger(tmp_path / "old", "w").append(old)
    found = TrialRecord.of(read_ledger(tmp_path / "old").records[0])
    assert found is not None
    assert found.made_on is None


ON_GPU = made_on(FINGERPRINT).model_copy(update={"gpu_name": "NVIDIA H100 NVL", "driver": "580.1"})


def test_a_rate_that_the_gpu_cannot_reach_is_not_kept(tmp_path):
    machine = FakeMachine(lambda trial: Measured(figures={"products_flops_per_s": [8.6e15]}))
    measuring = replace(runner(tmp_path, None), machine=machine, made_on=ON_GPU)
    load = Trial(job="links", measured={}, timeout_s=60.0)
    with pytest.raises(Undecided, match=r"8,600 TFLOP/s .* NVIDIA H100 NVL"):
        measuring.run(load, "t")
    assert measuring.every_record() == ()


def test_a_step_is_checked_where_its_rate_is_taken(tmp_path):
    figures = {
        "optimizer_steps": 1, "step_s": [1.0], "slot_tokens_per_step": 1, "peak_bytes": 1, "loss": 1.0,
        "outside_allocator_bytes": None, "model_flops_per_step": 1e15,
    }  # fmt: skip
    machine = FakeMachine(lambda trial: Measured(figures=figures))
    measuring = replace(runner(tmp_path, None), machine=machine, made_on=ON_GPU)
    step = Trial(job="step", measured={"config": {"precision": "bf16"}}, timeout_s=60.0)
    with pytest.raises(Undecided, match="1,000 TFLOP/s"):
        measuring.run(step, "t", timed=True)
    assert measuring.every_record() == ()
    assert isinstance(measuring.run(step, "t"), Measured)


def test_an_impossible_rate_of_the_ledger_is_measured_again(tmp_path):
    rates = iter([8.6e15, 600e12])
    machine = FakeMachine(lambda trial: Measured(figures={"products_flops_per_s": [next(rates)]}))
    load = Trial(job="links", measured={}, timeout_s=60.0)
    replace(runner(tmp_path, None), machine=machine, made_on=None).run(load, "t")
    again = replace(runner(tmp_path, None), machine=machine, made_on=ON_GPU)
    assert again.run(load, "t") == Measured(figures={"products_flops_per_s": [600e12]})
    assert not again.finished[0].from_ledger


@pytest.mark.parametrize("job", ["feed", "links", "exchange"])
def test_no_rate_is_measured_on_a_pretended_gpu(tmp_path, job):
    pretended = ON_GPU.model_copy(update={"driver": "0.0 (nullgpu)"})
    measuring = replace(runner(tmp_path, None), made_on=pretended)
    with pytest.raises(MachineLacks, match="pretended NVIDIA H100 NVL"):
        measuring.run(Trial(job=job, measured={}, timeout_s=60.0), "t")
    assert measuring.machine.trials == []
