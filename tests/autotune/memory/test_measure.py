import itertools
from dataclasses import replace

import pytest

import autotune.memory.estimate
import autotune.memory.measure
from autotune.errors import ExceedsMemory, OutOfTime, Undecided
from autotune.memory.decide.memory_model import peak_bytes
from autotune.memory.decide.overheads import overheads_on_cpu
from autotune.memory.estimate import CannotTrace, estimate_model
from autotune.memory.measure import Probe, ProbeRequest, probe_model
from autotune.memory.values import Allocation, Trace, TraceRequest
from autotune.speed.values import Kernel, StepWork
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import made_on
from autotune.trials.values import (
    Contaminated,
    Crashed,
    Measured,
    OutOfMemory,
    TimedOut,
)
from testbed.datasets import write_dataset
from testbed.examples.feeds import runner_on
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeHost, FakeMachine
from trainer.config.presets import model_settings
from trainer.config.train_config import ParallelSettings, TrainConfig
from trainer.data.dataset import SpecialIds, read_manifest
from trainer.data.masking import head_slots

FIXED_BYTES = 300_000_000
SEQUENCE_BYTES = 20_000_000
MODEL_FIGURES = {
    "parameters": 75_000_000,
    "attention": "sdpa",
    "attention_reason": "asked for",
}


def work_of(micro_batch_size):
    return StepWork(
        micro_batch_size=micro_batch_size,
        padded_tokens=64 * micro_batch_size,
        model_flops=1e9,
        kernels=((Kernel("copy"), 1),),
    )


def trace_figures(trial, sequence_bytes=SEQUENCE_BYTES):
    """Return the figures of a trace of such a model, without libraries' memory."""
    traces = []
    for size in trial.measured["sizes"]:
        trace = Trace(
            work=work_of(size),
            predicted_tokens=0,
            allocations=(
                Allocation(size_bytes=FIXED_BYTES, term="parameters"),
                Allocation(
                    size_bytes=sequence_bytes * size, term="activations: Linear"
                ),
            ),
            events=(0, 1, -2),
            repeats_from=0,
        )
        traces.append(trace.to_json())
    return MODEL_FIGURES | {"traces": traces}


def is_timed(trial):
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


@pytest.fixture
def probe(tmp_path):
    manifest = read_manifest(write_dataset(tmp_path / "data", [[5, 6]]))
    clock = FakeClock()

    def run(
        machine,
        memory_budget_bytes=10**9,
        site="here",
        here=None,
        local_ranks=1,
        overheads=None,
        **changes,
    ):
        config = TrainConfig(
            model=model_settings("bert-mini"), seq_length_tokens=64, layout="packed"
        )
        settings = {
            name: changes.pop(name)
            for name in TrainConfig.model_fields
            if name in changes
        }
        config = config.model_copy(update=settings)
        options = {
            "accumulate": False,
            "max_micro_batch_size": 1000,
            "trial_timeout_s": 10,
        } | changes
        request = ProbeRequest(
            config=config, data=tmp_path, reports=tmp_path, **options
        )
        ready = Probe(
            request=request,
            config=config,
            manifest=manifest,
            memory_budget_bytes=memory_budget_bytes,
            local_ranks=local_ranks,
            overheads=overheads,
        )
        runner = runner_on(machine, tmp_path / "trials", clock, site=site, made_on=here)
        train, evidence = probe_model(ready, runner)
        run.chosen_size = train.micro_batch_size
        return evidence

    return run


def bracket(evidence):
    return evidence.feasible_max, evidence.infeasible_min


def test_largest_micro_batch_is_verified_on_both_sides(probe):
    machine = FakeMachine(simulate)
    evidence = probe(machine)
    assert bracket(evidence) == (35, 36)
    verified = next(trial.measured for trial in machine.trials if size_of(trial) == 35)
    assert verified["memory_budget_bytes"] == 1_000_000_000
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
    assert sizes == [1, 2, 4, 8, 16, 32, 33]
    assert evidence.sustained is None  # on a CPU a few steps are enough
    timed_steps = {
        trial.measured["timed_steps"] for trial in machine.trials if is_timed(trial)
    }
    assert timed_steps == {4}


def test_trace_saves_trials(probe):
    evidence = probe(
        FakeMachine(simulate),
        memory_budget_bytes=1_010_000_000,
        overheads=overheads_on_cpu(),
    )
    assert bracket(evidence) == (35, 36)
    assert evidence.search_trials <= 3
    assert evidence.traced_micro_batch_size in (33, 34, 35)
    assert evidence.traced_peak_bytes == pytest.approx(
        evidence.feasible_peak_bytes, rel=0.05
    )
    assert set(evidence.traced_terms_bytes) >= {"parameters", "activations: Linear"}


def test_wrong_trace_does_not_change_the_result(probe):
    def misled(trial):
        if trial.job == "trace":
            return Measured(figures=trace_figures(trial, sequence_bytes=26_000_000))
        return simulate(trial)

    evidence = probe(FakeMachine(misled), overheads=overheads_on_cpu())
    assert bracket(evidence) == (35, 36)


def test_failed_trace_is_reported_with_the_result(probe):
    crash = Crashed(detail="RuntimeError: Tensor.item() on meta")
    machine = machine_with(crash, lambda trial: trial.job == "trace")
    evidence = probe(machine, overheads=overheads_on_cpu())
    assert bracket(evidence) == (35, 36)
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
    evidence = probe(machine, device="cuda", precision="bf16", trial_timeout_s=600)
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
    evidence = probe(machine, device="cuda", precision="bf16", here=here)
    assert bracket(evidence) == (35, 36)
    assert evidence.curve == []
    assert evidence.sustained is None
    assert probe.chosen_size == 33
    assert not any(map(is_timed, machine.trials))


@pytest.mark.parametrize(
    ("outcome", "message", "next_step", "tries"),
    [
        (
            Crashed(detail="a bus error"),
            (
                r".33 sequences, throughput. could not be measured \(crashed\):\na bus"
                r" error"
            ),
            "resumes from",
            3,
        ),
        (
            OutOfMemory(detail="no room"),
            "micro-batch size 33 fitted at first",
            "--headroom",
            1,
        ),
    ],
)
def test_failing_throughput_trial_ends_the_probe(
    probe, outcome, message, next_step, tries
):
    machine = machine_with(outcome, is_timed)
    with pytest.raises(Undecided, match=message) as caught:
        probe(machine)
    assert next_step in caught.value.next_step
    assert sum(map(is_timed, machine.trials)) == tries


def test_largest_size_without_room_is_verified_twice(probe):
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

    assert bracket(probe(FakeMachine(doubtful))) == (35, 36)


def test_trials_have_the_requested_micro_batches_per_step(probe):
    machine = FakeMachine(simulate)
    probe(machine, accumulate=True, local_ranks=3)
    config = machine.trials[0].measured["config"]
    assert config["global_batch_size"] == 6 * config["micro_batch_size"]
    assert machine.trials[0].measured["local_ranks"] == 3
    # Accumulation repeats what one micro-batch costs.
    curve = machine.trials[-1].measured["config"]
    assert curve["global_batch_size"] == 3 * curve["micro_batch_size"]


def test_interrupted_probe_resumes(probe):
    whole = FakeMachine(simulate)
    expected = probe(whole)
    for stop in range(1, len(whole.trials)):

        def interrupt(trial, trials=itertools.count(), stop=stop):  # noqa: B008 - one counter per machine is meant
            if next(trials) == stop:
                raise KeyboardInterrupt
            return simulate(trial)

        site = f"stopped at {stop}"
        resumed = FakeMachine(simulate)
        with pytest.raises(KeyboardInterrupt):
            probe(FakeMachine(interrupt), site=site)
        assert probe(resumed, site=site) == expected
        assert len(resumed.trials) == len(whole.trials) - stop


def test_finished_probe_is_repeated_from_its_trial_log(probe):
    expected = probe(FakeMachine(simulate))
    assert probe(FakeMachine(lambda trial: pytest.fail("ran"))) == expected


def test_too_large_model_reports_its_need(probe):
    with pytest.raises(ExceedsMemory, match="305 MiB") as rejected:
        probe(
            FakeMachine(simulate),
            memory_budget_bytes=200_000_000,
            overheads=overheads_on_cpu(),
        )
    assert "largest part: parameters, 286 MiB" in rejected.value.message
    assert "--memory" in rejected.value.next_step


@pytest.mark.parametrize(
    ("strategy", "ranks", "is_advised"),
    [("ddp", 2, True), ("zero1", 1, True), ("zero1", 2, False)],
)
def test_sharding_is_advised_for_unsharded_state_only(
    probe, monkeypatch, strategy, ranks, is_advised
):
    sharing = "parallel.strategy = 'fsdp2' over 4 ranks"
    monkeypatch.setattr(
        autotune.memory.measure, "smallest_sharding", lambda *_, **__: sharing
    )
    parallel = ParallelSettings(strategy=strategy)
    changes = {
        "parallel": parallel,
        "local_ranks": ranks,
        "memory_budget_bytes": 200_000_000,
    }
    with pytest.raises(ExceedsMemory) as rejected:
        probe(FakeMachine(simulate), overheads=overheads_on_cpu(), **changes)
    next_step = rejected.value.next_step
    assert ("shard the state: parallel.strategy" in next_step) == is_advised


@pytest.mark.parametrize(
    ("outcome", "message", "tries"),
    [(Crashed(detail="boom"), "boom", 3), (TimedOut(detail="killed"), "timed out", 1)],
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
    assert bracket(evidence) == (35, 36)
    sizes = [point.micro_batch_size for point in evidence.curve]
    assert sizes == [probe.chosen_size] == [33]


def test_slow_machine_times_fewer_steps(probe, monkeypatch):
    usual = probe(FakeMachine(simulate), site="usual").curve[-1].timed_steps
    monkeypatch.setattr(TrialRunner, "budget_left_s", 1.0)
    slow = probe(FakeMachine(simulate), site="slow").curve[-1].timed_steps
    assert (usual, slow) == (4, 1)


REQUEST = TraceRequest(
    config=TrainConfig(model=model_settings("bert-mini"), seq_length_tokens=64),
    vocab_size=500,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    documents_per_sequence=1.0,
    micro_batches=2,
    ranks=1,
)
FIXED = 100_000_000
SEQUENCE = 3_000_000
SLOT = 2_000
BEND = 20_000_000


def trace_of_slots(trial, bent_from=10**9, other_order_from=10**9, unlike=()):
    """Trace a model with a block for each sequence and one for each slot of the head.

    Sizes in ``unlike`` have terms of their own.
    """
    traces = []
    for size in trial.measured["sizes"]:
        slots = head_slots(64 * size, 0.15)
        bend = BEND if size >= bent_from else 0
        head = f"head of {size}" if size in unlike else "head and loss"
        trace = Trace(
            work=work_of(size),
            predicted_tokens=slots,
            allocations=(
                Allocation(size_bytes=FIXED, term="parameters"),
                Allocation(
                    size_bytes=SEQUENCE * size + bend, term="activations: Linear"
                ),
                Allocation(size_bytes=SLOT * slots, term=head),
            ),
            events=(0, 1, 2, -2, -3) if size < other_order_from else (0, 1, 2, -3, -2),
            repeats_from=1,
        )
        traces.append(trace.to_json())
    return Measured(figures=MODEL_FIGURES | {"traces": traces})


CPU = overheads_on_cpu().usual
LARGE_BYTES = 7 * 10**10


def estimated(budget_bytes=LARGE_BYTES, machine=None, **model):
    machine = machine or FakeMachine(lambda trial: trace_of_slots(trial, **model))
    return estimate_model(
        REQUEST, machine, budget_bytes, CPU, max_micro_batch_size=16_384
    )


def true_bytes(size: int) -> int:
    head_bytes = SLOT * head_slots(64 * size, 0.15)
    return FIXED + SEQUENCE * size + head_bytes + CPU.non_pytorch_bytes


ONE_SEQUENCE_BYTES = (true_bytes(1) + true_bytes(2)) / 2


@pytest.mark.parametrize(
    "budget", [10**8, ONE_SEQUENCE_BYTES, 5 * 10**8, 10**9, LARGE_BYTES]
)
def test_predicted_largest_size_is_the_true_one(budget):
    size = estimated(budget).max_micro_batch_size
    assert size == 0 or true_bytes(size) <= budget
    assert size == 16_384 or true_bytes(size + 1) > budget * (1 - 1e-4)


@pytest.mark.parametrize(
    "budget", [10**8, ONE_SEQUENCE_BYTES, 5 * 10**8, 10**9, LARGE_BYTES]
)
def test_no_size_is_traced_twice(budget):
    machine = FakeMachine(trace_of_slots)
    estimate = estimated(budget, machine)
    assert len(estimate.memory_model.micro_batch_sizes) <= 5
    sizes = [size for trial in machine.trials for size in trial.measured["sizes"]]
    assert len(sizes) == len(set(sizes))


def test_sizes_between_traces_are_predicted_closely():
    sizes = (1, 7, 100, 1000)
    model = estimated(LARGE_BYTES).memory_model
    predicted = [peak_bytes(model, size, CPU) for size in sizes]
    assert predicted == pytest.approx([true_bytes(size) for size in sizes], rel=0.01)


def test_jump_in_memory_is_predicted_from_larger_traces():
    size = estimated(5 * 10**8, bent_from=100).max_micro_batch_size
    assert true_bytes(size) + BEND <= 5 * 10**8 < true_bytes(size + 1) + BEND


def test_other_order_of_small_sizes_is_left_out():
    model = estimated(other_order_from=100).memory_model
    assert model.micro_batch_sizes.min() > 100


def test_model_without_a_common_order_cannot_be_traced():
    with pytest.raises(CannotTrace, match="change order"):
        estimated(unlike=range(100))


@pytest.mark.parametrize("unlike", [8, 64, 23_109])
def test_unlike_trace_is_left_out(unlike):
    traced_sizes = estimated(unlike=(unlike,)).memory_model.micro_batch_sizes
    assert unlike not in traced_sizes
    assert len(traced_sizes) > 2


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("Tensor.item", Crashed(detail="…\nError: Tensor.item() cannot be called")),
        ("longer", TimedOut(detail="")),
    ],
)
def test_untraceable_model_advises_a_probe(monkeypatch, message, outcome):
    monkeypatch.setattr(autotune.memory.estimate, "SystemHost", FakeHost)
    with pytest.raises(CannotTrace, match=message) as rejected:
        estimated(machine=FakeMachine(lambda trial: outcome))
    assert "autotune probe" in rejected.value.next_step


class BusyHost(FakeHost):
    """A host on which other programs run."""

    def facts(self, paths):
        return replace(super().facts(paths), load_average_1min=17.14)


def test_late_trace_names_a_busy_machine(monkeypatch):
    monkeypatch.setattr(autotune.memory.estimate, "SystemHost", BusyHost)
    with pytest.raises(CannotTrace) as rejected:
        estimated(machine=FakeMachine(lambda trial: TimedOut(detail="")))
    assert "machine is busy: the load average is 17.14 with 8" in str(rejected.value)
    assert "again" in rejected.value.next_step
