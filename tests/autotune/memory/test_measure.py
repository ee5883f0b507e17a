import itertools

import pytest

import autotune.memory.measure
from autotune.errors import ExceedsMemory, OutOfTime, Undecided
from autotune.memory.decide.overheads import overheads_on_cpu
from autotune.memory.measure import probe_model
from autotune.memory.probe import Probe, ProbeRequest
from autotune.memory.values import Allocation
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    Measured,
    OutOfMemory,
    TimedOut,
)
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import made_on
from testbed.datasets import write_dataset
from testbed.examples.feeds import runner_on
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeMachine
from tests.autotune.memory.simulated_traces import figures_of, trace_of
from trainer.config.presets import model_settings
from trainer.config.train_config import ParallelSettings, TrainConfig
from trainer.data.manifest import read_manifest

FIXED_BYTES = 300_000_000
SEQUENCE_BYTES = 20_000_000
BUDGET_BYTES = 1_000_000_000
VERIFIED = (35, 36)
"""Largest size that fits: 300 MB and 35 times 20 MB are 1 GB; and the next one."""
WITH_HEADROOM = 33
"""Largest size that leaves 3 % of 35 sequences free."""
ON_GPU = {"device": "cuda", "precision": "bf16"}


def trace_figures(trial, sequence_bytes=SEQUENCE_BYTES):
    """Return the figures of a trace of such a model, without libraries' memory."""
    return figures_of(
        trace_of(
            size,
            allocations=[
                Allocation(size_bytes=FIXED_BYTES, term="parameters"),
                Allocation(
                    size_bytes=sequence_bytes * size, term="activations: Linear"
                ),
            ],
            events=[0, 1, -2],
        )
        for size in trial.measured["sizes"]
    )


def is_timed(trial):
    """Return whether a trial measures throughput; others only test if a size fits."""
    return trial.job == "step" and trial.measured["timed_steps"] > 2


def simulate(trial):
    """Simulate a machine on which a model takes 300 MB and each sequence 20 MB.

    It computes 100 sequences/s, a little less with few in a micro-batch.
    """
    if trial.job == "trace":
        return Measured(figures=trace_figures(trial))
    size = size_of(trial)
    budget = trial.measured["memory_budget_bytes"]
    peak = FIXED_BYTES + SEQUENCE_BYTES * size
    if budget is not None and peak > budget:
        return OutOfMemory(detail="refused")
    step_s = [(size + 2) / 100] * trial.measured["timed_steps"]
    return Measured(
        figures=STEP_FIGURES
        | {
            "step_s": step_s,
            "padded_tokens_per_step": size * 64,
            "peak_bytes": peak,
        }
    )


def size_of(trial):
    return trial.measured["config"]["micro_batch_size"]


def count_trials(machine, size):
    return [size_of(trial) for trial in machine.trials].count(size)


def machine_with(outcome, concerned):
    """Return a machine on which some trials have another outcome."""
    return FakeMachine(lambda trial: outcome if concerned(trial) else simulate(trial))


class Prober:
    """Probes a model on simulated machines.

    Trials of one site share a trial log.
    """

    def __init__(self, directory):
        self._directory = directory
        self._manifest = read_manifest(write_dataset(directory / "data", [[5, 6]]))
        self._clock = FakeClock()
        self.chosen_size = None

    def __call__(
        self,
        machine,
        *,
        settings=None,
        memory_budget_bytes=BUDGET_BYTES,
        local_ranks=1,
        overheads=None,
        accumulate=False,
        max_micro_batch_size=1000,
        trial_timeout_s=10,
        site="here",
        here=None,
    ):
        """Probe with these settings of the step, and return the evidence."""
        config = TrainConfig(
            model=model_settings("bert-mini"), seq_length_tokens=64, layout="packed"
        ).model_copy(update=settings or {})
        request = ProbeRequest(
            config=config,
            data=self._directory,
            reports=self._directory,
            accumulate=accumulate,
            max_micro_batch_size=max_micro_batch_size,
            trial_timeout_s=trial_timeout_s,
        )
        probe = Probe(
            request=request,
            config=config,
            manifest=self._manifest,
            memory_budget_bytes=memory_budget_bytes,
            local_ranks=local_ranks,
            overheads=overheads,
        )
        trial_log = self._directory / "trials"
        runner = runner_on(machine, trial_log, self._clock, site=site, made_on=here)
        train, evidence = probe_model(probe, runner)
        self.chosen_size = train.micro_batch_size
        return evidence


@pytest.fixture
def probe(tmp_path):
    return Prober(tmp_path)


def bracket(evidence):
    return evidence.feasible_max, evidence.infeasible_min


def test_largest_micro_batch_is_verified_on_both_sides(probe):
    machine = FakeMachine(simulate)
    evidence = probe(machine)
    assert bracket(evidence) == VERIFIED
    verified = next(trial.measured for trial in machine.trials if size_of(trial) == 35)
    assert verified["memory_budget_bytes"] == BUDGET_BYTES
    assert verified["warmup_steps"] + verified["timed_steps"] == 2
    assert evidence.predicted_peak_bytes == pytest.approx(
        evidence.feasible_peak_bytes, rel=0.02
    )


def test_search_ends_at_the_largest_allowed_size(probe):
    evidence = probe(FakeMachine(simulate), max_micro_batch_size=10)
    assert bracket(evidence) == (10, None)


def test_curve_ends_at_the_headroom(probe):
    machine = FakeMachine(simulate)
    evidence = probe(machine)
    sizes = [point.micro_batch_size for point in evidence.curve]
    assert sizes == [1, 2, 4, 8, 16, 32, WITH_HEADROOM]
    assert evidence.sustained is None  # on a CPU a few steps are enough
    timed_steps = {
        trial.measured["timed_steps"] for trial in machine.trials if is_timed(trial)
    }
    assert timed_steps == {4}


def test_trace_saves_trials(probe):
    evidence = probe(
        FakeMachine(simulate),
        # 10 MB more than 35 sequences take, so that the largest size runs only once.
        memory_budget_bytes=BUDGET_BYTES + 10_000_000,
        overheads=overheads_on_cpu(),
    )
    assert bracket(evidence) == VERIFIED
    assert evidence.search_trials <= 3
    assert evidence.traced_micro_batch_size in (33, 34, 35)
    assert evidence.traced_peak_bytes == pytest.approx(
        evidence.feasible_peak_bytes, rel=0.05
    )
    assert set(evidence.traced_terms_bytes) >= {"parameters", "activations: Linear"}


def test_wrong_trace_does_not_change_the_result(probe):
    def mislead(trial):
        if trial.job == "trace":
            return Measured(figures=trace_figures(trial, sequence_bytes=26_000_000))
        return simulate(trial)

    evidence = probe(FakeMachine(mislead), overheads=overheads_on_cpu())
    assert bracket(evidence) == VERIFIED


def test_failed_trace_is_reported_with_the_result(probe):
    crash = Crashed(detail="RuntimeError: Tensor.item() on meta")
    machine = machine_with(crash, lambda trial: trial.job == "trace")
    evidence = probe(machine, overheads=overheads_on_cpu())
    assert bracket(evidence) == VERIFIED
    assert "Tensor.item()" in evidence.not_traced
    assert evidence.traced_peak_bytes is None


def test_chosen_size_is_timed_for_a_minute(probe):
    def warm(trial):
        outcome = simulate(trial)
        if trial.job == "step" and trial.measured["timed_steps"] > 10:
            outcome.figures["step_s"] = [
                1.05 * step_s for step_s in outcome.figures["step_s"]
            ]
        return outcome

    machine = FakeMachine(warm)
    evidence = probe(machine, settings=ON_GPU, trial_timeout_s=600)
    timed = [trial.measured for trial in machine.trials if is_timed(trial)]
    assert all(request["warmup_steps"] >= 3 for request in timed)
    assert all(request["timed_steps"] >= 10 for request in timed)
    cold = next(
        point for point in evidence.curve if point.micro_batch_size == probe.chosen_size
    )
    sustained = evidence.sustained
    assert sustained.timed_steps * sustained.step_s >= 60
    assert sustained.micro_batch_size == probe.chosen_size
    assert sustained.padded_tokens_per_s == pytest.approx(
        cold.padded_tokens_per_s / 1.05
    )


def test_pretended_gpu_measures_no_throughput(probe):
    machine = FakeMachine(simulate)
    here = made_on(FINGERPRINT).model_copy(
        update={"gpu_name": "NVIDIA H100 NVL", "driver": "0.0 (nullgpu)"}
    )
    evidence = probe(machine, settings=ON_GPU, here=here)
    assert bracket(evidence) == VERIFIED
    assert evidence.curve == []
    assert evidence.sustained is None
    assert probe.chosen_size == WITH_HEADROOM
    assert not any(map(is_timed, machine.trials))


def test_crashing_throughput_trial_ends_the_probe(probe):
    machine = machine_with(Crashed(detail="a bus error"), is_timed)
    message = (
        r".33 sequences, throughput. could not be measured \(crashed\):\na bus error"
    )
    with pytest.raises(Undecided, match=message) as caught:
        probe(machine)
    assert "resumes from" in caught.value.next_step
    assert sum(map(is_timed, machine.trials)) == 3


def test_throughput_trial_out_of_memory_ends_the_probe(probe):
    machine = machine_with(OutOfMemory(detail="no room"), is_timed)
    message = "micro-batch size 33 fitted at first"
    with pytest.raises(Undecided, match=message) as caught:
        probe(machine)
    assert "--headroom" in caught.value.next_step
    assert sum(map(is_timed, machine.trials)) == 1


def test_largest_size_without_room_is_verified_twice(probe):
    # The second of two equal trials finds less memory.
    def unsteady(trial):
        if size_of(trial) == 35 and count_trials(machine, 35) == 2:
            return OutOfMemory(detail="this time not")
        return simulate(trial)

    machine = FakeMachine(unsteady)
    budget = FIXED_BYTES + 35 * SEQUENCE_BYTES + 1000
    assert bracket(probe(machine, memory_budget_bytes=budget)) == (34, 35)


def test_trial_knows_whether_it_is_the_first_attempt(probe):
    def doubtful(trial):
        outcome = simulate(trial)
        if isinstance(outcome, OutOfMemory) and trial.local["first_attempt"]:
            return Crashed(detail="CUBLAS_STATUS_EXECUTION_FAILED")
        return outcome

    assert bracket(probe(FakeMachine(doubtful))) == VERIFIED


def test_trials_have_the_requested_micro_batches_per_step(probe):
    machine = FakeMachine(simulate)
    probe(machine, accumulate=True, local_ranks=3)
    config = machine.trials[0].measured["config"]
    assert config["global_batch_size"] == 6 * config["micro_batch_size"]
    assert machine.trials[0].measured["local_ranks"] == 3
    # Accumulation repeats what one micro-batch costs.
    curve = machine.trials[-1].measured["config"]
    assert curve["global_batch_size"] == 3 * curve["micro_batch_size"]


def machine_interrupted_after(trials):
    """Return a machine on which a user interrupts the trial after so many."""
    started = itertools.count()

    def interrupt(trial):
        if next(started) == trials:
            raise KeyboardInterrupt
        return simulate(trial)

    return FakeMachine(interrupt)


def test_interrupted_probe_resumes(probe):
    uninterrupted = FakeMachine(simulate)
    expected = probe(uninterrupted)
    for stop in range(1, len(uninterrupted.trials)):
        site = f"stopped at {stop}"
        resumed = FakeMachine(simulate)
        with pytest.raises(KeyboardInterrupt):
            probe(machine_interrupted_after(stop), site=site)
        assert probe(resumed, site=site) == expected
        assert len(resumed.trials) == len(uninterrupted.trials) - stop


def test_finished_probe_is_repeated_from_its_trial_log(probe):
    expected = probe(FakeMachine(simulate))
    assert probe(FakeMachine(lambda trial: pytest.fail("ran"))) == expected


def test_too_large_model_reports_its_need(probe):
    # 320 MB are measured; the prediction also has 38 MiB of libraries.
    with pytest.raises(ExceedsMemory, match="305 MiB needed") as rejected:
        probe(
            FakeMachine(simulate),
            memory_budget_bytes=200_000_000,
            overheads=overheads_on_cpu(),
        )
    assert rejected.value.message.endswith(
        "; largest part: parameters, 286 MiB of 343 MiB predicted"
    )
    assert "--memory" in rejected.value.next_step


def test_largest_part_is_of_the_predicted_memory(probe):
    """The measured peak may be less than the libraries are assumed to take alone."""

    def simulate_tiny_model(trial):
        if trial.job == "step" and trial.measured["memory_budget_bytes"] is None:
            return Measured(figures=STEP_FIGURES | {"peak_bytes": 37 * 2**20})
        if trial.job == "step":
            return OutOfMemory(detail="refused")
        parameters = [Allocation(size_bytes=2**20, term="parameters")]
        sizes = trial.measured["sizes"]
        return Measured(
            figures=figures_of(trace_of(size, parameters, [0]) for size in sizes)
        )

    with pytest.raises(ExceedsMemory) as rejected:
        probe(
            FakeMachine(simulate_tiny_model),
            memory_budget_bytes=2**20,
            overheads=overheads_on_cpu(),
        )
    assert rejected.value.message.endswith(
        "; 37 MiB needed; largest part: non-PyTorch memory, 38 MiB of 39 MiB predicted"
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
    sharing = "parallel.strategy = 'fsdp2' over 4 ranks"
    monkeypatch.setattr(
        autotune.memory.measure, "smallest_sharding", lambda *_, **__: sharing
    )
    with pytest.raises(ExceedsMemory) as rejected:
        probe(
            FakeMachine(simulate),
            settings={"parallel": ParallelSettings(strategy=strategy)},
            local_ranks=ranks,
            memory_budget_bytes=200_000_000,
            overheads=overheads_on_cpu(),
        )
    next_step = rejected.value.next_step
    assert ("shard the state: parallel.strategy" in next_step) == is_advised


@pytest.mark.parametrize(
    ("outcome", "message", "tries"),
    [
        pytest.param(Crashed(detail="boom"), "boom", 3, id="crash is tried again"),
        pytest.param(TimedOut(detail="killed"), "timed out", 1, id="timeout is not"),
    ],
)
def test_crash_is_not_out_of_memory(probe, outcome, message, tries):
    machine = machine_with(outcome, lambda trial: size_of(trial) == 4)
    with pytest.raises(Undecided, match=message):
        probe(machine)
    assert count_trials(machine, 4) == tries
    # It is tried again when the command is: it may have been mended.
    assert probe(FakeMachine(simulate)).feasible_max == 35


@pytest.mark.parametrize(
    "outcome",
    [Crashed(detail="boom"), Contaminated(detail="hw_thermal in 1 of 21 samples")],
)
@pytest.mark.parametrize("timed", [False, True])
def test_disturbed_trial_is_repeated(probe, outcome, timed):
    attempts = itertools.count()

    def is_first_attempt(trial):
        is_concerned = size_of(trial) == 4 and is_timed(trial) == timed
        return is_concerned and next(attempts) == 0

    machine = machine_with(outcome, is_first_attempt)
    assert probe(machine).feasible_max == 35
    assert next(attempts) == 2


@pytest.fixture
def probe_within(probe, monkeypatch):
    """Return a function that probes with time for a number of trials."""
    run_trial = TrialRunner.run

    def probe_in_time(most_trials):
        machine = FakeMachine(simulate)

        def run(runner, trial, label, **options):
            if len(machine.trials) >= most_trials:
                raise OutOfTime("3 s are left", next_step="more time")
            return run_trial(runner, trial, label, **options)

        monkeypatch.setattr(TrialRunner, "run", run)
        return probe(machine, site=f"within {most_trials}")

    return probe_in_time


def test_short_search_gives_a_lower_bound(probe, probe_within):
    search_trials = probe(FakeMachine(simulate)).search_trials
    evidence = probe_within(search_trials - 1)
    assert evidence.is_lower_bound
    assert 1 <= evidence.feasible_max <= 35
    assert evidence.curve == []
    assert "no time was left" in evidence.choice


def test_search_without_any_size_is_out_of_time(probe_within):
    with pytest.raises(OutOfTime, match="no size is verified yet; 3 s are left"):
        probe_within(0)


def test_short_curve_keeps_its_points(probe, probe_within):
    search_trials = probe(FakeMachine(simulate)).search_trials
    evidence = probe_within(search_trials + 1)
    assert not evidence.is_lower_bound
    assert bracket(evidence) == VERIFIED
    sizes = [point.micro_batch_size for point in evidence.curve]
    assert sizes == [probe.chosen_size] == [WITH_HEADROOM]


def test_slow_machine_times_fewer_steps(probe, monkeypatch):
    usual = probe(FakeMachine(simulate), site="usual").curve[-1].timed_steps
    monkeypatch.setattr(TrialRunner, "budget_left_s", 1.0)
    slow = probe(FakeMachine(simulate), site="slow").curve[-1].timed_steps
    assert (usual, slow) == (4, 1)
