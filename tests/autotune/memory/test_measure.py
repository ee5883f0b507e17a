import itertools

import pytest

import autotune.memory.measure
from autotune.errors import ExceedsMemory, OutOfTime, Undecided
from autotune.memory.decide.memory_model import overheads_on_cpu, peak_bytes
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
from testbed.fakes import FakeClock, FakeMachine
from trainer.config.presets import model_settings
from trainer.config.train_config import ParallelSettings, TrainConfig
from trainer.data.dataset import SpecialIds, read_manifest
from trainer.data.masking import head_slots

FIXED_BYTES, ROW_BYTES = 300_000_000, 20_000_000
OF_MODEL = {
    "parameters": 75_000_000,
    "attention": "sdpa",
    "attention_reason": "asked for",
}


def work_of(rows):
    return StepWork(
        micro_batch_size=rows,
        padded_tokens=64 * rows,
        model_flops=1e9,
        kernels=((Kernel("copy"), 1),),
    )


def trace_figures(trial, row_bytes=ROW_BYTES):
    """What a trace of such a model says, without what libraries take."""
    traces, order = [], {"predicted_tokens": 0, "events": (0, 1, -2), "repeats_from": 0}
    for rows in trial.measured["sizes"]:
        sizes = {"parameters": FIXED_BYTES, "activations: Linear": row_bytes * rows}
        blocks = tuple(
            Allocation(size_bytes=size, term=term) for term, size in sizes.items()
        )
        traces.append(Trace(work=work_of(rows), allocations=blocks, **order).to_json())
    return OF_MODEL | {"traces": traces}


def is_timed(trial):
    return trial.job == "step" and trial.measured["timed_steps"] > 2


def simulate(trial):
    """A machine on which a model takes 300 MB and each row 20 MB; 100 rows/s, a little
    slower when few."""
    if trial.job == "trace":
        return Measured(figures=trace_figures(trial))
    rows, timed = rows_of(trial), trial.measured["timed_steps"]
    budget = trial.measured["memory_budget_bytes"]
    peak = FIXED_BYTES + ROW_BYTES * rows
    if budget is not None and peak > budget:
        return OutOfMemory(detail="refused")
    step_s = [(rows + 2) / 100] * timed
    return Measured(
        figures=STEP_FIGURES
        | {
            "step_s": step_s,
            "padded_tokens_per_step": rows * 64,
            "peak_bytes": peak,
        }
    )


def rows_of(trial):
    return trial.measured["config"]["micro_batch_size"]


def tries_of(machine, rows):
    return [rows_of(trial) for trial in machine.trials].count(rows)


def except_where(concerned, outcome):
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
        train, found = probe_model(
            ready,
            runner_on(machine, tmp_path / "trials", clock, site=site, made_on=here),
        )
        run.chosen_rows = train.micro_batch_size
        return found

    return run


def bracket(found):
    return found.feasible_max, found.infeasible_min


def test_the_largest_micro_batch_is_verified_and_bounded_and_the_curve_ends_at_the_headroom(
    probe,
):
    machine = FakeMachine(simulate)
    found = probe(machine)
    assert bracket(found) == (35, 36)
    assert [point.micro_batch_size for point in found.curve] == [1, 2, 4, 8, 16, 32, 33]
    assert found.sustained is None  # on a CPU a few steps are enough
    assert {
        trial.measured["timed_steps"] for trial in machine.trials if is_timed(trial)
    } == {4}
    verified = next(trial.measured for trial in machine.trials if rows_of(trial) == 35)
    assert verified["memory_budget_bytes"] == 1_000_000_000
    assert verified["warmup_steps"] + verified["timed_steps"] == 2
    assert found.predicted_peak_bytes == pytest.approx(
        found.feasible_peak_bytes, rel=0.02
    )
    assert bracket(probe(FakeMachine(simulate), max_micro_batch_size=10)) == (10, None)


def test_a_trace_leads_to_the_answer_in_three_trials(probe):
    found = probe(
        FakeMachine(simulate),
        memory_budget_bytes=1_010_000_000,
        overheads=overheads_on_cpu(),
    )
    assert bracket(found) == (35, 36)
    assert found.search_trials <= 3
    assert found.traced_micro_batch_size in (33, 34, 35)
    assert found.traced_peak_bytes == pytest.approx(found.feasible_peak_bytes, rel=0.05)
    assert set(found.traced_terms_bytes) >= {"parameters", "activations: Linear"}


def test_a_trace_that_is_wrong_or_not_to_be_had_costs_trials_and_no_exactness_and_that_is_said(
    probe,
):
    def misled(trial):
        return (
            Measured(figures=trace_figures(trial, row_bytes=26_000_000))
            if trial.job == "trace"
            else simulate(trial)
        )

    assert bracket(probe(FakeMachine(misled), overheads=overheads_on_cpu())) == (35, 36)
    crash = Crashed(detail="RuntimeError: Tensor.item() on meta")
    found = probe(
        except_where(lambda trial: trial.job == "trace", crash),
        site="there",
        overheads=overheads_on_cpu(),
    )
    assert bracket(found) == (35, 36)
    assert "Tensor.item()" in found.not_traced
    assert found.traced_peak_bytes is None


def test_the_chosen_micro_batch_of_a_gpu_is_timed_for_a_minute_and_that_is_what_is_promised(
    probe,
):
    def warm(trial):
        outcome = simulate(trial)
        if trial.job == "step" and trial.measured["timed_steps"] > 10:
            outcome.figures["step_s"] = [
                1.05 * second for second in outcome.figures["step_s"]
            ]
        return outcome

    machine = FakeMachine(warm)
    found = probe(machine, device="cuda", precision="bf16", trial_timeout_s=600)
    timed = [trial.measured for trial in machine.trials if is_timed(trial)]
    assert all(one["warmup_steps"] >= 3 and one["timed_steps"] >= 10 for one in timed)
    cold = next(
        point for point in found.curve if point.micro_batch_size == probe.chosen_rows
    )
    assert found.sustained.timed_steps * found.sustained.step_s >= 60
    assert found.sustained.micro_batch_size == probe.chosen_rows
    assert found.sustained.padded_tokens_per_s == pytest.approx(
        cold.padded_tokens_per_s / 1.05
    )


def test_a_pretended_gpu_yields_a_size_and_no_rate(probe):
    machine = FakeMachine(simulate)
    here = made_on(FINGERPRINT).model_copy(
        update={"gpu_name": "NVIDIA H100 NVL", "driver": "0.0 (nullgpu)"}
    )
    found = probe(machine, device="cuda", precision="bf16", here=here)
    assert (*bracket(found), found.curve, found.sustained, probe.chosen_rows) == (
        35,
        36,
        [],
        None,
        33,
    )
    assert not any(map(is_timed, machine.trials))


@pytest.mark.parametrize(
    ("outcome", "said", "next_step", "tries"),
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
def test_a_size_that_fitted_and_fails_when_its_speed_is_measured_ends_the_probe(
    probe, outcome, said, next_step, tries
):
    machine = except_where(is_timed, outcome)
    with pytest.raises(Undecided, match=said) as caught:
        probe(machine)
    assert next_step in caught.value.next_step
    assert sum(map(is_timed, machine.trials)) == tries


def test_a_largest_size_without_room_to_spare_is_proven_twice_and_only_a_first_attempt_is_followed_by_another(
    probe,
):
    def unsteady(trial):
        again = rows_of(trial) == 35 and tries_of(machine, 35) == 2
        return OutOfMemory(detail="this time not") if again else simulate(trial)

    def doubtful(trial):
        outcome = simulate(trial)
        doubts = isinstance(outcome, OutOfMemory) and trial.local["first_attempt"]
        return Crashed(detail="CUBLAS_STATUS_EXECUTION_FAILED") if doubts else outcome

    machine = FakeMachine(unsteady)
    assert bracket(
        probe(machine, memory_budget_bytes=FIXED_BYTES + 35 * ROW_BYTES + 1000)
    ) == (34, 35)
    assert bracket(probe(FakeMachine(doubtful))) == (35, 36)


def test_steps_of_several_micro_batches_and_ranks_are_what_is_tried(probe):
    machine = FakeMachine(simulate)
    probe(machine, accumulate=True, local_ranks=3)
    config = machine.trials[0].measured["config"]
    assert config["global_batch_size"] == 6 * config["micro_batch_size"]
    assert machine.trials[0].measured["local_ranks"] == 3
    # Accumulation repeats what one micro-batch costs.
    curve = machine.trials[-1].measured["config"]
    assert curve["global_batch_size"] == 3 * curve["micro_batch_size"]


def test_an_interrupted_probe_goes_on_where_it_was_and_a_finished_one_is_repeated_from_its_ledger(
    probe,
):
    whole = FakeMachine(simulate)
    expected = probe(whole)
    for stop in range(1, len(whole.trials)):

        def interrupt(trial, left=itertools.count(), stop=stop):  # noqa: B008 - one counter per machine is meant
            if next(left) == stop:
                raise KeyboardInterrupt
            return simulate(trial)

        site, rest = f"stopped at {stop}", FakeMachine(simulate)
        with pytest.raises(KeyboardInterrupt):
            probe(FakeMachine(interrupt), site=site)
        assert probe(rest, site=site) == expected
        assert len(rest.trials) == len(whole.trials) - stop
    assert probe(FakeMachine(lambda trial: pytest.fail("ran"))) == expected


def test_one_row_that_does_not_fit_says_what_it_needs(probe):
    with pytest.raises(ExceedsMemory, match="305 MiB") as refused:
        probe(
            FakeMachine(simulate),
            memory_budget_bytes=200_000_000,
            overheads=overheads_on_cpu(),
        )
    assert "largest part: parameters, 286 MiB" in refused.value.message
    assert "--memory" in refused.value.next_step


@pytest.mark.parametrize(
    ("strategy", "ranks", "told"),
    [("ddp", 2, True), ("zero1", 1, True), ("zero1", 2, False)],
)
def test_a_state_that_is_shared_already_is_not_divided_once_more(
    probe, monkeypatch, strategy, ranks, told
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
    with pytest.raises(ExceedsMemory) as refused:
        probe(FakeMachine(simulate), overheads=overheads_on_cpu(), **changes)
    assert ("shard the state: parallel.strategy" in refused.value.next_step) == told


@pytest.mark.parametrize(
    ("outcome", "said", "tries"),
    [(Crashed(detail="boom"), "boom", 3), (TimedOut(detail="killed"), "timed out", 1)],
)
def test_a_crash_or_a_hang_is_not_taken_for_a_lack_of_memory(
    probe, outcome, said, tries
):
    machine = except_where(lambda trial: rows_of(trial) == 4, outcome)
    with pytest.raises(Undecided, match=said):
        probe(machine)
    assert tries_of(machine, 4) == tries
    # It is tried again when the command is: it may have been mended.
    assert probe(FakeMachine(simulate)).feasible_max == 35


@pytest.mark.parametrize(
    "outcome",
    [Crashed(detail="boom"), Contaminated(detail="hw_thermal in 1 of 21 samples")],
)
@pytest.mark.parametrize("timed", [False, True])
def test_a_trial_that_crashes_or_is_disturbed_once_is_tried_again(
    probe, outcome, timed
):
    left = itertools.count()
    machine = except_where(
        lambda one: rows_of(one) == 4 and is_timed(one) == timed and next(left) == 0,
        outcome,
    )
    assert probe(machine).feasible_max == 35
    assert next(left) == 2


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
    assert sizes == [probe.chosen_rows] == [33]


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
FIXED, ROW, SLOT, BEND = 100_000_000, 3_000_000, 2_000, 20_000_000


def trace_of_slots(trial, bent_from=10**9, other_order_from=10**9, unlike=()):
    """A model with a block for each row and one for each slot of the head; some sizes
    are unlike all others."""
    traces = []
    for rows in trial.measured["sizes"]:
        slots = head_slots(64 * rows, 0.15)
        allocations = (
            Allocation(size_bytes=FIXED, term="parameters"),
            Allocation(
                size_bytes=ROW * rows + (BEND if rows >= bent_from else 0),
                term="activations: Linear",
            ),
            Allocation(
                size_bytes=SLOT * slots,
                term=f"head of {rows}" if rows in unlike else "head and loss",
            ),
        )
        events = (0, 1, 2, -2, -3) if rows < other_order_from else (0, 1, 2, -3, -2)
        order = {"events": events, "repeats_from": 1}
        traces.append(
            Trace(
                work=work_of(rows),
                predicted_tokens=slots,
                allocations=allocations,
                **order,
            ).to_json()
        )
    return Measured(figures=OF_MODEL | {"traces": traces})


CPU = overheads_on_cpu().usual
LARGE_BYTES = 7 * 10**10


def estimated(budget_bytes=LARGE_BYTES, machine=None, **model):
    machine = machine or FakeMachine(lambda trial: trace_of_slots(trial, **model))
    return estimate_model(
        REQUEST, machine, budget_bytes, CPU, max_micro_batch_size=16_384
    )


def true_bytes(rows: int) -> int:
    return (
        FIXED + ROW * rows + SLOT * head_slots(64 * rows, 0.15) + CPU.non_pytorch_bytes
    )


ONE_ROW = (true_bytes(1) + true_bytes(2)) / 2


@pytest.mark.parametrize("budget", [10**8, ONE_ROW, 5 * 10**8, 10**9, LARGE_BYTES])
def test_the_predicted_largest_fits_and_one_more_does_not_and_other_sizes_are_predicted_closely(
    budget,
):
    machine = FakeMachine(trace_of_slots)
    estimate = estimated(budget, machine)
    rows = estimate.max_micro_batch_size
    assert rows == 0 or true_bytes(rows) <= budget
    assert rows == 16_384 or true_bytes(rows + 1) > budget * (1 - 1e-4)
    assert len(estimate.memory_model.micro_batch_sizes) <= 5
    sizes = [size for trial in machine.trials for size in trial.measured["sizes"]]
    assert len(sizes) == len(set(sizes))  # none is traced twice
    if budget == LARGE_BYTES:
        predicted = [
            peak_bytes(estimate.memory_model, rows, CPU) for rows in (1, 7, 100, 1000)
        ]
        assert predicted == pytest.approx(
            [true_bytes(rows) for rows in (1, 7, 100, 1000)], rel=0.01
        )


def test_kernels_that_need_more_from_some_size_on_are_predicted_from_traces_above_it():
    rows = estimated(5 * 10**8, bent_from=100).max_micro_batch_size
    assert true_bytes(rows) + BEND <= 5 * 10**8 < true_bytes(rows + 1) + BEND


def test_a_model_that_allocates_in_another_order_for_few_rows_is_predicted_from_many_and_at_every_size_not_at_all():
    assert estimated(other_order_from=100).memory_model.micro_batch_sizes.min() > 100
    with pytest.raises(CannotTrace, match="change order"):
        estimated(unlike=range(100))


@pytest.mark.parametrize("unlike", [8, 64, 23_109])
def test_a_size_that_is_unlike_others_by_chance_is_left_out(unlike):
    fit = estimated(unlike=(unlike,)).memory_model
    assert unlike not in fit.micro_batch_sizes
    assert len(fit.micro_batch_sizes) > 2


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("Tensor.item", Crashed(detail="…\nError: Tensor.item() cannot be called")),
        ("longer", TimedOut(detail="")),
    ],
)
def test_a_model_that_cannot_be_traced_is_to_be_measured(said, outcome):
    with pytest.raises(CannotTrace, match=said) as refused:
        estimated(machine=FakeMachine(lambda trial: outcome))
    assert "autotune probe" in refused.value.next_step
