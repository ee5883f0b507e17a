"""Throughput of a probed model: its curve, and the trial of the chosen size."""

import pytest

from autotune.errors import Undecided
from autotune.memory.sections.size_reasons import dip_words
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_bench import site_facts
from testbed.examples.kernels import H100
from testbed.examples.profiles import FINGERPRINT, example_profile
from testbed.fakes import FakeMachine
from tests.autotune.memory.simulated_probes import (
    ON_GPU,
    VERIFIED,
    WITH_HEADROOM,
    is_throughput_trial,
    machine_with,
    simulate,
    size_of,
    sizes_of_curve,
    verified_sizes,
)

SUBJECT = example_profile().subject
CURVE_STEPS_ON_CPU = 4
CURVE_STEPS_ON_GPU = 10
WARMUP_STEPS_ON_GPU = 3


def throughput_requests(machine):
    """Return the requests of all throughput trials, in their order."""
    return [trial.measured for trial in machine.trials if is_throughput_trial(trial)]


def test_curve_ends_at_the_headroom(probe):
    evidence = probe(FakeMachine(simulate))
    assert sizes_of_curve(evidence) == [1, 2, 4, 8, 16, 32, WITH_HEADROOM]


def test_few_steps_are_timed_on_a_cpu(probe):
    machine = FakeMachine(simulate)
    evidence = probe(machine)
    timed_steps = {request["timed_steps"] for request in throughput_requests(machine)}
    assert timed_steps == {CURVE_STEPS_ON_CPU}
    assert evidence.sustained is None


def test_throughput_is_of_one_micro_batch(probe):
    """Accumulation repeats a micro-batch, each time at the same speed."""
    machine = FakeMachine(simulate)
    probe(machine, accumulate=True, local_ranks=3)
    for trial in filter(is_throughput_trial, machine.trials):
        config = trial.config
        assert config["global_batch_size"] == 3 * config["micro_batch_size"]


def test_steps_are_warm_on_a_gpu(probe):
    machine = FakeMachine(simulate)
    probe(machine, settings=ON_GPU, trial_timeout_s=600)
    for request in throughput_requests(machine):
        assert request["warmup_steps"] >= WARMUP_STEPS_ON_GPU
        assert request["timed_steps"] >= CURVE_STEPS_ON_GPU


def test_chosen_size_is_timed_for_a_minute(probe):
    slowdown = 1.05

    def simulate_warm_gpu(trial):
        outcome = simulate(trial)
        # Only the sustained trial has more steps than a point of the curve.
        is_sustained = (
            trial.job == "step" and trial.measured["timed_steps"] > CURVE_STEPS_ON_GPU
        )
        if is_sustained:
            outcome.figures["step_s"] = [
                slowdown * step_s for step_s in outcome.figures["step_s"]
            ]
        return outcome

    machine = FakeMachine(simulate_warm_gpu)
    evidence = probe(machine, settings=ON_GPU, trial_timeout_s=600)
    cold = next(point for point in evidence.curve if point.size == probe.chosen_size)
    sustained = evidence.sustained
    assert sustained.timed_steps * sustained.step_s >= 60
    assert sustained.size == probe.chosen_size
    assert sustained.units_per_s == pytest.approx(cold.units_per_s / slowdown)


def test_pretended_gpu_measures_no_throughput(probe):
    machine = FakeMachine(simulate)
    pretended_gpu = site_facts(FINGERPRINT).model_copy(
        update={"gpu_name": "NVIDIA H100 NVL", "driver": "0.0 (nullgpu)"}
    )
    evidence = probe(machine, settings=ON_GPU, made_on=pretended_gpu)
    assert verified_sizes(evidence) == VERIFIED
    assert evidence.curve == []
    assert evidence.sustained is None
    # The global batch is as many micro-batches of 32 as of 33, with fewer empty rows.
    assert probe.chosen_size == 32
    assert throughput_requests(machine) == []


def test_crashing_throughput_trial_ends_the_probe(probe):
    machine = machine_with(Crashed(detail="a bus error"), is_throughput_trial)
    message = (
        r"'32 sequences, throughput' could not be measured \(crashed\):\na bus error"
    )
    with pytest.raises(Undecided, match=message) as caught:
        probe(machine)
    assert "resumes from" in caught.value.next_step
    # A crash may be chance, so that it is tried three times.
    assert len(throughput_requests(machine)) == 3


def test_throughput_trial_out_of_memory_ends_the_probe(probe):
    machine = machine_with(OutOfMemory(detail="no room"), is_throughput_trial)
    message = "micro-batch size 32 fitted at first"
    with pytest.raises(Undecided, match=message) as caught:
        probe(machine)
    assert "--headroom" in caught.value.next_step
    assert len(throughput_requests(machine)) == 1


def test_short_curve_keeps_its_points(probe, probe_with_trials):
    search_trials = probe(FakeMachine(simulate)).search_trials
    evidence = probe_with_trials(search_trials + 1)
    assert not evidence.is_lower_bound
    assert verified_sizes(evidence) == VERIFIED
    # 256 sequences in micro-batches of at most 33 are eight of 32.
    assert sizes_of_curve(evidence) == [32]
    assert probe.chosen_size == 32


def test_slow_machine_times_fewer_steps(probe, monkeypatch):
    # A step of 33 sequences takes 0.35 s: a quarter of the second that is left has no
    # time for even one, and one is the fewest.
    monkeypatch.setattr(TrialRunner, "budget_left_s", 1.0)
    evidence = probe(FakeMachine(simulate))
    assert evidence.curve[-1].timed_steps == 1


def dipping(trial):
    """Simulate a machine on which 16 sequences take twice as long as they should."""
    if trial.job == "kernels":
        size = size_of(trial)
        norm_s = 0.02 * size / 8 if size == 16 else 0.002 * size / 8
        kernels = [
            {"name": f"matmul_{size}", "calls": 4.0, "seconds": 0.01 * size / 8},
            {"name": f"layer_norm_{size}", "calls": 8.0, "seconds": norm_s},
        ]
        return Measured(
            figures={
                "kernels": kernels,
                "units_per_step": 64.0 * size,
                "step_s": 0.05 * size / 8,
                "roofline": H100.model_dump(),
            }
        )
    outcome = simulate(trial)
    if is_throughput_trial(trial) and size_of(trial) == 16:
        step_s = [2 * seconds for seconds in outcome.figures["step_s"]]
        return Measured(figures=outcome.figures | {"step_s": step_s})
    return outcome


def test_dip_names_the_kernel_that_grew(probe):
    dip = probe(FakeMachine(dipping)).dip
    assert (dip.smaller_size, dip.larger_size) == (8, 16)
    assert [kernel.name for kernel in dip.kernels] == ["layer_norm_"]
    assert dip.kernels[0].ratio == pytest.approx(10.0)
    assert dip_words(dip, SUBJECT) == (
        "tokens/s fall by 44.4% from 8 to 16 sequences:"
        " layer norm takes 10.00x as long per token (layer_norm_)"
    )


def test_dip_without_profile_says_why(probe):
    def without_profiler(trial):
        if trial.job == "kernels":
            return Crashed(detail="no profiler")
        return dipping(trial)

    dip = probe(FakeMachine(without_profiler)).dip
    assert dip_words(dip, SUBJECT).endswith(
        "its kernels were not profiled: crashed with 8 sequences"
    )


def test_rising_curve_has_no_dip(probe):
    assert probe(FakeMachine(simulate)).dip is None
