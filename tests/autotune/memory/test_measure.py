"""Probe of one model on a simulated machine, up to its largest micro-batch."""

import itertools

import pytest

import autotune.memory.measure
from autotune.errors import ExceedsMemory, OutOfTime, Undecided
from autotune.memory.decide.overheads import overheads_on_cpu
from autotune.memory.values import Allocation
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    Measured,
    OutOfMemory,
    TimedOut,
)
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeMachine
from tests.autotune.memory.simulated_probes import (
    BUDGET_BYTES,
    FIXED_BYTES,
    SEQUENCE_BYTES,
    VERIFIED,
    count_trials,
    is_throughput_trial,
    machine_with,
    simulate,
    size_of,
    trace_figures,
    verified_sizes,
)
from tests.autotune.memory.simulated_traces import figures_of, trace_of
from trainer.formats.train_config import ParallelSettings

TOO_SMALL_BYTES = 200_000_000
"""Budget in which not even one sequence of the simulated model fits."""


def machine_interrupted_after(finished_trials):
    """Return a machine on which you interrupt the trial that follows so many."""
    trial_numbers = itertools.count()

    def interrupt(trial):
        if next(trial_numbers) == finished_trials:
            raise KeyboardInterrupt
        return simulate(trial)

    return FakeMachine(interrupt)


def test_largest_micro_batch_is_verified_on_both_sides(probe):
    evidence = probe(FakeMachine(simulate))
    assert verified_sizes(evidence) == VERIFIED


def test_size_is_tested_by_two_limited_steps(probe):
    machine = FakeMachine(simulate)
    probe(machine)
    request = next(trial.measured for trial in machine.trials if size_of(trial) == 35)
    assert request["memory_budget_bytes"] == BUDGET_BYTES
    assert request["warmup_steps"] + request["timed_steps"] == 2


def test_peak_is_predicted_from_smaller_trials(probe):
    evidence = probe(FakeMachine(simulate))
    # The simulated memory is a straight line.
    assert evidence.predicted_peak_bytes == evidence.feasible_peak_bytes


def test_search_ends_at_the_largest_allowed_size(probe):
    evidence = probe(FakeMachine(simulate), max_micro_batch_size=10)
    assert evidence.feasible_max == 10
    assert evidence.infeasible_min is None


def test_trace_saves_trials(probe):
    evidence = probe(
        FakeMachine(simulate),
        # 10 MB more than 35 sequences take, so that the largest size runs only once.
        memory_budget_bytes=BUDGET_BYTES + 10_000_000,
        overheads=overheads_on_cpu(),
    )
    assert verified_sizes(evidence) == VERIFIED
    assert evidence.search_trials <= 3


def test_evidence_has_the_prediction_of_the_trace(probe):
    evidence = probe(FakeMachine(simulate), overheads=overheads_on_cpu())
    # The simulated trials have no libraries, for which the prediction adds 38 MiB: the
    # memory of two sequences.
    libraries_bytes = overheads_on_cpu().usual.non_pytorch_bytes
    assert evidence.traced_micro_batch_size == 33
    assert evidence.traced_peak_bytes == evidence.feasible_peak_bytes + libraries_bytes
    assert set(evidence.traced_terms_bytes) >= {"parameters", "activations: Linear"}


def test_wrong_trace_does_not_change_the_result(probe):
    def mislead(trial):
        if trial.job == "trace":
            return Measured(figures=trace_figures(trial, sequence_bytes=26_000_000))
        return simulate(trial)

    evidence = probe(FakeMachine(mislead), overheads=overheads_on_cpu())
    assert verified_sizes(evidence) == VERIFIED


def test_failed_trace_is_reported_with_the_result(probe):
    crash = Crashed(detail="RuntimeError: Tensor.item() on meta")
    machine = machine_with(crash, lambda trial: trial.job == "trace")
    evidence = probe(machine, overheads=overheads_on_cpu())
    assert verified_sizes(evidence) == VERIFIED
    assert "Tensor.item()" in evidence.not_traced
    assert evidence.traced_peak_bytes is None


def test_largest_size_without_room_is_verified_twice(probe):
    # The second of two equal trials finds less memory.
    def simulate_unsteady_memory(trial):
        if size_of(trial) == 35 and count_trials(machine, 35) == 2:
            return OutOfMemory(detail="less memory than before")
        return simulate(trial)

    machine = FakeMachine(simulate_unsteady_memory)
    # After 35 sequences only 1,000 bytes are free.
    budget_bytes = FIXED_BYTES + 35 * SEQUENCE_BYTES + 1000
    evidence = probe(machine, memory_budget_bytes=budget_bytes)
    assert evidence.feasible_max == 34
    assert evidence.infeasible_min == 35


def test_trial_knows_whether_it_is_the_first_attempt(probe):
    # Near the limit an error of cuBLAS may be one of memory. The job reports a crash if
    # it is the first attempt, and out of memory if it happens again.
    def simulate_unclear_failure(trial):
        outcome = simulate(trial)
        if isinstance(outcome, OutOfMemory) and trial.local["first_attempt"]:
            return Crashed(detail="CUBLAS_STATUS_EXECUTION_FAILED")
        return outcome

    evidence = probe(FakeMachine(simulate_unclear_failure))
    assert verified_sizes(evidence) == VERIFIED


def test_trials_have_the_requested_micro_batches_per_step(probe):
    machine = FakeMachine(simulate)
    probe(machine, accumulate=True, local_ranks=3)
    request = machine.trials[0].measured
    config = machine.trials[0].config
    # Two micro-batches, which stand for any larger number, on each of three ranks.
    assert config["global_batch_size"] == 2 * 3 * config["micro_batch_size"]
    assert request["local_ranks"] == 3


def test_interrupted_probe_resumes(probe):
    uninterrupted = FakeMachine(simulate)
    expected = probe(uninterrupted)
    for finished_trials in range(1, len(uninterrupted.trials)):
        site = f"interrupted after {finished_trials}"
        resumed = FakeMachine(simulate)
        with pytest.raises(KeyboardInterrupt):
            probe(machine_interrupted_after(finished_trials), site=site)
        assert probe(resumed, site=site) == expected
        assert len(resumed.trials) == len(uninterrupted.trials) - finished_trials


def test_finished_probe_is_repeated_from_its_trial_log(probe):
    expected = probe(FakeMachine(simulate))
    assert probe(FakeMachine(lambda trial: pytest.fail("ran"))) == expected


def test_too_large_model_reports_its_need(probe):
    # One sequence takes 320 MB, 305 MiB. The prediction also has 38 MiB of libraries.
    with pytest.raises(ExceedsMemory, match="it needs 305 MiB") as rejected:
        probe(
            FakeMachine(simulate),
            memory_budget_bytes=TOO_SMALL_BYTES,
            overheads=overheads_on_cpu(),
        )
    assert rejected.value.message.endswith(
        "; largest part: parameters, 286 MiB of 343 MiB predicted"
    )
    assert "--memory" in rejected.value.next_step


def test_largest_part_is_of_the_predicted_memory(probe):
    """The measured peak may be less than the libraries are assumed to take alone."""
    budget_bytes = 2**20

    def simulate_tiny_model(trial):
        if (
            trial.job == "step"
            and trial.measured["memory_budget_bytes"] == budget_bytes
        ):
            return OutOfMemory(detail="no memory")
        if trial.job == "step":
            return Measured(figures=STEP_FIGURES | {"peak_bytes": 37 * 2**20})
        parameters = [Allocation(size_bytes=2**20, term="parameters")]
        return Measured(
            figures=figures_of(
                trace_of(size, parameters, events=[0])
                for size in trial.measured["sizes"]
            )
        )

    with pytest.raises(ExceedsMemory) as rejected:
        probe(
            FakeMachine(simulate_tiny_model),
            memory_budget_bytes=budget_bytes,
            overheads=overheads_on_cpu(),
        )
    assert rejected.value.message.endswith(
        "; it needs 37 MiB; largest part: non-PyTorch memory, 38 MiB of 39 MiB"
        " predicted"
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "is_advised"),
    [
        pytest.param("ddp", 2, True, id="each rank has the whole state"),
        pytest.param("zero1", 1, True, id="one rank has the whole state"),
        pytest.param("zero1", 2, False, id="the state is sharded already"),
    ],
)
def test_sharding_is_advised_for_unsharded_state_only(
    probe, monkeypatch, strategy, ranks, is_advised
):
    # No sharding makes the simulated model fit, so this one is made up.
    sharding = "parallel.strategy = 'fsdp2' over 4 ranks"
    monkeypatch.setattr(
        autotune.memory.measure, "smallest_sharding", lambda *_, **__: sharding
    )
    with pytest.raises(ExceedsMemory) as rejected:
        probe(
            FakeMachine(simulate),
            settings={"parallel": ParallelSettings(strategy=strategy)},
            local_ranks=ranks,
            memory_budget_bytes=TOO_SMALL_BYTES,
            overheads=overheads_on_cpu(),
        )
    next_step = rejected.value.next_step
    assert (f"shard the state: {sharding}" in next_step) == is_advised


@pytest.mark.parametrize(
    ("outcome", "message", "attempts"),
    [
        pytest.param(Crashed(detail="boom"), "boom", 3, id="crash is tried again"),
        pytest.param(TimedOut(detail="killed"), "timed out", 1, id="timeout is not"),
    ],
)
def test_crash_is_not_out_of_memory(probe, outcome, message, attempts):
    machine = machine_with(outcome, lambda trial: size_of(trial) == 4)
    with pytest.raises(Undecided, match=message):
        probe(machine)
    assert count_trials(machine, 4) == attempts


def test_next_probe_repeats_a_crashed_trial(probe):
    machine = machine_with(Crashed(detail="boom"), lambda trial: size_of(trial) == 4)
    with pytest.raises(Undecided):
        probe(machine)
    # The reason of the crash may be gone.
    assert verified_sizes(probe(FakeMachine(simulate))) == VERIFIED


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(Crashed(detail="boom"), id="crashed"),
        pytest.param(
            Contaminated(detail="hw_thermal in 1 of 21 samples"), id="contaminated"
        ),
    ],
)
@pytest.mark.parametrize(
    "measures_throughput",
    [
        pytest.param(False, id="trial of the search"),
        pytest.param(True, id="throughput trial"),
    ],
)
def test_disturbed_trial_is_repeated(probe, outcome, measures_throughput):
    attempts = 0

    def is_first_attempt(trial):
        nonlocal attempts
        is_timed = is_throughput_trial(trial)
        if size_of(trial) != 4 or is_timed != measures_throughput:
            return False
        attempts += 1
        return attempts == 1

    evidence = probe(machine_with(outcome, is_first_attempt))
    assert evidence.feasible_max == 35
    assert attempts == 2


def test_short_search_gives_a_lower_bound(probe, probe_with_trials):
    search_trials = probe(FakeMachine(simulate)).search_trials
    evidence = probe_with_trials(search_trials - 1)
    assert evidence.is_lower_bound
    assert 1 <= evidence.feasible_max <= 35
    assert evidence.curve == []
    assert "no time was left" in evidence.choice


def test_search_without_any_size_is_out_of_time(probe_with_trials):
    with pytest.raises(OutOfTime, match="no size is verified yet; 3 s are left"):
        probe_with_trials(0)
